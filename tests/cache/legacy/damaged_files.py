"""Damaged files of a legacy folder whose name, size or header is refused, before anything that they say is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .damage import KEYS, VALUES, file, header, moved, taken_apart, written
from .omlx_writer import framed

# -- the file ---------------------------------------------------------------------------------------------------------


def _other_digit(path: Path) -> Path:
    digit = "0" if path.name[0] != "0" else "1"
    return path.parent.parent / digit / path.name


def _replaced(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def replace_it(path: Path) -> None:
        path.unlink()
        make(path)

    return replace_it


def _linked(path: Path) -> None:
    target = path.parent.parent.parent / f"{path.parent.parent.name}-elsewhere.safetensors"
    path.rename(target)
    path.symlink_to(target)


def _length(n: int) -> Callable[[Path], None]:
    return lambda path: written(path, struct.pack("<Q", n) + path.read_bytes()[8:])


def _long_header(path: Path) -> None:
    found, data = taken_apart(path.read_bytes())
    text = json.dumps(found, separators=(",", ":")).encode()
    path.write_bytes(framed(text + b" " * ((16 << 20) + 8 - len(text)), data))


file("upper case name", "NAME", moved(lambda p: p.with_name(p.stem.upper() + p.suffix)))
file("short name", "NAME", moved(lambda p: p.with_name(p.stem[:-1] + p.suffix)))
file("name that is no hex", "NAME", moved(lambda p: p.with_name(p.stem[:-1] + "g" + p.suffix)))
file("temporary that a crash left", "NAME", moved(lambda p: p.with_name(p.stem + "_tmp" + p.suffix)))
file("in the folder of another digit", "NAME", moved(_other_digit))
file("link", "NOT_A_FILE", _linked)
file("dangling link", "NOT_A_FILE", _replaced(lambda p: p.symlink_to(p.with_name("gone"))))
file("link to a device", "NOT_A_FILE", _replaced(lambda p: p.symlink_to("/dev/zero")))
file("folder", "NOT_A_FILE", _replaced(lambda p: p.mkdir()))
file("pipe", "NOT_A_FILE", _replaced(os.mkfifo))
file("empty", "TOO_SMALL", lambda p: written(p, b""))
file("seven bytes", "TOO_SMALL", lambda p: written(p, p.read_bytes()[:7]))
file("header of 2^64 − 1 bytes", "HEADER_LENGTH", _length((1 << 64) - 1))
file("header of 2^63 bytes", "HEADER_LENGTH", _length(1 << 63))
file("header one byte longer than the file", "HEADER_LENGTH", lambda p: _length(p.stat().st_size - 7)(p))
file("header of more than 16 MiB", "HEADER_LENGTH", _long_header)
file("header of no bytes", "HEADER_JSON|HEADER_LENGTH", _length(0))
file("eight bytes", "HEADER_JSON|HEADER_LENGTH", lambda p: written(p, bytes(8)))
file("zeros", "HEADER_JSON|HEADER_LENGTH", lambda p: written(p, bytes(p.stat().st_size)))
file("16 bytes cut off", "OFFSETS", lambda p: written(p, p.read_bytes()[:-16]))
file("40 bytes too many", "OFFSETS", lambda p: written(p, p.read_bytes() + bytes(40)))
file("one byte too many", "OFFSETS", lambda p: written(p, p.read_bytes() + b"\0"))

# -- the header -------------------------------------------------------------------------------------------------------


def _text(old: str, new: str) -> Callable[[dict[str, Any]], bytes]:
    def change(found: dict[str, Any]) -> bytes:
        text = json.dumps(found, separators=(",", ":"))
        assert old in text
        return text.replace(old, new, 1).encode("utf-8", "surrogatepass")

    return change


def _entry(name: str = KEYS, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found[name].update(fields)


def _shifted(name: str, by: tuple[int, int]) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        a, b = found[name]["data_offsets"]
        found[name]["data_offsets"] = [a + by[0], b + by[1]]

    return change


def _reordered(found: dict[str, Any]) -> dict[str, Any]:
    """Names in another order than their data."""
    names = list(found)
    return {name: found[name] for name in [names[0], *reversed(names[1:])]}


def _swapped(found: dict[str, Any]) -> None:
    found[KEYS]["data_offsets"], found[VALUES]["data_offsets"] = (
        found[VALUES]["data_offsets"],
        found[KEYS]["data_offsets"],
    )


def _gap(path: Path) -> None:
    """Eight bytes between the first tensor and the others, which no tensor names."""
    found, data = taken_apart(path.read_bytes())
    for name in found:
        if name not in ("__metadata__", KEYS):
            _shifted(name, (8, 8))(found)
    first = found[KEYS]["data_offsets"][1]
    written(path, framed(json.dumps(found).encode(), data[:first] + bytes(8) + data[first:]))


header("not JSON", "HEADER_JSON", lambda f: b"{]")
header("cut JSON", "HEADER_JSON", lambda f: json.dumps(f).encode()[:-3])
header("JSON and more", "HEADER_JSON", lambda f: json.dumps(f).encode() + b"{}")
header("a list", "HEADER_JSON", lambda f: [f])
header("a string", "HEADER_JSON", lambda f: "__metadata__")
header("not UTF-8", "HEADER_JSON", _text('"F32"', '"\ud800"'))
header("nested 100,000 deep", "HEADER_JSON", lambda f: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
header("a number of 5,000 digits", "HEADER_JSON|SIZES", _text('"shape":[1', '"shape":[' + "9" * 5_000))
header("NaN", "HEADER_JSON", _text('"shape":[1', '"shape":[NaN'))
header("infinity", "HEADER_JSON", _text('"data_offsets":[0', '"data_offsets":[-Infinity'))
header("1e999", "HEADER_JSON", _text('"shape":[1', '"shape":[1e999'))
header("NaN in metadata", "HEADER_JSON", _text('"num_layers":"2"', '"num_layers":NaN'))
header("a tensor twice", "HEADER_JSON", lambda f: _twice(f, KEYS))
header("metadata twice", "HEADER_JSON", lambda f: _twice(f, "__metadata__"))
header("a metadata key twice", "HEADER_JSON", _text('"num_layers":"2"', '"num_layers":"2","num_layers":"2"'))
header("a shape twice", "HEADER_JSON", _text('"shape":', '"shape":[1],"shape":'))
header("metadata that is a list", "HEADER_JSON", lambda f: f.update(__metadata__=[]))
header("metadata of numbers", "HEADER_JSON", lambda f: f["__metadata__"].update(num_layers=2))
header("metadata of null", "HEADER_JSON", lambda f: f["__metadata__"].update(num_layers=None))
header("a tensor that is a number", "HEADER_JSON", lambda f: f.update({KEYS: 1}))
header("a tensor without offsets", "HEADER_JSON", lambda f: f[KEYS].pop("data_offsets") and None)
header("a tensor with a field too many", "HEADER_JSON", _entry(strides=[1, 1, 1, 1]))
header("an offset that is a float", "HEADER_JSON", _text('"data_offsets":[0', '"data_offsets":[0.0'))
header("an offset that is a truth value", "HEADER_JSON", _text('"data_offsets":[0', '"data_offsets":[false'))
header("an offset that is a string", "HEADER_JSON", _text('"data_offsets":[0', '"data_offsets":["0"'))
header("three offsets", "HEADER_JSON", _text('"data_offsets":[0', '"data_offsets":[0,0'))
header("negative offset", "HEADER_JSON|OFFSETS", _text('"data_offsets":[0', '"data_offsets":[-8'))
header("a shape that is a truth value", "HEADER_JSON", _text('"shape":[1', '"shape":[true'))
header("negative shape", "HEADER_JSON|SIZES", _entry(shape=[-1, 2, 4, -4]))
header("shape of 2^64 elements", "SIZES|HEADER_JSON", _entry(shape=[1 << 32, 1 << 32, 4, 4]))
header("shape of 4,000 axes", "SIZES|HEADER_JSON", _entry(shape=[1] * 4_000))
header("shape with huge axes and a zero", "SIZES|HEADER_JSON", _entry(shape=[1 << 62, 1 << 62, 0, 4]))
header("overlapping", "OFFSETS|SIZES", _shifted(VALUES, (-16, -16)))
file("a gap", "OFFSETS", _gap)
header("out of order", "OFFSETS", _reordered)
header("swapped", "OFFSETS|SIZES", _swapped)
header("beyond the file", "OFFSETS|SIZES", _shifted("layer_1_state_1", (0, 1 << 40)))
header("the same bytes for two", "OFFSETS|SIZES", lambda f: f[VALUES].update(f[KEYS]))
header(
    "end before begin",
    "OFFSETS|HEADER_JSON|SIZES",
    lambda f: f[KEYS].update(data_offsets=f[KEYS]["data_offsets"][::-1]),
)
header("wrong shape", "SIZES", _entry(shape=[1, 2, 4, 5]))
header("wrong dtype", "SIZES", _entry(dtype="F16"))
header("unknown dtype", "SIZES|HEADER_JSON|DTYPE", _entry(dtype="F7"))
header("a dtype of this size that no cache has", "DTYPE", _entry(dtype="I32"))
header("metadata missing", "TOO_OLD|HEADER_JSON", lambda f: f.pop("__metadata__") and None)


def _twice(found: dict[str, Any], name: str) -> bytes:
    text = json.dumps(found, separators=(",", ":"))
    again = json.dumps({name: found[name]}, separators=(",", ":"))[1:-1]
    return (text[:-1] + "," + again + "}").encode()
