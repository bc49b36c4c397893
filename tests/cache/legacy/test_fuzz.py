"""Two thousand hostile files, drawn anew each time; scripts/soak draws 50,000."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlxkv.cache.legacy.header import HostileFile
from mlxkv.cache.legacy.reasons import Refused
from tests.cache.machine import scratch

from .fuzz import CODES, Folder, files, read
from .omlx_writer import Style, framed

SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("values", ["[[[[[[[]]]]]]],", "{},", '"",', "0,"])
def test_headers_of_millions_of_values(values, tmp_path):
    """They are refused before they are made: what they would take is many times the file."""
    text = f'{{"a":[{values * ((15 << 20) // len(values))}0]}}'.encode()
    (tmp_path / "f.safetensors").write_bytes(framed(text, b""))
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="HEADER_JSON"):
            HostileFile.open(tmp_path / "f.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def one_tensor(shape: list[int], offsets: list[int]) -> bytes:
    return framed(json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode(), bytes(8))


def test_headers():
    """Nothing but Refused is raised, each kind of refusal is reached (by an example at least: a thousand drawn ones may
    miss a rare kind), and what is accepted is what the file says."""
    seen: Counter[str] = Counter()
    with scratch() as folder:

        @settings(SETTINGS, max_examples=1_000)
        @example(b"small")
        @example(struct.pack("<Q", 1 << 40) + bytes(16))
        @example(framed(b'{"a":', b""))
        @example(one_tensor([2], [8, 0]))
        @example(one_tensor([3], [0, 8]))
        @example(one_tensor([2], [0, 8]))
        @given(files)
        def draw(raw: bytes) -> None:
            seen[read(folder / "f.safetensors", raw)] += 1

        draw()
    assert set(seen) == {"", *CODES}, seen


@pytest.mark.parametrize(
    ("layout", "style"),
    [
        ("list", Style()),
        ("pair", Style(composite="pm", stamped=True)),
        ("mixed", Style()),
        ("window", Style(version="2")),
    ],
)
def test_blocks(layout, style):
    """What is imported beside or from a changed block is what it was; what is missing has a reason."""
    seen: Counter[str] = Counter()
    with scratch() as base:
        folder = Folder(base, layout, style)

        @settings(SETTINGS, max_examples=60)
        @given(st.data())
        def draw(data: st.DataObject) -> None:
            seen.update(folder.tried(data.draw))

        draw()
    assert len(seen) > 2, seen
