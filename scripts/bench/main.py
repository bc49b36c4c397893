"""The main job against others: prefill, decoding, time to first token after a restart, start-up, memory of a step.

Both sides use OpenBLAS where it is found, and float32. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
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
import mlx_lm  # isort: skip
from mlx.utils import tree_flatten, tree_map, tree_map_with_path  # isort: skip
from mlx_lm.models import llama  # isort: skip
from mlx_lm.utils import load as lm_load  # isort: skip

import mlxkv
from mlxkv.config import EMBEDDED
from mlxkv.decode import generation
from mlxkv.decode.options import Options
from mlxkv.decode.request import Request, SamplingParams
from mlxkv.decode.runtime import open_runtime

from .pairs import Bar, Result, environment, in_turn, judge, report

ROOT = Path(__file__).parents[2]
STORY = (
    "The lighthouse on the northern point was built of grey stone, and its keeper wrote down every ship that passed, "
    "the hour, the weather, the flag, and whatever the crew had shouted across the water. "
)


def random_model(folder: Path, tokenizer_from: Path, module: Any, config: dict[str, Any]) -> Path:
    """A folder with random weights of ``module``'s architecture and another model's tokenizer."""
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(1), 4096))

    def weight(name: str, old: mx.array) -> mx.array:
        return mx.random.normal(old.shape, key=next(keys)) * 0.05 if old.ndim == 2 else old

    model.update(tree_map_with_path(weight, model.parameters()))
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer_from / name).read_bytes())
    return folder


def float32(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer as mlx-lm loads them, with weights in float32 as on our side (bfloat16 is slow on a CPU)."""
    model, tokenizer, *_ = lm_load(str(folder))
    model.update(
        tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
    )
    mx.eval(model.parameters())
    return model, tokenizer


def ids(n: int, vocab: int = 2000) -> list[int]:
    return [(i * 7919) % (vocab - 100) + 50 for i in range(n)]


def prefill(model: Path, pairs: int) -> Result:
    theirs, tokenizer = float32(model)
    prompt = ids(1000)
    with mlxkv.load(model, cache=False) as engine:

        def ours_s() -> float:
            return mlxkv.generate(engine, list(prompt), max_tokens=1).timings.ttft_s

        def theirs_s() -> float:
            started = time.perf_counter()
            for _ in mlx_lm.stream_generate(theirs, tokenizer, prompt, max_tokens=1):
                return time.perf_counter() - started
            return 0.0

        measured = in_turn(pairs, theirs_s, ours_s)
    note = f"mlx-lm {measured[-1][0]:.2f} s, mlxkv {measured[-1][1]:.2f} s"
    return judge("prefill 1,000 tokens, demo model", [a / b for a, b in measured], Bar(3.0), note)


def decoding(name: str, model: Path, pairs: int, tokens: int) -> Result:
    theirs, tokenizer = float32(model)
    prompt = ids(64)
    endless = {token: -100.0 for token in tokenizer.eos_token_ids}

    with mlxkv.load(model, cache=False) as engine:

        def ours_tps() -> float:
            done = mlxkv.generate(engine, list(prompt), max_tokens=tokens, logit_bias=endless)
            assert len(done.token_ids) == tokens, "the model stopped early"
            return done.timings.decode_tps

        def theirs_tps() -> float:
            first, count = 0.0, 0
            bias = mlx_lm.sample_utils.make_logits_processors(logit_bias=endless)
            for _ in mlx_lm.stream_generate(theirs, tokenizer, prompt, max_tokens=tokens, logits_processors=bias):
                count += 1
                first = first or time.perf_counter()
            return (count - 1) / (time.perf_counter() - first)

        measured = in_turn(pairs, theirs_tps, ours_tps)
    note = f"mlx-lm {measured[-1][0]:.1f} tok/s, mlxkv {measured[-1][1]:.1f} tok/s"
    return judge(f"decoding tokens/s, {name}", [b / a for a, b in measured], Bar(1.0), note)


def restart(name: str, model: Path, pairs: int) -> Result:
    """Time to first token in a new process: 1,500 tokens asked before plus one question, against the same run cold."""
    messages = [
        {"role": "system", "content": "You answer questions about a story."},
        {"role": "user", "content": STORY * 35 + "What was the tower built of?"},
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def run(conversation: list[dict[str, Any]], *flags: str, tokens: int = 1) -> dict[str, Any]:
            (folder / "messages.json").write_text(json.dumps(conversation))
            command = [sys.executable, "-m", "mlxkv", "run", "--json", "--model", str(model), "--temp", "0"]
            command += ["--messages", str(folder / "messages.json"), "--max-tokens", str(tokens), *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"mlxkv run failed ({done.returncode}): {done.stderr.strip()}")
            return json.loads(done.stdout)

        cache = ["--cache-dir", str(folder / "cache")]
        first = run(messages, *cache, tokens=24)
        messages.append({"role": "assistant", "content": first["text"]})
        longer = [*messages, {"role": "user", "content": "1 name: who wrote it?"}]
        seen: list[dict[str, Any]] = []

        def cold_s() -> float:
            return run(longer, "--no-cache")["timings"]["ttft_s"]

        def warm_s() -> float:
            # each pair asks something new, so that nothing of the question itself is stored
            asked = [*messages, {"role": "user", "content": f"{len(seen) + 2} names: who wrote them?"}]
            seen.append(run(asked, *cache))
            return seen[-1]["timings"]["ttft_s"]

        measured = in_turn(pairs, warm_s, cold_s, warm=False)
    usage = seen[-1]["usage"]
    restored = f"{usage['cached_tokens']} of {usage['prompt_tokens']} restored"
    note = f"{restored}; {measured[-1][0]:.2f} s, cold {measured[-1][1]:.1f} s"
    return judge(
        f"first token in a new process / cold, {name}", [a / b for a, b in measured], Bar(0.1, at_most=True), note
    )


def help_time(pairs: int) -> Result:
    lines = [
        "import typer",
        "app = typer.Typer()",
        "@app.command()",
        "def main(name: str = 'x'):",
        "    'Say.'",
        "app()",
    ]
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "bare.py"
        program.write_text("\n".join(lines))
        mine = [str(Path(sys.executable).with_name("mlxkv"))]

        def timed(command: list[str]) -> float:
            started = time.perf_counter()
            subprocess.run([*command, "--help"], check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - started

        measured = in_turn(pairs, lambda: timed(mine), lambda: timed([sys.executable, str(program)]))
    note = f"{measured[-1][0]:.2f} s, bare {measured[-1][1]:.2f} s"
    return judge("mlxkv --help / bare Typer --help", [a / b for a, b in measured], Bar(2.0, at_most=True), note)


def step_memory(folder: Path, tokenizer_from: Path, pairs: int) -> Result:
    """Peak of decoding steps over 64 MB of keys and values, less what was live before, as a part of those 64 MB."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16384, "tie_word_embeddings": True,
    }  # fmt: skip
    model = random_model(folder, tokenizer_from, llama, config)
    rt, _ = open_runtime(Options(model=model))
    seen: dict[str, int] = {}

    class Watched(generation.Generation):
        def _decode(self, state, sampler, logits, limit):  # type: ignore[no-untyped-def]
            mx.eval(logits, state.live())
            mx.clear_cache()
            seen["kv"] = sum(a.nbytes for a in state.live())
            seen["before"] = mx.get_active_memory()
            mx.reset_peak_memory()
            reason = super()._decode(state, sampler, logits, limit)
            seen["peak"] = mx.get_peak_memory()
            return reason

    ratios = []
    for _ in range(pairs):
        request = Request(tokens=ids(8160), sampling=SamplingParams(max_tokens=16, logit_bias={0: -1.0}))
        Watched(rt, request, lambda e: None, lambda: False, time.monotonic()).run()
        ratios.append((seen["peak"] - seen["before"]) / seen["kv"])
    note = f"{seen['kv'] / 2**20:.0f} MB of KV, {(seen['peak'] - seen['before']) / 2**20:.1f} MB more in a step"
    return judge("peak of a step beyond one KV / KV", ratios, Bar(0.5, at_most=True), note)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_main", description=__doc__)
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--quick", action="store_true", help="under two minutes; too few pairs for most bars")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--only", help="run only benchmarks whose name contains this")
    options = parser.parse_args()
    for name in [n for n in os.environ if n.startswith("MLXKV_") and n != "MLXKV_BLAS"]:
        del os.environ[name]  # the child processes run with defaults
    few, many = (3, 3) if options.quick else (9, 15)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        todo = {
            "prefill": lambda: prefill(EMBEDDED, many),
            "decoding demo": lambda: decoding("demo model", EMBEDDED, many, 128),
            "decoding SmolLM2": lambda: decoding("SmolLM2", options.smollm2, few, 48),
            "restart demo": lambda: restart("demo model", EMBEDDED, 2 if options.quick else 9),
            "restart SmolLM2": lambda: restart("SmolLM2", options.smollm2, 2 if options.quick else 9),
            "help": lambda: help_time(many),
            "memory": lambda: step_memory(folder / "wide", options.smollm2, 1 if options.quick else 9),
        }
        results = []
        for title, bench in todo.items():
            if options.only is None or options.only in title:
                print(f"… {title}", file=sys.stderr, flush=True)
                results.append(bench())
        return report(results, environment(ROOT), options.json)


if __name__ == "__main__":
    sys.exit(main())
