"""A safetensors file that nobody vouches for: its header is proven to fit its bytes before any of them is used.

Format: u64 little-endian length of the header, the header (JSON: tensor name -> dtype, shape, data_offsets; strings
under ``__metadata__``), then the data. The file is opened once, is a regular file, and is read with ``pread`` into
private memory; what was read counts only while the file is still what it was when it was opened.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from .reasons import Refused
from .strict import loads

MAX_HEADER = 16 << 20
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 1 << 48
_CHUNK = 1 << 20
_MAX_READ = 1 << 30

#: safetensors dtype -> numpy dtype with the same bytes; what numpy lacks is read as plain words
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"),
}


@dataclass(frozen=True)
class Signature:
    """Which file it is, and in which version: all that ``stat`` says of it. Times in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime: int
    ctime: int

    @classmethod
    def of(cls, info: os.stat_result) -> Signature:
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


@dataclass(frozen=True)
class Tensor:
    """``start`` and ``end``: its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class HostileFile:
    """An open file whose header has been proven. Use as a context manager; after ``close`` a read opens it again, and
    refuses it as CHANGED if it is not the very same file in the same state."""

    def __init__(self, path: Path, fd: int, signature: Signature, ordered: bool) -> None:
        self.path, self.signature = path, signature
        self._fd: int | None = fd
        self.metadata, self.tensors, self.data_start = self._parse(fd, ordered)

    @classmethod
    def open(cls, path: Path, *, ordered: bool = True) -> HostileFile:
        """``ordered``: tensors must stand in the header in the order of their bytes (MLX's own files do not). Raises
        Refused: NOT_A_FILE, UNREADABLE, TOO_SMALL, HEADER_LENGTH, HEADER_JSON, SIZES, OFFSETS, CHANGED."""
        fd, signature = _open(path)
        try:
            return cls(path, fd, signature, ordered)
        except BaseException:
            os.close(fd)
            raise

    def _parse(self, fd: int, ordered: bool) -> tuple[dict[str, str], dict[str, Tensor], int]:
        size = self.signature.size
        if size < 8:
            raise Refused("TOO_SMALL", f"{size} bytes", self.path)
        (length,) = struct.unpack("<Q", self._bytes(fd, 8, 0))
        if length > min(size - 8, MAX_HEADER):
            raise Refused("HEADER_LENGTH", f"a header of {length:,} bytes in a file of {size:,}", self.path)
        text = self._bytes(fd, length, 8)
        self.check(fd)
        try:
            header = loads(text)
            if not isinstance(header, dict):
                raise ValueError("not an object")
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
                raise ValueError("metadata that is not text")
            if len(header) > MAX_TENSORS:
                raise ValueError(f"{len(header):,} tensors")
            tensors = {name: _tensor(entry) for name, entry in header.items()}
        except ValueError as e:
            raise Refused("HEADER_JSON", str(e)[:200], self.path) from None
        _check_places(tensors, size - 8 - length, ordered, self.path)
        return metadata, tensors, 8 + length

    def read(self, name: str) -> np.ndarray:
        """A whole tensor as a fresh array; bfloat16 comes as uint16. Raises Refused (CHANGED, UNREADABLE)."""
        t = self.tensors[name]
        out = np.empty(t.shape, DTYPES[t.dtype])
        self._fill(out, self.data_start + t.start)
        self.check()
        return out

    def rows(self, name: str, a: int, b: int) -> np.ndarray:
        """Rows [a, b) of a tensor ``[batch, heads, rows, width]``, of which only those bytes are read. Raises
        Refused."""
        t = self.tensors[name]
        batch, heads, rows, width = t.shape
        assert 0 <= a <= b <= rows, (a, b, rows)
        if (a, b) == (0, rows):
            return self.read(name)
        dtype = DTYPES[t.dtype]
        out = np.empty((batch, heads, b - a, width), dtype)
        step, skip = rows * width * dtype.itemsize, a * width * dtype.itemsize
        for i, head in enumerate(out.reshape(batch * heads, b - a, width) if out.size else ()):
            self._fill(head, self.data_start + t.start + i * step + skip)
        self.check()
        return out

    def ends_in_zeros(self, n: int) -> bool:
        """Whether there are ``n`` bytes of data or more, and the last ``n`` are all zero. Raises Refused."""
        if self.signature.size - self.data_start < n:
            return False
        return not any(self._bytes(self._opened(), n, self.signature.size - n))

    def digest(self) -> str:
        """XXH3-128 of the whole file, hex. Raises Refused."""
        h = xxhash.xxh3_128()
        fd = self._opened()
        at = 0
        while at < self.signature.size:
            data = self._bytes(fd, min(_CHUNK, self.signature.size - at), at)
            h.update(data)
            at += len(data)
        self.check(fd)
        return h.hexdigest()

    def check(self, fd: int | None = None) -> None:
        """Raises Refused (CHANGED) if the open file is no longer what it was."""
        try:
            now = Signature.of(os.fstat(self._opened() if fd is None else fd))
        except OSError as e:
            raise Refused("UNREADABLE", e.strerror or str(e), self.path) from None
        if now != self.signature:
            raise Refused("CHANGED", "", self.path)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> HostileFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _opened(self) -> int:
        if self._fd is None:
            fd, signature = _open(self.path)
            if signature != self.signature:
                os.close(fd)
                raise Refused("CHANGED", "", self.path)
            self._fd = fd
        return self._fd

    def _fill(self, out: np.ndarray, offset: int) -> None:
        if out.size:
            self._into(self._opened(), out.reshape(-1).view(np.uint8).data, offset)

    def _bytes(self, fd: int, n: int, offset: int) -> bytes:
        out = bytearray(n)
        self._into(fd, memoryview(out), offset)
        return bytes(out)

    def _into(self, fd: int, view: memoryview, offset: int) -> None:
        while len(view):
            try:
                got = os.preadv(fd, [view[:_MAX_READ]], offset)
            except OSError as e:
                raise Refused("UNREADABLE", e.strerror or str(e), self.path) from None
            if not got:
                raise Refused("CHANGED", "it ended while it was read", self.path)
            view, offset = view[got:], offset + got


def read_small(path: Path, most: int) -> bytes:
    """All of a regular file of at most ``most`` bytes. Raises Refused (NOT_A_FILE, UNREADABLE, HEADER_LENGTH)."""
    fd, signature = _open(path)
    try:
        if signature.size > most:
            raise Refused("HEADER_LENGTH", f"{signature.size:,} bytes", path)
        return os.pread(fd, most + 1, 0)[: signature.size]
    except OSError as e:
        raise Refused("UNREADABLE", e.strerror or str(e), path) from None
    finally:
        os.close(fd)


def _open(path: Path) -> tuple[int, Signature]:
    """An open regular file that is no link. Nothing else is opened: a device may do something when it is."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise Refused("NOT_A_FILE", "", path)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        link = e.errno in (errno.ELOOP, errno.EMLINK)
        raise Refused("NOT_A_FILE" if link else "UNREADABLE", e.strerror or str(e), path) from None
    except ValueError as e:  # a name that no file can have
        raise Refused("UNREADABLE", str(e), path) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refused("NOT_A_FILE", "", path)
        return fd, Signature.of(info)
    except BaseException:
        os.close(fd)
        raise


def _tensor(entry: Any) -> Tensor:
    """Raises ValueError."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor that is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    whole = isinstance(shape, list) and isinstance(offsets, list) and all(type(n) is int for n in [*shape, *offsets])
    if not isinstance(dtype, str) or not whole or len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise ValueError("a tensor whose dtype, shape or data_offsets is of another type")
    if min([*shape, *offsets]) < 0:
        raise ValueError("a negative number")
    return Tensor(dtype, tuple(shape), *offsets)


def _check_places(tensors: Mapping[str, Tensor], size: int, ordered: bool, path: Path) -> None:
    """The tensors cover the ``size`` bytes of data without a gap, and each has the bytes of its dtype and shape."""
    at = 0
    items = list(tensors.items())
    for name, t in items if ordered else sorted(items, key=lambda item: (item[1].start, item[1].end)):
        if t.start != at or t.end < t.start:
            raise Refused("OFFSETS", f"{name[:80]} is at [{t.start}, {t.end}), the bytes before it end at {at}", path)
        at = t.end
    if at != size:
        raise Refused("OFFSETS", f"the tensors end at {at:,}, the data at {size:,}", path)
    for name, t in items:
        if t.dtype not in DTYPES:
            raise Refused("SIZES", f"{name[:80]} has dtype {t.dtype[:20]}", path)
        weight = math.prod(t.shape) * DTYPES[t.dtype].itemsize
        # beside a dimension of 0 the others cost no bytes, and could be of any size
        if weight != t.end - t.start or math.prod(n for n in t.shape if n) > _MAX_ELEMENTS:
            raise Refused("SIZES", f"{name[:80]}: {t.dtype} {list(t.shape)} in {t.end - t.start:,} bytes", path)
