"""Whether a model can be decoded as a batch: found by running two short sequences alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ... import numerics
from ..layout import Layout
from ..member import PositionError
from ..state import SequenceState
from .batch import Batch
from .form import NoBatchForm, NotYet

#: largest |Δ| / largest |value| between alone and together, where bits are not promised: sums run in another order
BOUND = 1e-4
#: lengths of the two sequences, and of the one that joins later into a slot that was used
_LENGTHS = (3, 9)
_LATER = 5
#: joint steps before and after that
_STEPS = 3


class _Alone:
    """A short sequence on its own caches, which the batch is compared with."""

    def __init__(self, model: Callable[..., mx.array], make_cache: Callable[[], list[Any]], tokens: list[int]) -> None:
        self._model = model
        self.state = SequenceState.new(make_cache())
        self.token = 0
        self.run(tokens[:-1])
        self.state.settle()
        self.run(tokens[-1:])

    def run(self, tokens: list[int]) -> mx.array:
        logits = self._model(mx.array([tokens], mx.int32), cache=self.state.caches)[:, -1]
        self.state.advance(len(tokens))
        mx.eval(logits, self.state.live())
        self.token = int(logits.argmax())
        return logits


def obstacle(model: Callable[..., mx.array], make_cache: Callable[[], list[Any]], live: Layout) -> str | None:
    """Why rows of this model must take turns, or None if they can be decoded together.

    Two short sequences are run alone and as a batch, one leaves, another joins into its slot; logits and states must
    be the same: in ``exact`` (on a CPU) the same bits or within ``BOUND`` for architectures whose operations sum in an
    order that depends on the batch, elsewhere within ``BOUND`` always. A class without a form, an exception and another
    result are each a reason. Costs about 25 forwards of one token; reads no class names but for the message.
    """
    try:
        return _compare(model, make_cache, live)
    except NoBatchForm as e:
        return e.message
    except PositionError as e:
        return f"its rows do not count as one: {e}"
    except Exception as e:  # whatever a model raises when it is called with a batch
        return f"it fails on several sequences at once: {type(e).__name__}: {e}"
