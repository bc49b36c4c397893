"""The prefill of one prompt: chunks on the sequence's own caches, alone and unpadded, cut at its boundaries."""

from __future__ import annotations

import time

import mlx.core as mx

from ..cache.inside import Inside
from ..cache.state import SequenceState
from .prompt_logprobs import CHUNK_BYTES, rows_of
from .request import Progress
from .sequence import Sequence


class Prefill:
    """Brings ``state`` to the end of ``sequence``'s prompt but one, a chunk a call. Boundaries are where they are,
    however long the chunks."""

    def __init__(self, sequence: Sequence, state: SequenceState) -> None:
        self.sequence, self.state = sequence, state
        self._roles = sequence.roles
        self._edges = sorted({*self._roles, sequence.end})
        self._ids = mx.array(sequence.prompt.tokens, mx.int32)
        #: chunks that were read
        self.chunks = 0

    @property
    def remaining(self) -> int:
        """Tokens to go."""
        return self.sequence.end - self.state.position

    def chunk(self, most: int) -> int:
        """One forward over at most ``most`` tokens, evaluated, and what the store keeps of it; how many there were."""
        seq, state, rt = self.sequence, self.state, self.sequence.rt
        started, before = time.monotonic(), state.position
        tells = seq.prompt_logprobs is not None
        if tells:
            most = min(most, rows_of(CHUNK_BYTES, rt.vocab_size))
        end, inside = rt.split.segment(state.position, self._edges, most)
        logits, left = self._segment(end, inside)
        if tells:
            seq.tell_prompt(logits[0])
        logits = None  # else they keep what they would be computed from
        mx.eval(state.live())
        if seq.recorder is not None:
            seq.recorder.flush(left, self._roles)
        left = None
        if state.position in self._roles:
            self._boundary(self._roles[state.position])
        if seq.recorder is not None:
            seq.recorder.commit(now=seq.request.share and not self.remaining)
        mx.clear_cache()
        self.chunks += 1
        seq.prefill_s += time.monotonic() - started
        seq.ticket.put(Progress(state.position, len(seq.prompt.tokens)))
        return state.position - before

    def _segment(self, end: int, inside: tuple[int, ...]) -> tuple[mx.array, Inside | None]:
        """One forward up to ``end``: its logits [1, n, V], lazily, and what its layers left at the boundaries
        ``inside`` it."""
        rt, state = self.sequence.rt, self.state
        ids = self._ids[state.position : end]
        if not inside:
            logits = rt.model(ids[None], cache=state.caches)
            state.advance(ids.size)
            return logits, None
        with rt.spans.inside(state.position, end, inside) as left:
            logits = rt.model(ids[None], cache=state.caches)
        state.advance(ids.size)
        return logits, left

    def _boundary(self, role: str) -> None:
        if self.sequence.recorder is not None:
            self.sequence.recorder.boundary(role=role)
        self.state.settle()
        mx.eval(self.state.live())
