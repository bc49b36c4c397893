"""Measures how a run that restores from SSD compares with one that never left memory and with a plain, cold run.

Run as ``python -m tests.cache.equality PHASE FOLDER`` so that the restoring process is a new one. ``write`` stores a
prompt for every architecture; ``read`` restores it at every kept boundary with tails of 0 … block + 1 tokens and prints
one JSON object: for each architecture the kept boundaries and the worst differences of logits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import numpy as np  # isort: skip

from mlxkv import numerics  # isort: skip
from mlxkv.decode.runtime import Runtime
from tests import tiny
from tests.probe import BLOCK, kept_in_memory, run, runtime

ARCHS = ("qwen3_5", "falcon_h1", "gemma3_text", "nemotron_h", "lfm2", "llama")
LENGTH = 37


def story() -> tuple[list[int], list[int]]:
    """A prompt and its message ends: two inside one block, one on the grid, one after a wrapped window."""
    tokens = tiny.ids(LENGTH, seed=11)
    ends = [5, 7, 16, 29]
    for end in ends:
        tokens[end - 1] = tiny.EOS
    return tokens, ends


def tail(p: int, length: int) -> list[int]:
    """Tokens that no stored prompt goes on with."""
    story_tokens = story()[0]
    out = tiny.ids(length, seed=100 + 31 * p + length)
    if out and p < LENGTH and out[0] == story_tokens[p]:
        out[0] = out[0] % 200 + 3
    return out


def write(folder: Path) -> None:
    for arch in ARCHS:
        rt = runtime(tiny.make(arch, folder / arch), folder / "cache", prefill_chunk=12)
        run(rt, story()[0])
        rt.store.close()


def resumed(rt: Runtime, tokens: list[int], ends: list[int], lengths: Iterable[int], *, promise: bool = True) -> dict:
    """Ask a store that holds ``tokens`` for each of their first ``ends``, with tails of ``lengths`` tokens after them:
    what was restored, and the worst differences of logits from a run that remembered and (``promise``) a cold one."""
    # a layout of rows alone is not cut at message ends: it can stand anywhere
    edges = [] if rt.layout.growing_only else [*ends, len(tokens) - 1]
    report = {"restored": [], "transparent": 0.0, "promise": 0.0, "scale": 0.0}
    for p in [*ends, len(tokens) - 1]:
        for length in lengths:
            prompt = tokens[:p] + tail(p, length)
            logits, completion = run(rt, prompt, keep=False)
            cached = completion.usage.cached_tokens
            report["restored"].append([p, length, cached, completion.cache.miss_reason])
            if rt.layout.growing_only or cached in (0, *edges):
                mine = [] if rt.layout.growing_only else edges[: edges.index(p) + 1]
                memory = kept_in_memory(rt, tokens, prompt, mine, cached)
                report["transparent"] = max(report["transparent"], float(np.abs(logits - memory).max()))
            if not promise:
                continue
            cold, _ = run(rt, prompt, use_cache=False)
            report["promise"] = max(report["promise"], float(np.abs(logits - cold).max()))
            report["scale"] = max(report["scale"], float(np.abs(cold).max()))
    return report


def read(folder: Path) -> dict:
    out = {}
    tokens, ends = story()
    # every tail in exact, where the promise is bits; the edges of a block in fast
    lengths = range(BLOCK + 2) if numerics.mode() == "exact" else (0, 1, BLOCK, BLOCK + 1)
    for arch in ARCHS:
        rt = runtime(folder / arch, folder / "cache", prefill_chunk=12)
        report = resumed(rt, tokens, ends, lengths)
        prompt = tokens[: ends[-1]] + tail(ends[-1], 3)
        report["text"] = [
            run(rt, prompt, keep=False, max_tokens=64)[1].token_ids,
            run(rt, prompt, use_cache=False, max_tokens=64)[1].token_ids,
        ]
        rt.store.close()
        out[arch] = report
    return out


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(where)
    else:
        print(json.dumps(read(where)))
