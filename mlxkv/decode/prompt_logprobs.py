"""Log-probabilities of a prompt's own tokens, from the logits of its prefill, a chunk at a time."""

from __future__ import annotations

import mlx.core as mx

from .request import TokenLogprob
from .sampling import finite, likeliest

#: bytes of float32 logits that a chunk may have, and of those that are looked at together
CHUNK_BYTES, SLICE_BYTES = 128 << 20, 16 << 20


def rows_of(room: int, vocab_size: int) -> int:
    """Rows of logits that fit into ``room`` bytes; at least one."""
    return max(1, room // (4 * vocab_size))


def told(logits: mx.array, tokens: list[int], n: int) -> list[TokenLogprob]:
    """Of each of ``tokens``, which row i of ``logits`` [len(tokens), V] is about, with the ``n`` likeliest. The
    distribution is the model's own, as of sampled tokens."""
    step = rows_of(SLICE_BYTES, logits.shape[-1])
    out: list[TokenLogprob] = []
    for at in range(0, len(tokens), step):
        out += _slice(logits[at : at + step], tokens[at : at + step], n)
    return out


def _slice(logits: mx.array, tokens: list[int], n: int) -> list[TokenLogprob]:
    rows = logits.astype(mx.float32)
    total = mx.logsumexp(rows, axis=-1, keepdims=True)
    own = (mx.take_along_axis(rows, mx.array(tokens, mx.int32)[:, None], axis=-1) - total)[:, 0]
    n = min(n, rows.shape[-1])
    if not n:
        return [TokenLogprob(t, finite(v)) for t, v in zip(tokens, own.tolist(), strict=True)]  # type: ignore[arg-type]
    ids = mx.argpartition(-rows, kth=n - 1, axis=-1)[:, :n]
    values = mx.take_along_axis(rows, ids, axis=-1) - total
    mx.eval(own, ids, values)
    return [
        TokenLogprob(t, finite(v), likeliest(i, top))
        for t, v, i, top in zip(tokens, own.tolist(), ids.tolist(), values.tolist(), strict=True)  # type: ignore[arg-type]
    ]
