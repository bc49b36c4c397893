#!/usr/bin/env python3
"""Measures what --store-bits gives and costs: the weight of rows, and how far logits move after a restore.

Each prompt is run cold, stored, and asked again from disk; the logits after its last token are compared, and the greedy
text of 24 tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from mlxkv import numerics  # noqa: E402

numerics.prepare()

import numpy as np  # noqa: E402

from mlxkv.cache.record import Reader  # noqa: E402
from mlxkv.config import EMBEDDED  # noqa: E402
from mlxkv.decode.options import Options  # noqa: E402
from mlxkv.decode.request import Request, SamplingParams  # noqa: E402
from mlxkv.decode.runtime import Runtime, open_runtime  # noqa: E402
from tests.probe import Probe  # noqa: E402

NAMES = ["Ruby", "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jack", "Kate"]


def conversations(lines: int) -> list[list[dict[str, Any]]]:
    """Questions about what was said before, behind so many ``lines`` of other things."""
    who = [(NAMES[i % 12], 7 * i % 13, NAMES[(i * 5 + 1) % 12]) for i in range(lines)]
    ledger = [f"Entry {i}: {seller} sold {n} apples to {buyer}." for i, (seller, n, buyer) in enumerate(who)]
    out = []
    for name in NAMES:
        first = "\n".join([*ledger, f"My name is {name}. I live in a small house and I like apples."])
        said = [("user", first), ("assistant", f"Hello {name}."), ("user", "What is my name?")]
        out.append([{"role": role, "content": text} for role, text in said])
        first = "\n".join([*ledger, f"{name} likes bread. Tom likes milk. The cat of {name} is black."])
        said = [("user", first), ("assistant", "I will remember that."), ("user", f"What does {name} like?")]
        out.append([{"role": role, "content": text} for role, text in said])
    return out


def ask(rt: Runtime, messages: list[dict[str, Any]], *, use_cache: bool = True, keep: bool = True) -> Probe:
    request = Request(messages=messages, sampling=SamplingParams(max_tokens=24), use_cache=use_cache)
    made = Probe(rt, request, lambda event: None, lambda: False, time.monotonic())
    made.keep = keep
    made.completion = made.run()
    return made


def weigh(folder: Path) -> tuple[int, int]:
    """Bytes of rows: the tensors, and the files."""
    tensors = files = 0
    for path in folder.rglob("*.rows.safetensors"):
        files += path.stat().st_size
        with Reader.open(path) as reader:
            tensors += sum(b - a for _, _, a, b in reader.tensors.values())
    return tensors, files


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", type=Path, default=EMBEDDED)
    p.add_argument("--lines", type=int, default=0, help="lines before each question")
    p.add_argument("--prompts", type=int, default=24)
    args = p.parse_args()
    print(f"{args.model.name}, {numerics.current().device}, numerics {numerics.mode()}")
    exact = (0, 0)
    for bits in (None, 8, 4):
        with tempfile.TemporaryDirectory() as where:
            folder = Path(where) / "cache"
            rt = open_runtime(Options(model=args.model, cache_dir=folder, ram_budget=0, store_bits=bits))[0]
            store = rt.store
            assert store is not None and rt.layout is not None
            moved: list[float] = []
            top = same = tokens = 0
            asked = conversations(args.lines)[: args.prompts]
            for messages in asked:
                cold = ask(rt, messages, use_cache=False)
                ask(rt, messages)
                assert store.writer.flush(60)
                restored = ask(rt, messages, keep=False)
                usage = restored.completion.usage
                assert usage.cached_tokens == usage.prompt_tokens - 1
                tokens += usage.prompt_tokens
                moved.append(float(np.abs(restored.logits - cold.logits).max() / np.abs(cold.logits).max()))
                top += int(restored.logits.argmax() == cold.logits.argmax())
                same += restored.completion.token_ids == cold.completion.token_ids
            store.close()
            weight = weigh(folder)
        exact = weight if bits is None else exact
        n = len(asked)
        print(
            f"{bits or 'off':>3}: rows {weight[0] / exact[0]:.3f} (files {weight[1] / exact[1]:.3f}); "
            f"logits moved by {np.median(moved):.2g} of the largest (median), {max(moved):.2g} (most); "
            f"likeliest token the same {top}/{n}, text the same {same}/{n}; {tokens // n} tokens a prompt",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
