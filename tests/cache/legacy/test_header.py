"""The header of a file that nobody vouches for: what is refused, with which code, and what a slice reads."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest

from mlxkv.cache.legacy.header import HostileFile
from mlxkv.cache.legacy.reasons import Refused
from mlxkv.cache.legacy.strict import loads


def put(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor(a, b, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [a, b]}


def code(path, **options):
    with pytest.raises(Refused) as caught, HostileFile.open(path, **options):
        pass
    assert caught.value.path == path
    return caught.value.code


def test_rows_are_read_without_the_rest(tmp_path):
    array = np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
    header = {"__metadata__": {"a": "b"}, "x": tensor(0, array.nbytes, [2, 3, 5, 4])}
    with HostileFile.open(put(tmp_path / "f", header, array.tobytes())) as file:
        assert file.metadata == {"a": "b"}
        assert np.array_equal(file.rows("x", 1, 4), array[:, :, 1:4])
        assert file.rows("x", 2, 2).shape == (2, 3, 0, 4)
        assert np.array_equal(file.read("x"), array)
        digest = file.digest()
        file.close()
        assert np.array_equal(file.rows("x", 4, 5), array[:, :, 4:5])  # opened again: the very same file
        file.close()
        (tmp_path / "g").write_bytes((tmp_path / "f").read_bytes())
        os.replace(tmp_path / "g", tmp_path / "f")
        with pytest.raises(Refused, match="CHANGED"):  # the same bytes, but another file
            file.rows("x", 0, 1)
    with HostileFile.open(tmp_path / "f") as file:
        assert file.digest() == digest


def test_a_file_that_changes_is_refused(tmp_path):
    path = put(tmp_path / "f", {"x": tensor(0, 8, [2])}, bytes(8))
    with HostileFile.open(path) as file:
        file.close()
        os.utime(path, ns=(1, 1))
        with pytest.raises(Refused, match="CHANGED"):
            file.read("x")
    with HostileFile.open(path) as file:
        os.truncate(path, 20)
        with pytest.raises(Refused, match="CHANGED"):
            file.read("x")


NOTHING = b'"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
BAD_HEADERS = {
    "no object": (b"[]", b"", "HEADER_JSON"),
    "no JSON": (b"{", b"", "HEADER_JSON"),
    "no UTF-8": (b'{"\xff":1}', b"", "HEADER_JSON"),
    "half a pair": (b'{"__metadata__":{"a":"\\ud800"}}', b"", "HEADER_JSON"),
    "a key twice": (b'{"__metadata__":{"a":"1","a":"1"}}', b"", "HEADER_JSON"),
    "a tensor twice": (
        b"{" + b",".join([b'"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'] * 2) + b"}",
        b"",
        "HEADER_JSON",
    ),
    "NaN": (b'{"__metadata__":{"a":NaN}}', b"", "HEADER_JSON"),
    "a number in the metadata": (b'{"__metadata__":{"a":1}}', b"", "HEADER_JSON"),
    "nested": (b'{"a":' * 50_000, b"", "HEADER_JSON"),
    "nested less": (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", b"", "HEADER_JSON"),
    "an offset beyond 64 bits": ({"x": tensor(0, 1 << 70, [1])}, b"", "HEADER_JSON"),
    "an offset of 5,000 digits": (b'{"x":' + b"9" * 5000 + b"}", b"", "HEADER_JSON"),
    "a true offset": ({"x": tensor(0, True, [1], "U8")}, b"a", "HEADER_JSON"),
    "a negative offset": ({"x": tensor(-4, 0, [1])}, b"aaaa", "HEADER_JSON"),
    "a fraction": ({"x": tensor(0, 4.0, [1])}, b"aaaa", "HEADER_JSON"),
    "another field": ({"x": tensor(0, 4, [1]) | {"more": 1}}, b"aaaa", "HEADER_JSON"),
    "an overlap": ({"x": tensor(0, 4, [1]), "y": tensor(3, 7, [1])}, bytes(7), "OFFSETS"),
    "a gap": ({"x": tensor(0, 4, [1]), "y": tensor(5, 9, [1])}, bytes(9), "OFFSETS"),
    "out of order": ({"x": tensor(4, 8, [1]), "y": tensor(0, 4, [1])}, bytes(8), "OFFSETS"),
    "backwards": ({"x": tensor(0, 4, [1]), "y": tensor(4, 0, [0])}, bytes(4), "OFFSETS"),
    "bytes behind it": ({"x": tensor(0, 4, [1])}, bytes(5), "OFFSETS"),
    "cut off": ({"x": tensor(0, 4, [1])}, bytes(3), "OFFSETS"),
    "other bytes than its shape": ({"x": tensor(0, 4, [2])}, bytes(4), "SIZES"),
    "an unknown dtype": ({"x": tensor(0, 4, [1], "F33")}, bytes(4), "SIZES"),
    "huge beside nothing": ({"x": tensor(0, 0, [0, 1 << 62, 1 << 62])}, b"", "SIZES"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers(tmp_path, case):
    header, data, expected = BAD_HEADERS[case]
    assert code(put(tmp_path / "f", header, data)) == expected


def test_order_of_tensors_is_asked_only_where_it_means_something(tmp_path):
    path = put(tmp_path / "f", {"x": tensor(4, 8, [1]), "y": tensor(0, 4, [1])}, struct.pack("<ff", 1, 2))
    with HostileFile.open(path, ordered=False) as file:
        assert (file.read("x")[0], file.read("y")[0]) == (2, 1)
    assert (
        code(put(tmp_path / "f", {"x": tensor(4, 8, [1]), "y": tensor(0, 5, [1])}, bytes(8)), ordered=False)
        == "OFFSETS"
    )


def test_what_is_no_such_file(tmp_path):
    (tmp_path / "real").write_bytes(b"1234567")
    os.symlink("real", tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    assert code(tmp_path / "real") == "TOO_SMALL"
    assert code(tmp_path / "link") == code(tmp_path / "fifo") == code(tmp_path) == "NOT_A_FILE"
    assert code(tmp_path / "none") == code(tmp_path / "no\0name") == "UNREADABLE"
    (tmp_path / "long").write_bytes(struct.pack("<Q", 1 << 63) + b"{}")
    assert code(tmp_path / "long") == "HEADER_LENGTH"
    with open(tmp_path / "large", "wb") as f:  # a file with a hole: nothing of it may be read
        f.write(struct.pack("<Q", (16 << 20) + 1))
        f.truncate(1 << 40)
    assert code(tmp_path / "large") == "HEADER_LENGTH"


def test_a_header_of_very_many_values_is_not_even_parsed(tmp_path):
    with pytest.raises(Refused, match="more than 1,000,000 values"):
        HostileFile.open(put(tmp_path / "f", b'{"x":[' + b"1," * 1_000_001 + b"1]}"))


@pytest.mark.parametrize("text", ["1e999", "-Infinity", "1" * 30, "0." + "1" * 50])
def test_numbers_have_bounds(text):
    with pytest.raises(ValueError, match="number"):
        loads(text)
