"""Late requests at every point of a cycle, alone and in bursts: by counting from the queueing, nobody waits for more
than a forward; every stream is what it is alone; and whatever happens in whatever state, nothing is left."""

from __future__ import annotations

import random
from itertools import product

import pytest

from mlxkv.cache.restoring import Restoring
from mlxkv.decode import seats
from mlxkv.decode.handoff import State
from mlxkv.decode.loop import Loop
from mlxkv.decode.reading import Reading
from mlxkv.decode.seats import Seats
from mlxkv.decode.speculation import Speculation
from mlxkv.errors import EngineError
from tests import architectures, tiny
from tests.decode.kept import compare, kept
from tests.decode.late import POINTS, STREAM, Company, Due, Scene, engine, left_behind, scripted, waited, watched
from tests.decode.many import ask, load
from tests.decode.scripted import Scripted, pattern


@pytest.fixture(scope="module")
def drafter():
    return scripted(random.Random(1))


@pytest.fixture(scope="module")
def company(alone, drafter):
    return Company(random.Random(2), alone, drafter)


def test_at_every_point_of_a_cycle(model, alone, company, drafter):
    """Bursts of 1 to 6, each size at one or two points; the soak has several at each."""
    with engine(model, drafter) as made, watched(made) as house:
        for n, point in enumerate(POINTS):
            for count in {1 + n % 6, 6 - 2 * (n % 3)} if n % 4 == 0 else {1 + n % 6}:
                assert company.scene([(point, 1)] * count).play(house, alone) == [], (point, count)
                assert len(house.tickets) == 1 + count
        status = made.status()
        went = {"idle > speculating", "speculating > draining", "draining > sharing", "sharing > draining"}
        went |= {"draining > handoff", "handoff > batched", "batched > speculating", "speculating > idle"}
        assert went <= set(status.handoffs) and not any("recovery" in change for change in status.handoffs)
        assert status.drafted > status.accepted > status.cycles > 25


def test_one_after_the_other_beside_a_real_head(model, alone, company, tmp_path):
    """Its rows are stored with the prompts, and made from hidden states of cycles, of joint steps and of chunks."""
    asked = []
    with engine(model, None, tmp_path / "many", prefill_chunk=None) as made, watched(made) as house:
        for _ in range(2):
            scene = company.anywhere(4)
            scene.late = [(point, skip, r) for point, skip, r in scene.late if r not in asked]
            asked += [scene.stream, *(r for *_, r in scene.late)]
            house.begin(scene.stream, scene.numbers, scene.due(house))
            house.finish()
            for number, (*_, request) in zip(scene.numbers, scene.late, strict=True):
                assert waited(house.trace, number) is not None and house.seen[number].tokens == alone(request).token_ids
            assert house.seen[STREAM].tokens == alone(scene.stream).token_ids and not left_behind(house)
    with load(model, tmp_path / "one", prefill_chunk=None, draft="off") as plain:
        for request in asked:
            plain.submit(request).result()
    compared = compare(kept(tmp_path / "many"), kept(tmp_path / "one"))
    assert not compared.wrong and compared.both > 0.6 * compared.either > 5


def test_speculation_goes_on_when_the_company_has_left(model, alone, company, drafter):
    with engine(model, drafter) as made, watched(made) as house:
        scene = Scene(
            company.streams[0], [("before the commit", 0, company.late[1]), ("a token is said", 3, company.late[4])]
        )
        assert scene.play(house, alone) == []
        last = max(i for i, (kind, number) in enumerate(house.trace) if kind == "end" and number != STREAM)
        joined = min(i for i, (kind, number) in enumerate(house.trace) if kind == "joins" and number != STREAM)
        cycles = [i for i, (kind, _) in enumerate(house.trace) if kind == "cycle"]
        assert min(cycles) < joined < last < max(cycles)


def test_between_its_chunks_the_stream_speculates(model, alone, company, drafter):
    """A prompt of several chunks: cycles lie between them, and none before the first."""
    long = company.late[3]
    with engine(model, drafter) as made, watched(made) as house:
        assert Scene(company.streams[0], [("a turn begins", 2, long)]).play(house, alone) == []
        queued = house.trace.index(("queued", 1))
        chunks = [i for i, what in enumerate(house.trace) if what == ("chunk", 1)]
        cycles = [i for i, (kind, _) in enumerate(house.trace) if kind == "cycle"]
        assert len(chunks) >= 3 and not any(queued < i < chunks[0] for i in cycles)
        assert all(any(a < i < b for i in cycles) for a, b in zip(chunks, chunks[1:], strict=False))


def test_who_is_restored_or_waits_for_room_stops_nobody(model, alone, company, drafter, tmp_path, monkeypatch):
    stream, late = company.streams[0], company.late[0]
    with engine(model, drafter, tmp_path / "c") as made, watched(made) as house:
        made.submit(late).result()
        real, turns = Restoring.advance, []

        def slow(restoring):
            turns.append(1)
            return len(turns) > 8 and real(restoring)

        house.begin(stream, [1], [Due("after the step", lambda: monkeypatch.setattr(Restoring, "advance", slow)),
                                  Due("after the step", lambda: house.queue(1, late))])  # fmt: skip
        seen = house.finish()
        done = seen[1].completion
        assert done is not None and done.token_ids == alone(late).token_ids and done.usage.cached_tokens > 0
        assert seen[STREAM].tokens == alone(stream).token_ids
        queued, came = house.trace.index(("queued", 1)), house.trace.index(("joins", 1))
        assert sum(kind == "cycle" for kind, _ in house.trace[queued:came]) >= 4
        assert not left_behind(house)
    with engine(model, drafter, max_rows=1) as made, watched(made) as house:
        house.begin(stream, [1], [Due("after the step", lambda: house.queue(1, late))])
        seen = house.finish()
        meanwhile = house.trace[house.trace.index(("queued", 1)) : house.trace.index(("end", STREAM))]
        assert sum(kind == "cycle" for kind, _ in meanwhile) > 5 and ("chunk", 1) not in meanwhile
        assert [seen[n].tokens for n in (STREAM, 1)] == [alone(r).token_ids for r in (stream, late)]
        assert made.status().handoffs == {"idle > speculating": 2, "speculating > idle": 2} and not left_behind(house)


def test_who_has_had_no_chunk_goes_first(model, alone, company, drafter):
    """Whoever has fewer tokens to go: a burst that comes while another prompt is read does not wait for that."""
    reading, *burst = company.late[0], company.late[3], company.late[5]
    with engine(model, drafter) as made, watched(made) as house:
        late = [("a token is said", 0, reading), *(("after the commit", 1, each) for each in burst)]
        assert Scene(company.streams[0], late).play(house, alone) == []
        queued = house.trace.index(("queued", 3))
        chunks = [number for kind, number in house.trace[queued:] if kind == "chunk"]
        assert sorted(chunks[:2]) == [2, 3] and 1 in chunks[2:]


def test_however_fast_they_come_the_stream_goes_on(model, alone, company, drafter):
    """With each chunk another one is queued: after some of them the stream makes a step, which is no cycle."""
    with engine(model, drafter) as made, watched(made) as house:
        late = [("a turn begins", 1, company.late[3]), *(("a chunk is read", n, company.late[3]) for n in range(7))]
        assert Scene(company.streams[0], late).play(house, alone) == []
        assert len(house.tickets) == 9
        meanwhile = house.trace[house.trace.index(("queued", 1)) : house.trace.index(("chunk", 8))]
        assert ("forward", STREAM) in meanwhile and ("cycle", STREAM) not in meanwhile


def test_what_is_in_flight_is_said_before_a_chunk(model, alone, company, drafter, monkeypatch):
    """A stream whose drafts do not pay makes plain steps, and is drained all the same."""
    monkeypatch.setattr(Speculation, "next", lambda self, rows, most: 0)
    with engine(model, drafter) as made, watched(made) as house:
        scene = Scene(company.streams[0], [("a turn begins", 1, company.late[n]) for n in range(4)])
        assert scene.play(house, alone) == []
        for number in scene.numbers:
            between = waited(house.trace, number)
            assert between is not None and (between["token"], between["forward"]) == (1, 0)
        assert made.status().cycles == 0


def test_a_batch_that_is_made_longer_says_no_more_than_a_run(model, alone, company, monkeypatch):
    """Tokens in flight are read before its columns are copied; whoever comes just then waits for no cycle besides."""
    monkeypatch.setattr(seats, "OPEN_END", 16)
    # whether tokens are in flight at the batch's end depends on how long the prompt is
    assert any(_made_longer(model, alone, company.late[4], monkeypatch, n) for n in range(220, 224))


def _made_longer(model, alone, late, monkeypatch, n):
    """Whether a batch with tokens in flight was made longer, beside a stream whose prompt has ``n`` tokens."""

    class EveryOther(Scripted):
        turns = 0

        def propose(self, round, k):
            self.turns += 1
            return super().propose(round, k) if self.turns % 2 else None

    look_ahead, depth, came = Seats._look_ahead, 3, 0
    stream, beside = ask(tiny.ids(n, seed=1), 60), ask(tiny.ids(12, seed=2), 60)
    drafter = EveryOther(pattern("all", random.Random(1)), architectures.VOCAB)
    drafter.learn([*(r.tokens or []), *alone(r).token_ids] for r in (stream, beside, late))
    with engine(model, drafter) as made, watched(made) as house, monkeypatch.context() as patched:

        def looking(self, group):
            nonlocal came
            flew, capacity = group.flies, group.batch.capacity
            before = len(house.trace)
            look_ahead(self, group)
            if flew and group.batch.capacity > capacity and not came:
                came = 2  # as if it had been queued before anything was said
                house.queue(came, late)
                house.trace.insert(before, house.trace.pop())

        patched.setattr(Seats, "_look_ahead", looking)
        house.begin(stream, [1, 2], [Due("a token is said", lambda: house.queue(1, beside))])
        house.until(lambda: house.seen[STREAM].ended or came == 2)
        if not came:
            return False
        seen = house.finish()
        between = waited(house.trace, 2)
        assert between is not None and between["token"] <= depth + 1
        assert [seen[n].tokens for n in (STREAM, 1, 2)] == [alone(r).token_ids for r in (stream, beside, late)]
        assert not left_behind(house)
        return True


def test_chunks_between_two_tokens_share_one_gap(model, alone, company, monkeypatch):
    """Where nothing was proposed a step is submitted and nothing said: what is read then counts for the same gap."""

    class Silent(Scripted):
        def propose(self, round, k):
            return None

    chunk, seen = Reading.chunk, []

    def read(self, sequence, groups, among):
        if groups:
            seen.append((house.trace.count(("token", STREAM)), self._spent))
        chunk(self, sequence, groups, among)

    monkeypatch.setattr(Reading, "chunk", read)
    with engine(model, Silent(pattern("none", random.Random(1)), architectures.VOCAB)) as made, watched(made) as house:
        scene = Scene(company.streams[0], [("a turn begins", 2, company.late[3])])
        assert scene.play(house, alone) == []
    again = [spent for (said, _), (now, spent) in zip(seen, seen[1:], strict=False) if now == said]
    assert again and all(spent > 0 for spent in again)


#: where something happens: a point, or what the handoff has just come to
WHERE = {state: str(state) for state in State if state is not State.IDLE} | {
    State.SPECULATING: "before the verification"
}


def happens(house, what):
    if what == "fails":
        house.error = ValueError("it failed")
    elif what == "shut down":
        house.engine.close()
    else:
        leave = {"the stream leaves": (STREAM,), "newcomers leave": (1, 2), "all leave": (STREAM, 1, 2)}[what]
        for number in leave:
            if number in house.tickets:
                house.tickets[number].cancel()


def disturbed(house, alone, company, state, what):
    """A stream and two newcomers, one of which is read in several chunks; ``what`` happens in ``state``."""
    asked = [company.streams[1], company.late[3], company.late[2]]
    scene = Scene(asked[0], [("a token is said", 1, each) for each in asked[1:]])
    numbers, due = scene.numbers, scene.due(house)
    if state is State.SPECULATING:  # before anybody comes
        numbers, due = [], []
    elif state is State.RECOVERY:  # to come there, somebody leaves first
        due.append(Due(str(State.DRAINING), lambda: house.tickets[1].cancel()))
    due.append(Due(WHERE[state], lambda: happens(house, what)))
    house.begin(scene.stream, numbers, due)
    for number, got in house.finish().items():
        right = alone(asked[number]).token_ids
        assert got.ended and got.tokens == right[: len(got.tokens)]
        if got.error is not None:
            assert isinstance(got.error, EngineError) and (what in ("fails", "shut down") or not got.events)
        else:
            assert got.completion.finish_reason == "cancelled" or got.tokens == right
    assert all(each.done for each in due)
    assert left_behind(house) == []


WHATS = ("the stream leaves", "newcomers leave", "all leave", "fails")


def test_whatever_happens_in_whatever_state(model, alone, company, drafter):
    with engine(model, drafter) as made, watched(made) as house:
        for state, what in product(WHERE, WHATS):
            disturbed(house, alone, company, state, what)
            made.inspect(Loop.check_integrity)
        assert made.health().ok and made.status().handoffs["recovery > speculating"] > 0
        assert company.scene([("after the commit", 0)] * 3).play(house, alone) == []


@pytest.mark.parametrize("state", WHERE)
def test_shut_down_in_whatever_state(model, alone, company, drafter, state):
    with engine(model, drafter) as made, watched(made) as house:
        disturbed(house, alone, company, state, "shut down")
        made.close()
        assert left_behind(house) == [] and made.status().active == 0
        assert made.status().memory["caches"] == 0


@pytest.mark.parametrize("what", [*WHATS, "shut down"])
def test_nothing_is_left_of_who_is_being_restored(model, alone, company, drafter, tmp_path, monkeypatch, what):
    stream, late = company.streams[0], company.late[0]
    with engine(model, drafter, tmp_path) as made, watched(made) as house:
        made.submit(late).result()
        restores = made.inspect(lambda loop: loop.rt.store.restores)
        real, turns = Restoring.advance, []

        def slow(restoring):
            if restoring._tokens != late.tokens:  # the stream's own
                return real(restoring)
            turns.append(restores.under_way)
            return len(turns) > 8 and real(restoring)

        monkeypatch.setattr(Restoring, "advance", slow)
        monkeypatch.setattr("mlxkv.cache.restoring.AT_ONCE", -1)  # by other threads, however little it is
        due = [Due("a token is said", lambda: house.queue(1, late)),
               Due("before the verification", lambda: happens(house, what), 3)]  # fmt: skip
        house.begin(stream, [1], due)
        seen = house.finish()
        if what == "shut down":
            made.close()
        assert turns[:2] == [1, 1] and due[-1].done and all(got.ended for got in seen.values())
        for number, request in ((STREAM, stream), (1, late)):
            right, got = alone(request).token_ids, seen[number]
            assert got.tokens == right[: len(got.tokens)]
            if what == ("newcomers leave" if number == STREAM else "the stream leaves"):
                assert got.tokens == right
        assert restores.under_way == 0 and left_behind(house) == []


def test_without_a_drafter_nothing_is_handed_over(model, alone, company):
    with load(model, None, draft="off") as made, watched(made) as house:
        scene = company.scene([("after the step", 1)] * 3)
        house.begin(scene.stream, scene.numbers, scene.due(house))
        house.finish()
        status = made.status()
        assert (status.handoff, status.handoffs, status.cycles, status.drafted) == ("idle", {}, 0, 0)
