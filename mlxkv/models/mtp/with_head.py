"""A model and its head as one callable for prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .head import Head


class WithHead:
    """``cache`` is the body's cache list and, last, a ``HeadCache`` that is shown each hidden state and the token it
    came from. The head itself runs when that cache catches up."""

    def __init__(self, model: Any, head: Head) -> None:
        self.model, self.head = model, head
        self._text = getattr(model, "language_model", model)

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """``ids`` [1, n] -> logits [1, n, V]."""
        hidden = self.head.hidden(self._text, ids, cache[:-1])
        cache[-1].observe(ids, hidden)
        return self._output(self.head.finish(self._text, hidden))

    def logits(self, m: mx.array, step: int = 0) -> mx.array:
        """Logits [1, n, V] of what the head gave as m [1, n, H] for the draft of number ``step``."""
        return self.head.logits(m, self._output, step)

    def runner(self) -> Callable[..., mx.array]:
        """run(tokens [1, n], hidden [1, n, H], key/value cache, step=0) -> m [1, n, H].

        ``hidden`` is what was observed, or the m of the draft before; the cache grows by n rows. ``step`` is the
        draft's number, 0 for the first.
        """

        def run(tokens: mx.array, hidden: mx.array, cache: Any, step: int = 0) -> mx.array:
            embedded = self.head.embed(tokens, self._text.model.embed_tokens)
            return self.head(embedded, hidden, cache, step)

        return run

    def _output(self, hidden: mx.array) -> mx.array:
        """Logits [1, n, V] of the body's output matrix."""
        output = self._text.get("lm_head")
        return self._text.model.embed_tokens.as_linear(hidden) if output is None else output(hidden)
