"""The numbers of a ring: tables of reference/state-handoff.md A.2 and A.8."""

from __future__ import annotations

import pytest

from mlxkv.cache.compress.check import check_rings
from mlxkv.cache.compress.geometry import Geometry, write_pad
from mlxkv.errors import ConfigError
from tests.cache.compress.plans import C4, C4_PLAIN, C128, C128_PLAIN


@pytest.mark.parametrize(
    ("window", "ring", "pad"),
    [(8, 8, 0), (8, 16, 10), (8, 32, 26), (128, 1, 0), (128, 128, 0), (128, 256, 130), (128, 512, 386)],
)
def test_the_write_pad(window, ring, pad):
    assert write_pad(window, ring) == pad


@pytest.mark.parametrize(
    ("geometry", "window", "width"), [(C4, 8, 10), (C4_PLAIN, 8, 1), (C128, 128, 130), (C128_PLAIN, 128, 1)]
)
def test_what_a_ring_serves(geometry, window, width):
    assert (geometry.window, geometry.most_width, geometry.most_drafts) == (window, width, width - 1)


@pytest.mark.parametrize(
    ("ratio", "overlap", "width", "ring"),
    [
        (4, True, 1, 8),
        (4, True, 2, 12),  # a ring as long as its window keeps no row for a second time
        (4, True, 6, 12),
        (4, True, 7, 16),
        (4, True, 10, 16),
        (4, True, 11, 20),
        (8, False, 3, 16),
        (128, False, 1, 128),
        (128, False, 2, 256),
        (128, False, 130, 256),
        (128, False, 131, 384),
    ],
)
def test_the_ring_that_would_do(ratio, overlap, width, ring):
    made = Geometry.serving(ratio, overlap, width)
    assert made.ring == ring and made.most_width >= width
    if ring > made.window:  # none that is shorter would
        assert ring - ratio < made.window or Geometry(ratio, overlap, ring - ratio).most_width < width


@pytest.mark.parametrize(("ratio", "overlap", "ring"), [(4, True, 4), (4, True, 10), (128, False, 64), (1, False, 8)])
def test_a_ring_that_cannot_be(ratio, overlap, ring):
    with pytest.raises(ValueError, match=str(ratio)):
        Geometry(ratio, overlap, ring)


@pytest.mark.parametrize(
    ("geometry", "n", "entries", "pending"),
    [
        (C4, 511, 127, 7),
        (C4, 512, 128, 4),
        (C4, 515, 128, 7),
        (C4, 516, 129, 4),
        (C4, 3, 0, 3),
        (C128, 639, 4, 127),
        (C128, 640, 5, 0),
        (C128, 1, 0, 1),
    ],
)
def test_entries_and_rows_that_are_still_needed(geometry, n, entries, pending):
    assert (geometry.entries(n), geometry.pending(n)) == (entries, pending)


@pytest.mark.parametrize(
    ("widths", "c4", "c128", "refused"),
    [
        ([6], True, True, None),
        ([10], True, True, None),
        ([2, 10, 6], True, True, None),
        ([11], True, False, 4),
        ([11], True, True, 4),
        ([2, 11, 6], True, True, 4),  # the widest of all drafters and depths
        ([11], False, True, None),
        ([130], False, True, None),
        ([131], False, True, 128),
        ([200], False, False, None),
        ([0], True, True, None),
        ([], True, True, None),
    ],
)
def test_the_check_when_an_engine_is_opened(widths, c4, c128, refused):
    rings = [C4] * 3 * c4 + [C128] * 2 * c128
    if refused is None:
        return check_rings(rings, widths)
    with pytest.raises(ConfigError) as e:
        check_rings(rings, widths)
    ring, most, better = {4: (16, 9, 20), 128: (256, 129, 384)}[refused]
    assert f"{max(widths) - 1} drafts" in e.value.message
    assert f"{ring} rows" in e.value.message and f"ratio {refused} " in e.value.message
    assert f"{most} at most" in e.value.message
    assert f"--draft-depth {most} " in e.value.cure and f"a ring of {better} rows." in e.value.cure


def test_rings_without_spare_rows_serve_plain_steps_only():
    check_rings([C4_PLAIN, C128_PLAIN], [1])
    with pytest.raises(ConfigError, match="0 at most") as e:
        check_rings([C4_PLAIN, C128_PLAIN], [2])
    assert "--draft off" in e.value.cure and "--ring-spare 1 " in e.value.cure


def test_advice_thinks_of_other_layers():
    with pytest.raises(ConfigError, match="serves 9 at most.*--draft-depth 3 or less.*a ring of 20 rows"):
        check_rings([C4, C128], [11], others=3)
