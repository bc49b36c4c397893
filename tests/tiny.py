"""Tiny random-weight models of real architectures, written as ordinary model folders.

Weights are float32, seeded, and scaled so that greedy text varies and top logits stand apart. Recurrent layers decay
slowly (0.6 to 0.98 a token), so that a lost or misplaced state shows in the logits many tokens later. The rows of
special tokens in the output matrix are small: greedy text does not end by chance; pass ``eos_token_id=...`` to make it.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from mlxkv.models.architectures import classes
from tests.architectures import ARCHITECTURES, HEADED, MORE, OWN, SUITE, VOCAB

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = VOCAB - 1
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>tool\n{{ tool | tojson }}<|im_end|>\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name ~ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PAIRS = (
    "Ġ t,Ġ a,h e,i n,r e,o n,e r,Ġt he,Ġ s,a t,Ġ w,Ġ o,e n,Ġ c,i t,i s,a n,o r,e s,Ġ b,e d,Ġ f,in g,Ġ p,o u,Ġa n,a l,"
    "a r,Ġt o,Ġ m,Ġo f,Ġ in,Ġ d,Ġ h,Ġan d,i c,a s,l e,Ġt h,i on,o m,l l,en t,Ġ n,Ġ l,s t,Ġ re,v e,Ġ e,r o,l y,Ġb e,"
    "Ġ g,Ġ T,c t,Ġ S,i d,o t,Ġ I,u t,e t"
)

ARCHS = tuple(SUITE)
MORE_ARCHS = tuple(MORE)
OWN_ARCHS = tuple(OWN)


def config(arch: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; an override goes to ``text_config`` if the key stands there."""
    made = json.loads(json.dumps((SUITE | MORE | OWN | HEADED)[arch]))  # a deep copy
    made |= {
        "model_type": arch,
        "architectures": [ARCHITECTURES.get(arch, arch)],
        "dtype": "float32",
        "eos_token_id": VOCAB - 1,
        "pad_token_id": VOCAB - 3,
    }
    for key, value in overrides.items():
        inner = made.get("text_config", {})
        (inner if key in inner else made)[key] = value
    return made


def build(arch: str, *, seed: int = 0, **overrides: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model in memory (eval mode, evaluated) and its config."""
    made = config(arch, **overrides)
    model_class, args_class = classes(made)
    model = model_class(args_class.from_dict(json.loads(json.dumps(made))))
    weights = {}
    for i, (name, old) in enumerate(sorted(tree_flatten(model.parameters()))):
        weights[name] = _weight(name, old, mx.random.key(seed * 100_003 + i))
    if head := next((k for k in weights if k.endswith("lm_head.weight")), None):
        _quiet_special(weights, head, 1.0)
    else:  # tied
        _quiet_special(
            weights, next(k for k in weights if k.endswith((".embed_tokens.weight", ".embeddings.weight"))), 0.4
        )
    model.update(tree_unflatten(list(weights.items())))
    model.eval()
    mx.eval(model.parameters())
    return model, made


def make(arch: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a model folder that ``mlx_lm.utils.load`` loads; gives back the folder.

    ``overrides`` replace fields of the config (``num_hidden_layers=2``, ``sliding_window=16``, ``eos_token_id=5``).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model, made = build(arch, seed=seed, **overrides)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(made, indent=1))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer().save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """A byte-level BPE with Qwen's splitting rule and NFC, which the qwen3_5 loader imposes on every tokenizer."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [tuple(pair.split(" ")) for pair in _PAIRS.split(",")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(BPE(vocab=vocab, merges=merges))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    assert made.get_vocab_size() == VOCAB
    return made


def ids(n: int, seed: int = 0) -> list[int]:
    """n random token ids, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB - len(SPECIAL)) for _ in range(n)]


def _weight(name: str, old: mx.array, key: mx.array) -> mx.array:
    shape = old.shape
    if name.endswith("tid2eid"):  # one of the experts first, then those that follow it, for each token
        experts = mx.random.randint(0, 4, (shape[0], 1), key=key) + mx.arange(shape[1])
        return (experts % 4).astype(old.dtype)
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(0.02, 0.4, shape, key=key))
    if name.endswith("dt_bias"):
        return mx.random.uniform(0.5, 1.5, shape, key=key)
    if name.endswith("conv1d.weight") or name.endswith("conv.conv.weight"):
        return mx.random.normal(shape, key=key) * shape[1] ** -0.5
    if len(shape) < 2:  # norms, biases, D: around what the architecture starts from
        return old.astype(mx.float32) + 0.1 * mx.random.normal(shape, key=key)
    if "embed" in name:
        return mx.random.normal(shape, key=key)
    return mx.random.normal(shape, key=key) * (1.5 * shape[-1] ** -0.5)


def _quiet_special(weights: dict[str, mx.array], name: str, scale: float) -> None:
    row = mx.arange(weights[name].shape[0])[:, None]
    special = (row >= VOCAB - len(SPECIAL)) & (row < VOCAB)
    weights[name] = weights[name] * mx.where(special, 0.05 * scale, scale)
