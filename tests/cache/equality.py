"""Measures how a run that restores compares with one that never left memory and with a plain, cold run.

Two processes have one folder open. The first (``write``) stores a story for every architecture and restores it from
RAM, at every kept boundary with tails of 0 … block + 1 tokens. The second, a new one (``read``), does the same from
SSD, and stores another story, which the first one then restores: written by another process while it was open.
"""

from __future__ import annotations

import json
import os
import subprocess
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


def story(seed: int = 11) -> tuple[list[int], list[int]]:
    """A prompt and its message ends: two inside one block, one on the grid, one after a wrapped window."""
    tokens = tiny.ids(LENGTH, seed=seed)
    ends = [5, 7, 16, 29]
    for end in ends:
        tokens[end - 1] = tiny.EOS
    return tokens, ends


def tail(p: int, length: int, stored: list[int]) -> list[int]:
    """Tokens that the stored prompt does not go on with: a branch."""
    out = tiny.ids(length, seed=100 + 31 * p + length)
    if out and p < len(stored) and out[0] == stored[p]:
        out[0] = out[0] % 200 + 3
    return out


def tails() -> Iterable[int]:
    """Every length in ``exact``, where the promise is bits; the edges of a block in ``fast``."""
    return range(BLOCK + 2) if numerics.mode() == "exact" else (0, 1, BLOCK, BLOCK + 1)


def opened(folder: Path, arch: str, **options) -> Runtime:
    return runtime(folder / arch, folder / "cache", prefill_chunk=12, **options)


def write(folder: Path, archs: list[str]) -> dict:
    """Says "written" when ``read`` may begin, and goes on when a line comes. Gives what was found from RAM (restored
    positions; the logits are left in a file) and of the other story."""
    out, open_ones = {}, {}
    tokens, ends = story()
    for arch in archs:
        tiny.make(arch, folder / arch)
        rt = open_ones[arch] = opened(folder, arch, ram_budget=1 << 28)
        run(rt, tokens)
        assert rt.store is not None
        rt.store.writer.write_tips()
        assert rt.store.writer.flush(60)
        restored, logits, sources = [], {}, set()
        for p in [*ends, LENGTH - 1]:
            for length in tails():
                got, completion = run(rt, tokens[:p] + tail(p, length, tokens), keep=False)
                restored.append([p, length, completion.usage.cached_tokens, completion.cache.miss_reason])
                logits[f"{p} {length}"] = got
                sources.add(completion.cache.source)
        np.savez(folder / f"{arch}.npz", **logits)
        out[arch] = {"ram": restored, "ram_sources": sorted(sources - {"none"})}
    print("written", flush=True)
    sys.stdin.readline()
    for arch, rt in open_ones.items():
        out[arch]["other"] = resumed(rt, *story(12), (1, BLOCK + 1))
        del out[arch]["other"]["logits"]
        rt.store.close()
    return out


def resumed(rt: Runtime, tokens: list[int], ends: list[int], lengths: Iterable[int], *, promise: bool = True) -> dict:
    """Ask a store that holds ``tokens`` for each of their first ``ends``, with tails of ``lengths`` tokens after them:
    what was restored, the worst differences of logits from a run that remembered and (``promise``) a cold one, and the
    logits themselves, by "end tail"."""
    # a layout of rows alone is not cut at message ends: it can stand anywhere
    edges = [] if rt.layout.growing_only else [*ends, len(tokens) - 1]
    report = {"restored": [], "transparent": 0.0, "promise": 0.0, "scale": 0.0, "logits": {}}
    for p in [*ends, len(tokens) - 1]:
        for length in lengths:
            prompt = tokens[:p] + tail(p, length, tokens)
            logits, completion = run(rt, prompt, keep=False)
            report["logits"][f"{p} {length}"] = logits
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


def read(folder: Path, archs: list[str]) -> dict:
    out = {}
    tokens, ends = story()
    for arch in archs:
        rt = opened(folder, arch)
        report = resumed(rt, tokens, ends, tails())
        ram = np.load(folder / f"{arch}.npz")
        report["ram"] = max(float(np.abs(ram[name] - got).max()) for name, got in report.pop("logits").items())
        prompt = tokens[: ends[-1]] + tail(ends[-1], 3, tokens)
        report["text"] = [
            run(rt, prompt, keep=False, max_tokens=64)[1].token_ids,
            run(rt, prompt, use_cache=False, max_tokens=64)[1].token_ids,
        ]
        run(rt, story(12)[0])
        rt.store.close()
        out[arch] = report
    return out


def measure(folder: Path, mode: str, archs: Iterable[str] = ARCHS) -> dict[str, dict]:
    """Run both processes with these numerics. For each architecture what ``read`` found, with ``write``'s under
    "first". Raises RuntimeError with what a process said when it failed."""

    def start(phase: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.cache.equality", phase, str(folder), *archs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"MLXKV_NUMERICS": mode},
            cwd=Path(__file__).parents[2],
        )

    def end(process: subprocess.Popen, told: str) -> dict:
        said, why = process.communicate(told, timeout=3600)
        if process.returncode:
            raise RuntimeError(why[-3000:])
        return json.loads(said)

    first = start("write")
    assert first.stdout is not None
    if first.stdout.readline() != "written\n":
        raise RuntimeError(first.communicate()[1][-3000:])
    found = end(start("read"), "")
    return {arch: found[arch] | {"first": report} for arch, report in end(first, "go\n").items()}


def wrong_with(report: dict, bound: float) -> list[str]:
    """What one architecture's report of ``exact`` breaks of the promise; ``bound``: of logits against a cold run,
    relative to the largest."""
    first, ends = report["first"], [*story()[1], LENGTH - 1]
    restored, cold = report["text"]
    checks = {
        "not what a run that remembered has": report["transparent"] == 0.0,
        "not what a run that remembered has, of another process": first["other"]["transparent"] == 0.0,
        "not what a cold run says": report["promise"] <= bound * report["scale"],
        "not what a cold run says, of another process": first["other"]["promise"] <= bound * first["other"]["scale"],
        "RAM gives other bits than SSD": report["ram"] == 0.0,
        "RAM reaches elsewhere than SSD": first["ram"] == report["restored"] and first["ram_sources"] == ["ram"],
        "another text": restored == cold and len(cold) == 64,
        "a boundary is not resumed": {p for p, n, cached, _ in report["restored"] if n and cached == p} == set(ends),
    }
    return [what for what, holds in checks.items() if not holds]


if __name__ == "__main__":
    phases = {"write": write, "read": read}
    print(json.dumps(phases[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])))
