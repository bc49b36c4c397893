#!/usr/bin/env python3
"""Evaluates a demo-model folder on a held-out set (demo_model/heldout.py, blind.py), prints the gate; no torch."""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from mlxkv import numerics  # noqa: E402

numerics.prepare()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("folder", type=Path)
    p.add_argument("--json", type=Path, help="write every figure and answer here")
    p.add_argument("--only", choices=("near", "far", "json", "tool", "free"), help="one kind of prompt")
    p.add_argument("--set", choices=("heldout", "blind"), default="heldout", help="which held-out set")
    p.add_argument("--show", type=int, default=0, help="print this many wrong answers, and free ones")
    p.add_argument("--check", action="store_true", help="check tokenizer and template instead")
    p.add_argument("--reference", type=Path, help="with --check: PyTorch's logits (tests/models/demo_reference.npz)")
    p.add_argument("--card", action="store_true", help="run both sets and write their figures into the model card")
    args = p.parse_args()
    from demo_model import blind, corpus, evaluation, heldout

    if args.check:
        g = corpus.Grammar(3)
        texts = [g.draw("mix", 256).text for _ in range(290)] + [
            "Café naïve",
            "e\u0301 1234 x  y\n\n z",
            "日本語 🙂",
        ] * 4
        figures: dict[str, float] = {
            "tokenizer": evaluation.check_tokenizer(args.folder, texts),
            "template": evaluation.check_template(args.folder),
        }
        if args.reference:
            figures |= evaluation.check_reference(evaluation.Demo(args.folder), args.reference)
        print(json.dumps(figures))
        return 0 if all(v <= 1e-4 for v in figures.values()) else 1
    if args.card:
        card = args.folder / "README.md"
        both = [evaluation.evaluate(args.folder, cases=s.cases) for s in (heldout, blind)]
        text = card.read_text().split(evaluation.FIGURES)[0] + evaluation.figures(*both)
        card.write_text(text)
        print(text.split(evaluation.FIGURES)[1])
        return 0
    begin = time.monotonic()
    chosen = {"heldout": heldout, "blind": blind}[args.set]
    result = evaluation.evaluate(args.folder, only=args.only, cases=chosen.cases)
    out = result.to_json() if not args.only else {"rates": result.rates, "answers": result.answers}
    wrong = [a for a in result.answers if a["right"] is False]
    for a in (wrong + [a for a in result.answers if a["right"] is None][: args.show])[: 2 * args.show]:
        print(f"  {a['id']}: wanted {a['value']!r}, got {a['answer']!r}")
    if args.only:
        print(json.dumps(out["rates"]))
    else:
        print(f"{'gate':<16}{'bar':>7}{'rate':>9}{'':>4}")
        for key, g in out["gate"].items():
            print(f"{key:<16}{g['bar']:>7.2f}{g['rate']:>9.4f}  {'met' if g['met'] else 'SHORT'}")
        for key, r in out["rates"].items():
            print(f"  {key:<20}{r['rate']:>8.4f}  {r['right']}/{r['of']}")
        print(f"perplexity of held-out prompts {out['perplexity']:.2f}; {time.monotonic() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    return 0 if args.only or all(g["met"] for g in out["gate"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
