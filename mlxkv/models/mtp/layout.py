"""What a layout of head tensors is: whose they are, what they are called, and the module that they fill."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .head import Head


class Misfit(Exception):
    """Why a head that is there cannot be used; a clause, without a full stop."""


class Layout(Protocol):
    """One way in which checkpoints store heads. Nothing here evaluates a tensor."""

    #: whether a checkpoint in its original layout stores norms as w − 1; then evidence is needed of how this one does
    shifts: bool

    def names(self, names: list[str], config: dict[str, Any]) -> list[str]:
        """Those of a checkpoint's tensor names that are a head's in this layout."""
        ...

    def local(self, name: str, config: dict[str, Any]) -> str:
        """A tensor's name inside the head, as ``build`` takes it."""
        ...

    def stored(self, name: str, config: dict[str, Any]) -> str:
        """The published name for a parameter of the head that ``build`` gives."""
        ...

    def build(self, config: dict[str, Any], weights: Mapping[str, mx.array]) -> tuple[Head, dict[str, mx.array]]:
        """The head that these tensors (by local name) fill, and the tensors by its parameters' names. Raises Misfit."""
        ...


def fit(head: Head, weights: Mapping[str, mx.array]) -> None:
    """Give ``head`` quantised layers where ``weights`` are, and check that they fill it. Raises Misfit.

    Bits, group and mode of a layer come from the shapes of its own tensors, as mlx-lm finds them where a config names
    no layer: heads are quantised in other ways than their bodies.
    """
    from mlx_lm.utils import infer_quant_config

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return infer_quant_config(path, module, dict(weights))

    try:
        nn.quantize(head, class_predicate=how)
    except Exception as error:  # shapes of strangers fail in every way there is
        raise Misfit(f"its quantisation cannot be told from its tensors: {error}") from error
    wanted = {name: tuple(array.shape) for name, array in tree_flatten(head.parameters())}  # type: ignore[union-attr]
    given = {name: tuple(array.shape) for name, array in weights.items()}
    if missing := sorted(wanted.keys() - given.keys()):
        raise Misfit(f"{_some(missing)} missing")
    if strange := sorted(given.keys() - wanted.keys()):
        raise Misfit(f"{_some(strange)} not known")
    for name, shape in wanted.items():
        if given[name] != shape:
            raise Misfit(f"{name} has the shape {list(given[name])}, where {list(shape)} is expected")


def layer_numbers(weights: Mapping[str, Any], prefix: str) -> list[int]:
    """The numbers that follow ``prefix`` in tensor names, which must be 0, 1, ... Raises Misfit."""
    found = {int(m[1]) for n in weights if (m := re.match(re.escape(prefix) + r"(\d+)\.", n))}
    if not found or found != set(range(len(found))):
        raise Misfit(f"its layers are numbered {sorted(found)}" if found else "it has no layer")
    return sorted(found)


def stacked(weights: Mapping[str, mx.array], mlp: str) -> dict[str, mx.array]:
    """``{mlp}experts.E.X`` of all experts E, each [out, in], as one ``{mlp}switch_mlp.X`` [experts, out, in]."""
    pattern = re.compile(re.escape(mlp) + r"experts\.(\d+)\.(.+)")
    out: dict[str, mx.array] = {}
    groups: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if m := pattern.fullmatch(name):
            groups.setdefault(m[2], {})[int(m[1])] = array
        else:
            out[name] = array
    for rest, experts in groups.items():
        if set(experts) != set(range(len(experts))):
            raise Misfit(f"{mlp}experts are numbered {sorted(experts)[:8]}")
        out[f"{mlp}switch_mlp.{rest}"] = mx.stack([experts[e] for e in range(len(experts))])
    return out


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} others" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more} {'is' if len(names) == 1 else 'are'}"
