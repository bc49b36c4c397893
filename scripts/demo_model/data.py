"""Rows of token ids with loss weights, packed from the grammar's documents."""

import bisect

import torch
from tokenizers import Tokenizer

from .corpus import Doc, Grammar
from .tokenizer import EOT


def encode(tok: Tokenizer, doc: Doc) -> tuple[list[int], list[float]]:
    """Ids and per-token weights; a token that starts in a segment has that segment's weight."""
    if doc.ids is not None:
        return doc.ids, doc.weights or []
    ends, weights, total = [], [], 0
    for text, weight in doc.segments:
        total += len(text)
        ends.append(total)
        weights.append(weight)
    enc = tok.encode(doc.text, add_special_tokens=False)
    # A word's leading space belongs to its token, so its last character decides.
    return enc.ids, [weights[bisect.bisect_right(ends, max(e - 1, 0))] for _, e in enc.offsets]


def batch(tok: Tokenizer, seed: int, stage: str, length: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` packed rows: ids [rows, length] and the weight of predicting each of them."""
    grammar = Grammar(seed)
    out, ws = [], []
    for _ in range(rows):
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            i, w = encode(tok, grammar.draw(stage, length))
            ids += [*i, EOT]
            weights += [*w, 0.02]
        out.append(ids[:length])
        ws.append(weights[:length])
    return torch.tensor(out), torch.tensor(ws)
