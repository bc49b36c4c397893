"""Records: one safetensors file for one block and kind, verified field by field and byte by byte when read.

The file is plain safetensors. Its metadata holds span, parent, tokens, layout, a checksum for each tensor and a digest
over the header itself (computed with the digest's own field zeroed). Tensor data is aligned to 64 bytes, or to 16 KiB
in files with a tensor of 1 MiB or more; safetensors allows no holes, so gaps are tensors named ``__pad…``. This
module does not own: which records exist (``index``), which to read (``planner``), when to write (``writer``).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from .keys import SCHEMA, KeySpace, pack
from .tensors import HOST_DTYPE, TensorSpec

FORMAT = "mlxkv-record"
_ZERO = "0" * 32
_MAX_HEADER = 64 << 20
#: most headers are read with one call
_FIRST_READ = 8192
_MAX_GAP = 16384  # of padding, which begins a big tensor on a page
_IOV = 1024
_MAX_READ = 1 << 30


#: name -> (safetensors dtype, C-contiguous host array)
HostArrays = dict[str, tuple[str, np.ndarray]]


class RecordError(Exception):
    """A record that cannot be used. ``reason`` is the miss reason; ``action`` what happens to the file."""

    reason = "corrupt"
    action = "quarantine"


class ShortRecord(RecordError):
    """The file ends before its header says: proof of corruption, the file is deleted."""

    action = "delete"


class LongRecord(RecordError):
    """The file is longer than its header says: not used, but kept."""

    action = "keep"


class NewerRecord(RecordError):
    """A record of a schema that a later version of mlxkv wrote: not used, and left to that version. Every schema keeps
    ``format``, ``schema`` and ``header_xxh3``, so that a damaged number is not taken for one."""

    reason = "other_layout"
    action = "keep"


class UnreadableRecord(RecordError):
    """Opening or reading failed; that proves nothing about the file, which stays."""

    reason = "io_error"
    action = "keep"


class OtherRows(RecordError):
    """A whole record whose rows start elsewhere than the index says: another process wrote it too, or power failed
    before the index was on disk. The file is the truth; once the index says the same, it can be used."""

    reason = "evicted"
    action = "adopt"


class MissingRecord(RecordError):
    """The file is gone: evicted or purged by the system."""

    reason = "evicted"
    action = "forget"


@dataclass(frozen=True)
class Meta:
    """What a record says of itself.

    Rows and windows cover [row_start, end); ``base`` is the key of the entry that covers [start, row_start), if that is
    not empty. A state stands at exactly ``end``. ``tokens`` are the ids of [start, end). ``role`` is what the place is
    (``policy.ROLES``), '' in records of before there were roles. ``store_bits``: what the layout has rows quantised
    to, 0 for none.
    """

    kind: str
    key: bytes
    root: bytes
    parent: bytes
    start: int
    end: int
    row_start: int
    base: bytes | None
    tokens: tuple[int, ...]
    block: int
    layout: bytes
    model: str = ""
    fingerprint: bytes = b""
    compute: str = "{}"
    software: str = ""
    answer: str = ""
    role: str = ""
    store_bits: int = 0

    def strings(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "schema": str(SCHEMA),
            "kind": self.kind,
            "key": self.key.hex(),
            "root": self.root.hex(),
            "parent": self.parent.hex(),
            "start": str(self.start),
            "end": str(self.end),
            "row_start": str(self.row_start),
            "base": self.base.hex() if self.base else "",
            "tokens": json.dumps(list(self.tokens), separators=(",", ":")),
            "block": str(self.block),
            "layout": self.layout.hex(),
            "model": self.model,
            "fingerprint": self.fingerprint.hex(),
            "compute": self.compute,
            "software": self.software,
            "answer": self.answer,
            "role": self.role,
            **({"store_bits": str(self.store_bits)} if self.store_bits else {}),
        }

    @classmethod
    def parse(cls, s: dict[str, str]) -> Meta:
        if s.get("format") != FORMAT or s.get("schema") != str(SCHEMA):
            number = s.get("schema", "")
            if s.get("format") == FORMAT and number.isascii() and number.isdecimal() and int(number) > SCHEMA:
                raise NewerRecord(f"a record of schema {number[:20]}; this version of mlxkv knows {SCHEMA}")
            raise RecordError(f"not a record of schema {SCHEMA}")
        return cls(
            kind=s["kind"],
            key=bytes.fromhex(s["key"]),
            root=bytes.fromhex(s["root"]),
            parent=bytes.fromhex(s["parent"]),
            start=int(s["start"]),
            end=int(s["end"]),
            row_start=int(s["row_start"]),
            base=bytes.fromhex(s["base"]) or None,
            tokens=tuple(json.loads(s["tokens"])),
            block=int(s["block"]),
            layout=bytes.fromhex(s["layout"]),
            model=s["model"],
            fingerprint=bytes.fromhex(s["fingerprint"]),
            compute=s["compute"],
            software=s["software"],
            answer=s["answer"],
            role=s.get("role", ""),
            store_bits=int(s.get("store_bits", "0")),
        )

    def consistent(self) -> bool:
        """The key really is the hash of parent and tokens, and the spans fit each other."""
        return (
            0 <= self.start <= self.row_start <= self.end
            and self.start % self.block == 0
            and self.start < self.end <= self.start + self.block
            and len(self.tokens) == self.end - self.start
            and (self.base is None) == (self.row_start == self.start)
            and KeySpace(self.root, self.block).key_packed(self.parent, pack(self.tokens)) == self.key
        )


def checksum(parts: Iterable[Any]) -> str:
    h = xxhash.xxh3_128()
    for part in parts:
        h.update(part)
    return h.hexdigest()


@dataclass(frozen=True)
class Body:
    """Tensors of a record as private host arrays, with the checksums taken when the engine handed them over."""

    arrays: dict[str, tuple[str, np.ndarray]]
    sums: dict[str, str]

    @classmethod
    def of(cls, arrays: dict[str, tuple[str, np.ndarray]]) -> Body:
        """arrays: name -> (safetensors dtype, C-contiguous array that nobody else refers to)."""
        return cls(arrays, {name: checksum([_bytes(a)]) for name, (_, a) in arrays.items()})

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for _, a in self.arrays.values())


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def encode(meta: Meta, body: Body) -> tuple[bytes, list[bytes | memoryview]]:
    """Header (with its length prefix and padding) and data parts, in file order."""
    align = _MAX_GAP if any(a.nbytes >= 1 << 20 for _, a in body.arrays.values()) else 64
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    offset = 0
    for name, (dtype, array) in body.arrays.items():
        step = _MAX_GAP if array.nbytes >= 1 << 20 else 64
        if gap := -offset % step:
            header[f"__pad{len(parts)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [offset, offset + gap]}
            parts.append(bytes(gap))
            offset += gap
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        parts.append(_bytes(array))
        offset = end
    strings = meta.strings() | {"checksums": json.dumps(body.sums, separators=(",", ":")), "header_xxh3": _ZERO}

    def dump() -> bytes:
        text = json.dumps({"__metadata__": strings, **header}, separators=(",", ":")).encode()
        return text + b" " * (-(len(text) + 8) % align)

    strings["header_xxh3"] = checksum([dump()])
    text = dump()
    return struct.pack("<Q", len(text)) + text, parts


def size(meta: Meta, body: Body) -> int:
    """Bytes of the file that ``write`` would make."""
    header, parts = encode(meta, body)
    return len(header) + sum(len(part) for part in parts)


def write(path: Path, meta: Meta, body: Body) -> int:
    """Write a record to ``path`` (mode 0600, not yet durable); returns its size in bytes.

    The bytes are hashed again on their way to the file: raises RecordError if they are not those that were handed over.
    """
    header, parts = encode(meta, body)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = _write_all(fd, header)
        for part in parts:
            size += _write_all(fd, part)
    finally:
        os.close(fd)
    for name, (_, array) in body.arrays.items():
        if checksum([_bytes(array)]) != body.sums[name]:
            raise RecordError(f"tensor {name} changed between hand-over and file")
    return size


def _write_all(fd: int, data: bytes | memoryview) -> int:
    view = memoryview(data)
    total = len(view)
    while len(view):
        view = view[os.write(fd, view[:_MAX_READ]) :]
    return total


#: name -> (safetensors dtype, shape, first byte of its data, the byte after it)
Tensors = dict[str, tuple[str, tuple[int, ...], int, int]]


def parse_header(text: bytes, size: int) -> tuple[Meta, dict[str, str], Tensors, dict[int, int]]:
    """(meta, checksums, tensors, where a tensor begins -> bytes of padding before it) of a record of ``size`` bytes,
    whose header is ``text``. Raises RecordError and its kinds."""
    length = len(text)
    try:
        header = json.loads(text)
        strings: dict[str, str] = header.pop("__metadata__")
        claimed = strings["header_xxh3"]
        zeroed = text.replace(f'"header_xxh3":"{claimed}"'.encode(), f'"header_xxh3":"{_ZERO}"'.encode(), 1)
        if checksum([zeroed]) != claimed:
            raise RecordError("the header's digest is wrong")
        meta = Meta.parse(strings)
        sums = json.loads(strings["checksums"])
        tensors = {
            name: (t["dtype"], tuple(t["shape"]), t["data_offsets"][0], t["data_offsets"][1])
            for name, t in header.items()
            if not name.startswith("__pad")
        }
        pads = [t["data_offsets"] for name, t in header.items() if name.startswith("__pad")]
        gaps = {b: b - a for a, b in pads if 0 <= b - a <= _MAX_GAP}
        end = max((t["data_offsets"][1] for t in header.values()), default=0)
        if not meta.consistent():
            raise RecordError("key, tokens and span do not fit each other")
        if size < 8 + length + end:
            raise ShortRecord(f"{size} bytes of {8 + length + end}")
        if size > 8 + length + end:
            raise LongRecord(f"{size} bytes, the header says {8 + length + end}")
    except RecordError:
        raise
    except Exception as e:  # a file may hold anything: nesting, numbers and names without bound
        raise RecordError(f"the header cannot be read: {e!r}") from e
    return meta, sums, tensors, gaps


def decode(data: memoryview) -> tuple[Meta, Body]:
    """A record that came as bytes, verified: header, spans, checksums and padding. The arrays are fresh. Raises
    RecordError and its kinds."""
    size = len(data)
    if size < 8:
        raise ShortRecord(f"{size} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if length > _MAX_HEADER:
        raise RecordError(f"a header of {length} bytes")
    if size < 8 + length:
        raise ShortRecord(f"{size} bytes, the header alone needs {8 + length}")
    meta, sums, tensors, gaps = parse_header(bytes(data[8 : 8 + length]), size)
    arrays: HostArrays = {}
    for name, (dtype, shape, a, b) in tensors.items():
        begin = 8 + length + a
        try:
            array = np.empty(shape, HOST_DTYPE[dtype])
            if array.nbytes != b - a or a < 0:
                raise ValueError(f"{array.nbytes} bytes, not {b - a}")
        except (KeyError, ValueError, TypeError, MemoryError) as e:
            raise RecordError(f"tensor {name} is none: {e}") from e
        np.copyto(array.reshape(-1).view(np.uint8), np.frombuffer(data[begin : begin + array.nbytes], np.uint8))
        if checksum([_bytes(array)]) != sums.get(name):
            raise RecordError(f"tensor {name} has a wrong checksum")
        if bytes(data[begin - gaps.get(a, 0) : begin]).strip(b"\0"):
            raise RecordError(f"the padding before tensor {name} is not empty")
        arrays[name] = dtype, array
    return meta, Body(arrays, sums)


@dataclass
class Reader:
    """An open record whose header has been verified. Use as a context manager."""

    path: Path | str
    fd: int
    meta: Meta
    sums: dict[str, str]
    data_start: int
    size: int  # of the file, bytes
    tensors: Tensors = field(default_factory=dict)
    #: where a tensor begins -> bytes of padding before it
    gaps: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | str) -> Reader:
        """Raises RecordError or one of its kinds."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError as e:
            raise MissingRecord(str(e)) from e
        except OSError as e:
            raise UnreadableRecord(str(e)) from e
        try:
            return cls._verified(path, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _verified(cls, path: Path | str, fd: int) -> Reader:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise UnreadableRecord("not a regular file")
        size = info.st_size
        begin = _read_exactly(fd, min(size, _FIRST_READ), 0) if size >= 8 else b""
        if len(begin) < 8:
            raise ShortRecord(f"{size} bytes")
        (length,) = struct.unpack_from("<Q", begin)
        if length > _MAX_HEADER:
            raise RecordError(f"a header of {length} bytes")
        if size < 8 + length:
            raise ShortRecord(f"{size} bytes, the header alone needs {8 + length}")
        text = begin[8 : 8 + length]
        if len(text) < length:
            text += _read_exactly(fd, length - len(text), len(begin))
        meta, sums, tensors, gaps = parse_header(text, size)
        return cls(path, fd, meta, sums, 8 + length, size, tensors, gaps)

    def require(self, specs: Sequence[TensorSpec], tokens: int) -> None:
        """Raises RecordError unless exactly these tensors are there, with the shapes and dtypes of ``tokens`` tokens
        from the first one with rows on."""
        start = self.meta.row_start
        want = {t.name: (t.dtype, t.sized(tokens, start), t.nbytes(tokens, start)) for t in specs}
        have = {name: (dtype, shape, b - a) for name, (dtype, shape, a, b) in self.tensors.items()}
        if want != have or set(self.sums) != set(have):
            raise RecordError("tensors, shapes or dtypes are not those of the layout")

    def read_into(self, name: str, views: Sequence[memoryview]) -> None:
        """Fill writable byte views, in order, with one tensor. Its checksum is compared afterwards, and the padding
        before it must be empty: a flip anywhere in a record shows.

        Raises RecordError on a wrong checksum, ShortRecord on an early end, UnreadableRecord on an I/O error. The
        views' content is undefined then.
        """
        _, _, a, b = self.tensors[name]
        if sum(len(v) for v in views) != b - a:
            raise RecordError(f"tensor {name} has {b - a} bytes")
        gap = bytearray(self.gaps.get(a, 0))
        _read_scattered(self.fd, [memoryview(gap), *views], self.data_start + a - len(gap))
        if checksum(views) != self.sums.get(name):
            raise RecordError(f"tensor {name} has a wrong checksum")
        if gap.strip(b"\0"):
            raise RecordError(f"the padding before tensor {name} is not empty")

    def read(self, name: str) -> np.ndarray:
        """One tensor as a fresh host array (bfloat16 as uint16), verified."""
        dtype, shape, _, _ = self.tensors[name]
        out = np.empty(shape, HOST_DTYPE[dtype])
        self.read_into(name, [_bytes(out)] if out.size else [])
        return out

    def close(self) -> None:
        with contextlib.suppress(OSError):  # all was read and verified before; an error on close changes nothing
            os.close(self.fd)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_newer(path: Path | str) -> bool:
    """Whether a file is a record that a later version of mlxkv wrote."""
    try:
        Reader.open(path).close()
    except NewerRecord:
        return True
    except RecordError:
        pass
    return False


def _read_exactly(fd: int, n: int, offset: int) -> bytes:
    out = bytearray(n)
    _read_scattered(fd, [memoryview(out)], offset)
    return bytes(out)


def _read_scattered(fd: int, views: list[memoryview], offset: int) -> None:
    """``preadv`` in portions that every system takes (at most 1,024 buffers and 1 GiB a call)."""
    todo = [v for v in views if len(v)]
    while todo:
        batch: list[memoryview] = []
        room = _MAX_READ
        for view in todo[:_IOV]:
            batch.append(view[:room])
            room -= len(batch[-1])
            if room <= 0:
                break
        try:
            got = os.preadv(fd, batch, offset)
        except OSError as e:
            raise UnreadableRecord(str(e)) from e
        if got == 0:
            raise ShortRecord("the file ended while it was read")
        offset += got
        while got:
            step = min(got, len(todo[0]))
            got -= step
            todo[0] = todo[0][step:]
            if not len(todo[0]):
                todo.pop(0)
