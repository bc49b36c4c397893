"""Speculation: what drafts gain, what they cost where they are useless, who waits for whom, and what a rewind costs.

Plain is the fastest of mlxkv without drafts, the same with compiled steps (--compile on), and mlx-lm, found first.
Prompts are the demo model's held-out ones, whose answers end where they end. Nothing else should run on the machine.

tokens: tokens/s of decoding, all prompts together, at the best depth (compiled or not, found first too) against plain;
greedy, and at temperature 0.7. useless: the same with a head of random weights and a depth that adapts; of new engines,
what they learn included, and of engines with compiled steps that go on. late: the first token of a request that comes
while another one's answer is made, with drafts against without. rewind: taking two of three tokens back and making the
states again, against one plain step, for each family whose layers keep a journal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import mlx.core as mx  # isort: skip
import mlx_lm  # isort: skip

import mlxkv
from mlxkv import Engine
from mlxkv.cache.state import SequenceState
from mlxkv.config import EMBEDDED
from mlxkv.decode.options import Options
from mlxkv.decode.request import Delta, Request, SamplingParams
from mlxkv.decode.runtime import open_runtime
from mlxkv.decode.solo import Solo

from .apart import Apart
from .main import ROOT, float32, random_model
from .pairs import Bar, Result, environment, in_turn, judge, report

sys.path.insert(0, str(ROOT / "scripts"))
from demo_model.heldout import cases  # noqa: E402

#: tokens of an answer at most
MOST = 200
DEPTHS = (2, 4, 6, 8)
#: how often an answer is timed
TIMES = 3
#: engines a side of a pair: new ones for each, and those that go on; late requests
NEW, ENGINES, COMERS = 3, 8, 5


def prompts(tokenizer: Any, step: int) -> list[list[int]]:
    """Every ``step``-th held-out prompt that is not long."""
    every = cases(lambda messages: sum(len(m["content"]) for m in messages) // 4)
    chosen = [c for c in every if c.kind != "far" and not c.tools][::step]
    return [list(tokenizer.apply_chat_template(c.messages, add_generation_prompt=True)) for c in chosen]


def answer(engine: Engine, prompt: list[int], **sampling: Any) -> Any:
    params = SamplingParams(**{"max_tokens": MOST} | sampling)
    return engine.submit(Request(tokens=list(prompt), sampling=params)).result()


#: one prompt, and a seed -> tokens after the answer's first one, and the seconds that they took
One = Callable[[list[int], int], tuple[int, float]]


def decoded(engine: Engine, prompt: list[int], **sampling: Any) -> tuple[int, float]:
    done = answer(engine, prompt, **sampling)
    n = len(done.token_ids) - 1
    return (n, n / done.timings.decode_tps) if n > 0 else (0, 0.0)


def mlx_lm_decoded(model: Any, tokenizer: Any, prompt: list[int], temperature: float, seed: int) -> tuple[int, float]:
    mx.random.seed(seed)
    sampler = mlx_lm.sample_utils.make_sampler(temp=temperature)
    first = last = 0.0
    count = 0
    for _ in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=MOST, sampler=sampler):
        count += 1
        last = time.perf_counter()
        first = first or last
    return count - 1, last - first


def answers(sides: Sequence[One], asked: Sequence[list[int]], seed: int) -> list[list[tuple[int, float]]]:
    """Tokens and seconds of each side's answers. They take turns prompt by prompt, so that a machine that becomes
    slower becomes so for all; who is first changes from prompt to prompt."""
    found: list[list[tuple[int, float]]] = [[] for _ in sides]
    for number, prompt in enumerate(asked):
        for i in range(len(sides)):
            side = (i + number + seed) % len(sides)
            found[side].append(sides[side](prompt, seed))
    return found


def typical(made: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Of the answers to the same prompts, made some times or by some engines: each prompt's tokens, and the median of
    their seconds. All of an answer is a few milliseconds, and machines pause."""
    return [(prompt[0][0], statistics.median(s for _, s in prompt)) for prompt in zip(*made, strict=True)]


def tps(made: Sequence[tuple[int, float]]) -> float:
    return sum(n for n, _ in made) / sum(s for _, s in made)


def all_tps(sides: Sequence[One], asked: Sequence[list[int]], seeds: Sequence[int], times: int = TIMES) -> list[float]:
    """Tokens/s of each side over all prompts with all ``seeds``, each answer as long as it mostly takes."""
    made: list[list[tuple[int, float]]] = [[] for _ in sides]
    for seed in seeds:
        turns = [answers(sides, asked, seed) for _ in range(times)]
        for side, again in zip(made, zip(*turns, strict=True), strict=True):
            side.extend(typical(again))
    return [tps(side) for side in made]


def load(draft: str, **options: Any) -> Engine:
    return mlxkv.load(EMBEDDED, cache=False, draft=draft, **options)


def best(sides: dict[str, One], asked: Sequence[list[int]], rounds: int) -> tuple[str, str]:
    """The name of the fastest, measured in turn, and all medians for people."""
    found = [all_tps(list(sides.values()), asked, [turn], 1) for turn in range(rounds + 1)][1:]
    medians = {name: statistics.median(values) for name, values in zip(sides, zip(*found, strict=True), strict=True)}
    return max(medians, key=medians.__getitem__), ", ".join(f"{n} {v:.0f}" for n, v in medians.items())


def tokens(temperature: float, bar: float, pairs: int, step: int) -> Result:
    model, tokenizer = float32(EMBEDDED)
    asked = prompts(tokenizer, step)
    plain = {"mlxkv": load("off"), "compiled": load("off", compile="on")}
    drafting = {f"depth {k}": load("mtp", draft_depth=k) for k in DEPTHS}
    drafting |= {f"depth {k}, compiled": load("mtp", draft_depth=k, compile="on") for k in DEPTHS}
    drafting["adapting"] = load("auto")

    def side(engine: Engine) -> One:
        def one(prompt: list[int], seed: int) -> tuple[int, float]:  # the same seed gives both sides the same text
            return decoded(engine, prompt, temperature=temperature, seed=seed if temperature else None)

        return one

    try:
        sides = {name: side(engine) for name, engine in plain.items()}
        sides["mlx-lm"] = lambda prompt, seed: mlx_lm_decoded(model, tokenizer, prompt, temperature, seed)
        rounds = 1 if pairs == 1 else 3
        fastest, others = best(sides, asked, rounds)
        drafted = {name: side(engine) for name, engine in drafting.items()}
        deepest, depths = best(drafted, asked, rounds)
        both, seeds = [sides[fastest], drafted[deepest]], 2 if temperature else 1
        first = rounds + 1  # other texts than those that the depth was chosen by
        measured = [
            all_tps(both, asked, range(first + seeds * pair, first + seeds * (pair + 1))) for pair in range(pairs + 1)
        ][1:]
        counts = drafting[deepest].status()
    finally:
        for engine in (*plain.values(), *drafting.values()):
            engine.close()
    note = f"tok/s, plain: {others}; drafts: {depths}; compared: {fastest} and {deepest}; {len(asked)} prompts; "
    note += f"{counts.accepted} of {counts.drafted} drafts accepted"
    how = "greedy" if not temperature else f"temperature {temperature}"
    return judge(f"tokens/s with drafts / plain, {how}", [b / a for a, b in measured], Bar(bar), note)


def warm(model: Path, draft: str, compile: Any) -> Engine:
    """Without a store, warmed up as the server does it before it takes requests."""
    engine = mlxkv.load(model, cache=False, draft=draft, compile=compile)
    engine.warm_up()
    return engine


def biased(engine: Engine, prompt: list[int], bias: dict[int, float]) -> tuple[int, float]:
    return decoded(engine, prompt, logit_bias=bias)


def useless(compile: str, pairs: int, step: int, a_side: int) -> Result:
    """Answers of 200 tokens. Two engines of the same kind differ here by several per cent, whatever they were asked, by
    where their buffers came to lie: so a side of a pair is several engines, each in a process of its own; an answer
    takes a side what it takes most of them, the one in which drafts are tried included, for that comes at the same
    prompt in all.

    By a new engine's standards: what was learned in one pair is not known in the next. Where steps are compiled shapes
    are traced when they are met, which is not what is measured: all pairs are of the same engines there, after a first
    one that does not count. So the spread over pairs does not show there how engines differ."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as throughout:
        made = Path(folder) / "random-head"
        shutil.copytree(EMBEDDED, made)
        weights = dict(mx.load(str(made / "model.safetensors")))
        for i, name in enumerate(sorted(n for n in weights if n.startswith("mtp."))):
            old = weights[name]
            weights[name] = (mx.random.normal(old.shape, key=mx.random.key(i)) * 0.3).astype(old.dtype)
        mx.save_safetensors(str(made / "model.safetensors"), weights, metadata={"format": "pt"})
        _, tokenizer = float32(EMBEDDED)
        asked = prompts(tokenizer, step)[:6]
        bias = dict.fromkeys(tokenizer.eos_token_ids, -100.0)
        order = ["off", "auto"] * a_side

        def engines(opened: ExitStack) -> list[Apart]:
            return [opened.enter_context(Apart(warm, made, draft, compile)) for draft in order]

        def side(engine: Apart) -> One:
            return lambda prompt, _: engine.ask(biased, prompt, bias)

        def pair(number: int, engines: list[Apart]) -> tuple[float, float]:
            given = answers([side(engine) for engine in engines], asked, number)
            return tps(typical(given[::2])), tps(typical(given[1::2]))

        def told(engines: list[Apart]) -> list[Any]:
            return [engine.ask(Engine.status) for engine in engines[1::2]]

        measured, seen = [], []
        if compile == "on":
            same = engines(throughout)
            measured = [pair(number, same) for number in range(pairs + 1)]
            seen = told(same)
        else:
            for number in range(pairs + 1):
                with ExitStack() as briefly:
                    new = engines(briefly)
                    measured.append(pair(number, new))
                    seen += told(new)
        measured = measured[1:]
    note = f"medians: plain {statistics.median(a for a, _ in measured):.0f} tok/s, with drafts "
    note += f"{statistics.median(b for _, b in measured):.0f}; {sum(s.accepted for s in seen)} of "
    note += f"{sum(s.drafted for s in seen)} accepted in {sum(s.cycles for s in seen)} cycles, {a_side} engines a side"
    name = "tokens/s with useless drafts / plain" + (", compiled" if compile == "on" else "")
    return judge(name, [b / a for a, b in measured], Bar(0.97), note)


def late(pairs: int, n: int) -> Result:
    """As served: with a store. Each newcomer's prompt is a new one; a side of a pair is the median of a few of them."""
    _, tokenizer = float32(EMBEDDED)
    stream = prompts(tokenizer, 1)[-1]
    bias = dict.fromkeys(tokenizer.eos_token_ids, -100.0)
    asked = {"plain": 0, "drafting": 0}

    def side(name: str, engine: Engine) -> float:
        number = asked[name] = asked[name] + 1
        newcomer = [(i * 7919 + number * 131) % 1900 + 50 for i in range(n)]
        long = engine.submit(
            Request(tokens=stream, sampling=SamplingParams(max_tokens=4096, temperature=0.0, logit_bias=bias))
        )
        made = 0
        for event in long:
            made += isinstance(event, Delta)
            if made >= 40:
                break
        started = time.perf_counter()
        came = engine.submit(Request(tokens=newcomer, sampling=SamplingParams(max_tokens=4, temperature=0.0)))
        seconds = next(time.perf_counter() - started for event in came if isinstance(event, Delta))
        came.result()
        long.cancel()
        for _ in long:
            pass
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        options = [{"cache_dir": Path(folder) / name, "cache_budget": 1 << 30} for name in asked]
        with (
            mlxkv.load(EMBEDDED, draft="off", **options[0]) as plain,
            mlxkv.load(EMBEDDED, **options[1]) as drafting,
        ):

            def some(name: str, engine: Engine) -> float:
                return statistics.median(side(name, engine) for _ in range(COMERS))

            measured = in_turn(pairs, lambda: some("plain", plain), lambda: some("drafting", drafting))
    note = f"medians: without {1000 * statistics.median(a for a, _ in measured):.1f} ms, with "
    note += f"{1000 * statistics.median(b for _, b in measured):.1f} ms"
    name = f"first token of a late request of {n} tokens, drafts / none"
    return judge(name, [b / a for a, b in measured], Bar(1.1, at_most=True), note)


def family(name: str, folder: Path) -> Path:
    """A model of the architecture with random weights, of about the demo model's size."""
    from mlx_lm.models import falcon_h1, lfm2

    common: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0,
    }  # fmt: skip
    if name == "falcon_h1":
        mamba = {"mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 256, "mamba_d_state": 64, "mamba_n_groups": 1,
                 "mamba_n_heads": 4, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0}  # fmt: skip
        return random_model(folder, EMBEDDED, falcon_h1, common | mamba | {"model_type": "falcon_h1"})
    layers = ["conv", "conv", "full_attention", "conv"] * 2
    short = {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 256, "block_ff_dim": 768,
             "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
             "full_attn_idxs": [i for i, kind in enumerate(layers) if kind == "full_attention"]}  # fmt: skip
    return random_model(folder, EMBEDDED, lfm2, common | short | {"model_type": "lfm2"})


def rewind(name: str, model: Path, pairs: int, repeats: int = 30) -> Result:
    """Both sides evaluate all that they leave. The forward that verifies is not counted: it takes the place of plain
    steps."""
    rt, _ = open_runtime(Options(model=model, cache_dir=None, draft="ngram"))
    drafting = rt.drafting
    assert drafting is not None
    state = SequenceState.new(rt.make_cache())
    state.reserve(1024)
    rt.model(mx.array([[(i * 7919) % 1900 + 50 for i in range(128)]], mx.int32), cache=state.caches)
    state.advance(128)
    mx.eval(state.live())
    run = Solo(rt.model, state, lambda rows: 1024, drafting)

    def step() -> float:
        started = time.perf_counter()
        logits = run.forward(mx.array([60], mx.int32), {})
        mx.eval(mx.argmax(logits, axis=-1), run.live())
        return time.perf_counter() - started

    def back() -> float:
        mx.eval(run.verify(mx.array([[60, 61, 62]], mx.int32)), run.live())
        started = time.perf_counter()
        run.commit([1], {})
        mx.eval(run.live())
        return time.perf_counter() - started

    def median_of(one: Callable[[], float]) -> float:
        return statistics.median(one() for _ in range(repeats))

    measured = in_turn(pairs, lambda: median_of(step), lambda: median_of(back))
    note = f"medians: a step {1000 * statistics.median(a for a, _ in measured):.2f} ms, a rewind "
    note += f"{1000 * statistics.median(b for _, b in measured):.2f} ms"
    return judge(f"a rewind / a plain step, {name}", [b / a for a, b in measured], Bar(0.3, at_most=True), note)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_mtp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under two minutes; too few pairs for most bars")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--only", help="run only parts whose name contains this: tokens, useless, late, rewind")
    options = parser.parse_args()
    for name in [n for n in os.environ if n.startswith("MLXKV_") and n != "MLXKV_BLAS"]:
        del os.environ[name]
    pairs, step = (1, 12) if options.quick else (9, 5)
    new, engines = (1, 1) if options.quick else (NEW, ENGINES)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], Result]] = {
            "tokens, greedy": lambda: tokens(0.0, 1.35, pairs, step),
            "tokens, temperature": lambda: tokens(0.7, 1.15, pairs, step),
            "useless": lambda: useless("auto", pairs, step, new),
            "useless, compiled": lambda: useless("on", pairs, step, engines),
            "late, short": lambda: late(pairs, 48),
            "late, long": lambda: late(pairs, 600),
            "rewind, gated delta": lambda: rewind("gated delta rule (demo model)", EMBEDDED, pairs),
            "rewind, Mamba-2": lambda: rewind("Mamba-2", family("falcon_h1", Path(folder) / "f"), pairs),
            "rewind, short convolution": lambda: rewind("short convolution", family("lfm2", Path(folder) / "l"), pairs),
        }
        chosen = [name for name in parts if options.only is None or options.only in name]
        if not chosen:
            parser.error(f"no part is named {options.only}: there are {'; '.join(parts)}")
        for name in chosen:
            print(f"… {name}", file=sys.stderr, flush=True)
            results.append(parts[name]())
            mx.clear_cache()
    return report(results, environment(ROOT), options.json)


if __name__ == "__main__":
    sys.exit(main())
