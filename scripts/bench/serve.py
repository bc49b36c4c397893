"""The server: what HTTP costs, and the same work against mlx_lm.server with the same model and BLAS, in float32.

stream: tokens/s after the first as a client of a stream sees them, against the engine called in this process. clients:
tokens/s of four clients together, against mlx_lm.server. headers: milliseconds until the headers of a stream are there,
while a long prompt of somebody else is read. restart: the second turn of a conversation of 3,000 tokens after the
server was started anew, time to the first text, against mlx_lm.server. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import httpx  # isort: skip

import mlxkv
from mlxkv import numerics
from mlxkv.config import EMBEDDED
from mlxkv.decode.request import Delta, Request, SamplingParams

from .main import ROOT, STORY
from .pairs import Bar, Result, environment, in_turn, judge, report

#: seconds that a server may take to start
START = 120.0


@dataclass
class Seen:
    """What a client saw of one stream: seconds from sending to the headers, the first text and the last one; tokens."""

    headers: float
    first: float
    last: float
    tokens: int
    text: str

    @property
    def tps(self) -> float:
        return (self.tokens - 1) / (self.last - self.first)


@dataclass(frozen=True)
class Base:
    """A server that runs, and what it calls its model."""

    url: str
    model: str


def ask(base: Base, body: dict[str, Any]) -> Seen:
    """A streamed chat completion. Raises RuntimeError for an error in place of an answer."""
    headers = first = last = 0.0
    tokens, pieces = 0, 0
    text = ""
    started = time.perf_counter()
    body = {"model": base.model, "stream": True, "temperature": 0.0} | body
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{base.url}/v1/chat/completions", json=body, timeout=600) as response:
        headers = time.perf_counter() - started
        if response.status_code != 200:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(line)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                if piece := choice.get("delta", {}).get("content"):
                    last = time.perf_counter() - started
                    first = first or last
                    text += piece
                    pieces += 1
    return Seen(headers, first, last, tokens or pieces, text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(command: list[str], model: str, ready: str, **env: str) -> Iterator[Base]:
    """A server process on a free port. Ends by SIGTERM."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env={**os.environ, **env})
        try:
            until = time.monotonic() + START
            while True:
                try:
                    if httpx.get(base + ready, timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} did not start:\n{log.read().decode()[-2000:]}")
                time.sleep(0.1)
            yield Base(base, model)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ours(model: Path, cache: Path | None, *flags: str) -> Any:
    command = [sys.executable, "-m", "mlxkv", "serve", "--model", str(model), "--host", "127.0.0.1", *flags]
    command += ["--cache-dir", str(cache)] if cache else ["--no-cache"]
    return running(command, model.name, "/ready")


def blas() -> dict[str, str]:
    """What gives another process the BLAS that this one multiplies with (Linux); empty where MLX has its own. numpy's
    own copy is none: its names are others."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    files = dict.fromkeys(line.split()[-1] for line in lines if "openblas" in line.rpartition("/")[2])
    found = next((file for file in files if hasattr(ctypes.CDLL(file), "cblas_sgemm")), None)
    return {"LD_PRELOAD": found, **numerics.SPIN} if found else {}


def theirs(model: Path) -> Any:
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--host", "127.0.0.1"]
    return running(command, "default_model", "/v1/models", **blas())


def endless(model: Path) -> dict[str, float]:
    """A bias against the end of an answer, so that both sides make as many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    config = json.loads((model / "config.json").read_text())
    ends = config.get("eos_token_id") or []
    return dict.fromkeys(
        {str(e) for e in ([ends] if isinstance(ends, int) else ends)} | {str(tokenizer.eos_token_id)}, -100.0
    )


def question(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Number {n}: tell me a long story about a lighthouse and its keeper."}]


def stream(name: str, model: Path, tokens: int, pairs: int) -> Result:
    bias = endless(model)
    with mlxkv.load(model, cache=False) as engine, ours(model, None) as base:
        engine.warm_up()
        number = [0, 0]

        def direct() -> float:
            number[0] += 1
            params = SamplingParams(max_tokens=tokens, logit_bias={int(t): b for t, b in bias.items()})
            first = last = 0.0
            made = 0
            for event in engine.submit(Request(messages=question(number[0]), sampling=params)):
                if isinstance(event, Delta):
                    made += len(event.token_ids)
                    if event.text:
                        last = time.perf_counter()
                        first = first or last
            return (made - 1) / (last - first)

        def http() -> float:
            number[1] += 1
            return ask(base, {"messages": question(number[1]), "max_tokens": tokens, "logit_bias": bias}).tps

        measured = in_turn(pairs, direct, http)
    note = f"medians: engine {statistics.median(a for a, _ in measured):.0f} tok/s, HTTP "
    note += f"{statistics.median(b for _, b in measured):.0f}"
    return judge(
        f"tokens/s through HTTP / engine called directly, {name}", [b / a for a, b in measured], Bar(0.95), note
    )


def clients(model: Path, tokens: int, pairs: int, many: int = 4) -> Result:
    bias = endless(model)

    def together(base: Base) -> float:
        made: list[int] = []

        def one(n: int) -> None:
            made.append(ask(base, {"messages": question(n), "max_tokens": tokens, "logit_bias": bias}).tokens)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(many)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(made) != many:
            raise SystemExit("a client got no answer")
        return sum(made) / (time.perf_counter() - started)

    numerics.prepare()  # so that this process has the BLAS that both are to use
    with ours(model, None) as mine, theirs(model) as other:
        measured = in_turn(pairs, lambda: together(other), lambda: together(mine))
    note = f"medians: mlx_lm.server {statistics.median(a for a, _ in measured):.1f} tok/s, mlxkv "
    note += f"{statistics.median(b for _, b in measured):.1f}"
    return judge(f"tokens/s of {many} clients / mlx_lm.server, SmolLM2", [b / a for a, b in measured], Bar(1.0), note)


def time_to_headers(base: Base, body: dict[str, Any]) -> float:
    """Seconds; the client leaves then."""
    started = time.perf_counter()
    body = {"model": base.model, "stream": True, "max_tokens": 1} | body
    with httpx.stream("POST", f"{base.url}/v1/chat/completions", json=body, timeout=600) as response:
        if response.status_code != 200:
            raise RuntimeError(response.read().decode())
        return time.perf_counter() - started


def headers(model: Path, many: int) -> Result:
    """Each request is another one; all while the long one is read."""
    long = [{"role": "user", "content": STORY * 150}]
    seen: list[float] = []
    with ours(model, None) as base:
        ask(base, {"messages": question(0), "max_tokens": 2})
        reading = threading.Thread(target=lambda: ask(base, {"messages": long, "max_tokens": 1}))
        reading.start()
        time.sleep(1.0)
        for n in range(many):
            if not reading.is_alive():
                raise SystemExit("the long prompt was read too soon")
            seen.append(1000 * time_to_headers(base, {"messages": question(n)}))
            time.sleep(0.3)
        reading.join()
    note = f"milliseconds, not a ratio; the slowest {max(seen):.1f}"
    return judge("time to headers beside a long prefill, ms", seen, Bar(100.0, at_most=True), note)


def restart(model: Path, pairs: int) -> Result:
    system = {"role": "system", "content": "You answer questions about a story."}
    first = [system, {"role": "user", "content": STORY * 75 + "What was the tower built of?"}]
    numerics.prepare()
    with tempfile.TemporaryDirectory() as folder:
        with ours(model, Path(folder)) as base:
            said = ask(base, {"messages": first, "max_tokens": 24}).text
        known = [*first, {"role": "assistant", "content": said}]

        def second(start: Callable[[], Any], n: int) -> float:
            with start() as base:
                return ask(base, {"messages": [*known, *question(n)], "max_tokens": 1}).first

        measured = [
            (second(lambda: theirs(model), n), second(lambda: ours(model, Path(folder)), n)) for n in range(pairs)
        ]
    note = f"medians: mlx_lm.server {statistics.median(a for a, _ in measured):.2f} s, mlxkv "
    note += f"{statistics.median(b for _, b in measured):.2f}"
    name = "first token of a second turn after a restart / mlx_lm.server, 3,000 tokens, SmolLM2"
    return judge(name, [b / a for a, b in measured], Bar(0.1, at_most=True), note)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="under two minutes; too few pairs for most bars")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--only", help="run only parts whose name contains this: stream, clients, headers, restart")
    options = parser.parse_args()
    for name in [n for n in os.environ if n.startswith("MLXKV_") and n != "MLXKV_BLAS"]:
        del os.environ[name]
    pairs, smollm2 = (1 if options.quick else 9), options.smollm2
    parts: dict[str, Callable[[], Result]] = {
        "stream, demo": lambda: stream("demo model", EMBEDDED, 200, pairs),
        "stream, SmolLM2": lambda: stream("SmolLM2", smollm2, 64, pairs),
        "clients": lambda: clients(smollm2, 48, pairs),
        "headers": lambda: headers(smollm2, 3 if options.quick else 11),
        "restart": lambda: restart(smollm2, 1 if options.quick else 3),
    }
    chosen = [name for name in parts if options.only is None or options.only in name]
    if not chosen:
        parser.error(f"no part is named {options.only}: there are {'; '.join(parts)}")
    results = []
    for name in chosen:
        print(f"… {name}", file=sys.stderr, flush=True)
        results.append(parts[name]())
    return report(results, environment(ROOT), options.json)


if __name__ == "__main__":
    sys.exit(main())
