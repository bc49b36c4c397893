"""Convert a checkpoint through mlx-lm, quantised or not, and keep its prediction head beside the weights.

mlx-lm's own converter drops heads. Here the body goes through mlx-lm's functions and the head into a file of its own
(``mtp.safetensors``), under its published names, with metadata that says how its norms are stored. They stay as the
checkpoint has them: 1 + w rounded to 16 bits would lose what w says.

The folder appears under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ConfigError, MlxkvError, ModelError
from . import folder, mtp, precision
from .loading import load_tokenizer, open_network

#: mode -> (group size, bits) that mlx-lm takes where none are given
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_SPARE = 16 << 20  # bytes beside the weights: tokenizer, config, index


@dataclass(frozen=True)
class Quantisation:
    """How matrices are quantised; ``bits`` and ``group_size`` None for what the mode does by default."""

    mode: str = "affine"
    bits: int | None = None
    group_size: int | None = None

    def settled(self) -> Quantisation:
        """With all numbers. Raises ConfigError for a combination that MLX does not have."""
        if self.mode not in MODES:
            raise ConfigError(f"The quantisation mode {self.mode!r} is not known.", f"Allowed are {', '.join(MODES)}.")
        group, bits = MODES[self.mode]
        if self.mode != "affine" and (self.bits or bits, self.group_size or group) != (bits, group):
            raise ConfigError(f"{self.mode} has {bits} bits in groups of {group}.", "Leave the numbers away.")
        if self.bits is not None and self.bits not in _BITS:
            raise ConfigError(f"{self.bits} bits are not possible.", f"Allowed are {_listed(_BITS)}.")
        if self.mode == "affine" and self.group_size is not None and self.group_size not in _GROUPS:
            raise ConfigError(f"Groups of {self.group_size} are not possible.", f"Allowed are {_listed(_GROUPS)}.")
        return Quantisation(self.mode, self.bits or bits, self.group_size or group)


@dataclass(frozen=True)
class Converted:
    """``head``: what was found of one; ``head_kept`` where it was written. ``nbytes`` of all files."""

    path: Path
    nbytes: int
    head: mtp.Found
    head_kept: bool


def convert(
    model: str | Path,
    target: str | Path,
    *,
    quantisation: Quantisation | None = None,
    dtype: str | None = None,
    plain_head: bool = False,
) -> Converted:
    """Write the model in folder (or of Hugging Face id) ``model`` into the new folder ``target``.

    ``quantisation`` None: matrices stay in ``dtype`` (None: the one that config.json names). ``plain_head``: the head
    is not quantised. Raises ConfigError (the target exists, or has no room) and ModelError.
    """
    how = None if quantisation is None else quantisation.settled()
    wanted = None if dtype is None else precision.parse(dtype)
    target = Path(os.path.abspath(Path(target).expanduser()))
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already.", "Name a folder that does not, or remove it.")
    if not target.parent.is_dir():
        raise ConfigError(f"There is no folder {target.parent}.", "Make it first.")
    path = folder.resolve(model)
    found, opened = mtp.open_head(path, folder.check(path))
    network, config = open_network(path, found.names)
    if how is not None and precision.is_quantised(network):
        raise ConfigError(
            f"The model in {path} is quantised already.", "Convert the original, or leave it with --no-quantise."
        )
    tokenizer = load_tokenizer(path, config)
    name = wanted or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    if name in precision.DTYPES:
        precision.cast(network, name)
    head = None if opened is None else _head(opened, network, name)
    if how is not None:
        rule = getattr(network, "quant_predicate", None)
        config = _quantise(network, config, how)
        if head is not None and not plain_head and not precision.is_quantised(head):
            _quantise_head(head, how, rule)
    _check_room(target.parent, _nbytes(network) + (0 if head is None else _nbytes(head)))
    made = _write(target, path, network, tokenizer, config, head, opened)
    return Converted(target, made, found, head is not None)


def _head(opened: mtp.Opened, network: nn.Module, dtype: str | None) -> mtp.Head:
    """The head with norms as they are stored, in the body's dtype, without what is the body's too."""
    head = opened.head
    head.load_weights(list(opened.weights.items()))
    if dtype in precision.DTYPES:
        precision.cast(head, dtype, like=network)
    mtp.share(head, network)
    return head


def _quantise(network: nn.Module, config: dict[str, Any], how: Quantisation) -> dict[str, Any]:
    from mlx_lm.utils import quantize_model

    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it did
        return quantize_model(network, config, how.group_size, how.bits, mode=how.mode)[1]


def _quantise_head(head: mtp.Head, how: Quantisation, rule: Any) -> None:
    """As mlx-lm quantises the body: what a group divides, where the architecture's own ``rule`` does not say else."""
    numbers = {"group_size": how.group_size, "bits": how.bits, "mode": how.mode}

    def wanted(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % how.group_size:
            return False
        said = True if rule is None else rule(path, module)
        return numbers if said is True else said

    nn.quantize(head, class_predicate=wanted)


def _nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))  # type: ignore[union-attr]


def _check_room(parent: Path, weights: int) -> None:
    needed, free = weights + _SPARE, shutil.disk_usage(parent).free
    if needed > free:
        raise ConfigError(
            f"The converted model needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in {parent}.",
            "Free some space, or choose another place.",
        )


def _write(
    target: Path,
    source: Path,
    network: nn.Module,
    tokenizer: Any,
    config: dict[str, Any],
    head: mtp.Head | None,
    opened: mtp.Opened | None,
) -> int:
    """Write everything into a hidden folder beside ``target`` and rename it. Gives back the bytes written."""
    from mlx_lm.utils import save

    hidden = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        try:
            if head is not None and opened is not None:
                mtp.write(hidden / mtp.SIDE_FILE, head, opened)
            save(hidden, source, network, tokenizer, config)
            config = folder.check(hidden)
            if head is not None and (reason := mtp.find(hidden, config).reason):
                raise ModelError(f"The head that was written cannot be read: {reason}.", "Report this.")
        except MlxkvError:
            raise
        except Exception as error:  # MLX says RuntimeError where a file cannot be written
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            cure = "Free some space, or choose another place." if full else ""
            text = " ".join(str(error).split())[:300]
            raise ModelError(f"{target} cannot be written: {type(error).__name__}: {text}", cure) from error
        hidden.chmod(0o777 & ~_umask())
        size = sum(file.stat().st_size for file in hidden.rglob("*") if file.is_file())
        try:
            os.rename(hidden, target)
        except OSError as error:
            raise ConfigError(f"{target} cannot be made: {error.strerror}.", "Was it made meanwhile?") from error
        return size
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
