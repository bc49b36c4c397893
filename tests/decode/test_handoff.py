"""The table of the handoff: every state with every event, what is reached, and that nobody is ever stuck."""

from __future__ import annotations

import logging
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxkv.decode.handoff import TABLE, Event, Handoff, HandoffError, Picture, State

#: a way to each state, as a loop may go it
WAYS = {
    State.IDLE: [],
    State.SPECULATING: [Event.STARTED],
    State.DRAINING: [Event.STARTED, Event.ARRIVED],
    State.SHARING: [Event.STARTED, Event.ARRIVED, Event.CHUNKED],
    State.HANDOFF: [Event.STARTED, Event.ARRIVED, Event.CHUNKED, Event.THROUGH, Event.DRAINED],
    State.BATCHED: [Event.STARTED, Event.ARRIVED, Event.CHUNKED, Event.THROUGH, Event.DRAINED, Event.JOINED],
    State.RECOVERY: [Event.STARTED, Event.FAILED],
}
OUT = (Event.CANCELLED, Event.FAILED, Event.SHUT_DOWN)
#: what the loop may see at a step edge
pictures = st.builds(
    Picture,
    streams=st.integers(0, 2),
    rows=st.integers(0, 4),
    newcomers=st.integers(0, 6),
    reading=st.integers(0, 3),
    through=st.integers(0, 2),
)


def at(state: State) -> Handoff:
    handoff = Handoff()
    for event in WAYS[state]:
        handoff.on(event)
    assert handoff.state is state
    return handoff


def test_a_stream_lets_a_newcomer_in_and_is_alone_again():
    handoff = Handoff()
    seen = []
    for event in (*WAYS[State.BATCHED], Event.ALONE, Event.OVER):
        handoff.on(event)
        seen.append((str(handoff.state), handoff.may_cycle))
    assert seen == [
        ("speculating", True),
        ("draining", False),  # before the first chunk
        ("sharing", True),
        ("draining", False),  # before the first joint step
        ("handoff", False),
        ("batched", False),
        ("speculating", True),
        ("idle", False),
    ]
    assert handoff.changes()["draining > handoff"] == 1 and sum(handoff.changes().values()) == len(seen)


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_state_with_every_event(state, event):
    """What the table has not is refused, and changes nothing; what stays as it is counts for nothing."""
    handoff = at(state)
    before = handoff.counts.total()
    if (state, event) not in TABLE:
        with pytest.raises(HandoffError, match=f"{state}.*{event.name}"):
            handoff.on(event)
        assert handoff.state is state and handoff.counts.total() == before
        return
    handoff.on(event)
    assert handoff.state is TABLE[state, event]
    assert handoff.counts.total() == before + (handoff.state is not state)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", OUT)
def test_from_every_state_to_nobody(state, event):
    """Cancelled, failed or sent away: no cycle until what is left was looked at; and if nobody is, it is idle."""
    handoff = at(state)
    handoff.on(event)
    assert handoff.state is (State.IDLE if state is State.IDLE else State.RECOVERY) and not handoff.may_cycle
    for again in OUT:
        handoff.on(again)
    handoff.see(Picture())
    assert handoff.state is State.IDLE


def test_every_state_is_reached_and_left():
    """By the table alone, and not only by way of a failure."""
    steps = {(a, b) for (a, event), b in TABLE.items() if event not in OUT and a is not b}
    reached = {State.IDLE}
    while more := {b for a, b in steps if a in reached} - reached:
        reached |= more
    assert reached == set(State) - {State.RECOVERY}
    for state in State:
        back = {state}
        while more := {b for a, b in steps if a in back} - back:
            back |= more
        assert State.IDLE in back and State.SPECULATING in back


def test_no_cycle_before_a_newcomer_has_had_its_chunk_or_its_step():
    """Whatever was, once somebody waits the next step is no cycle."""
    for state in set(State) - {State.HANDOFF}:
        for waits in (
            Picture(1, 1, newcomers=1),
            Picture(1, 1, 3, 2),
            Picture(1, 1, through=1),
            Picture(2, 3, 1, 1, 1),
        ):
            handoff = at(state)
            handoff.see(waits)
            assert handoff.state is State.DRAINING and not handoff.may_cycle
    assert not at(State.HANDOFF).may_cycle and not at(State.RECOVERY).may_cycle and not at(State.BATCHED).may_cycle


@given(st.lists(st.one_of(pictures, st.sampled_from(OUT)), max_size=40))
def test_whatever_is_seen_can_happen(seen):
    """Any picture may follow any other, with failures anywhere between; and it is followed at once."""
    handoff = Handoff()
    for what in seen:
        if isinstance(what, Event):
            handoff.on(what)
            continue
        handoff.see(what)
        waits = what.newcomers or what.through
        assert handoff.may_cycle == (what.streams > 0 and not waits)
        assert (handoff.state is State.DRAINING) == bool(what.streams and waits)
        assert handoff.state is not State.IDLE or not what.streams
        if handoff.state is State.DRAINING and what.through:
            handoff.on(Event.DRAINED)
            handoff.on(Event.JOINED)


def test_failures_are_told_and_the_rest_only_to_who_wants_to_know(caplog):
    with caplog.at_level(logging.DEBUG, "mlxkv.engine"):
        handoff = at(State.DRAINING)
        handoff.on(Event.ARRIVED)
        handoff.on(Event.FAILED)
    lines = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert [level for level, _ in lines] == [logging.DEBUG, logging.DEBUG, logging.INFO]
    assert "draining" in lines[-1][1] and "failed" in lines[-1][1] and "recovery" in lines[-1][1]
