"""Load a model: folder or Hugging Face id in, checked and evaluated model out.

Call it on the thread that will run the model: MLX streams belong to a thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import numerics
from ..errors import MlxkvError, ModelError
from . import architectures, folder, mtp, precision
from .fingerprint import fingerprint, identity
from .replace import as_subclass

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass
class Loaded:
    """A model that is ready to run.

    ``name`` is what the user called it, for display; ``context_length`` and ``vocab_size`` (of the logits) are in
    tokens; ``dtype`` is what it computes in; ``head`` is the multi-token-prediction head that the checkpoint brings, if
    it can be used; ``notes`` are sentences for the user.
    """

    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    path: Path
    name: str
    context_length: int | None
    eos_token_ids: set[int]
    vocab_size: int
    dtype: str
    dequantised: bool
    fingerprint: bytes
    fingerprint_name: str
    head: mtp.Head | None = None
    notes: list[str] = field(default_factory=list)


def load(
    model: str | Path, *, dtype: str = "auto", adapter: str | Path | None = None, memo_dir: Path | None = None
) -> Loaded:
    """Load a model.

    ``model``: a folder, or a Hugging Face id. ``dtype``: auto, bf16, fp16 or fp32. ``adapter``: a folder with LoRA
    weights as mlx-lm writes them. ``memo_dir``: where digests of weight files are remembered (fingerprint.py).
    Raises ModelError or ConfigError.
    """
    precision.parse(dtype)  # a bad value is told before a long download
    path = folder.resolve(model)
    found, opened = mtp.open_head(path, folder.check(path))
    name = path.name if Path(str(model)).expanduser().exists() else str(model)
    adapter_path = None if adapter is None else _check_adapter(Path(adapter).expanduser())
    weights = folder.weight_files(path)
    beside = [file for file in found.files if file not in weights] if found.usable else []
    files = [*weights, *beside]
    before = [identity(file) for file in files]

    network, config = open_network(path, found.names)
    if adapter_path is not None:
        _apply_adapter(network, adapter_path)
    tokenizer = load_tokenizer(path, config)

    now = numerics.current()
    notes: list[str] = []
    chosen = precision.choose(dtype, network, mode=now.mode, device=now.device)
    precision.cast(network, chosen)
    dequantised = False
    if now.device == "cpu" and precision.is_quantised(network):
        dequantised, note = precision.dequantise(network, precision.DTYPES[chosen].size)
        notes += [note] if note else []
    # a head is unpacked where the body's matrices are, also where some layers of the body have no plain form
    unpack = now.device == "cpu" and not any(isinstance(m, nn.QuantizedLinear) for m in network.modules())
    head = None if opened is None else mtp.evaluate(opened, precision.DTYPES[chosen], network, unpack=unpack)
    network.eval()
    try:
        mx.eval(network.parameters())
    except Exception as error:
        raise ModelError(f"The weights in {path} cannot be read: {error}", "Download or copy them again.") from error
    if now.device == "cpu" and now.mode == "fast":
        from .fast import accelerate

        accelerate(network)
        if head is not None:
            accelerate(head)
    assert not any(module.training for module in network.modules())
    mark = fingerprint(path, adapter_path, memo_dir, beside)
    if [identity(file) for file in files] != before:
        raise ModelError(f"The weights in {path} changed while they were loaded.", "Try again later.")
    if now.blas_hint:
        notes.append(now.blas_hint)
    return Loaded(
        model=network,
        tokenizer=tokenizer,
        config=config,
        path=path,
        name=name,
        context_length=_context_length(config),
        eos_token_ids=_eos_token_ids(tokenizer, config),
        vocab_size=_vocab_size(network),
        dtype=chosen,
        dequantised=dequantised,
        fingerprint=mark,
        fingerprint_name=f"{name}@{mark.hex()[:8]}",
        head=head,
        notes=notes,
    )


def open_network(path: Path, head: Collection[str] = ()) -> tuple[nn.Module, dict[str, Any]]:
    """The network of a checked folder, no weight evaluated, and its config. ``head``: names of a prediction head's
    tensors, which are left out: not every architecture drops them itself, and then its loading fails. Raises
    ModelError."""
    from mlx_lm.utils import load_model

    def without_head(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model, arguments = architectures.classes(config)
        own = getattr(model, "sanitize", lambda self, weights: weights)

        def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            return own(self, {name: array for name, array in weights.items() if name not in head})

        return type(model.__name__, (model,), {"sanitize": sanitize}), arguments

    more = architectures.overrides(folder.read_json(path / "config.json"))
    try:
        if not head:
            return load_model(path, lazy=True, model_config=more, get_model_classes=architectures.classes)
        network, config = load_model(path, lazy=True, model_config=more, get_model_classes=without_head)
        return as_subclass(type(network).__bases__[0], network), config
    except MlxkvError:
        raise
    except Exception as error:  # configs and weights of strangers fail in every way there is
        config = folder.read_json(path / "config.json")
        if isinstance(error, ValueError) and str(error).endswith("not supported."):
            raise ModelError(
                f"{path / 'config.json'} names the architecture {config.get('model_type')!r}, which the installed "
                "mlx-lm does not have.",
                "Upgrade mlx-lm, or use another model.",
            ) from error
        text = " ".join(str(error).split())
        raise ModelError(
            f"The model in {path} cannot be loaded: {type(error).__name__}: {text[:500]}",
            "Check that config.json belongs to these weights, and that mlx-lm is new enough for them.",
        ) from error


def _check_adapter(path: Path) -> Path:
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (path / name).is_file():
            raise ModelError(
                f"The adapter folder {path} has no {name}.", "Give a folder that `mlx_lm.lora` wrote (--adapter-path)."
            )
    folder.read_json(path / "adapter_config.json")
    folder.read_header(path / "adapters.safetensors")
    return path.resolve()


def _apply_adapter(network: nn.Module, path: Path) -> None:
    from mlx_lm.utils import load_adapters

    try:
        load_adapters(network, str(path))
    except Exception as error:
        raise ModelError(
            f"The adapter in {path} does not fit the model: {error}", "Use the adapter's own base model."
        ) from error


def load_tokenizer(path: Path, config: dict[str, Any]) -> Any:
    """The tokenizer of a folder. Raises ModelError."""
    from mlx_lm.utils import load_tokenizer as open_tokenizer

    try:
        return open_tokenizer(path, architectures.tokenizer_fields(config), eos_token_ids=config.get("eos_token_id"))
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise ModelError(
                f"The tokenizer in {path} wants to run its own Python code, which mlxkv does not allow.",
                "Use a model with a tokenizer.json.",
            ) from error
        raise ModelError(
            f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {text[:500]}",
            "Copy the tokenizer files of the original model into the folder again.",
        ) from error


def _context_length(config: dict[str, Any]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        for name in _CONTEXT_FIELDS:
            if isinstance(part.get(name), int) and part[name] > 0:
                return part[name]
    return None


def _eos_token_ids(tokenizer: Any, config: dict[str, Any]) -> set[int]:
    found = set(tokenizer.eos_token_ids or ())
    for value in (config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")):
        found |= set(value if isinstance(value, (list, tuple)) else [value])
    return {int(i) for i in found if isinstance(i, int)}


def _vocab_size(network: nn.Module) -> int:
    """The width of the logits, from the shape of an answer that is never computed."""
    return network(mx.zeros((1, 1), dtype=mx.int32)).shape[-1]
