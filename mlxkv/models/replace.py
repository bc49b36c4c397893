"""Replace layers of an mlx-lm model by instances of subclasses that keep their parameters."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.nn as nn
from mlx.utils import tree_unflatten


def replace(model: nn.Module, classes: Mapping[str, type[nn.Module]]) -> list[str]:
    """Replace, in place, each named layer by one of the class given for it; parameters are shared, not copied. Gives
    back what was replaced ("6 x Conv1d -> DepthwiseConv1d"), for the log."""
    if not classes:
        return []
    layers = dict(model.named_modules())
    made = {name: as_subclass(subclass, layers[name]) for name, subclass in classes.items()}
    model.update_modules(tree_unflatten(list(made.items())))
    pairs = [f"{type(layers[name]).__name__} -> {subclass.__name__}" for name, subclass in classes.items()]
    return [f"{pairs.count(pair)} x {pair}" for pair in sorted(set(pairs))]


def as_subclass(subclass: type[nn.Module], layer: nn.Module) -> nn.Module:
    """A layer of a subclass, with the very attributes and arrays of ``layer``; its constructor would make new ones."""
    made = subclass.__new__(subclass)
    made.__dict__.update(layer.__dict__)
    dict.update(made, layer)
    return made
