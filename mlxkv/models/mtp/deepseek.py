"""Heads of the DeepSeek-V3 kind: whole layers behind the body's, with norms and a projection of their own.

    x_t = P [RMSNorm_e(E[tok_{t+1}]), RMSNorm_h(h_t)],   y_t = layer(x_t),   logits for tok_{t+2} = E' RMSNorm_s(y_t)

with h_t the body's hidden state after its final norm, and E[.] zero in row 0 (vLLM's deepseek_mtp.py and
glm4_moe_mtp.py). y_t, without a norm, is the hidden state of the next draft. E and E' are copies of the body's.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from .head import Head, Project
from .layout import Misfit, layer_numbers

#: by mlx-lm's module: its decoder layer's class, whether that wants its mask as an array, and what people call it
BACKBONES = {
    "deepseek_v3": ("DeepseekV3DecoderLayer", True, "DeepSeek-V3"),
    "glm4_moe": ("DecoderLayer", False, "GLM-4.5"),
    "glm4_moe_lite": ("Glm4MoeLiteDecoderLayer", True, "GLM-4.7-Flash"),
}
_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")


class SharedHead(nn.Module):
    """The norm before the output matrix, and that matrix where the checkpoint brings a copy."""

    def __init__(self, size: int, vocab: int | None, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=eps)
        if vocab is not None:
            self.head = nn.Linear(size, vocab, bias=False)


class NextLayer(nn.Module):
    """One layer of the head."""

    def __init__(self, args: Any, block: nn.Module, own_output: bool) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.enorm, self.hnorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.shared_head = SharedHead(size, args.vocab_size if own_output else None, eps)


class DeepSeekHead(Head):
    blind_first = True

    def __init__(self, args: Any, module: Any, n_layers: int, own_embedding: bool, own_output: list[bool]) -> None:
        super().__init__()
        name, self._array_mask, self.family = BACKBONES[module.__name__.rpartition(".")[2]]
        blocks = [getattr(module, name)(args, args.num_hidden_layers + i) for i in range(n_layers)]
        self.layers = [NextLayer(args, block, own) for block, own in zip(blocks, own_output, strict=True)]
        if own_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def row(self, layer: int, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        my = self.layers[layer]
        x = my.eh_proj(mx.concatenate([my.enorm(embedded), my.hnorm(hidden)], axis=-1))
        mask: Any = create_attention_mask(x, cache, return_array=self._array_mask)
        return my.block(x, mask, cache)

    def embed(self, tokens: mx.array, body: Project) -> mx.array:
        return self.embed_tokens(tokens) if "embed_tokens" in self else body(tokens)

    def logits(self, m: mx.array, body: Project, step: int = 0) -> mx.array:
        mine = self.layers[step % self.n_layers].shared_head
        return (mine.head if "head" in mine else body)(mine.norm(m))

    def share(self, embedding: nn.Module | None, output: nn.Module | None) -> None:
        if "embed_tokens" in self and _same(self.embed_tokens, embedding):
            del self.embed_tokens
        for layer in self.layers:
            if "head" in layer.shared_head and _same(layer.shared_head.head, output):
                del layer.shared_head.head


class DeepSeek:
    """The layout: ``model.layers.N.*`` with N from the number of the body's layers on."""

    shifts = False

    def names(self, names: list[str], config: dict[str, Any]) -> list[str]:
        module = _module(config)
        if module is None or module.__name__.rpartition(".")[2] not in BACKBONES:
            return []
        layers = config.get("num_hidden_layers", 0)
        return [n for n in names if (m := re.match(r"model\.layers\.(\d+)\.", n)) and int(m[1]) >= layers]

    def local(self, name: str, config: dict[str, Any]) -> str:
        _, _, number, rest = name.split(".", 3)
        return f"layers.{int(number) - config['num_hidden_layers']}.{rest}"

    def stored(self, name: str, config: dict[str, Any]) -> str:
        if name.startswith("embed_tokens."):
            name = f"layers.0.{name}"
        _, number, rest = name.split(".", 2)
        return f"model.layers.{int(number) + config['num_hidden_layers']}.{rest.removeprefix('block.')}"

    def build(self, config: dict[str, Any], weights: Mapping[str, mx.array]) -> tuple[Head, dict[str, mx.array]]:
        module = _module(config)
        args = module.ModelArgs.from_dict(copy.deepcopy(config))
        numbers = layer_numbers(weights, "layers.")
        out = {}
        for name, array in _sanitised(module.Model, args, weights, len(numbers)).items():
            _, number, rest = name.split(".", 2)
            if rest.startswith("embed_tokens."):
                if number == "0":  # one embedding serves all layers
                    out[rest] = array
            else:
                out[f"layers.{number}.{rest if rest.startswith(_OWN) else 'block.' + rest}"] = array
        own = [f"layers.{i}.shared_head.head.weight" in out for i in numbers]
        return DeepSeekHead(args, module, len(numbers), "embed_tokens.weight" in out, own), out


def _module(config: dict[str, Any]) -> Any:
    """mlx-lm's module of an architecture; None if it has none."""
    from mlx_lm.utils import _get_classes

    try:
        return importlib.import_module(_get_classes(config)[0].__module__)
    except ValueError:
        return None


def _sanitised(model: type[nn.Module], args: Any, weights: Mapping[str, mx.array], layers: int) -> dict[str, mx.array]:
    """The tensors after the architecture's own clean-up, as if the head's layers were all there are: it stacks
    experts, splits what MLA absorbs and unpacks fp8. Raises Misfit."""
    only: Any = model.__new__(model)  # its clean-up asks for nothing but its arguments
    nn.Module.__init__(only)
    only.args = copy.copy(args)
    only.args.num_hidden_layers = layers
    try:
        cleaned = only.sanitize({f"model.{name}": array for name, array in weights.items()})
    except Exception as error:
        raise Misfit(f"mlx-lm cannot clean up its tensors: {type(error).__name__}: {error}") from error
    return {name.removeprefix("model."): array for name, array in cleaned.items()}


def _same(mine: nn.Module, body: nn.Module | None) -> bool:
    if body is None or ("scales" in mine) != ("scales" in body):
        return False
    a, b = dict(tree_flatten(mine.parameters())), dict(tree_flatten(body.parameters()))  # type: ignore[arg-type]
    if a.keys() != b.keys() or any(a[n].shape != b[n].shape or a[n].dtype != b[n].dtype for n in a):
        return False
    return all(mx.array_equal(a[n], b[n]).item() for n in a)
