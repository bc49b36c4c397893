"""Acceptance of drafts: a speculative text is the plain one, or has its distribution; and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.decode.acceptance import Trial, accepted, draft, judge
from mlxkv.decode.constraint import Constraint, Scout, pack, unpack
from mlxkv.decode.counts import Counts
from mlxkv.decode.request import Grammar, SamplingParams
from mlxkv.decode.sampling import Sampler, draw, sample
from mlxkv.errors import DeadEnd
from tests import tiny
from tests.decode.distribution import CASES, VOCAB, Case, Texts, counted, cycled, exact, surprise
from tests.decode.test_grammar import GRAMMARS, PADDED, SCHEMA, check
from tests.decode.test_sampling import PARAMS

SAMPLES = 5000
SEEDS = np.random.default_rng(11).integers(0, 2**63, SAMPLES).tolist()


@pytest.mark.parametrize("name", CASES)
def test_texts_are_distributed_as_those_of_plain_sampling(name):
    case = CASES[name]
    texts = Texts(case, SEEDS)
    speculative, plain, expected = texts.speculative(), texts.plain(), SAMPLES * exact(case)
    # normal deviates: 3.5 is passed twice in ten thousand, and the seeds are fixed
    assert surprise(counted(speculative), expected) < 3.5
    assert surprise(counted(plain), expected) < 3.5
    assert surprise(counted(speculative), counted(plain), of_samples=True) < 3.5
    for i in range(12):  # what was counted is what trials do; after a look-up that is plain sampling itself
        same = plain if case.drafter == "given" else speculative
        assert cycled(case, case.sampler(SEEDS[i])) == same[i].tolist()


def without_residual(p, q, drafts, u, keys):
    """A draft that is not kept is replaced by a token from p."""
    kept, _ = accepted(p, q, drafts, u, keys)
    return kept, draw(p[kept][None], keys[kept])


def residual(of: Callable[[mx.array, mx.array, mx.array], mx.array]):
    """A draft that is not kept is replaced by what ``of`` draws from p − q, by a uniform number or a key."""

    def rule(p, q, drafts, u, keys):
        kept, last = accepted(p, q, drafts, u, keys)
        at = mx.minimum(kept, len(q) - 1)
        other = of(mx.softmax(p[at]) - mx.softmax(q[at]), mx.random.uniform(key=keys[at]), keys[at])
        return kept, mx.where(kept < len(q), other.astype(mx.int32), last)

    return rule


def bonus_of_q(p, q, drafts, u, keys):
    """The token after all drafts is drawn from the last q."""
    return accepted(mx.concatenate([p[:-1], q[-1:]]), q, drafts, u, keys)


def always_kept(p, q, drafts, u, keys):
    return accepted(p, q, drafts, u * 0, keys)


def by_likelihood(p, q, drafts, u, keys):
    """Kept with probability p(draft)."""
    of_q = mx.take_along_axis(mx.softmax(q, axis=-1), drafts[:, None], axis=-1)[:, 0]
    return accepted(p, q, drafts, u / of_q, keys)


def one_number_for_all(p, q, drafts, u, keys):
    return accepted(p, q, drafts, mx.broadcast_to(u[:1], u.shape), mx.broadcast_to(keys[:1], keys.shape))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(without_residual, id="no residual"),
        pytest.param(
            residual(lambda rest, u, key: draw(mx.log(mx.abs(rest))[None], key)),
            id="residual without max",
        ),
        pytest.param(
            residual(lambda rest, u, key: mx.minimum((mx.cumsum(mx.maximum(rest, 0)) < u).sum(), VOCAB - 1)),
            id="residual not normalised",
        ),
        pytest.param(bonus_of_q, id="bonus from q"),
        pytest.param(always_kept, id="all kept"),
        pytest.param(by_likelihood, id="kept by p alone"),
        pytest.param(one_number_for_all, id="one random number for a run"),
    ],
)
def test_a_wrong_rule_is_found_out(rule):
    case = Case({"temperature": 0.7}, "far")
    assert surprise(counted(Texts(case, SEEDS).speculative(rule)), SAMPLES * exact(case)) > 7


# one text


class Toy:
    """Logits of a target and of a drafter after a text; alike, as far as ``apart`` is small."""

    def __init__(self, size: int, seed: int, apart: float = 0.5, dtype: mx.Dtype = mx.float32) -> None:
        self.size, self.seed, self.apart, self.dtype = size, seed, apart, dtype

    def target(self, said: list[int]) -> mx.array:
        rng = np.random.default_rng([self.seed, 0, *said[-2:], len(said)])
        return mx.array(rng.normal(size=self.size).astype(np.float32) * 2).astype(self.dtype)

    def drafter(self, said: list[int]) -> mx.array:
        rng = np.random.default_rng([self.seed, 1, *said[-2:], len(said)])
        other = mx.array(rng.normal(size=self.size).astype(np.float32) * 2).astype(self.dtype)
        return self.target(said) * (1 - self.apart) + other * self.apart


def plainly(sampler: Sampler, toy: Toy, n: int) -> list:
    out, said = [], []
    while len(out) < n and not sampler.done:
        out += sample([sampler], toy.target(said)[None]).read()
        said.append(out[-1][0])
        sampler.advance(said[-1])
    return out


def run(trial: Trial, toy: Toy, said: list[int], rng: np.random.Generator, kind: str, k: int) -> list[int]:
    """Drafts of a trial, those that count no more included."""
    path = list(said)
    if kind == "given":
        path += rng.integers(0, toy.size, k).tolist()
        if k and rng.random() < 0.7:  # a draft that is right
            path[len(said)] = int(toy.target(said).argmax().item())
        trial.given(path[len(said) :])
    elif kind == "draft":
        for _ in range(k):
            path.append(int(trial.draft(toy.drafter(path)[None]).item()))
    return path[len(said) :]


def speculatively(sampler: Sampler, toy: Toy, n: int, seed: int, kinds=("draft", "given", "dropped", "plain")) -> list:
    out, said = [], []
    rng = np.random.default_rng(seed)
    while len(out) < n and not sampler.done:
        kind, k = str(rng.choice(kinds)), int(rng.integers(0, 5))
        trial = Trial(sampler, int(rng.integers(0, 5)))
        if kind == "dropped":  # in the middle of its drafts, or judged and not read
            drafts = run(trial, toy, said, rng, "draft", k)
            if rng.random() < 0.5:
                trial.judge(mx.stack([toy.target(said + drafts[:i]) for i in range(k + 1)]))
            kind = "plain"
        if kind == "plain":
            read = sample([sampler], toy.target(said)[None]).read()
        else:
            drafts = run(trial, toy, said, rng, kind, k)
            verdict = trial.judge(mx.stack([toy.target(said + drafts[:i]) for i in range(k + 1)]))
            mx.eval(verdict.live())
            read = verdict.read()
            assert 1 <= len(read) <= len(trial) + 1
        for token, report in read:
            if len(out) < n and not sampler.done:
                out.append((token, report))
                said.append(token)
                sampler.advance(token)
    return out


@settings(max_examples=30, deadline=None)
@given(PARAMS, st.integers(0, 10**6), st.sampled_from([mx.float32, mx.bfloat16]))
def test_a_seeded_or_greedy_text_is_the_same_bits_whatever_was_drafted(params, seed, dtype):
    params = SamplingParams(seed=seed, **params, **({"top_logprobs": 2} if params.get("logprobs") else {}))
    toy = Toy(12, seed, dtype=dtype)
    plain, other = (Sampler(params, [3, 7, 7], 12) for _ in range(2))
    assert speculatively(other, toy, 12, seed) == plainly(plain, toy, 12)


@settings(max_examples=15, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 10**6))
def test_a_row_is_judged_as_if_alone(params, seed):
    toy, rng = Toy(12, seed, dtype=mx.bfloat16), np.random.default_rng(seed)
    samplers = [
        Sampler(SamplingParams(seed=i if i % 2 else None, **p), [3, 7], 12, own_seed=i) for i, p in enumerate(params)
    ]
    together, alone = ([Trial(s) for s in samplers] for _ in range(2))
    for trial, other in zip(together, alone, strict=True):
        given = rng.integers(0, 12, rng.integers(0, 2)).tolist()
        trial.given(given)
        other.given(given)
    for j in range(2):
        logits = mx.stack([toy.drafter([i, j]) for i in range(len(params) + 1)])
        drafts = draft([*together, None], logits)
        assert drafts.dtype == mx.int32
        assert drafts.tolist()[:-1] == [t.draft(logits[i : i + 1]).item() for i, t in enumerate(alone)]
    logits = mx.stack([mx.stack([toy.target([i, j]) for j in range(4)]) for i in range(len(params) + 1)])
    verdicts = judge([*together, None], logits)
    mx.eval([v.live() for v in verdicts])
    assert [v.read() for v in verdicts[:-1]] == [t.judge(logits[i]).read() for i, t in enumerate(alone)]
    assert verdicts[-1].read() == []


def test_drafts_of_a_seeded_text_are_kept_about_as_often_as_others():
    rng = np.random.default_rng(3)
    kept = {None: 0, 5: 0}
    p = rng.normal(size=(200, 2048)).astype(np.float32) * 3
    q = p + rng.normal(size=p.shape).astype(np.float32) * 0.3
    for seed in kept:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [], 2048, own_seed=1)
        for i in range(200):
            trial = Trial(sampler)
            trial.draft(mx.array(q[i : i + 1]))
            kept[seed] += len(trial.judge(mx.array(p[[i, i]])).read()) - 1
            sampler.advance(0)
    assert kept[None] > 150 and kept[5] > 0.9 * kept[None]


def test_a_drafter_may_have_a_vocabulary_of_another_width():
    toy = Toy(12, 0)
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1, "logit_bias": {11: 3.0}}):
        sampler = Sampler(SamplingParams(**params), [], 12, own_seed=2)
        for width, more in ((9, 0), (20, 50)):
            trials = [Trial(sampler) for _ in range(2)]
            logits = mx.array(np.random.default_rng(1).normal(size=(2, width)).astype(np.float32))
            logits[:, 12:] += more
            drafts = [draft(trials, logits).tolist() for _ in range(3)]
            assert all(0 <= d < min(width, 12) or "logit_bias" in params for row in drafts for d in row)
            assert all(0 <= d < 12 for row in drafts for d in row)
            assert 1 <= len(trials[0].judge(mx.stack([toy.target([i]) for i in range(4)])).read()) <= 4


# numbers at their limits


def chosen(p, q, drafts, seed=0):
    """The tokens that count, and how many drafts are kept."""
    keys = mx.random.split(mx.random.key(seed), len(p))
    u = mx.random.uniform(shape=(len(q),), key=mx.random.key(seed + 1))
    kept, last = accepted(mx.array(p, mx.float32), mx.array(q, mx.float32), mx.array(drafts, mx.int32), u, keys)
    return [*drafts[: kept.item()], last.item()][: len(p)], kept.item()


INF = float("inf")


def test_what_cannot_come_never_does():
    for seed in range(200):
        # a draft that p excludes; q and p have nothing in common
        assert chosen([[0, -INF, 0], [0, 0, 0]], [[-INF, 0, -INF]], [1], seed)[0][0] in (0, 2)
        # the only token that may come, with the least weight
        assert chosen([[-1e30, -INF, -INF]] * 2, [[0, 0, 0]], [seed % 3], seed)[0][0] == 0
        # a q of 0 for what was drawn: what p allows is kept
        assert chosen([[0, 0, 0]] * 2, [[0, -200, -INF]], [1], seed)[0][0] == 1
        # p and q the same, so that nothing is left of the rest
        tokens, kept = chosen([[0.1, 0.2, -INF]] * 2, [[0.1, 0.2, -INF]], [1], seed)
        assert kept == 1 and tokens[0] == 1 and tokens[1] < 2
        # no token may follow the last draft
        assert chosen([[0, 0, -INF]] * 2, [[0, 0, -INF]] * 2, [0, 1], seed) == ([0, 1], 2)
    # of p = q but for a rounding, and a draft that is not kept all the same
    p, q = [[0.0, 0.0]], [[0.0, 1e-7]]
    keys = mx.random.split(mx.random.key(0), 2)
    kept, last = accepted(mx.array(p * 2), mx.array(q), mx.array([1]), mx.array([1.0]), keys)
    assert kept.item() == 0 and last.item() in (0, 1)


@pytest.mark.parametrize("value", [float("nan"), -INF, INF])
def test_logits_without_meaning_end_in_some_token(value):
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1, "top_p": 0.5, "min_p": 0.1, "top_k": 3}):
        sampler = Sampler(SamplingParams(**params), [], 8, own_seed=3)
        for logits in (mx.full((3, 8), value), mx.zeros((3, 8)).at[:, 2].add(value)):
            trial = Trial(sampler)
            for i in range(2):
                assert 0 <= trial.draft(logits[i : i + 1]).item() < 8
            assert all(0 <= token < 8 for token, _ in trial.judge(logits).read())


# what a sampler remembers


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), max_size=9), st.integers(1, 12))
def test_counts_after_drafts_are_those_of_tokens(tokens, drafts, window):
    for size in (None, window):
        counts, other = Counts(tokens, size), Counts(tokens + drafts, size)
        before = dict(zip(counts.seen().ids.tolist(), counts.seen().counts.tolist(), strict=True))
        for seen, expected in ((counts.seen(drafts), other.seen()), (counts.seen(), Counts(tokens, size).seen())):
            found = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
            assert len(seen) == len(found)
            assert found == dict(zip(expected.ids.tolist(), expected.counts.tolist(), strict=True))
        assert before == dict(zip(counts.seen().ids.tolist(), counts.seen().counts.tolist(), strict=True))


def grammar(text: str | dict) -> Constraint:
    kind = {"regex": text} if isinstance(text, str) else {"json_schema": text}
    return GRAMMARS.constraint(Grammar.of(kind))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "seed": 4}, {"presence_penalty": 1.0}])
def test_a_text_of_a_grammar_is_the_plain_one(params):
    for seed in range(2):
        toy = Toy(PADDED, seed, 0.2)
        plain, other = (Sampler(SamplingParams(**params), [1], PADDED, grammar(SCHEMA)) for _ in range(2))
        expected = plainly(plain, toy, 300)
        assert plain.done and speculatively(other, toy, 300, seed) == expected
        check(tiny.tokenizer().decode([token for token, _ in expected]))


def test_no_draft_is_what_a_grammar_forbids_and_texts_without_a_seed_keep_to_it():
    for seed in range(4):
        toy, rng = Toy(PADDED, seed, 0.3), np.random.default_rng(seed)
        sampler = Sampler(SamplingParams(temperature=1.2, top_p=0.99), [1], PADDED, grammar(SCHEMA), seed)
        so_far, said = grammar(SCHEMA), []
        while not sampler.done:
            trial, k = Trial(sampler), int(rng.integers(1, 6))
            drafts = run(trial, toy, said, rng, "draft", k)
            ahead = so_far.fork()
            for token in drafts[: len(trial)]:
                assert token in unpack(ahead.mask())
                ahead.advance(token)
            assert len(trial) == k or not trial.open
            for token, _ in trial.judge(mx.stack([toy.target(said + drafts[:i]) for i in range(k + 1)])).read():
                said.append(token)
                so_far.advance(token)
                sampler.advance(token)
        check(tiny.tokenizer().decode(said))


def test_drafts_end_with_the_grammar_and_before_what_it_forbids():
    a, b = (tiny.tokenizer().token_to_id(c) for c in "ab")
    rows = mx.zeros((5, PADDED))
    sampler = Sampler(SamplingParams(), [], PADDED, grammar("aab"))
    trial = Trial(sampler)
    trial.given([a, b, a])  # the second may not come
    assert len(trial) == 1 and not trial.open
    assert [t for t, _ in trial.judge(rows).read()] == [a, a]
    trial = Trial(sampler)
    for _ in range(4):
        trial.draft(rows[:1])
    assert len(trial) == 3 and not trial.open  # aab, and nothing more
    assert [t for t, _ in trial.judge(rows).read()] == [a, a, b]
    for token in (a, a, b):
        assert not sampler.done
        sampler.advance(token)
    assert sampler.done


class Trap:
    """After 0 comes 0 or 1; with 1 it breaks (``how``: in the mask, in ``advance``, or with a panic), and there is no
    way back either."""

    accepting = done = free = False

    def __init__(self, how: str, tokens: tuple[int, ...] = ()) -> None:
        self.how, self.tokens, self.broken = how, list(tokens), False

    def mask(self) -> np.ndarray:
        if self.broken or 1 in self.tokens:
            self.broken = True
            raise DeadEnd("trapped")
        return pack([0, 1], 8)

    def advance(self, token: int) -> None:
        if self.broken or (token == 1 and self.how != "mask"):
            self.broken = True
            raise DeadEnd("trapped") if self.how == "advance" else BaseException("panic")
        self.tokens.append(token)

    def fork(self) -> Trap:
        assert not self.broken
        return Trap(self.how, tuple(self.tokens))

    def rollback(self, n: int) -> None:
        if self.broken:
            raise DeadEnd("no way back")
        del self.tokens[len(self.tokens) - n :]


@pytest.mark.parametrize("how", ["mask", "advance", "panic"])
def test_a_draft_that_leads_nowhere_harms_nobody_until_it_is_chosen(how):
    sampler = Sampler(SamplingParams(), [], 8, Trap(how))
    wants = [mx.eye(8)[i : i + 1] * 9 for i in range(2)]
    for _ in range(3):
        sampler.advance(0)
        trial = Trial(sampler)
        trial.draft(wants[0])
        trial.draft(wants[1])
        trial.draft(wants[0])  # nothing follows 1
        assert len(trial) == 2 and not trial.open
        assert [t for t, _ in trial.judge(mx.concatenate([wants[0]] * 4)).read()] == [0, 0]
        sampler.advance(0)
        assert sampler(wants[0]).item() == 0
    trial = Trial(sampler)
    trial.draft(wants[1])
    assert [t for t, _ in trial.judge(mx.concatenate([wants[1]] * 2)).read()] == [1]
    with pytest.raises(BaseException, match="trapped|panic"):
        sampler.advance(1)


def test_a_scout_computes_no_mask_twice():
    class Counting:
        masks = 0
        accepting = done = free = False

        def mask(self) -> np.ndarray:
            self.masks += 1
            return pack([0, 1], 8)

        def advance(self, token: int) -> None: ...
        def fork(self) -> Counting:
            return self

        def rollback(self, n: int) -> None: ...

    constraint = Counting()
    scout = Scout(constraint)
    for _ in range(10):
        for drafts in ([0], [0, 0], [0, 0, 0]):
            assert scout.look(drafts) is not None
        for token in (0, 0):  # the third is not kept
            scout.advance(token)
        scout.advance(1)
    assert constraint.masks == 1 + 10 * 4
