"""Two thousand hostile files, drawn anew each time; scripts/soak draws 50,000."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cache.machine import scratch

from .fuzz import CODES, Folder, files, read
from .omlx_writer import Style

SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def test_headers():
    """Nothing but Refused is raised, each kind of refusal is reached, and what is accepted is what the file says."""
    seen: Counter[str] = Counter()
    with scratch() as folder:

        @settings(SETTINGS, max_examples=1_000)
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

        @settings(SETTINGS, max_examples=100)
        @given(st.data())
        def draw(data: st.DataObject) -> None:
            seen.update(folder.tried(data.draw))

        draw()
    assert {"COUNTS", "TENSORS", "HASH"} <= set(seen), seen
