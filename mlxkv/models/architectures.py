"""Which classes a model is made of: mlx-lm's, or ours for the architectures that it has not."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn


def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """The model's class and its arguments'. Raises ValueError for an architecture that nobody has."""
    if config["model_type"] == "deepseek_v4":
        from . import deepseek_v4

        return deepseek_v4.Model, deepseek_v4.ModelArgs
    from mlx_lm.utils import _get_classes

    return _get_classes(config)


def overrides(config: dict[str, Any]) -> dict[str, Any]:
    """Fields that mlx-lm's loader needs in the config of one of ours."""
    if config["model_type"] == "deepseek_v4":
        from .deepseek_v4.checkpoint import quantization

        return quantization(config)
    return {}


def tokenizer_fields(config: dict[str, Any]) -> dict[str, Any]:
    """What the tokenizer's loader is told. It would read one of ours by its own rules for the architecture, which are
    narrower (DeepSeek-V4 with ratios of 4 and 128 only), and has no use for it."""
    if config.get("model_type") == "deepseek_v4":
        from transformers import PreTrainedConfig

        return {"config": PreTrainedConfig()}
    return {}
