"""What a path given to the import is, found by looking at names and at the headers of a few files: never guessed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...errors import ConfigError
from .header import HostileFile
from .reasons import Refused

#: kind -> what it is, for people
KINDS = {"omlx": "a cache folder of oMLX", "mlx-lm": "prompt caches of mlx-lm"}

#: names looked at in a folder, and headers read, before it counts as something unknown
_NAMES, _HEADERS = 10_000, 16
_SHARD = re.compile(r"[0-9a-f]")
_BLOCK = re.compile(r"[0-9a-f]{64}(?:_tmp)?\.safetensors")
#: tensors of a prompt cache are named by layer: ``0.1`` (a flattened list), in the oldest files ``0_keys``
_LAYER = re.compile(r"\d+(?:\.\d+)*|\d+_(?:keys|values)")
_OTHERS = (
    "Give the folder that oMLX keeps its cache in (with subfolders 0 to f), or a prompt-cache file of mlx-lm, or a "
    "folder of such files."
)


def recognise(path: Path) -> str:
    """A key of KINDS. Raises ConfigError for what is neither, or both."""
    if not os.path.lexists(path):
        raise ConfigError(f"{path} does not exist.", "Check the path.")
    try:
        if not path.is_dir():
            return _file(path)
        return _folder(path)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}.", "Check whose it is and its mode.") from None


def _file(path: Path) -> str:
    try:
        kind = _header(path)
    except Refused as e:
        raise ConfigError(f"{path} is not a file that can be imported: {e.code}: {e.detail}.", _OTHERS) from None
    if kind == "omlx":
        raise ConfigError(f"{path} is one block of an oMLX cache; a block alone says nothing.", _OTHERS)
    if kind is None:
        raise ConfigError(f"{path} is a safetensors file, but no prompt cache of mlx-lm.", _OTHERS)
    return kind


def _folder(path: Path) -> str:
    shards, files = _names(path)
    omlx = any(any(_BLOCK.fullmatch(name) for name in _names(shard)[1]) for shard in shards)
    caches = False
    for name in [name for name in files if name.endswith(".safetensors")][:_HEADERS]:
        try:
            caches = caches or _header(path / name) == "mlx-lm"
        except Refused:
            continue  # it will have its reason, if there is a good one beside it
    if omlx and caches:
        raise ConfigError(
            f"{path} holds oMLX blocks and prompt caches of mlx-lm.", "Give the prompt caches one by one."
        )
    if omlx or caches:
        return "omlx" if omlx else "mlx-lm"
    if len(shards) == 16:
        return "omlx"  # a new one, or one whose blocks have all been evicted
    raise ConfigError(f"{path} holds neither blocks of oMLX nor prompt caches of mlx-lm.", _OTHERS)


def _names(folder: Path) -> tuple[list[Path], list[str]]:
    """(subfolders named like oMLX's, names of other things), of the first names that the system lists."""
    shards, files = [], []
    with os.scandir(folder) as items:
        for seen, item in enumerate(items):
            if seen == _NAMES:
                break
            if _SHARD.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
                shards.append(Path(item.path))
            else:
                files.append(item.name)
    return sorted(shards), sorted(files)


def _header(path: Path) -> str | None:
    """Whose file this is by its header; None: nobody's that is known. Raises Refused."""
    with HostileFile.open(path, ordered=False) as file:
        if "block_hash" in file.metadata or "omlx_cache_format_version" in file.metadata:
            return "omlx"
        return "mlx-lm" if file.tensors and all(map(_LAYER.fullmatch, file.tensors)) else None
