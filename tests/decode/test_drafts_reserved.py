"""With drafts too, what is reserved is what is allocated: rows for a whole cycle are there before it is made."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.layout import probe
from mlxkv.cache.ring import with_rings
from mlxkv.cache.state import SequenceState
from mlxkv.decode import needs, seats
from mlxkv.decode.loop import Loop
from mlxkv.decode.memory import cycle_bytes, live_bytes
from mlxkv.decode.solo import MemoryFull
from mlxkv.models.spans import install
from tests import architectures, tiny
from tests.decode.many import Alone, Crowd, Planned, ask, changed, drive, load, schedule, settled, wrong_with
from tests.decode.scripted import Scripted, drafted_by, pattern
from tests.decode.stories import Stories
from tests.decode.test_many_reserved import Looks, allocated


class CycleLooks(Looks):
    """Each sequence that has caches, and each slot of a batch, is charged for its cycles too."""

    @contextlib.contextmanager
    def at_each_turn(self):
        """Looks after each turn of engines inside: who asks from another thread may come too late."""
        real = Loop.turn

        def turn(loop):
            real(loop)
            self.look(loop)

        with mock.patch.object(Loop, "turn", turn):
            yield

    def look(self, loop):
        status, found = loop.status(), allocated(loop)
        self.looks += 1
        self.most_rows = max(self.most_rows, found.rows)
        self.together = max([self.together, *found.batches])
        run = [group.executor for group in loop.groups]
        owners = sum(each.slots if each.batch is not None or each.state.position else 0 for each in run)
        owners += sum(prefill.state.position > 0 for prefill in loop.prefills.values())
        nbytes = found.nbytes + owners * loop.memory.cycle_bytes
        if status.reserved_rows != found.rows:
            self.wrong.append(f"{status.reserved_rows} rows reserved, {found.rows} there")
        if status.reserved_bytes != nbytes if self.exact else status.reserved_bytes < found.nbytes:
            self.wrong.append(f"{status.reserved_bytes} bytes reserved, {nbytes} there")
        for group in loop.groups:
            if group.batch is not None and max(group.positions().values(), default=0) > group.batch.capacity:
                self.wrong.append("a row stands beyond its columns")
        loop.pool.check_integrity()


class Bounded(Scripted):
    """No row may be asked to go past ``context`` tokens."""

    context = 10**9

    def propose(self, round, k):
        longest = max(len(row.sequence.tokens) for row in round.rows.values())
        assert longest + k <= self.context, f"{k} drafts after {longest} tokens"
        return super().propose(round, k)


def measure(folder, asked, how, *, plan=None, exact=True, store=None, context=10**9, **options):
    """``asked`` beside a drafter that is right as ``how`` says, which changes no answer; what was looked at."""
    alone, drafter = Alone(folder), Bounded(pattern(how, random.Random(7)), architectures.VOCAB)
    drafter.context = context
    answers = [alone(request) for request in asked]
    alone.close()
    drafter.learn([*(request.tokens or []), *answer.token_ids] for request, answer in zip(asked, answers, strict=True))
    plan = plan or [Planned(request) for request in asked]
    looks = CycleLooks(None, exact)
    with changed(drafted_by(drafter)), looks.at_each_turn(), load(folder, store, draft="ngram", **options) as engine:
        outcomes = drive(engine, plan)
        assert not settled(engine)
    step = 1 + options["draft_depth"]
    for planned, outcome, answer in zip(plan, outcomes, answers, strict=True):
        assert wrong_with(planned, outcome, answer, 2e-6, step) == []
    assert not looks.wrong, "\n".join(looks.wrong[:5])
    assert len(drafter.kept) >= 3
    return looks


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3_text"])
def test_reserved_is_allocated(tiny_model, tmp_path, arch):
    rng, alone = random.Random(f"{arch} 3"), Alone(tiny_model(arch))
    asked = Stories(rng, alone).take(4)
    alone.close()
    plan = schedule(rng, asked, cancelled=0.2)
    exact = arch == "qwen3_5"  # a window's buffer grows until it is full
    looks = measure(tiny_model(arch), asked, "random", plan=plan, exact=exact, store=tmp_path, draft_depth=3)
    assert looks.looks > 12 and looks.most_rows and looks.together >= 2


def test_answers_that_outgrow_their_room(tiny_model, monkeypatch):
    """Cycles go across the end of what was there, alone and together."""
    for module in (seats, needs):
        monkeypatch.setattr(module, "OPEN_END", 16)
    alone = measure(tiny_model("llama"), [ask(tiny.ids(230), 60)], "random", draft_depth=8)
    assert alone.most_rows == 512
    asked = [ask(tiny.ids(220 + 3 * n, seed=n), 60) for n in range(2)]
    looks = measure(tiny_model("llama"), asked, "random", draft_depth=8)
    assert looks.together == 2 and looks.most_rows == 2 * 512


@pytest.mark.parametrize("n", [1, 2])
def test_no_draft_goes_past_the_context(tmp_path, n):
    """Also beside a row that has far to go."""
    folder = tiny.make("llama", tmp_path / "model", max_position_embeddings=250)
    asked = [ask(tiny.ids(226), 100), ask(tiny.ids(100, seed=1), 60)][:n]
    looks = measure(folder, asked, "none", context=250, draft_depth=8)
    assert looks.most_rows == 256 * n and looks.together == (0 if n == 1 else 2), looks.together


def test_drafts_never_take_the_room_of_a_token(tiny_model, monkeypatch):
    """Who has no room for more goes on to the last row that there is, by narrower cycles."""
    for module in (seats, needs):
        monkeypatch.setattr(module, "OPEN_END", 16)
    drafter = Scripted(pattern("all", random.Random(1)), architectures.VOCAB)
    asked, alone = [ask(tiny.ids(200), 120), ask(tiny.ids(20, seed=1), 100)], Alone(tiny_model("llama"))
    answers = [alone(request) for request in asked]
    alone.close()
    drafter.learn([*(request.tokens or []), *answer.token_ids] for request, answer in zip(asked, answers, strict=True))
    with changed(drafted_by(drafter)), load(tiny_model("llama"), None, draft="ngram", draft_depth=5) as engine:
        crowd = Crowd(engine)
        for number, request in enumerate(asked):
            crowd.submit(number, request)
        crowd.until(lambda: all(crowd.reached(number, 3) for number in range(2)))

        def fill(loop):
            loop.memory.limit = loop.memory.weights + loop.memory.reserved

        engine.inspect(fill)
        outcomes = crowd.finish()
        error = outcomes[0].error
        assert isinstance(error, MemoryFull) and "257 tokens" in error.message
        assert outcomes[0].tokens == answers[0].token_ids[:57]
        assert wrong_with(Planned(asked[1]), outcomes[1], answers[1], 0.0, 6) == []
        assert not settled(engine)


def test_look_ahead_is_part_of_what_is_asked_for(tiny_model):
    """A prompt and an answer that fill their rows need more where a head or a model drafts; a look-up's drafts are
    among the tokens already."""
    rows = {}
    for name in ("off", "ngram", "mtp"):
        drafter = Scripted(pattern("all", random.Random(1)), architectures.VOCAB)
        drafter.name = name  # type: ignore[misc]
        change = changed(drafted_by(drafter)) if name != "off" else contextlib.nullcontext()
        draft = "off" if name == "off" else "ngram"
        with change, load(tiny_model("llama"), None, draft=draft, draft_depth=4) as engine:
            crowd = Crowd(engine)
            crowd.submit(0, ask(tiny.ids(200), 56))
            crowd.until(partial(crowd.reached, 0, 1))
            rows[name] = engine.status().reserved_rows
            crowd.finish()
    assert rows == {"off": 256, "ngram": 256, "mtp": 512}


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3_text", "falcon_h1", "lfm2", "llama", "deepseek_v4"])
def test_a_cycle_holds_no_more_than_is_charged(arch):
    """Arrays of the state before and after a forward over drafts, and of rings, by their own sizes."""
    model, _ = tiny.build(arch)
    spans, _ = install(model)
    spare = 4

    def make_cache():
        return with_rings(make_prompt_cache(model), spare)

    layout = probe(model, make_cache)
    state = SequenceState.new(make_cache())
    state.reserve(256)
    model(mx.array([tiny.ids(40)]), cache=state.caches)
    state.advance(40)
    mx.eval(state.live())
    before = {id(a): a for m in state.members or () if m.kind == "recurrent" for a in m.live()}
    state.expect(spare + 1)
    with spans.recording(spare + 1) as journal:
        logits = model(mx.array([tiny.ids(spare + 1, seed=2)]), cache=state.caches)
    state.advance(spare + 1)
    mx.eval(logits, state.live())
    held = {id(a): a for a in state.live()} | before
    most = live_bytes(layout, 256, 40) + cycle_bytes(layout, spare)
    assert sum(a.nbytes for a in held.values()) <= most
    state.commit(2, spare + 1, journal)
    mx.eval(state.live())
    assert sum(a.nbytes for a in state.live()) <= most
    assert (cycle_bytes(layout, spare) > 0) is (arch != "llama")
