"""A remote connector below RAM and SSD: what it is asked, what is made of its answer, and of its lies."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from mlxkv.cache import exchange
from mlxkv.cache.connectors import ConnectorError, Connectors, Delivery, Remote
from mlxkv.cache.exchange import RemoteTier
from mlxkv.cache.hits import NOTHING, Offer
from mlxkv.cache.record import Body
from mlxkv.cache.state import SequenceState
from tests import tiny
from tests.cache.peer import PATIENCE, Peer
from tests.cache.synthetic import BLOCK, MODELS, ask, verify

LENGTH = 6 * BLOCK + 3
TOKENS = tiny.ids(LENGTH, 5)
LAST = LENGTH - 1
#: rows and a state: where they differ, hits diverge
HYBRID = "quantised"


def stored(model, folder, tokens=TOKENS, ends=(BLOCK + 1, 3 * BLOCK)):
    """A folder that has the prompt, closed."""
    store = model.open(folder)
    ask(model, store, tokens, ends=ends, messages=True)
    store.close()
    return folder


def opened(model, folder, *remotes: Remote, seconds: float = PATIENCE, **options):
    store = model.open(folder, **options)
    store.remote = RemoteTier(remotes[0] if len(remotes) == 1 else Connectors(remotes), seconds=seconds)
    return store


def tier(store) -> RemoteTier:
    assert store.remote is not None
    return store.remote


def without_states(model, folder, beyond: int):
    """Its states after ``beyond`` tokens are gone, the rows are there."""
    store = model.open(folder)
    for key, kind in store.index.names():
        if kind == "state" and store.index.entry(key).end > beyond:
            store.folder.remove(key, kind)
            with store.index.transaction():
                store.index.drop_record(key, kind)
    store.close()


@pytest.mark.parametrize("ram", [0, 1 << 24])
@pytest.mark.parametrize("name", MODELS)
def test_what_another_stored_is_resumed_and_then_our_own(tmp_path, name, ram):
    model = MODELS[name]
    peer = Peer(stored(model, tmp_path / "theirs"))
    store = opened(model, tmp_path / "ours", peer, ram_budget=ram)
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.source, lookup.reason) == (LAST, "object", None)
    assert [(q.asked, q.common, q.limit) for q in peer.told] == [(0, 0, LAST)]
    assert peer.ended == [1]
    assert (tier(store).counters.served, tier(store).counters.broken) == (1, 0)
    assert store.writer.flush(PATIENCE)
    again = ask(model, store, TOKENS, keep=False)
    assert (again.tokens, again.source) == (LAST, "ram" if ram else "ssd")
    assert len(peer.told) == 1, "what is here is not asked for"
    store.close()
    assert peer.closed
    verify(tmp_path / "ours", alone := model.open(tmp_path / "ours"))
    assert ask(model, alone, TOKENS, keep=False).source == "ssd"
    alone.close()


@pytest.mark.parametrize("capable", [True, False])
def test_only_who_restores_states_is_asked_from_where_rows_end(tmp_path, capable):
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"), capable)
    stored(model, tmp_path / "ours", TOKENS[: 5 * BLOCK + 1])
    without_states(model, tmp_path / "ours", 3 * BLOCK)
    store = opened(model, tmp_path / "ours", peer)
    plan = store.lookup(TOKENS)
    assert (plan.position, plan.reach) == (3 * BLOCK, 5 * BLOCK + 1), "rows reach further than states"
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.source) == (LAST, "object")
    (question,) = peer.told
    assert (question.asked, question.common) == (5 * BLOCK if capable else 3 * BLOCK, 3 * BLOCK)
    assert (6 * BLOCK, LAST, "state") in peer.brought, "the state of the new end"
    assert min(start for start, _, kind in peer.brought if kind == "rows") == question.asked
    store.close()


@pytest.mark.parametrize(
    ("end", "brought"),
    [
        (3 * BLOCK, {(2 * BLOCK, 3 * BLOCK, "state")}),
        (3 * BLOCK + 1, {(3 * BLOCK, 3 * BLOCK + 1, "state"), (3 * BLOCK, 3 * BLOCK + 1, "rows")}),
    ],
    ids=["of a full block", "of a leaf"],
)
def test_a_state_that_is_lacking_is_brought_where_rows_are(tmp_path, end, brought):
    """All rows are here; what is asked for is the state."""
    model = MODELS[HYBRID]
    other = (TOKENS[end] + 1) % tiny.VOCAB
    stored(model, tmp_path / "theirs", [*TOKENS[:end], other], ends=[])
    stored(model, tmp_path / "ours")
    without_states(model, tmp_path / "ours", BLOCK + 1)
    peer = Peer(tmp_path / "theirs")
    store = opened(model, tmp_path / "ours", peer)
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.source, lookup.reason) == (end, "object", "no_state")
    assert peer.brought == brought
    assert (peer.told[0].asked, peer.told[0].common) == (6 * BLOCK, BLOCK + 1)
    store.close()


def test_who_has_nothing_leaves_the_place_that_all_agree_on(tmp_path):
    model = MODELS[HYBRID]
    stored(model, tmp_path / "ours")
    without_states(model, tmp_path / "ours", 3 * BLOCK)
    peer = Peer(stored(model, tmp_path / "theirs", tiny.ids(9, 8)))
    store = opened(model, tmp_path / "ours", peer)
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.source, lookup.reason) == (3 * BLOCK, "ssd", "no_state")
    assert len(peer.told) == 1, "and is not asked again"
    assert (tier(store).counters.broken, tier(store).counters.faults) == (0, 0)
    store.close()


# what it says and does not keep


def without(kind: str):
    """Delivers all but the records of a kind."""

    def spoil(delivery: Delivery) -> Delivery:
        left = [replace(d, bodies={k: b for k, b in d.bodies.items() if k != kind}) for d in delivery.drafts]
        return Delivery([d for d in left if d.bodies])

    return spoil


def flipped(delivery: Delivery) -> Delivery:
    """A bit of every record is another, under the old checksums."""
    for draft in delivery.drafts:
        for kind, body in draft.bodies.items():
            arrays = {name: (dtype, np.array(array)) for name, (dtype, array) in body.arrays.items()}
            for _, array in arrays.values():
                array.reshape(-1).view(np.uint8)[:1] ^= 1
            draft.bodies[kind] = Body(arrays, body.sums)
    return delivery


def of_others(delivery: Delivery) -> Delivery:
    """Records that say they are of other tokens."""
    for draft in delivery.drafts:
        draft.meta = replace(draft.meta, tokens=tuple(t + 1 for t in draft.meta.tokens))
    return delivery


def failed(delivery: Delivery) -> Delivery:
    return Delivery([], "evicted", "removed meanwhile")


def raising(error: Exception):
    def spoil(delivery: Delivery) -> Delivery:
        raise error

    return spoil


LIES = {
    "no states": (without("state"), "no_state", True),
    "no rows": (without("rows"), "evicted", True),
    "nothing": (lambda delivery: Delivery(), "evicted", True),
    "a failure": (failed, "evicted", True),
    "wrong bytes": (flipped, "corrupt", False),
    "other tokens": (of_others, "corrupt", True),
    "no connection": (raising(ConnectorError("refused")), "io_error", True),
    "a wrong key": (raising(ConnectorError("it cannot be decrypted", "corrupt")), "corrupt", True),
    "a bug": (raising(KeyError("x")), "io_error", True),
}


@pytest.mark.parametrize(("lie", "held"), [*((lie, True) for lie in LIES), ("no rows", False), ("wrong bytes", False)])
def test_a_promise_that_is_not_kept(tmp_path, lie, held):
    """A miss with a reason, from what was here; nothing wrong is served, or kept."""
    spoil, reason, counted = LIES[lie]
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    peer.spoil = spoil
    if held:
        stored(model, tmp_path / "ours", TOKENS[: 5 * BLOCK + 1])
        without_states(model, tmp_path / "ours", 3 * BLOCK)
    store = opened(model, tmp_path / "ours", peer)
    lookup = ask(model, store, TOKENS, keep=False)  # the bits of what is restored are compared
    expected = 3 * BLOCK if held else 0
    assert (lookup.tokens, lookup.reason) == (expected, reason)
    assert lookup.position == expected and lookup.source == ("ssd" if held else "none")
    assert len(peer.told) == 1 and store.faults[reason]
    assert tier(store).counters.broken == counted
    assert store.writer.flush(PATIENCE)
    peer.spoil = lambda delivery: delivery
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.reason) == (LAST, None), "the next request asks again"
    assert store.writer.flush(PATIENCE)
    store.close()
    verify(tmp_path / "ours", alone := model.open(tmp_path / "ours"))
    alone.close()


@pytest.mark.parametrize("offer", [Offer(LENGTH), Offer(-1), Offer(stands=LENGTH)])
def test_an_offer_of_what_cannot_be(tmp_path, offer):
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    peer.answer = lambda _: offer
    store = opened(model, tmp_path / "ours", peer)
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.reason) == (0, "corrupt") and not peer.brought
    store.close()


def test_who_cannot_say_yet(tmp_path):
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    peer.answer = lambda _: None
    store = opened(model, tmp_path / "ours", peer)
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.reason) == (0, "pending")
    store.close()


# who does not answer


@pytest.fixture
def gate():
    made = threading.Event()
    yield made
    made.set()


def fresh(model):
    state = SequenceState.new(model.make_cache())
    state.reserve(LENGTH + 5)
    return state


def begin(model, store):
    return store.begin(store.lookup(TOKENS), TOKENS, lambda: fresh(model), LENGTH + 5)


def test_who_does_not_answer_is_not_waited_for(tmp_path, monkeypatch, gate):
    """The request is served cold when its time is over; a place that answers nobody is not asked for ever."""
    monkeypatch.setattr(exchange, "GRACE", 0.05)
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    peer.gate = gate
    store = opened(model, tmp_path / "ours", peer, seconds=0.1)
    for i in range(exchange.THREADS + 2):
        under = begin(model, store)
        until = time.monotonic() + PATIENCE
        while not under.advance():
            assert time.monotonic() < until
            under.wait(0.01)
        _, lookup, _ = under.finish()
        assert (lookup.tokens, lookup.reason) == (0, "io_error")
        assert len(peer.told) == min(i + 1, exchange.THREADS), "all threads wait: nobody else is asked"
    assert not peer.ended
    gate.set()
    assert tier(store).readers.wait(PATIENCE)
    peer.gate = None
    assert ask(model, store, TOKENS, keep=False).tokens == LAST
    assert sorted(peer.ended) == [1, 2, 3, 4, 5]
    assert not store.ram.pinned or store.writer.flush(PATIENCE)
    store.close()


def test_waiting_for_it_ends_in_time(tmp_path, monkeypatch, gate):
    monkeypatch.setattr(exchange, "GRACE", 0.05)
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    peer.gate = gate
    store = opened(model, tmp_path / "ours", peer, seconds=0.1)
    assert ask(model, store, TOKENS, keep=False).reason == "io_error"
    gate.set()
    store.close()


def test_a_request_that_is_cancelled_meanwhile(tmp_path, gate):
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    peer.gate = gate
    store = opened(model, tmp_path / "ours", peer)
    under = begin(model, store)
    until = time.monotonic() + PATIENCE
    while not peer.told and time.monotonic() < until:
        assert not under.advance()
    under.cancel()
    assert peer.told[0].stopped() and not store.restores.under_way
    gate.set()
    assert tier(store).readers.wait(PATIENCE)
    store.close()
    assert peer.ended == [1]


def test_a_store_that_writes_nothing_serves_from_it(tmp_path):
    """What was brought is held for the request, and no longer."""
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    store = opened(model, tmp_path / "ours", peer, disk_floor=1 << 60)
    store.writer._stop("the disk is full")
    for _ in range(2):
        lookup = ask(model, store, TOKENS, keep=False)
        assert (lookup.tokens, lookup.source) == (LAST, "object")
        assert store.ram.nbytes == 0
    store.close()


# several


def test_a_group_asks_on_until_somebody_has_it(tmp_path):
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    empty, down = Peer(stored(model, tmp_path / "other", tiny.ids(9, 8))), Peer(tmp_path / "theirs")
    down.answer = lambda _: (_ for _ in ()).throw(ConnectorError("refused"))
    store = opened(model, tmp_path / "ours", empty, down, peer)
    lookup = ask(model, store, TOKENS, keep=False)
    assert (lookup.tokens, lookup.source, lookup.reason) == (LAST, "object", None)
    assert [len(p.told) for p in (empty, down, peer)] == [1, 1, 1]
    assert empty.ended == down.ended == peer.ended == [1]
    store.close()
    assert empty.closed and down.closed and peer.closed


class AnyOf(Connectors):
    """A mutant: a group can what any of its members can."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return any(m.supports_divergent_local_hybrid_hits for m in self.members)


def test_of_a_group_one_that_cannot_is_enough(tmp_path):
    """One member cannot restore states: none is asked from where rows end."""
    one_that_cannot(tmp_path, Connectors)


def test_any_of_a_group_is_not_enough(tmp_path):
    with pytest.raises(AssertionError):
        one_that_cannot(tmp_path, AnyOf)


def one_that_cannot(tmp_path, kind: type[Connectors]) -> None:
    model = MODELS[HYBRID]
    stored(model, tmp_path / "theirs")
    stored(model, tmp_path / "ours", TOKENS[: 5 * BLOCK + 1])
    without_states(model, tmp_path / "ours", 3 * BLOCK)
    first, second = Peer(tmp_path / "theirs", capable=True), Peer(tmp_path / "theirs", capable=False)
    first.answer = lambda _: NOTHING
    second.spoil = without("state")  # it restores none, as it says
    second.answer = lambda offer: offer if second.told[-1].asked > 3 * BLOCK else NOTHING
    store = opened(model, tmp_path / "ours", kind((first, second)))
    try:
        assert ask(model, store, TOKENS, keep=False).reason == "no_state"
        assert [q.asked for q in (*first.told, *second.told)] == [3 * BLOCK, 3 * BLOCK]
        assert not second.brought, "nothing is loaded that nobody can stand on"
    finally:
        store.close()


def test_a_group_whose_members_fail_says_why(tmp_path):
    model = MODELS[HYBRID]
    peer = Peer(stored(model, tmp_path / "theirs"))
    peer.answer = lambda _: (_ for _ in ()).throw(ConnectorError("refused"))
    pending = Peer(tmp_path / "theirs")
    pending.answer = lambda _: None
    store = opened(model, tmp_path / "ours", peer, pending)
    assert ask(model, store, TOKENS, keep=False).reason == "io_error"
    peer.answer = lambda _: NOTHING
    assert ask(model, store, TOKENS, keep=False).reason == "pending"
    store.close()
