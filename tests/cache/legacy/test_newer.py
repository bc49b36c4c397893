"""Records that a later version of mlxkv wrote: a miss with its reason, and the files stay, whatever is done."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from mlxkv.cache import adoption
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.opening import open_index
from mlxkv.cache.record import NewerRecord, Reader, RecordError, checksum
from mlxkv.cache.verify import verify
from tests.cache.stores import Written, records

ZERO = "0" * 32


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory) -> Written:
    return Written(tiny_model("qwen3_5"), tmp_path_factory.mktemp("written") / "c")


def to_schema(path: Path, schema: str, *, sealed: bool = True) -> bytes:
    """The record as a version with another schema number would have written it; ``sealed``: with its digest."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    strings = header["__metadata__"]
    strings |= {"schema": schema, "of a later time": "something"}
    if sealed:
        strings["header_xxh3"] = ZERO
        strings["header_xxh3"] = checksum([json.dumps(header, separators=(",", ":")).encode()])
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return path.read_bytes()


def test_they_stay_and_are_no_damage(written, tmp_path):
    written.copy(tmp_path / "c").store.close()
    files = {path: to_schema(path, "2") for path in records(tmp_path / "c", "state")}
    rt = written.at(tmp_path / "c")
    assert written.ask(rt)[1] == "other_layout"
    rt.store.close()
    found = verify(tmp_path / "c", repair=True)
    assert found.findings == [] and found.newer == len(files) > 1
    (tmp_path / "c" / "index.sqlite").unlink()
    assert written.ask_anew(tmp_path / "c") == (0, "no_state")  # the index that is built again does not know them
    assert verify(tmp_path / "c", repair=True).findings == []
    assert {path: path.read_bytes() for path in files} == files
    assert not any((tmp_path / "c" / "quarantine").glob("*.state.*"))


def test_no_room_is_made_at_their_cost(written, tmp_path):
    written.copy(tmp_path / "c").store.close()
    folder = CacheFolder(tmp_path / "c")
    files = {path: to_schema(path, "7") for path in records(tmp_path / "c")[:4]}
    (tmp_path / "c" / "index.sqlite").unlink()
    open_index(folder, budget=lambda size: 0).close()
    assert {path: path.read_bytes() for path in records(tmp_path / "c")} == files


def test_those_that_wait_do_not_go_either(written, tmp_path):
    written.copy(tmp_path / "c").store.close()
    folder = CacheFolder(tmp_path / "c")
    files = {path: to_schema(path, "7") for path in records(tmp_path / "c")[:4]}
    (tmp_path / "c" / "index.sqlite").unlink()
    index = open_index(folder, at_once=0)
    while index.any_waiting():
        adoption._give_up(folder, index, 1 << 40)
    assert {path: path.read_bytes() for path in records(tmp_path / "c")} == files
    assert dict(index.execute("SELECT name, bytes FROM ledger").fetchall())["inside"] == sum(map(len, files.values()))
    index.close()


@pytest.mark.parametrize("schema", ["2", "12"])
def test_a_number_that_is_only_damaged_is_damage(written, tmp_path, schema):
    written.copy(tmp_path / "c").store.close()
    path = records(tmp_path / "c")[0]
    to_schema(path, schema, sealed=False)
    with pytest.raises(RecordError) as e:
        Reader.open(path)
    assert e.value.action == "quarantine"


@pytest.mark.parametrize("schema", ["0", "", "-2", "two", "٢", "1" * 5000])
def test_what_is_no_later_schema_is_damage(written, tmp_path, schema):
    written.copy(tmp_path / "c").store.close()
    path = records(tmp_path / "c")[0]
    to_schema(path, schema)
    with pytest.raises(RecordError) as e:
        Reader.open(path)
    assert not isinstance(e.value, NewerRecord)
