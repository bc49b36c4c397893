"""A thousand hostile files, drawn anew each time; scripts/soak draws 50,000."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings

from tests.cache.machine import scratch

from .fuzz import CODES, files, read

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
