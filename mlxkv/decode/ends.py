"""How requests leave the engine's loop: answered, cancelled, or failed with what was done for them or for those beside
them. Whatever happens, each is told once, and nothing that was held for it stays."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..errors import EngineClosed, EngineError, MlxkvError, RequestCancelled
from .books import Books
from .group import Group
from .handoff import Event
from .options import Options
from .runtime import Runtime
from .sequence import Sequence

log = logging.getLogger("mlxkv.engine")


class Ends(Books):
    """``failed`` is told of errors that may be the device's; it gives back the error that requests are told."""

    def __init__(self, rt: Runtime, options: Options, failed: Callable[[BaseException], EngineError]) -> None:
        super().__init__(rt, options)
        self._options, self._failed = options, failed

    # of all

    def close(self) -> None:
        """Everybody leaves: who was admitted as cancelled, the others with an error."""
        self.handoff.on(Event.SHUT_DOWN)

        def closed() -> EngineClosed:  # each its own: whoever raises it adds to its traceback
            return EngineClosed("The engine was closed before this request was answered.")

        for ticket in self.tickets:
            ticket.fail(closed())
        self.tickets.clear()
        for sequence in list(self.waiting):
            self._fail(sequence, closed())
        for sequence in self.sequences:
            self._cancel(sequence)
        if self.active:  # what could not be taken out in order
            self.reset(closed())
        self._see()
        self.seats.tidy()  # no turn comes that would

    def give_up(self, error: BaseException) -> None:
        """The device cannot be trusted: nobody is answered."""
        self.reset(error)
        for ticket in self.tickets:
            ticket.fail(error)
        self.tickets.clear()

    def reset(self, error: BaseException) -> None:
        """Nothing that is here can be trusted: all that were taken in have failed. Who was not is still answered."""
        self.handoff.on(Event.FAILED)
        lost = [*self.waiting, *self.restoring, *self.prefills, *self.seats.clear()]
        self._tell_ended()
        for sequence in lost:
            try:
                self._fail(sequence, error)
            except Exception:
                log.exception("a failed request left something behind")
                self._release(sequence)
                sequence.fail(error)
        for books in (self.waiting, self.restoring, self.prefills, self._allotments):
            books.clear()
        self._see()
        self._forget()

    # of some

    def _cancel(self, sequence: Sequence) -> None:
        self.handoff.on(Event.CANCELLED)
        try:
            if sequence in self.restoring:
                self.restoring.pop(sequence).cancel()
                sequence.fail(RequestCancelled("The request was cancelled before it started."))
            elif sequence in self.prefills:
                prefill = self.prefills.pop(sequence)
                mx.eval(prefill.state.live())
                sequence.keep(prefill.state, "cancelled")
                sequence.finish("cancelled")
            else:
                with self._changing():
                    self.seats.remove(sequence)
        except Exception as e:
            self._lost(e, self._told(e), [sequence])
        self._release(sequence)

    @contextmanager
    def _changing(self, *coming: Sequence) -> Iterator[None]:
        """Groups are changed in the block. Who came to an end is told so, whatever else fails; if it raises, the rows
        of those groups have failed, and who was ``coming``."""
        try:
            yield
        except Exception as e:
            error, touched = self._told(e), list(self.seats.touched)
            self._tell_ended()
            self._lost(e, error, coming, touched)
        else:
            self._tell_ended()

    def _tell_ended(self) -> None:
        for end in self.seats.ended():
            try:
                self._release(end.sequence)
                if end.error is not None or end.reason == "cancelled":
                    self.handoff.on(Event.FAILED if end.error is not None else Event.CANCELLED)
                if end.error is not None:
                    end.sequence.fail(self._its_own(end.error))
                else:
                    assert end.reason is not None
                    end.sequence.finish(end.reason)
            except Exception as e:
                end.sequence.fail(self._its_own(e))

    def _lost(
        self,
        e: BaseException,
        error: BaseException,
        sequences: Iterable[Sequence] = (),
        groups: Iterable[Group] = (),
    ) -> None:
        """What was done for these failed with ``e``; they are told ``error``. On a GPU an error may surface later than
        the command that caused it: nobody's state can be trusted then."""
        if self.rt.device != "cpu" and isinstance(e, RuntimeError):
            sequences, groups = [*sequences, *self.restoring, *self.prefills], self.groups
        self.handoff.on(Event.FAILED)
        for sequence in list(sequences):
            self._fail(sequence, error)
        for group in list(groups):
            for row in group.rows.values():
                self._fail(row.sequence, error)
            self.seats.discard(group)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        restoring = self.restoring.pop(sequence, None)
        self.prefills.pop(sequence, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        try:
            if restoring is not None:
                restoring.cancel()
            sequence.drop()
            self._release(sequence)
        finally:  # it is in no book any more: nobody else would tell it
            sequence.fail(error)

    def _release(self, sequence: Sequence) -> None:
        self._allotments.pop(sequence, None)
        self.rt.memory.release(sequence)

    # what they are told

    def _told(self, e: BaseException) -> BaseException:
        """What a request is told of an error."""
        traceback.clear_frames(e.__traceback__)  # they hold the request's state, and callers keep errors
        return e if isinstance(e, MlxkvError) else self._failed(e)

    def _its_own(self, e: BaseException) -> BaseException:
        """What a request is told of an error in what is done for it alone, on the host: the device is not to blame,
        however often that happens."""
        traceback.clear_frames(e.__traceback__)
        if isinstance(e, MlxkvError):
            return e
        log.error("a request failed", exc_info=e)
        error = EngineError(f"The request failed: {type(e).__name__}: {e}.", "The engine goes on.")
        error.__cause__ = e
        return error
