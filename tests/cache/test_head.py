"""A head's cache through plain steps, drafts and commits, in any order: what it stores and drafts from is always what a
run without drafts has."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.head import HEAD_BEHIND, HeadCache
from mlxkv.models import load
from mlxkv.models.mtp import WithHead
from tests import headed, tiny
from tests.cache.synthetic import unevaluated

LENGTH = 64


class Story:
    """One text that the body has read: its tokens, hidden states, and the head beside them."""

    def __init__(self, folder) -> None:
        loaded = load(headed.make(folder))
        body: Any = loaded.model
        assert loaded.head is not None
        self.model = WithHead(loaded.model, loaded.head)
        self.tokens = mx.array([tiny.ids(LENGTH, seed=3)])
        self.hidden = body.language_model.model(self.tokens, make_prompt_cache(loaded.model))
        mx.eval(self.hidden)

    def head(self, n: int = 0) -> HeadCache:
        """Its cache after ``n`` tokens in one go."""
        cache = HeadCache(self.model.runner())
        if n:
            cache.observe(self.tokens[:, :n], self.hidden[:, :n])
        return cache

    def root(self, position: int) -> dict[int, int]:
        return {0: int(self.tokens[0, position].item())}  # type: ignore[arg-type]

    def plain(self, cache: HeadCache, n: int) -> None:
        at = cache.seen
        cache.observe(self.tokens[:, at : at + n], self.hidden[:, at : at + n])

    def draft(self, cache: HeadCache, k: int) -> list[mx.array]:
        """The m of each of k drafts; the drafts are any tokens."""
        out = [cache.first(self.root(cache.seen))]
        for i in range(k - 1):
            out.append(cache.following(mx.array([[7 + i]]), out[-1], i + 1))
        cache.drop()
        return out

    def verify(self, cache: HeadCache, width: int, kept: int) -> None:
        """A forward of which ``kept`` tokens are the text's."""
        at = cache.seen
        wrong = mx.full((1, width - kept, self.hidden.shape[2]), 9.0)
        cache.observe(
            mx.concatenate([self.tokens[:, at : at + kept], mx.full((1, width - kept), 1, mx.int32)], axis=1),
            mx.concatenate([self.hidden[:, at : at + kept], wrong], axis=1),
        )
        for member in cache.members(()):
            member.commit(kept, width, None)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return Story(tmp_path_factory.mktemp("headed") / "model")


def record(cache: HeadCache) -> dict[str, np.ndarray]:
    """What the store would be given of it here."""
    rows, hidden = cache.members(())
    rows.catch_up()
    out = rows.rows(0, cache.seen) | hidden.arrays()
    mx.eval(list(out.values()))
    return {name: np.array(a) for name, a in out.items()}


def resumed(story: Story, cache: HeadCache) -> HeadCache:
    """A fresh cache that was restored from what ``cache`` stores."""
    kept = {name: mx.array(a) for name, a in record(cache).items()}
    fresh = story.head()
    rows, hidden = fresh.members(())
    hidden.resume({"hidden": kept.pop("hidden")}, cache.seen)
    rows.resume(kept, cache.seen)
    return fresh


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_drafted_the_records_and_the_next_draft_are_those_of_a_plain_run(story, seed):
    rng = random.Random(seed)
    cache = story.head(rng.randrange(1, 6))
    while cache.seen < LENGTH - 10:
        before = cache.seen
        match rng.choice(("plain", "cycle", "cycle", "void", "capture", "undone")):
            case "plain":
                story.plain(cache, 1)
            case "cycle":
                k = rng.randrange(1, 9)
                kept = rng.randrange(1, k + 2)
                story.draft(cache, k)
                story.verify(cache, k + 1, kept)
                assert cache.seen == before + kept
            case "void":  # drafts that are never verified, again and again
                story.draft(cache, rng.randrange(1, 4))
            case "capture":
                cache.members(())[0].catch_up()
            case "undone":
                held = [m.hold() for m in cache.members(())]
                story.plain(cache, 1)
                for member, handle in zip(cache.members(()), held, strict=True):
                    member.put_back(handle)
        assert all(member.position == cache.seen for member in cache.members(()))
        plain = story.head(cache.seen)
        if rng.random() < 0.4:
            assert same(record(cache), record(plain))
        if rng.random() < 0.6:
            expected = mx.concatenate(story.draft(plain, 3))
            for other in (cache, resumed(story, plain)):
                assert mx.array_equal(mx.concatenate(story.draft(other, 3)), expected).item()
    assert same(record(cache), record(story.head(cache.seen)))


def test_what_is_not_evaluated_yet_is_told_at_the_next_step(story):
    """An array that nobody evaluates would keep all that it comes of alive, caches too."""
    rng = random.Random(1)
    cache = story.head(1)
    for _ in range(12):
        for _ in range(40):
            token, hidden = mx.array([[7]]), story.hidden[:, 3:4] * 1.0
            mx.eval(token)
            cache.observe(token, hidden)
            live = [a for member in cache.members(()) for a in member.live()]
            mx.eval(live)
            assert len(live) < 10 and not unevaluated([*cache.tokens, *cache.hidden])
        if rng.random() < 0.5:
            cache.catch_up()


def test_drafts_do_not_depend_on_what_was_drafted_before(story):
    """Without ``drop`` and ``commit`` the next draft would see rows of tokens that were refused."""
    cache, plain = story.head(10), story.head(12)
    story.draft(cache, 5)
    story.verify(cache, 6, 2)
    assert mx.array_equal(story.draft(cache, 1)[0], story.draft(plain, 1)[0]).item()
    spoiled = story.head(10)
    m = spoiled.first(story.root(10))
    spoiled.following(mx.array([[7]]), m, 1)
    spoiled.seen += 1  # as if the speculative row were a true one
    plain.catch_up()
    assert not mx.allclose(spoiled.kv.keys[..., 10, :], plain.kv.keys[..., 10, :]).item()


def test_a_state_inside_the_kept_run_is_still_held(story):
    """A store boundary inside the accepted run: its hidden state is there until the next draft."""
    cache = story.head(10)
    story.draft(cache, 4)
    story.verify(cache, 5, 4)
    for position in (11, 12, 13, 14):
        assert mx.array_equal(cache.hidden_at(position - 1), story.hidden[:, position - 1 : position]).item()
    assert cache.hidden_at(14) is None


def test_without_drafts_few_hidden_states_and_few_arrays_wait(story):
    """A long answer that nobody drafts for and nobody stores, and a prompt in large chunks."""
    calls: list[int] = []

    def run(tokens, hidden, kv):
        calls.append(tokens.shape[1])
        return story.model.runner()(tokens, hidden, kv)

    cache = HeadCache(run)
    for n in (700, 700, *[1] * 1200):
        cache.observe(mx.zeros((1, n), mx.int32), mx.zeros((1, n, 64)))
        mx.eval(cache.members(())[1].live(), cache.kv.state if cache.kv.keys is not None else [])
        assert sum(h.shape[1] for h in cache.hidden) <= max(HEAD_BEHIND, n + 1)
        assert len(cache.hidden) <= 32
    assert cache.seen == 2600 and max(calls) <= HEAD_BEHIND
    assert len(calls) < 12  # seldom, and then many at once
    assert not story.head().can_draft([0])  # a prompt of one token: there is no hidden state yet
