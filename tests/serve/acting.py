"""An engine that does what a test says: requests come, and the test gives their events."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from mlxkv.decode.engine import Health
from mlxkv.decode.options import EngineInfo
from mlxkv.decode.preparing import Prepared, prepare
from mlxkv.decode.request import CacheReport, Completion, Delta, Finished, Request, Started, Timings, Usage
from mlxkv.decode.status import Status
from mlxkv.decode.ticket import Ticket
from mlxkv.errors import QueueFull
from tests import tiny


def tokenizer() -> Any:
    """That of the tiny models."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(), eos_token="<|im_end|>")
    made.chat_template = tiny.CHAT_TEMPLATE
    return TokenizerWrapper(made)


class Acting:
    """Has the methods of an ``Engine`` that a server uses. ``reason``: why it cannot answer now. ``full``: how many
    tickets it takes."""

    def __init__(self, words: Any = None) -> None:
        """words: its tokenizer; None for that of the tiny models."""
        self.tokenizer = words or tokenizer()
        self.info = EngineInfo(
            "acting", Path("/models/acting"), 4096, "float32", "cpu", "exact", "none", 0.0, "", "a test", None
        )
        self.tickets: list[Ticket] = []
        self.reason: str | None = None
        self.full: int | None = None
        self._came = threading.Condition()

    # what a server uses

    def prepare(self, request: Request) -> Prepared:
        return prepare(request, self.tokenizer, {tiny.EOS}, len(self.tokenizer.get_vocab()), self.info.context_length)

    def submit(self, request: Request) -> Ticket:
        with self._came:
            if self.full is not None and len(self.tickets) >= self.full:
                raise QueueFull("Too many requests wait already.", "Try again later.")
            ticket = Ticket(request)
            self.tickets.append(ticket)
            self._came.notify_all()
            return ticket

    def health(self) -> Health:
        return Health(self.reason, sum(not t.cancelled for t in self.tickets), 0)

    def status(self) -> Status:
        return Status()

    def close(self) -> None:
        pass

    # what a test uses

    def ticket(self, i: int = 0, seconds: float = 10) -> Ticket:
        """The i-th request's ticket, once it came."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.tickets) > i, seconds), f"request {i} never came"
            return self.tickets[i]

    def begin(self, i: int = 0) -> Ticket:
        ticket = self.ticket(i)
        ticket.put(Started(5, 0))
        return ticket

    def say(self, ticket: Ticket, text: str) -> None:
        """A token for each character."""
        for char in text:
            ticket.put(Delta(char, list(self.tokenizer.encode(char, add_special_tokens=False))))

    def finish(self, ticket: Ticket, reason: Any = "stop", n: int = 3) -> None:
        ticket.put(
            Finished(
                Completion(
                    "", reason, [1] * n, Usage(5, n, 0), CacheReport("none", "off", 0, 0), Timings(0, 0, 0, 0, 0, 0)
                )
            )
        )

    def cancelled(self, i: int = 0, seconds: float = 5) -> bool:
        """Whether the i-th ticket is cancelled within ``seconds``; it then ends as a real one does."""
        ticket, until = self.ticket(i), time.monotonic() + seconds
        while not ticket.cancelled and time.monotonic() < until:
            time.sleep(0.005)
        if ticket.cancelled:
            self.finish(ticket, "cancelled")
        return ticket.cancelled
