"""What a load that fails in the middle leaves: the pieces before it are used and not read again, the failed one and
what follows are a miss, and a file goes only if it is proven bad. Four blocks of a model with rows alone."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from mlxkv.cache.record import Reader, UnreadableRecord
from mlxkv.cache.state import SequenceState
from tests import tiny
from tests.cache.stores import records, reopened
from tests.probe import BLOCK, equal, run, runtime

TOKENS = tiny.ids(4 * BLOCK + 1, 3)


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    """(runtime, logits of a cold run): four full blocks are stored."""
    rt = runtime(tiny_model("llama"), tmp_path_factory.mktemp("verdicts") / "cache")
    cold, _ = run(rt, TOKENS, use_cache=False)
    run(rt, TOKENS)
    rt.store.close()
    return rt, cold


def block(folder: Path, i: int) -> Path:
    for path in records(folder, "rows"):
        with Reader.open(path) as reader:
            if (reader.meta.start, reader.meta.end) == (i * BLOCK, (i + 1) * BLOCK):
                return path
    raise AssertionError(f"block {i} is not stored")


def cut(to: int):
    return lambda path: os.truncate(path, to if to >= 0 else path.stat().st_size + to)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def longer(path: Path) -> None:
    with open(path, "ab") as out:
        out.write(bytes(8))


def nothing(path: Path) -> None:
    pass


#: which block, what happens to it after the look-up, num_succeeded, whether its name is left, reason
CASES = {
    "none": (0, nothing, 4, True, None),
    "first-short": (0, cut(10), 0, False, "corrupt"),
    "last-short": (3, cut(-1), 3, False, "corrupt"),
    "second-empty": (1, cut(0), 1, False, "corrupt"),
    "third-links-to-itself": (2, loop, 2, True, "io_error"),
    "third-removed": (2, Path.unlink, 2, False, "evicted"),
    "second-longer": (1, longer, 1, True, "corrupt"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_came_before_the_failure_is_used(written, tmp_path, monkeypatch, case):
    before_the_failure(written, tmp_path, monkeypatch, case)


def test_who_deletes_what_could_not_be_opened_is_found_out(written, tmp_path, monkeypatch):
    """A mutant: an open error is taken for a proof."""
    monkeypatch.setattr(UnreadableRecord, "action", "delete")
    with pytest.raises(AssertionError):
        before_the_failure(written, tmp_path, monkeypatch, "third-links-to-itself")


def before_the_failure(written, tmp_path, monkeypatch, case: str) -> None:
    which, damage, kept, left, reason = CASES[case]
    rt, cold = reopened_copy(written, tmp_path)
    target = block(rt.store.folder.path, which)
    others = {p for p in records(rt.store.folder.path) if p != target}
    plan = rt.store.lookup(TOKENS)
    assert plan.position == 4 * BLOCK, "all four are a hit when they are looked up"
    damage(target)
    opened = opens(monkeypatch)
    logits, completion = run(rt, TOKENS, keep=False)
    assert equal(logits, cold)
    assert completion.usage.cached_tokens == kept * BLOCK
    assert completion.cache.miss_reason == reason
    assert os.path.lexists(target) == left
    assert all(p.exists() for p in others), "files after the failed one may be fine"
    assert set(opened.values()) == {1}, "nothing is read twice, and nothing that failed is tried again"
    logits, completion = run(rt, TOKENS, keep=False)
    assert equal(logits, cold)
    assert completion.usage.cached_tokens == kept * BLOCK, "it is as bad for the next request, and costs no more"
    assert all(p.exists() for p in others) and os.path.lexists(target) == left
    assert max(opened.values()) <= 2
    rt.store.close()


def test_a_read_error_proves_nothing(written, tmp_path, monkeypatch):
    rt, cold = reopened_copy(written, tmp_path)
    target, real, broken = block(rt.store.folder.path, 1), os.preadv, [True]

    def failing(fd, *args):
        if broken and os.path.samestat(os.fstat(fd), target.stat()):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, *args)

    monkeypatch.setattr(os, "preadv", failing)
    logits, completion = run(rt, TOKENS, keep=False)
    assert equal(logits, cold)
    assert (completion.usage.cached_tokens, completion.cache.miss_reason) == (BLOCK, "io_error")
    assert target.exists()
    broken.clear()
    logits, completion = run(rt, TOKENS, keep=False)  # the verdict ended with its request
    assert equal(logits, cold)
    assert completion.usage.cached_tokens == 4 * BLOCK
    rt.store.close()


def test_rows_of_a_failed_piece_do_not_stay_behind(written, tmp_path):
    """Verified rows are kept for the next plan; what a bad record left beyond them is not, were it NaN."""
    rt, _ = reopened_copy(written, tmp_path)
    target = block(rt.store.folder.path, 2)
    data = bytearray(target.read_bytes())
    data[-BLOCK * 64 :] = b"\xff" * BLOCK * 64
    target.write_bytes(data)
    plan = rt.store.lookup(TOKENS)
    state, lookup, _ = rt.store.restore(plan, TOKENS, lambda: fresh(rt), 64)
    assert lookup.tokens == 2 * BLOCK
    for array in state.live():
        assert not array[:, :, 2 * BLOCK :].any(), "rows beyond the position"
    rt.store.close()


def fresh(rt):
    state = SequenceState.new(rt.make_cache())
    state.reserve(64)
    return state


def reopened_copy(written, tmp_path):
    rt, cold = written
    shutil.copytree(rt.store.folder.path, tmp_path / "c")
    return reopened(rt, tmp_path / "c"), cold


def opens(monkeypatch) -> Counter[str]:
    """Counts how often each record is opened."""
    counted: Counter[str] = Counter()
    real = os.open

    def counting(path, flags, *args, **kwargs):
        if str(path).endswith(".safetensors") and not flags & os.O_CREAT:
            counted[os.fspath(path)] += 1
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", counting)
    return counted
