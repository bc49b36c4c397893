"""The demo model's tokenizer: byte-level BPE with Qwen's pre-tokenizer regex and NFC, and its chat template.

transformers replaces the pre-tokenizer of any ``qwen3_5`` tokenizer by Qwen's, so it is trained with that one.
The think form is asked for with the template variable ``reasoning``: mlx-lm sets ``enable_thinking`` for every
tokenizer that has <think>, and this model answers at once unless told otherwise.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

VOCAB = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FORM = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
EOS, EOT = 2, 0  # <|im_end|> ends a turn, <|endoftext|> a document
REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOLS_HEAD = (
    "# Tools\\n\\nCall a function by writing one JSON object, with its name and its arguments, between <tool_call> and "
    "</tool_call>. The functions are:\\n<tools>"
)
CHAT_TEMPLATE = (
    """
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set head = namespace(system='', first=0) -%}
{%- if messages and messages[0].role in ('system', 'developer') -%}
{%- set head.system = text(messages[0].content) -%}{%- set head.first = 1 -%}
{%- endif -%}
{%- if head.system or tools -%}
{{- '<|im_start|>system\\n' + head.system -}}
{%- if tools -%}
{%- if head.system -%}{{- '\\n\\n' -}}{%- endif -%}
{{- '"""
    + TOOLS_HEAD
    + """' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[head.first:] -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user\\n' -}}{%- else -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- text(message.content) -}}
{%- for item in message.tool_calls or [] -%}
{%- set tool_call = item.function if item.function else item -%}
{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' -}}
{%- if tool_call.arguments is string -%}{{- tool_call.arguments -}}
{%- else -%}{{- tool_call.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if reasoning is defined and reasoning -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""
).strip()


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of ``VOCAB`` entries trained on ``texts``."""
    tok = Tokenizer(BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    added = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    added += [AddedToken(t, special=False, normalized=False) for t in FORM]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    data = json.loads(tok.to_str())
    for entry in data["added_tokens"]:  # the trainer marks every added token special
        entry["special"] = entry["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(data))


def save(tok: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
