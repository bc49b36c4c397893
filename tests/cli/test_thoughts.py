"""The thoughts of a model of this process, told apart for people at a terminal."""

from __future__ import annotations

import pytest

from mlxkv.cli.client import Apart
from mlxkv.cli.render import Thought
from mlxkv.decode.request import Delta, Finished, Started
from mlxkv.serve.pipeline import Pipeline
from tests.cli.test_render import completion
from tests.decode.test_preparing import wrapped


class Ticket:
    cancelled = False

    def __init__(self, *events):
        self._events = events

    def cancel(self):
        self.cancelled = True

    def __iter__(self):
        return iter(self._events)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("thinking", "text", "thought", "said"),
    [
        (True, "so\n</think>\n\nYes <b>.", "so", "Yes <b>."),
        (False, "<think>so</think>Yes", "so", "Yes"),
        (False, "Yes <thi", "", "Yes <thi"),
        (True, "never ends", "never ends", ""),
    ],
)
def test_thoughts_are_events_of_their_own(size, thinking, text, thought, said):
    pieces = [Delta(text[i : i + size], []) for i in range(0, len(text), size)]
    end = Finished(completion(text=text))
    ticket = Ticket(Started(5, 0), *pieces, end)
    apart = Apart(ticket, Pipeline(wrapped(thinks=True), thinking=thinking))
    first, *came, last = apart
    assert first == Started(5, 0) and last is end
    assert "".join(e.text for e in came if isinstance(e, Thought)).strip() == thought
    assert "".join(e.text for e in came if isinstance(e, Delta)).strip() == said
    apart.cancel()
    assert apart.cancelled and ticket.cancelled
