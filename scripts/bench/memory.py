"""Memory after many requests, in a process of its own: MLX's active memory and what the process has resident.

The model is a small hybrid of the demo's architecture with random weights: one recurrent layer, one with attention; a
state weighs 137 KB, a token's rows 1 KB. Up to eight requests are under way at a time; some prompts come again, some
requests are cancelled. RAM tier and store are small enough to be full early, and it is checked that they are.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import mlx.core as mx  # isort: skip
from mlx_lm.models import qwen3_5  # isort: skip

import mlxkv
from mlxkv.cache.store import PrefixStore
from mlxkv.config import EMBEDDED
from mlxkv.decode.request import Request, SamplingParams
from mlxkv.errors import EngineError

from .main import ROOT, random_model
from .pairs import Bar, Result, counted, unshown

#: requests under way at the same time
AT_ONCE = 8
#: full is what holds at least this part of its budget
FULL = 0.9


def small_hybrid(folder: Path) -> Path:
    config = json.loads((EMBEDDED / "config.json").read_text())
    config["text_config"] |= {
        "num_hidden_layers": 2, "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 4096, "mtp_num_hidden_layers": 0,
    }  # fmt: skip
    return random_model(folder, EMBEDDED, qwen3_5, config)


def resident() -> int:
    """Bytes of this process that are in memory."""
    if sys.platform == "darwin":
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
        return int(shown.stdout) * 1024
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def requests(seed: int) -> Any:
    """(request, what becomes of it), without end: three in ten have a prompt of the last 40, two in a hundred are
    cancelled at once and two when they have begun."""
    chance = random.Random(seed)
    recent: deque[list[int]] = deque(maxlen=40)
    while True:
        if recent and chance.random() < 0.3:
            prompt = chance.choice(recent)
        else:
            prompt = [chance.randrange(50, 1900) for _ in range(chance.randrange(40, 240))]
            recent.append(prompt)
        sampling = SamplingParams(max_tokens=chance.randrange(1, 6))
        yield Request(tokens=prompt, sampling=sampling), chance.choices(("", "at once", "begun"), (96, 2, 2))[0]


def serve(engine: mlxkv.Engine, store: PrefixStore, source: Any, count: int) -> None:
    """Have ``count`` requests answered. What waits to be written is held in RAM whatever the budget: where the writer
    is behind, the next requests wait for it, so that it is not a queue that is measured."""
    under_way: deque[Any] = deque()

    def end() -> None:
        with contextlib.suppress(EngineError):  # cancelled before it started
            under_way.popleft().result()
        while store.ram.nbytes > store.ram.budget:
            time.sleep(0.005)

    for _ in range(count):
        if len(under_way) == AT_ONCE:
            end()
        request, cancelled = next(source)
        under_way.append(engine.submit(request))
        if cancelled == "begun":
            under_way[-1].next_event()
        if cancelled:
            under_way[-1].cancel()
    while under_way:
        end()


def sample(store: PrefixStore) -> dict[str, Any]:
    """Figures in bytes, when nothing is under way: medians of nine readings."""
    if not store.writer.flush(60):
        raise SystemExit("the store did not write everything within a minute")
    readings = []
    for _ in range(9):
        gc.collect()
        readings.append((mx.get_active_memory(), resident(), mx.get_cache_memory()))
        time.sleep(0.2)
    active, rss, cached = (statistics.median(each) for each in zip(*readings, strict=True))
    return {
        "active": active,
        "resident": rss,
        "cached": cached,
        "spread": max(r for _, r, _ in readings) - min(r for _, r, _ in readings),
        "ram": store.ram.nbytes,
        "folder": sum(p.stat().st_size for p in store.folder.path.rglob("*") if p.is_file()),
        "written": store.writer.counters.written_bytes,
        "faults": sum(store.writer.counters.faults.values()),
        "fault": store.writer.counters.last_fault,
    }


def child(first: int, last: int, ram: int, disk: int) -> int:
    """Samples after ``first`` requests, at two places between, and after ``last``; prints them as JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = small_hybrid(folder / "model")
        options: dict[str, Any] = {"cache_dir": folder / "cache", "ram_budget": ram, "cache_budget": disk}
        with mlxkv.load(model, **options) as engine:
            assert engine.info.store_off is None and engine.info.disk_off is None, engine.info
            (store,) = (o for o in gc.get_objects() if isinstance(o, PrefixStore))
            source, done, samples = requests(7), 0, []
            for at in (first, first + (last - first) // 3, first + 2 * (last - first) // 3, last):
                serve(engine, store, source, at - done)
                done = at
                samples.append({"done": done} | sample(store))
            assert engine.health().ok
    print(json.dumps(samples))
    return 0


def memory(first: int, last: int, ram: int, disk: int) -> list[Result]:
    """After ``last`` requests against after ``first``, ``ram`` and ``disk`` (bytes) being full by then."""
    what = f"after {last:,} requests / after {first:,}"
    bars = {"active": ("MLX's active memory", Bar(1.02, at_most=True))}
    bars["resident"] = ("resident memory", Bar(1.05, at_most=True))
    command = [sys.executable, "-m", "bench.batch", "--memory", *map(str, (first, last, ram, disk))]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT / "scripts")
    if done.returncode:
        raise SystemExit(f"the process whose memory is measured failed ({done.returncode})")
    samples = json.loads(done.stdout.splitlines()[-1])
    begin, end = samples[0], samples[-1]
    held = f"RAM tier {begin['ram'] / ram:.0%}, store {begin['folder'] / disk:.0%} of the budget after {first:,}"
    full = begin["ram"] >= FULL * ram and begin["folder"] >= FULL * disk and begin["written"] > disk
    full &= all(a["written"] < b["written"] for a, b in pairwise(samples))  # and goes on taking in
    if fault := end["fault"]:
        held += f"; {end['faults']} not written, the last: {fault}"
    out = []
    for key, (name, bar) in bars.items():
        note = ", ".join(f"{s['done']:,}: {s[key] / 2**20:.1f} MB" for s in samples) + f"; {held}"
        if key == "resident":
            note += f"; readings within {max(s['spread'] for s in samples) / 2**20:.1f} MB"
            note += f"; {time.monotonic() - started:.0f} s in all"
        if full:
            out.append(counted(f"{name}, {what}", end[key] / begin[key], bar, note))
        else:
            out.append(unshown(f"{name}, {what}", bar, f"not full, or nothing is written: {note}"))
    return out
