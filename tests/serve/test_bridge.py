"""A ticket's items on the event loop: order, what came before anybody listened, and a loop that is gone."""

from __future__ import annotations

import asyncio
import threading

from mlxkv.decode.request import CacheReport, Completion, Delta, Finished, Request, Timings, Usage
from mlxkv.decode.ticket import Ticket
from mlxkv.errors import EngineError
from mlxkv.serve import bridge
from mlxkv.serve.bridge import Inbox

DONE = Finished(Completion("", "stop", [], Usage(1, 0, 0), CacheReport("none", "off", 0, 0), Timings(0, 0, 0, 0, 0, 0)))


def ticket():
    return Ticket(Request(prompt="x"))


def test_order_whatever_came_before():
    async def run():
        made, seen, over = ticket(), [], asyncio.Event()

        def take(key, item):
            seen.append((key, item))
            if item is None:
                over.set()

        made.put(Delta("a", [1]))
        Inbox(take).listen(7, made)

        def engine():
            for i in range(100):
                made.put(Delta(str(i), [i]))
            made.put(DONE)

        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.wait_for(over.wait(), 10)
        thread.join()
        return seen

    items = [Delta("a", [1]), *(Delta(str(i), [i]) for i in range(100)), DONE, None]
    assert asyncio.run(run()) == [(7, item) for item in items]


def test_an_error_comes_after_what_was_before_it():
    broken = EngineError("broken")

    async def run():
        made, seen = ticket(), []
        Inbox(lambda key, item: seen.append(item)).listen(0, made)
        made.put(Delta("a", [1]))
        made.fail(broken)
        while len(seen) < 3:
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(run()) == [Delta("a", [1]), broken, None]


def test_text_that_comes_fast_is_handed_over_together_and_the_end_does_not_wait(monkeypatch):
    monkeypatch.setattr(bridge, "FRAME", 60.0)

    async def run():
        made, seen = ticket(), []
        Inbox(lambda key, item: seen.append(item)).listen(0, made)
        for text in "abc":
            made.put(Delta(text, [1]))
            await asyncio.sleep(0.05)
        before = list(seen)
        made.put(DONE)
        while len(seen) < 5:
            await asyncio.sleep(0.01)
        return before, seen

    before, seen = asyncio.run(asyncio.wait_for(run(), 30))
    assert before == [Delta("a", [1])]
    assert seen == [*(Delta(text, [1]) for text in "abc"), DONE, None]


def test_text_that_comes_slowly_does_not_wait(monkeypatch):
    monkeypatch.setattr(bridge, "FRAME", 0.005)

    async def run():
        made, seen = ticket(), []
        Inbox(lambda key, item: seen.append(item)).listen(0, made)
        for i in range(5):
            made.put(Delta(str(i), [i]))
            while len(seen) <= i:
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)
        return seen

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [Delta(str(i), [i]) for i in range(5)]


def test_a_closed_loop_cancels():
    made = ticket()

    async def run():
        Inbox(lambda key, item: None).listen(0, made)

    asyncio.run(run())
    made.put(Delta("a", [1]))
    assert made.cancelled
