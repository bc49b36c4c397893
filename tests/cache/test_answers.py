"""What is remembered of answers: a hint that leads to the very ids or to nothing, whatever became of the entries."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.cache.stores import reopened
from tests.probe import run, runtime


@pytest.fixture
def told(tiny_model, tmp_path):
    """A store, a prompt of 12 tokens, and an answer of 24 that ends three blocks further on."""
    rt = runtime(tiny_model("qwen3_5"), tmp_path / "c")
    asked = tiny.ids(12, seed=2)
    _, completion = run(rt, asked, max_tokens=24)
    assert rt.store.writer.flush(10)
    rt.store.close()
    rt = reopened(rt, tmp_path / "c")
    assert rt.store.answer_ids(asked, completion.text) == completion.token_ids
    yield rt, asked, completion
    rt.store.close()


def on_the_way(store) -> list[bytes]:
    """Entries from the answer's end back to the first block, the last first."""
    (key,) = store.index.execute("SELECT key FROM answers").fetchone()
    found = []
    while (entry := store.index.entry(key)) is not None:
        found.append(key)
        key = entry.parent
    return found


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_answer_that_runs_over_a_gap_is_not_known(told, place):
    """A block on its way was dropped, as a damaged record is: nothing is made of what is left."""
    rt, asked, completion = told
    key = on_the_way(rt.store)[place]
    with rt.store.index.transaction():
        for kind, _ in rt.store.index.records_of(key):
            rt.store.folder.remove(key, kind)
            rt.store.index.drop_record(key, kind)
    assert rt.store.answer_ids(asked, completion.text) is None and not rt.store.faults
    assert rt.store.index.execute("SELECT count(*) FROM answers").fetchone() == (1,)
    # the same answer again closes the gap
    _, again = run(rt, asked, max_tokens=24)
    assert again.token_ids == completion.token_ids and rt.store.writer.flush(10)
    assert rt.store.answer_ids(asked, completion.text) == completion.token_ids


def test_an_answer_goes_with_the_entry_that_it_ends_in(told):
    rt, asked, completion = told
    key = on_the_way(rt.store)[0]
    kinds = [kind for kind, _ in rt.store.index.records_of(key)]
    for left in range(len(kinds), 0, -1):
        assert rt.store.answer_ids(asked, completion.text) == completion.token_ids
        with rt.store.index.transaction():
            rt.store.folder.remove(key, kinds[left - 1])
            rt.store.index.drop_record(key, kinds[left - 1])
    assert rt.store.answer_ids(asked, completion.text) is None and not rt.store.faults
    assert rt.store.index.execute("SELECT count(*) FROM answers").fetchone() == (0,)


def test_an_answer_that_leads_to_what_was_never_there_is_not_known(told):
    rt, asked, completion = told
    with rt.store.index.transaction():
        rt.store.index.execute("UPDATE answers SET key = ?", (b"k" * 32,))
    assert rt.store.answer_ids(asked, completion.text) is None and not rt.store.faults
