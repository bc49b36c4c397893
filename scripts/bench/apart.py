"""Engines in processes of their own, as their users have them. Several in one process share a heap, and each is as fast
as the others have left that."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

#: what is asked of an engine: f(engine, *what)
Ask = Callable[..., Any]


class Apart:
    """``Apart(opened, *how)``: the engine that ``opened(*how)`` gives back, for as long as the block lasts. Functions
    are named by their modules: they are called there."""

    def __init__(self, opened: Callable[..., Any], *how: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, opened, how), daemon=True)
        self._process.start()
        there.close()
        self._answer()

    def ask(self, ask: Ask, *what: Any) -> Any:
        self._here.send((ask, what))
        return self._answer()

    def _answer(self) -> Any:
        try:
            failed, answer = self._here.recv()
        except EOFError:
            raise RuntimeError("An engine's process has ended: see what it printed.") from None
        if failed:
            raise RuntimeError(f"In an engine's process: {answer}")
        return answer

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *exc: object) -> None:
        self._here.close()
        self._process.join()


def _serve(there: Connection, opened: Callable[..., Any], how: Sequence[Any]) -> None:
    try:
        with opened(*how) as engine:
            there.send((False, None))
            while True:
                ask, what = there.recv()
                there.send((False, ask(engine, *what)))
    except EOFError:  # nobody asks any more
        pass
    except Exception as e:
        there.send((True, f"{type(e).__name__}: {e}"))
        raise
