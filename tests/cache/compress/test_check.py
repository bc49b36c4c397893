"""What rings of compression cannot serve is refused when an engine is opened, with what would do."""

from __future__ import annotations

import pytest

from mlxkv.cache.compressed import CompressedCache
from mlxkv.cache.kinds import members_of
from mlxkv.cache.rewind import check_drafts, why_not
from mlxkv.cache.ring import with_rings
from mlxkv.errors import ConfigError
from tests.decode.many import load


def members(spare: int):
    """Of a layer with its window only, of one whose windows overlap, and of one whose do not."""
    shapes = [(0, False, None), (4, True, 4), (128, False, None)]
    caches = [CompressedCache(window=8, ratio=r, overlap=o, head_dim=4, index_dim=i) for r, o, i in shapes]
    return members_of(with_rings(caches, spare))


@pytest.mark.parametrize("spare", [1, 3, 8])
def test_as_many_drafts_as_there_are_spare_rows(spare):
    check_drafts(members(spare), spare)
    assert why_not(members(spare)) is None


@pytest.mark.parametrize(
    ("drafts", "spare", "message"),
    [
        (
            6,
            3,
            "6 drafts were asked for, and the ring of 12 rows that compression at ratio 4 keeps serves 5 at most. "
            "Give --draft-depth 3 or less, or --ring-spare 6 or more, which makes a ring of 16 rows.",
        ),
        (
            4,
            3,
            "4 drafts were asked for, and the ring of layer 0.0 (a window of 8 rows, 3 spare) can take back 3 at most. "
            "Give --draft-depth 3 or less, or --ring-spare 4 or more.",
        ),
    ],
)
def test_more_are_refused(drafts, spare, message):
    with pytest.raises(ConfigError) as e:
        check_drafts(members(spare), drafts)
    assert str(e.value) == message


def test_without_spare_rows_nothing_is_drafted():
    assert why_not(members(0)) == (
        "layer 0.0 is a window of 8 rows without spare ones, and would have overwritten what comes back"
    )
    assert why_not(members(0)[2:]) == "layer 1.1 is compressed at ratio 4 out of a ring of 8 rows, none of them spare"
    with pytest.raises(ConfigError, match="Nothing can be drafted"):
        check_drafts(members(0), 1)


def test_an_engine_is_not_opened_with_them(tiny_model):
    """Nor does ``doctor`` call it well."""
    model = tiny_model("deepseek_v4")
    for spare, depth, ring in [(1, 8, "the ring of 12 rows that compression at ratio 4 keeps serves 5 at most"),
                               (3, 6, "the ring of 12 rows that compression at ratio 4 keeps serves 5 at most"),
                               (3, 4, "a window of 8 rows, 3 spare")]:  # fmt: skip
        with pytest.raises(ConfigError) as e, load(model, None, draft="ngram", draft_depth=depth, ring_spare=spare):
            pass
        assert ring in e.value.message and f"--draft-depth {spare} or less" in e.value.cure
        assert f"--ring-spare {depth} or more" in e.value.cure
    with load(model, None, draft="ngram", ring_spare=3) as engine:
        assert engine.info.drafts == 3
