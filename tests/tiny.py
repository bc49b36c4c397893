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
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from tests.recurrent import MORE

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 320  # 256 bytes, 61 merges, 3 special tokens: every id has a token
EOS = VOCAB - 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PAIRS = (
    "Ġ t,Ġ a,h e,i n,r e,o n,e r,Ġt he,Ġ s,a t,Ġ w,Ġ o,e n,Ġ c,i t,i s,a n,o r,e s,Ġ b,e d,Ġ f,in g,Ġ p,o u,Ġa n,a l,"
    "a r,Ġt o,Ġ m,Ġo f,Ġ in,Ġ d,Ġ h,Ġan d,i c,a s,l e,Ġt h,i on,o m,l l,en t,Ġ n,Ġ l,s t,Ġ re,v e,Ġ e,r o,l y,Ġb e,"
    "Ġ g,Ġ T,c t,Ġ S,i d,o t,Ġ I,u t,e t"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"rope_theta": 10000.0, "num_hidden_layers": 2},
    "gemma3_text": _COMMON
    | {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32, "rope_theta": 10000.0},
    "qwen3_5": {
        "text_config": _COMMON
        | {
            "model_type": "qwen3_5_text",
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        }
    },
    "falcon_h1": _COMMON
    | {
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_n_heads": 2,
        "rope_theta": 10000.0,
    },
    "nemotron_h": _COMMON
    | {
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "attention_bias": False,
        "mamba_num_heads": 2,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "lfm2": _COMMON
    | {
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
}
ARCHS = tuple(_CONFIGS)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}


def config(arch: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; an override goes to ``text_config`` if the key stands there."""
    made = json.loads(json.dumps((_CONFIGS | MORE)[arch]))  # a deep copy
    made |= {
        "model_type": arch,
        "architectures": [_ARCHITECTURES.get(arch, arch)],
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
    model_class, args_class = _get_classes(made)
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
