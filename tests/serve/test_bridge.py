"""A ticket's events on the event loop: order, silence, errors, and leaving early."""

from __future__ import annotations

import asyncio

import pytest

from mlxkv.decode.request import CacheReport, Completion, Delta, Finished, Request, Timings, Usage
from mlxkv.decode.ticket import Ticket
from mlxkv.errors import EngineError
from mlxkv.serve.bridge import events

DONE = Finished(Completion("", "stop", [], Usage(1, 0, 0), CacheReport("none", "off", 0, 0), Timings(0, 0, 0, 0, 0, 0)))


def ticket():
    return Ticket(Request(prompt="x"))


def test_order_and_end():
    async def run():
        made = ticket()
        for event in (Delta("a", [1]), Delta("b", [2]), DONE):
            made.put(event)
        return [event async for event in events(made)]

    assert asyncio.run(run()) == [Delta("a", [1]), Delta("b", [2]), DONE]


def test_silence_is_filled_and_loses_nothing():
    async def run():
        made, seen = ticket(), []
        async for event in events(made, ping=0.02):
            seen.append(event)
            if seen.count(None) == 3 and len(seen) == 3:
                made.put(Delta("a", [1]))
                made.put(DONE)
        return seen

    assert asyncio.run(run()) == [None, None, None, Delta("a", [1]), DONE]


def test_an_error_comes_after_what_was_before_it():
    async def run():
        made, seen = ticket(), []
        made.put(Delta("a", [1]))
        made.fail(EngineError("broken"))
        with pytest.raises(EngineError, match="broken"):
            async for event in events(made):
                seen.append(event)
        return seen

    assert asyncio.run(run()) == [Delta("a", [1])]


def test_leaving_early_cancels():
    async def run():
        made = ticket()
        made.put(Delta("a", [1]))
        stream = events(made)
        async for _ in stream:
            break
        assert not made.cancelled
        await stream.aclose()
        made.put(DONE)
        return made.cancelled

    assert asyncio.run(run())
