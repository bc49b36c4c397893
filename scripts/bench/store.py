"""What the prefix store costs: restoring, writing, opening, memory, and what a restart saves.

Nothing else should run on the machine. Most parts use arrays without a model; the last use SmolLM2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import mlx.core as mx  # isort: skip
import numpy as np  # isort: skip

import mlxkv
from mlxkv.cache.catalogue import complete
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.keys import KeySpace
from mlxkv.cache.record import Body, Meta, Reader, write
from mlxkv.cache.store import PrefixStore

from .main import ids
from .pairs import Bar, Result, counted, environment, in_turn, judge, report
from .synthetic import Shape, wait_written

ROOT = Path(__file__).parents[2]
LARGE = Shape()
HYBRID = Shape(layers=2, heads=2, width=64, dtype=mx.float32, states=6, state_size=1 << 14)


def files_of(folder: Path, kind: str = "*") -> list[Path]:
    return list((folder / "records").rglob(f"*.{kind}.safetensors"))


def drop_pages(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def restoring(n: int, pairs: int) -> list[Result]:
    """A restore with all its checks against reading the same files in the same order into fresh MLX arrays."""
    out = []
    tokens = ids(n + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = LARGE.open(folder)
        LARGE.extend(store, tokens[:n], [])
        wait_written(store)
        plan = store.lookup(tokens)
        assert plan.position == n, plan.reason
        order = [store.folder.file(piece.entry.key, "rows") for piece in plan.pieces]
        offsets = []
        for path in order:
            with Reader.open(path) as reader:
                offsets.append((path, reader.data_start, path.stat().st_size - reader.data_start))
        store.close()
        size = sum(s for *_, s in offsets)
        arrays = 2 * LARGE.layers
        allocating: list[float] = []

        def plain(cold: bool) -> float:
            if cold:
                drop_pages(order)
            mx.clear_cache()
            started = time.perf_counter()
            into = [mx.zeros((-(-size // arrays),), mx.uint8) for _ in range(arrays)]
            mx.eval(into)
            allocating.append(time.perf_counter() - started)
            views = [memoryview(a) for a in into]
            at, room = 0, len(views[0])
            for path, start, length in offsets:
                fd = os.open(path, os.O_RDONLY)
                while length:
                    i, j = divmod(at, room)
                    got = os.preadv(fd, [views[i][j : j + min(length, room - j)]], start)
                    at, start, length = at + got, start + got, length - got
                os.close(fd)
            return time.perf_counter() - started

        def ours(cold: bool) -> float:
            anew = LARGE.open(folder)  # nothing of it in RAM
            try:
                if cold:
                    drop_pages(order)
                mx.clear_cache()
                started = time.perf_counter()
                state, lookup, _ = anew.restore(anew.lookup(tokens), tokens, lambda: LARGE.fresh(n), n)
                mx.eval(state.live())
                spent = time.perf_counter() - started
                assert lookup.tokens == n
                return spent
            finally:
                anew.close()

        for what, cold, bar in (("page cache warm", False, 0.8), ("page cache dropped", True, 0.9)):
            measured = in_turn(pairs, lambda c=cold: plain(c), lambda c=cold: ours(c))
            note = f"{size / 1e6:.0f} MB: plain {measured[-1][0]:.2f} s (allocation {allocating[-1]:.2f}), restore "
            note += f"{measured[-1][1]:.2f} s"
            out.append(judge(f"reading / restore, {what}", [a / b for a, b in measured], Bar(bar), note))
        arrays_bytes = n * LARGE.row_bytes()
        ratio = sum(p.stat().st_size for p in order) / arrays_bytes
        out.append(counted("record files / arrays, bytes", ratio, Bar(1.03, at_most=True), f"{n:,} tokens"))
    return out


def growth(longest: int) -> Result:
    """Bytes written, deleted ones too, for prompts of n, 4 n and 16 n tokens: slope of log bytes over log n."""
    sizes = [longest // 16, longest // 4, longest]
    written = []
    for n in sizes:
        with tempfile.TemporaryDirectory() as name:
            store = HYBRID.open(Path(name))
            tokens = ids(n)
            HYBRID.extend(store, tokens, list(range(500, n, 500)))
            wait_written(store)
            written.append(store.writer.counters.written_bytes)
            store.close()
    slope = float(np.polyfit(np.log(sizes), np.log(written), 1)[0])
    note = ", ".join(f"{n:,}: {b / 1e6:.1f} MB" for n, b in zip(sizes, written, strict=True))
    return counted("bytes written over tokens, slope", slope, Bar(1.01, at_most=True), note)


def turns(count: int) -> Result:
    """``count`` turns of 60 tokens, each recorded by a store that restores the one before. What merging the pieces of
    blocks writes at idle is stated apart."""
    shape = Shape(layers=4, heads=4, width=64, states=2)
    with tempfile.TemporaryDirectory() as name:
        store = shape.open(Path(name))
        tokens = ids(60 * count)
        for turn in range(1, count + 1):
            shape.extend(store, tokens[: 60 * turn], [60 * turn - 15])
        wait_written(store)
        written = sum(p.stat().st_size for p in files_of(Path(name), "rows"))
        states, files = len(files_of(Path(name), "state")), len(files_of(Path(name)))
        store.writer.merge()
        wait_written(store)
        done = store.writer.counters
        kept = sum(p.stat().st_size for p in files_of(Path(name), "rows"))
        store.close()
    ratio = written / (len(tokens) * shape.row_bytes())
    note = f"{len(tokens):,} tokens, {written / 1e6:.1f} MB of rows, {states} states kept; merged at idle: "
    note += f"{done.merged_blocks} blocks, {done.merged_bytes / 1e6:.1f} MB more written, {files} files before and "
    note += f"{files - done.merged_files} after, {kept / 1e6:.1f} MB of rows"
    return counted(f"{count} turns: row files / rows, bytes", ratio, Bar(1.2, at_most=True), note)


def writing(model: Path, pairs: int, prompt: int, tokens: int) -> Result:
    """Decoding right after a prompt whose records are being written, against the store off."""
    with tempfile.TemporaryDirectory() as name, mlxkv.load(model, cache_dir=name) as engine:
        seen = iter(range(1000))

        def tps(use_cache: bool) -> float:
            first = next(seen)
            asked = [50 + first, *ids(prompt)]
            options: dict[str, Any] = {"max_tokens": tokens, "use_cache": use_cache, "logit_bias": endless}
            return mlxkv.generate(engine, asked, **options).timings.decode_tps

        endless = {token: -100.0 for token in engine.tokenizer.eos_token_ids}
        measured = in_turn(pairs, lambda: tps(False), lambda: tps(True))
    note = f"off {measured[-1][0]:.1f} tok/s, writing {measured[-1][1]:.1f} tok/s, prompt {prompt}"
    return judge("decoding, store writing / off", [b / a for a, b in measured], Bar(0.95), note)


def tiny_tokens(i: int) -> tuple[int, ...]:
    """Of the ``i``-th of many records."""
    return (i % 60000, i // 60000, 1, 2, 3, 4, 5, 6)


def many_records(folder: Path, count: int) -> PrefixStore:
    """A folder of ``count`` tiny records that no index knows; the store is returned open."""
    shape = Shape(layers=1, heads=1, width=8)
    store = shape.open(folder)
    space: KeySpace = store.space()
    where = CacheFolder(folder)
    arrays = {t.name: (t.dtype, np.zeros(t.sized(8), np.uint16)) for t in store.layout.tensors("rows")}
    body = Body.of(arrays)
    for i in range(count):
        tokens = tiny_tokens(i)
        key = space.key(space.root, tokens)
        meta = Meta(
            kind="rows", key=key, root=space.root, parent=space.root, start=0, end=8, row_start=0, base=None,
            tokens=tokens, block=space.block, layout=store.layout.digest, model="synthetic",
            fingerprint=store.identity.fingerprint, compute=store.identity.compute_json(), software="",
        )  # fmt: skip
        path = where.file(key, "rows")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write(path, meta, body)
    return store


def opening(count: int, pairs: int) -> list[Result]:
    """From a closed folder to the first look-up that is answered, a hit, with everything in it counted and within its
    budget; against listing it."""
    out = []
    shape = Shape(layers=1, heads=1, width=8)
    asked = [*tiny_tokens(count - 1), 7]  # the newest record, and one token more
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        many_records(folder, count).close()
        shape.open(folder).close()  # every file is known by name now
        started = time.perf_counter()
        complete(folder, lambda: contextlib.nullcontext(lambda done, total: None))
        all_in = time.perf_counter() - started

        def scan() -> float:
            started = time.perf_counter()
            stack, seen = [str(folder)], 0
            while stack:
                with os.scandir(stack.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(entry.path)
                        else:
                            seen += 1
            assert seen >= count
            return time.perf_counter() - started

        def opened(damaged: bool) -> float:
            if damaged:
                with open(folder / "index.sqlite", "r+b") as file:
                    file.write(b"not a database, but noise" * 8)
            said: list[tuple[int, int]] = []
            started = time.perf_counter()
            store = shape.open(folder, progress=lambda done, total: said.append((done, total)))
            plan = store.lookup(asked)
            spent = time.perf_counter() - started
            assert plan.position == len(asked) - 1 and store.index.charge() <= store.budget
            assert bool(said) == damaged
            store.close()
            return spent

        for what, damaged, bar in (("opening", False, 4.0), ("opening, damaged index", True, 15.0)):
            measured = in_turn(pairs, scan, lambda d=damaged: opened(d))
            note = f"{count:,} records: scandir {measured[-1][0]:.3f} s, open {measured[-1][1]:.3f} s"
            note += f"; all headers read behind: {all_in:.0f} s without a pause" if damaged else ""
            out.append(judge(f"{what} / scandir", [b / a for a, b in measured], Bar(bar, at_most=True), note))
    return out


def restart(model: Path, n: int, pairs: int, limit: float) -> Result:
    """Time to first token in a new process (model loaded): ``n`` tokens restored from SSD, against cold."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompt.json").write_text(json.dumps(ids(n)))

        def run(*flags: str) -> dict[str, Any]:
            command = [sys.executable, "-m", "mlxkv", "run", "--json", "--model", str(model), "--max-tokens", "1"]
            command += ["--prompt-tokens", str(folder / "prompt.json"), *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"mlxkv run failed ({done.returncode}): {done.stderr.strip()}")
            return json.loads(done.stdout)

        cache = ["--cache-dir", str(folder / "cache")]
        run(*cache)
        last: dict[str, Any] = {}

        def warm() -> float:
            last.update(run(*cache))
            return last["timings"]["ttft_s"]

        measured = in_turn(pairs, warm, lambda: run("--no-cache")["timings"]["ttft_s"], warm=False)
        assert last["usage"]["cached_tokens"] == n - 1, last
    note = f"{measured[-1][0]:.3f} s, cold {measured[-1][1]:.1f} s"
    return judge(
        f"first token, {n:,} tokens restored / cold", [a / b for a, b in measured], Bar(limit, at_most=True), note
    )


def peak(n: int, queue: int) -> int:
    """Run in a process of its own: store ``n`` tokens (``queue`` bytes may wait; 0: no store); prints the peak RSS."""
    import resource

    with tempfile.TemporaryDirectory() as name:
        store = HYBRID.open(Path(name), queue_limit=queue) if queue else None
        HYBRID.extend(store, ids(n), list(range(500, n, 500)))
        if store is not None:
            store.close()
    unit = 1 if sys.platform == "darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return 0


def memory(n: int, pairs: int) -> Result:
    queue = 64 << 20
    states = HYBRID.states * HYBRID.state_size * 4

    def measured(limit: int) -> float:
        command = [sys.executable, "-m", "bench.store", "--peak", str(n), str(limit)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "scripts").stdout)

    both = in_turn(pairs, lambda: measured(0), lambda: measured(queue), warm=False)
    bound = (64 << 20) + states + queue
    note = f"{(both[-1][1] - both[-1][0]) / 2**20:.0f} MB more, allowed {bound / 2**20:.0f} MB"
    return judge(
        f"peak memory, storing {n:,} tokens / allowed",
        [(b - a) / bound for a, b in both],
        Bar(1.0 + 1e-9, at_most=True),
        note,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_store", description=__doc__)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--quick", action="store_true", help="under two minutes; too few pairs for most bars")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--only", help="run only benchmarks whose name contains this")
    parser.add_argument("--peak", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        return peak(*options.peak)
    for name in [n for n in os.environ if n.startswith("MLXKV_") and n != "MLXKV_BLAS"]:
        del os.environ[name]
    quick = options.quick
    many, few = (3, 1) if quick else (9, 3)
    todo = {
        "restoring": lambda: restoring(4096 if quick else 16384, many),
        "growth": lambda: [growth(16384 if quick else 65536)],
        "turns": lambda: [turns(30 if quick else 100)],
        "memory": lambda: [memory(16384 if quick else 65536, few)],
        "opening": lambda: opening(5000 if quick else 100_000, many),
        "writing": lambda: [writing(options.smollm2, many, 300 if quick else 1000, 24 if quick else 64)],
        "restart 1,420": lambda: [restart(options.smollm2, 1420, few if quick else many, 0.03)],
        "restart 4,096": lambda: [] if quick else [restart(options.smollm2, 4096, 3, 0.02)],
    }
    results: list[Result] = []
    for title, bench in todo.items():
        if options.only is None or options.only in title:
            print(f"… {title}", file=sys.stderr, flush=True)
            results += bench()
    return report(results, environment(ROOT), options.json)


if __name__ == "__main__":
    sys.exit(main())
