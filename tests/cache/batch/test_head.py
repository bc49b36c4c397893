"""Heads of a batch: rows that draft together, each with its own number of kept tokens, draft and store what they would
alone."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.batch.head import MOST, BatchHead
from mlxkv.cache.batch.head_rows import HeadRowsOfAll
from mlxkv.cache.batch.head_traced import TracedHeads
from mlxkv.cache.batch.place import Place, Seat
from mlxkv.cache.head import HeadCache
from mlxkv.cache.layout import probe
from mlxkv.models import load
from mlxkv.models.mtp import WithHead
from tests import headed, tiny
from tests.cache.batch.schedules import apart, tolerance
from tests.cache.synthetic import unevaluated

LENGTH, TEXTS = 70, 4


class Story:
    """Texts that the body has read, and the head beside them."""

    def __init__(self, folder) -> None:
        loaded = load(headed.make(folder))
        assert loaded.head is not None
        self.model = model = WithHead(loaded.model, loaded.head)
        self.live = probe(model, lambda: [*make_prompt_cache(loaded.model), HeadCache(model.runner())])
        self.spec = next(m for m in self.live.members if m.kind == "head")
        self.tokens = mx.array([tiny.ids(LENGTH, seed=i) for i in range(TEXTS)])
        self.hidden = mx.concatenate(
            [loaded.head.hidden(model._text, t[None], make_prompt_cache(loaded.model)) for t in self.tokens]
        )
        mx.eval(self.hidden)

    def alone(self, text: int, n: int, joint: bool = True) -> HeadCache:
        """The head of one text after ``n`` tokens, in one go."""
        cache = HeadCache(self.model.runner(), joint)
        cache.observe(self.tokens[text : text + 1, :n], self.hidden[text : text + 1, :n])
        return cache

    def root(self, text: int, position: int) -> int:
        return int(self.tokens[text, position].item())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return Story(tmp_path_factory.mktemp("headed") / "model")


class Company:
    """A batch's heads; ``texts``: slot -> which text sits there."""

    def __init__(self, story: Story, slots: int, joint: bool) -> None:
        self.story, self.joint = story, joint
        self.place = Place(slots)
        self.form = BatchHead(self.place, story.spec, slots, LENGTH)
        self.texts: dict[int, int] = {}

    @property
    def at(self) -> list[int]:
        return self.place.positions

    def join(self, slot: int, text: int, n: int) -> None:
        self.form.join(slot, self.story.alone(text, n, self.joint), n)
        self.at[slot] = n
        self.texts[slot] = text

    def leave(self, slot: int) -> None:
        self.form.leave(slot)
        self.at[slot] = 0
        del self.texts[slot]

    def resize(self, slots: int, keep: dict[int, int]) -> None:
        at = {old: self.at[old] for old in keep}
        self.form.resize(slots, LENGTH + slots, keep, at)
        self.place.positions = [0] * slots
        for old, new in keep.items():
            self.at[new] = at[old]
        self.texts = {new: self.texts[old] for old, new in keep.items()}

    def step(self, kept: dict[int, int], width: int) -> None:
        """A step of ``width`` tokens a row, of which the first ``kept`` are the text's."""
        tokens, hidden = [], []
        for slot in range(len(self.at)):
            n, text, at = kept.get(slot, 0), self.texts.get(slot, 0), self.at[slot]
            tokens.append(mx.concatenate([self.story.tokens[text, at : at + n], mx.full((width - n,), 1, mx.int32)]))
            wrong = mx.full((width - n, self.story.hidden.shape[2]), 9.0)
            hidden.append(mx.concatenate([self.story.hidden[text, at : at + n], wrong]))
        ids, shown = mx.stack(tokens), mx.stack(hidden)
        ids = ids[:, 0] if width == 1 else ids
        mx.eval(ids)  # as a hidden state that came of them would be evaluated with them
        if width == 1:
            self.form.shown(ids, shown)
        else:
            self.form.verified(ids, shown)
            self.form.committed([kept.get(slot, 0) for slot in range(len(self.at))])
        for slot, n in kept.items():
            self.at[slot] += n
        mx.eval(self.form.live())
        assert not unevaluated(self.everything())

    def everything(self) -> list[mx.array]:
        """All that the form holds, whether or not a step must evaluate it."""
        mine = [a for step in self.form._steps for a in (step.tokens, step.hidden)] + self.form.rows.arrays()
        return mine + [a for head in self.form.heads if head is not None for a in (*head.tokens, *head.hidden)]

    def draft(self, k: int) -> mx.array:
        """The m of k drafts of all rows [k, slots, 1, H]; the drafts are any tokens."""
        m = [self.form.first({s: self.story.root(t, self.at[s]) for s, t in self.texts.items()})]
        for i in range(1, k):
            drafts = mx.array([[7 + i + t] for t in range(len(self.at))])
            m.append(self.form.following(drafts, m[-1], i))
        self.form.drop()
        return mx.stack(m)

    def expected(self, slot: int, k: int) -> mx.array:
        """[k, 1, H]: the same from a head that is alone and has never drafted."""
        head = self.story.alone(self.texts[slot], self.at[slot])
        m = [head.first({0: self.story.root(self.texts[slot], self.at[slot])})]
        for i in range(1, k):
            m.append(head.following(mx.array([[7 + i + slot]]), m[-1], i))
        return mx.stack(m)[:, 0]

    def check_rows(self, slot: int) -> None:
        """What the store is given, and what a row that leaves takes along."""
        alone = self.story.alone(self.texts[slot], self.at[slot])
        taken = HeadCache(self.story.model.runner())
        self.form.take(slot, taken)
        rows, hidden = self.form.row(Seat(slot), (5,))
        for head in (alone, taken):
            head.catch_up()
        rows.catch_up()
        n = self.at[slot]
        want = alone.members(())[0].rows(0, n) | alone.members(())[1].arrays()
        for got in (rows.rows(0, n) | hidden.arrays(), taken.members(())[0].rows(0, n) | taken.members(())[1].arrays()):
            assert got.keys() == want.keys()
            assert all(apart(got[name], want[name]) <= tolerance() for name in want)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_rows_draft_together_what_they_would_alone(story, seed, joint):
    rng = random.Random(seed)
    company = Company(story, 3, joint)
    company.join(0, 0, 4)
    company.join(2, 1, 9)
    while max(company.at) < LENGTH - 12:
        move = rng.choice(["cycle"] * 6 + ["plain", "void", "look", "come", "go", "move"])
        free = [s for s in range(len(company.at)) if s not in company.texts]
        match move:
            case "cycle":
                k = rng.randrange(1, 6)
                drafts = company.draft(k)
                for slot in company.texts:
                    assert apart(drafts[:, slot], company.expected(slot, k)) <= tolerance()
                company.step({s: rng.randrange(1, k + 2) for s in company.texts}, k + 1)
            case "plain":
                company.step(dict.fromkeys(company.texts, 1), 1)
            case "void":
                company.draft(3)
            case "look":
                company.check_rows(rng.choice(list(company.texts)))
            case "come" if free:
                company.join(rng.choice(free), rng.randrange(TEXTS), rng.randrange(1, 20))
            case "go" if len(company.texts) > 1:
                company.leave(rng.choice(list(company.texts)))
            case "move":
                slots = rng.randrange(len(company.texts), 5)
                places = rng.sample(range(slots), len(company.texts))
                company.resize(slots, dict(zip(company.texts, places, strict=True)))
    for slot in list(company.texts):
        company.check_rows(slot)


def test_rows_that_draft_at_every_edge_are_one_forward_a_draft(story):
    """However many tokens each of them kept; and little is kept of what was."""
    company = Company(story, 4, True)
    for slot in range(4):
        company.join(slot, slot, 3 + slot)
    company.draft(1)
    calls = []
    run = company.form.rows.run
    company.form.rows.run = lambda *a, **b: calls.append(a[1].shape) or run(*a, **b)  # type: ignore[method-assign]
    alone = []
    for head in company.form.heads:
        assert head is not None
        head.run = _counted(head.run, alone)
    for i in range(12):
        company.step({s: 1 + (s + i) % 4 for s in range(4)}, 4)
        company.draft(3)
    assert len(calls) == len(alone) == 36
    assert {shape[0] for shape in calls} == {4}
    assert len(company.form._steps) <= 2 and all(len(h.hidden) <= 1 for h in company.form.heads if h is not None)


def _counted(run, calls):
    def counted(*args):
        calls.append(args[0].shape)
        return run(*args)

    return counted


def test_a_state_inside_the_kept_run_is_still_held(story):
    company = Company(story, 2, True)
    company.join(0, 0, 10)
    company.join(1, 1, 5)
    for _ in range(2):
        at = list(company.at)
        company.draft(4)
        company.step({0: 4, 1: 2}, 5)
        members = company.form.row(Seat(0), (5,))
        for position in range(at[0] + 1, at[0] + 5):
            hidden = members[1].state_at(position, None)["hidden"]  # type: ignore[arg-type]
            assert mx.array_equal(hidden, story.hidden[:1, position - 1 : position]).item()


def test_rows_that_are_shown_many_steps_hold_few_arrays(story):
    company = Company(story, 2, True)
    company.join(0, 0, 10)
    for _ in range(3 * MOST):
        company.at[0] = 10  # the text goes round
        company.form.hold()
        company.step({0: 1}, 1)
        assert len(company.form.live()) < 2 * MOST + 80


@pytest.mark.parametrize("width", [1, 5])
def test_steps_that_nobody_asks_the_heads_about_do_not_pile_up(story, width):
    """Cycles whose drafts come from elsewhere, with no plain step between them."""
    company = Company(story, 2, True)
    company.join(0, 0, 10)
    for _ in range(6 * MOST // width):
        company.at[0] = 10
        company.step({0: 1}, width)
        assert len(company.form.live()) < 2 * MOST // width + 80
    company.leave(0)
    company.join(1, 1, 2)
    for _ in range(MOST + 1):
        company.step({1: 1}, width)
    company.check_rows(1)


def test_a_deaf_head_only_counts(story):
    """It comes and goes with its row, and the others in the batch are shown what they are shown without it."""
    company = Company(story, 2, True)
    company.join(1, 1, 5)
    deaf = story.alone(0, 10)
    deaf.deafen()
    company.form.join(0, deaf, 10)
    company.at[0], company.texts[0] = 10, 0
    for i in range(MOST + 3):
        company.at[0], company.at[1] = 10 + i % 20, 5 + i % 20
        assert not company.form.can_draft([0, 1])
        company.step({0: 1, 1: 1}, 1)
    taken = HeadCache(story.model.runner())
    company.form.take(0, taken)
    assert taken.deaf and taken.seen == company.at[0] and not taken.hidden and not taken.can_draft([0])
    company.leave(1)
    for _ in range(3):
        company.step({0: 1}, 1)
        assert not company.form._steps and not company.form.live()[2:]


def test_the_head_of_a_free_slot_disturbs_nobody(story):
    """Free slots are computed too, whatever is in them."""
    one, other = Company(story, 2, True), Company(story, 2, True)
    other.join(1, 1, 60)
    other.leave(1)
    for company in (one, other):
        company.join(0, 0, 10)
        company.draft(2)
        company.step({0: 2}, 3)
    assert np.array_equal(np.array(one.draft(3)[:, 0]), np.array(other.draft(3)[:, 0]))


def test_compiled_forwards_are_the_plain_ones(tmp_path):
    """Of batches that come and go, traced once for a shape; rows and outputs within the order of sums."""
    story, traced = Story(tmp_path / "model"), TracedHeads()
    run, made = story.model.runner(), []
    traced.rare = 1  # the first of these two is plain
    for compiled in (None, traced, traced, traced):
        rows = HeadRowsOfAll(story.spec, 2, 64)
        rows.traced = compiled
        rows.made[:] = [3, 0]
        m = rows.run(run, story.tokens[:2, :1].astype(mx.int32), story.hidden[:2, :1])
        made.append([m, *rows.arrays()])
    assert traced.traces == 1
    for other in made[1:]:
        assert all(apart(a, b) <= 1e-5 for a, b in zip(other, made[0], strict=True))
