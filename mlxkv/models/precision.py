"""In which dtype a model computes, and whether quantised weights are unpacked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from ..errors import ConfigError

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "auto"} | {name: name for name in DTYPES}
_MARGIN = 0.8  # of the available memory may become weights; the rest is for caches and other processes


def choose(wish: str, model: nn.Module, *, mode: str, device: str) -> str:
    """The compute dtype's name for what the user asked for (``auto``, ``fp32``, ``float32``, ``bf16``, ...).

    ``auto`` is float32 on a CPU, where it is also the fastest; on a GPU it is bfloat16, or float16 where the checkpoint
    is or where the chip (M1, M2) computes bfloat16 slowly. Raises ConfigError.
    """
    name = parse(wish)
    if device == "cpu":
        if mode == "exact" and name not in ("auto", "float32"):
            raise ConfigError(f"MLXKV_NUMERICS=exact computes in float32 on a CPU, not in {name}.", "Use dtype fp32.")
        return "float32" if name == "auto" else name
    if name != "auto":
        return name
    stored = stored_dtype(model)
    if stored == "float16":
        return stored
    # Gemma's activations pass float16's largest number.
    old_chip = str(mx.device_info().get("architecture", "")).startswith(("applegpu_g13", "applegpu_g14"))
    return "float16" if old_chip and not getattr(model, "model_type", "").startswith("gemma") else "bfloat16"


def parse(wish: str) -> str:
    """The full name of a dtype, or "auto". Raises ConfigError."""
    name = _NAMES.get(str(wish).strip().lower())
    if name is None:
        raise ConfigError(f"The dtype {wish!r} is not known.", "Allowed are auto, bf16, fp16 and fp32.")
    return name


def stored_dtype(model: nn.Module) -> str:
    """The floating dtype most bytes of the checkpoint are in (of the scales, where it is quantised)."""
    sizes = {name: 0 for name in DTYPES}
    for _, array in tree_flatten(model.parameters()):
        for name, dtype in DTYPES.items():
            if isinstance(array, mx.array) and array.dtype == dtype:
                sizes[name] += array.nbytes
    return max(sizes, key=lambda name: sizes[name])


def cast(model: nn.Module, name: str, like: nn.Module | None = None) -> None:
    """Cast the floating parameters, except those the architecture (``like``'s, or the model's own) keeps as they are
    (``cast_predicate``)."""
    dtype = DTYPES[name]
    wanted = getattr(model if like is None else like, "cast_predicate", lambda path: True)

    def convert(path: str, array: Any) -> Any:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and wanted(path) else array

    model.update(tree_map_with_path(convert, model.parameters()))


def is_quantised(model: nn.Module) -> bool:
    return any("scales" in module for _, module in model.named_modules())


def dequantise(model: nn.Module, itemsize: int = 4) -> tuple[bool, str]:
    """Replace quantised layers by plain ones where memory allows; gives back (done, note for the user).

    On a CPU products with unpacked float32 weights are 30 to 50 times faster for a prompt. Cast first: the values are
    computed in the dtype of the scales.
    """
    from mlx_lm.utils import dequantize_model, get_total_parameters

    if any(module.get("global_scale") is not None for _, module in model.named_modules() if "scales" in module):
        return False, "The weights stay quantised: their scales have two levels. Prompts are read slowly."
    needed, free = get_total_parameters(model) * itemsize, available_memory()
    if needed > free * _MARGIN:
        return False, (
            f"The weights stay quantised: unpacked they need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory "
            "are free. Prompts are read slowly."
        )
    dequantize_model(model)
    model.eval()
    if is_quantised(model):
        return False, "Some layers stay quantised: mlx-lm has no plain form of them."
    return True, ""


def available_memory() -> int:
    """Bytes this process could still take without swapping."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        try:
            found = os.sysconf("SC_AVPHYS_PAGES") * page
        except (OSError, ValueError):  # macOS tells the total only
            found = os.sysconf("SC_PHYS_PAGES") * page // 2
    try:  # a container's limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        found = min(found, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(found, 0)
