"""A model folder: found on this machine or on the Hugging Face hub, and checked before anything is loaded."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
#: files beside the weights in which a prediction head may be; mlx-lm does not read them
SIDE_FILES = ("mtp*.safetensors",)
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_NEEDS = "A model folder holds config.json, model*.safetensors and a tokenizer."
_CONVERT = "Convert it with `mlx_lm.convert --hf-path <original model>`, or use a model in MLX or Hugging Face format."


def resolve(model: str | Path) -> Path:
    """The folder of a model: a path on this machine, or a Hugging Face id (``owner/name``), which is downloaded unless
    it is complete in the local cache already. Raises ModelError."""
    text = str(model)
    path = Path(text).expanduser()
    try:
        found = path.exists()
    except OSError as error:
        _unreadable(path, error)
    if found:
        return path.resolve()
    if isinstance(model, Path) or not _HUB_ID.fullmatch(text):
        raise ModelError(
            f"There is no model folder {text!r}.",
            "Give the path of a folder, or a Hugging Face id such as mlx-community/Qwen3.5-4B-4bit.",
        )
    return _from_hub(text)


def check(path: Path) -> dict[str, Any]:
    """Check that a folder holds a model mlx-lm can load; gives back its config.json. Raises ModelError."""
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            raise ModelError(f"{path} is a GGUF file, which mlxkv does not read.", _CONVERT)
        raise ModelError(f"{path} is a file, not a model folder.", "Give the folder that contains it. " + _NEEDS)
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        _unreadable(path, error)
    if "config.json" not in names:
        if any(name.lower().endswith(".gguf") for name in names):
            raise ModelError(f"{path} holds a GGUF file, which mlxkv does not read.", _CONVERT)
        raise ModelError(f"{path} has no config.json.", _NEEDS)
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path / 'config.json'} names no model_type.", "Is this the config of a language model?")
    if config.get("model_file") is not None:
        raise ModelError(
            f"{path} wants to run its own Python code ({config['model_file']}), which mlxkv does not allow.",
            "Use a model whose architecture mlx-lm has built in.",
        )
    _check_weights(path, names)
    if not any(name in names for name in _TOKENIZER_FILES) and not any(n.endswith(".tiktoken") for n in names):
        raise ModelError(
            f"{path} has no tokenizer ({', '.join(_TOKENIZER_FILES)}).",
            "Copy the tokenizer files of the original model into the folder.",
        )
    return config


def weight_files(path: Path) -> list[Path]:
    """The files mlx-lm reads weights from, sorted."""
    return sorted(path.glob("model*.safetensors"))


def side_files(path: Path) -> list[Path]:
    """The files beside them in which a prediction head may be, sorted."""
    return sorted(file for pattern in SIDE_FILES for file in path.glob(pattern))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        _unreadable(path, error)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.", "Download or copy the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object.", "Download or copy the file again.")
    return value


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets (bytes). Raises ModelError if the
    header is damaged or the file's length is not what it says."""
    again = "Download or copy the file again."
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(f"{path} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in the folder.")
            if len(start) < 8 or length > min(_MAX_HEADER, size - 8):
                raise ModelError(f"{path} is not a whole safetensors file ({size} bytes).", again)
            raw = file.read(length)
    except OSError as error:
        _unreadable(path, error)
    try:
        header = json.loads(raw)
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} has a damaged safetensors header.", again) from error
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        fault = "is cut off" if size < wanted else "is longer than its header says"
        raise ModelError(f"{path} {fault}: {size} bytes where {wanted} are expected.", again)
    return header


def _check_weights(path: Path, names: list[str]) -> None:
    index = path / "model.safetensors.index.json"
    if index.name in names:
        try:
            shards = sorted(set(read_json(index)["weight_map"].values()))
        except (KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} has no weight_map.", "Download or copy the file again.") from error
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise ModelError(
                f"{path} lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}, which "
                f"{index.name} names.",
                "Finish the download, or copy the missing files.",
            )
    files = weight_files(path)
    if not files:
        others = [name for name in names if name.endswith(".safetensors")]
        if others:
            cure = "Name the weights model.safetensors or model-00001-of-0000N.safetensors."
            raise ModelError(f"{path} has no model*.safetensors, only {', '.join(others[:3])}.", cure)
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            raise ModelError(f"{path} has PyTorch weights only; mlxkv reads safetensors.", _CONVERT)
        if any(name.lower().endswith(".gguf") for name in names):
            raise ModelError(f"{path} has GGUF weights only; mlxkv reads safetensors.", _CONVERT)
        raise ModelError(f"{path} has no model*.safetensors.", _NEEDS)
    for file in files:
        read_header(file)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, hf_repo_to_path

    try:
        return hf_repo_to_path(name)  # complete in the local cache: no network needed
    except (OSError, ValueError):  # not there, or not complete
        pass
    local = "Download it elsewhere and give the path of its folder."
    try:
        return Path(snapshot_download(name, allow_patterns=[*DEFAULT_ALLOW_PATTERNS, *SIDE_FILES]))
    except GatedRepoError as error:
        cure = "Accept its terms on huggingface.co and run `hf auth login`."
        raise ModelError(f"The model {name} is gated.", cure) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder {name!r} here and no model {name} on the Hugging Face hub that you may read.",
            "Check the spelling; for a private model run `hf auth login`.",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"There is no folder {name!r} here, and the Hugging Face hub cannot be reached.", local) from (
            error
        )
    except HfHubHTTPError as error:
        raise ModelError(f"The Hugging Face hub refused {name}: {error}", local) from error
    except Exception as error:  # what a broken connection raises depends on the hub library's HTTP client
        raise ModelError(f"Downloading {name} failed: {type(error).__name__}: {error}", local) from error


def _unreadable(path: Path, error: OSError) -> NoReturn:
    cure = "Check that the file exists and that you may read it."
    if isinstance(error, PermissionError):
        cure = "Give yourself permission to read it (on a Mac, see Full Disk Access in the privacy settings)."
    raise ModelError(f"{path} cannot be read: {error.strerror or error}.", cure) from error
