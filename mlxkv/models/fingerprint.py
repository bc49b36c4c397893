"""A model's fingerprint: what it computes, not where it lies.

SHA-256 over length-prefixed fields: a schema name, config.json in canonical form (quantisation settings included),
hf_quant_config.json, the sorted XXH3-128 digests of the weight files' bytes, and the same of an adapter and of files
beside the weights that a prediction head was read from. Folder and file names, times and the tokenizer are not in it.

Reading every byte of a large model takes seconds, so digests are remembered in a small JSON file under the identity of
the file they came from (device, inode, size, modification and status-change times). Losing it costs time only.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from ..errors import ModelError
from .folder import read_json, weight_files

SCHEMA = b"mlxkv-model-1"
MEMO_NAME = "weights.json"
_NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version")
_PIECE = 8 << 20  # bytes a read
_SETTLED = 2.0  # seconds; a file changed more recently could change again within its time stamp's granularity


def fingerprint(
    path: Path, adapter: Path | None = None, memo_dir: Path | None = None, beside: Sequence[Path] = ()
) -> bytes:
    """The 32-byte fingerprint of the model in folder ``path`` with the LoRA adapter in folder ``adapter``, and a head
    from the files ``beside`` its weights.

    ``memo_dir``: where digests are remembered (made if missing); None to read the files every time. Raises ModelError.
    """
    memo = Memo(memo_dir)
    fields = [SCHEMA, _canonical(path / "config.json")]
    quantisation = path / "hf_quant_config.json"  # where NVIDIA's exporter keeps it
    fields.append(_canonical(quantisation) if quantisation.is_file() else b"")
    fields.append(b"".join(sorted(memo.digest(file) for file in weight_files(path))))
    if adapter is not None:
        fields.append(_canonical(adapter / "adapter_config.json"))
        fields.append(memo.digest(adapter / "adapters.safetensors"))
    if beside:
        fields += [b"head", b"".join(sorted(memo.digest(file) for file in beside))]
    memo.save()
    whole = hashlib.sha256()
    for field in fields:
        whole.update(len(field).to_bytes(8, "little"))
        whole.update(field)
    return whole.digest()


def identity(path: Path) -> str:
    """What changes whenever a file's content may have changed."""
    s = path.stat()
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


class Memo:
    """Digests of files, remembered under their identities. Any fault of the memo's own file is as if it were empty."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / MEMO_NAME
        self._known: dict[str, str] = {}
        self._changed = False
        if self._path is not None:
            try:
                known = json.loads(self._path.read_text())["xxh3_128"]
                self._known = {k: v for k, v in known.items() if isinstance(v, str) and len(bytes.fromhex(v)) == 16}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass

    def digest(self, path: Path) -> bytes:
        """The XXH3-128 digest (16 bytes) of a file's content. Raises ModelError if it cannot be read."""
        try:
            before = identity(path)
            if before in self._known:
                return bytes.fromhex(self._known[before])
            changed = path.stat()
            running = xxhash.xxh3_128()
            with path.open("rb", buffering=0) as file:
                piece = bytearray(_PIECE)
                while n := file.readinto(piece):
                    running.update(memoryview(piece)[:n])
            if identity(path) != before:
                raise ModelError(f"{path} changed while it was read.", "Try again when nothing writes to it.")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.") from error
        if time.time() - max(changed.st_mtime, changed.st_ctime) > _SETTLED:
            self._known[before] = running.hexdigest()
            self._changed = True
        return running.digest()

    def save(self) -> None:
        """Write what was learnt: atomically, mode 0600. A failure is ignored: the memo only saves time."""
        if self._path is None or not self._changed:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            newest = dict(list(self._known.items())[-1000:])
            handle, name = tempfile.mkstemp(prefix=".weights-", dir=self._path.parent)  # mkstemp makes it 0600
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"xxh3_128": newest}, file)
                os.replace(name, self._path)
            except BaseException:
                os.unlink(name)
                raise
            self._changed = False
        except OSError:
            pass


def _canonical(path: Path) -> bytes:
    config: dict[str, Any] = {k: v for k, v in read_json(path).items() if k not in _NOT_COMPUTED_WITH}
    return json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
