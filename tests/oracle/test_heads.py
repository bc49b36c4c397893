"""Logits of every layout of prediction heads against PyTorch, written from the equations (``heads.py``).

The stored logits stand for PyTorch where it is not installed; where it is, they are made anew.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlxkv.models import load
from tests import headed, heads

REFERENCE = Path(__file__).parent / "heads_reference.npz"
CASES = [*((kind, 1) for kind in heads.KINDS), ("qwen3_5", 2), ("deepseek_v3", 2)]


def drafts(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """What a loaded head gives for the inputs of ``heads.inputs``: rows in two forwards, then a draft of a draft."""
    head = load(folder).head
    assert head is not None
    embedded, hidden, output = (mx.array(a) for a in heads.inputs(kind))
    cache = KVCache()
    m = mx.concatenate([head(embedded[None, a:b], hidden[None, a:b], cache) for a, b in ((0, 3), (3, 7))], axis=1)
    made = {"first": np.array(head.logits(m, lambda x: x @ output.T)[0])}
    assert np.allclose(np.array(head(embedded[None, :-1], hidden[None], None)), np.array(m), atol=2e-5)
    if head.most_drafts is None:
        again = head(embedded[None, -1:], m[:, -1:], cache, 1)
        made["second"] = np.array(head.logits(again, lambda x: x @ output.T, 1)[0, 0])
    assert cache.offset == heads.ROWS + (head.most_drafts is None)
    return made


@pytest.mark.parametrize(("kind", "layers"), CASES)
def test_logits_are_pytorchs(kind, layers, tmp_path):
    stored = np.load(REFERENCE)
    mine = drafts(headed.make(tmp_path / "model", kind, layers=layers, own=True), kind)
    assert {f"{kind}.{layers}.{name}" for name in mine} == {
        name for name in stored.files if name.startswith(f"{kind}.{layers}.")
    }
    for name, logits in mine.items():
        wanted = stored[f"{kind}.{layers}.{name}"]
        assert np.abs(wanted).max() > 1
        assert np.abs(logits - wanted).max() <= 1e-4


@pytest.mark.parametrize(("kind", "layers"), CASES)
def test_stored_logits_are_those_pytorch_gives(kind, layers):
    pytest.importorskip("torch")
    from tests.oracle.heads import reference

    stored = np.load(REFERENCE)
    for name, logits in reference(kind, layers).items():
        assert np.allclose(stored[f"{kind}.{layers}.{name}"], logits, atol=1e-5)
