"""A boundary of the store inside a run of accepted tokens: it costs no token, and the state is the one that a plain run
keeps there."""

from __future__ import annotations

import random
from contextlib import contextmanager
from unittest import mock

import pytest

from mlxkv.decode.batched import Batched
from mlxkv.decode.solo import Solo
from tests import architectures, tiny
from tests.decode.equal import runtimes
from tests.decode.kept import compare, kept
from tests.decode.many import Alone, ask, changed, load
from tests.decode.scripted import Scripted, pattern

#: the first rung; an answer of 60 to a prompt of 10 or 13 tokens passes 32 and 64
LADDER, RUNGS = 16, {32, 64}
DEPTH = 5


@contextmanager
def watched(kind):
    """(position before, kept, wanted) of each commit of a row for which a state was wanted."""
    seen, real = [], kind.commit

    def commit(run, kept, wanted):
        after = real(run, kept, wanted)
        seen.extend((run.position(slot) - kept[slot], kept[slot], at) for slot, at in wanted.items())
        return after

    with mock.patch.object(kind, "commit", commit):
        yield seen


#: few operations: each kernel of a compiled step takes a second to build
SMALL = {
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1]},
    # nothing of it is recurrent: its rings still have what it held at the rung
    "deepseek_v4": {"num_hidden_layers": 2, "compress_ratios": [4, 8], "hc_sinkhorn_iters": 1},
}


@pytest.mark.parametrize(
    ("arch", "rows", "compile"),
    [("lfm2", 1, "off"), ("lfm2", 2, "off"), ("lfm2", 1, "on"), ("deepseek_v4", 2, "off")],
)
def test_a_rung_inside_an_accepted_run(tmp_path, arch, rows, compile):
    model = tiny.make(arch, tmp_path / "model", **SMALL[arch])
    asked = [ask(tiny.ids(10 + 3 * n, seed=n), 60, logit_bias={tiny.EOS: -100.0}) for n in range(rows)]
    alone = Alone(model)
    drafter = Scripted(pattern("all", random.Random(1)), architectures.VOCAB)
    right = [alone(each) for each in asked]
    alone.close()
    drafter.learn([*(each.tokens or []), *r.token_ids] for each, r in zip(asked, right, strict=True))
    how = {"compile": compile, "draft": "ngram", "draft_depth": DEPTH}
    with (
        watched(Solo) as solo,
        watched(Batched) as batched,
        changed(runtimes(LADDER, drafter)),
        load(model, tmp_path / "drafts", **how) as engine,
    ):
        tickets = [engine.submit(each) for each in asked]
        assert [t.result().token_ids for t in tickets] == [r.token_ids for r in right]
        status = engine.status()
    assert bool(status.traces) == (compile == "on")
    # no cycle was shorter for it: all drafts were kept, but for the ends of answers
    assert status.accepted >= 40 * rows and all(n == k for n, k in drafter.kept[: -3 * rows])
    inside = [at for start, n, at in (solo if (rows, compile) == (1, "off") else batched) if start < at < start + n]
    assert len(inside) >= rows
    with changed(runtimes(LADDER)), load(model, tmp_path / "plain", draft="off") as engine:
        for each in asked:
            engine.submit(each).result()
    mine, theirs = kept(tmp_path / "drafts"), kept(tmp_path / "plain")
    assert not compare(mine, theirs).wrong
    for each in (mine, theirs):
        at = [meta.end for meta, _ in each.values() if meta.kind == "state"]
        assert sorted(end for end in at if end in RUNGS) == sorted([*RUNGS] * rows)
    assert mine.keys() == theirs.keys()
