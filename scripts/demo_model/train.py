"""Training of the demo model: two single-threaded processes that average gradients, checkpoints, resume.

Loss: cross entropy + 0.3 first draft + 0.2 second draft (the head fed its own output). The rate follows a cosine over
the planned active minutes; time in which the process was stopped does not count.
"""

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer

from . import corpus, data, tokenizer
from .model import DemoModel, text_config

START = 0.10  # part of the plan that is copying and short recall only
DRAFTS, ALL_DRAFTS = 0.12, 0.6  # from here on half of the rows, then all rows train the MTP head
LAST = 0.9  # from here on rows are long


def log(*parts: object) -> None:
    print(time.strftime("%H:%M:%S"), *parts, flush=True)


def losses(model: DemoModel, ids: torch.Tensor, w: torch.Tensor, mtp: int, bf16: bool) -> dict[str, torch.Tensor]:
    """Weighted losses and hit rates of one batch; the first ``mtp`` rows train the head; "loss" is minimised."""
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
    with cast:
        hidden = model.hidden(ids)
        flat_w, target = w[:, 1:].reshape(-1), ids[:, 1:].reshape(-1)
        logits = model.logits(hidden[:, :-1].flatten(0, 1)).float()
        drafts = model.drafts(ids[:mtp], hidden[:mtp]) if mtp else []
    norm = flat_w.sum().clamp(min=1)
    ce = (F.cross_entropy(logits, target, reduction="none") * flat_w).sum() / norm
    out = {"loss": ce, "ce": ce.detach()}
    with torch.no_grad():
        guess = logits.argmax(-1)
        value = flat_w >= corpus.VALUE
        out["value"] = (guess == target)[value].float().mean() if value.any() else torch.tensor(0.0)
        main = (flat_w >= 0.5).view(ids.shape[0], -1)
        guess = guess.view(ids.shape[0], -1)
    if mtp:
        ids, w, guess, main = ids[:mtp], w[:mtp], guess[:mtp], main[:mtp]
    ok = torch.ones_like(guess, dtype=torch.bool)
    for k, m in enumerate(drafts):  # m[:, i] predicts ids[i + 2 + k]; guess[:, j] predicts ids[j + 1]
        use = w[:, 2 + k :] >= 0.5
        with cast:
            lg = model.logits(m[:, : use.shape[1]][use]).float()
        part = F.cross_entropy(lg, ids[:, 2 + k :][use]) if len(lg) else logits.sum() * 0
        out[f"mtp{k + 1}"] = part.detach()
        out["loss"] = out["loss"] + (0.3, 0.2)[k] * part
        with torch.no_grad():
            same = torch.zeros_like(use)
            same[use] = lg.argmax(-1) == guess[:, 1 + k :][use]
            given = use & main[:, 1 + k :] & ok[:, : use.shape[1]]
            out[f"acc{k + 1}"] = same[given].float().mean() if given.any() else torch.tensor(0.0)
            ok = same if k == 0 else ok
    return out


def optimizers(model: DemoModel, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
    named = [(n, p) for n, p in model.named_parameters()]
    matrix = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    other = [p for n, p in named if not (p.ndim == 2 and "embed" not in n)]
    if not muon:
        groups = [{"params": matrix, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)]
    return [
        torch.optim.Muon(matrix, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Trainer:
    """One process of the training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank = args, args.rank
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        self.out = Path(args.out).expanduser()
        self.tok = Tokenizer.from_file(str(self.out / "tokenizer.json"))
        self.model = DemoModel(text_config(args.hidden, args.intermediate, args.layers))
        self.opts = optimizers(self.model, args.lr, args.muon)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.step, self.tokens, self.active, self.origin = 0, 0, 0.0, 0.0
        self.stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        if args.procs > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{args.meet}",
                rank=self.rank,
                world_size=args.procs,
                timeout=timedelta(days=2),
            )
        if args.resume:
            self.load(self.out / "checkpoint.pt")
        elif args.start:
            from .export import read_folder

            weights, _, made = read_folder(Path(args.start).expanduser())
            self.model.load_state_dict(weights)
            self.step, self.tokens = made["step"], made["tokens"]

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        for opt, kept in zip(self.opts, state["opts"], strict=True):
            opt.load_state_dict(kept)
        self.step, self.tokens, self.active = state["step"], state["tokens"], state["active"]
        self.origin = self.active if self.args.replan else state["origin"]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "opts": [o.state_dict() for o in self.opts],
            "step": self.step,
            "tokens": self.tokens,
            "active": self.active,
            "origin": self.origin,
            "sizes": (self.args.hidden, self.args.intermediate, self.args.layers),
        }
        tmp = self.out / "checkpoint.tmp"
        torch.save(state, tmp)
        os.replace(tmp, self.out / "checkpoint.pt")

    def plan(self, done: float) -> tuple[str, int]:
        """Stage and row length at ``done`` (0 to 1) of the plan; every process draws the same."""
        p = random.Random(self.args.seed * 7919 + self.step).random()
        if done < START and not self.args.replan:
            return "start", 128
        if done > self.args.long_from:
            return "mix", 1024 if p < 0.6 else 512
        return "mix", 1024 if p < 0.25 else 256

    def rate(self, done: float) -> float:
        warm = min(1.0, (self.step + 1) / 60) if not self.args.replan else min(1.0, done / 0.02 + 0.1)
        return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))) * self.args.lr

    def average(self) -> None:
        if self.args.procs == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.params]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= self.args.procs
        at = 0
        for p, g in zip(self.params, grads, strict=True):
            p.grad = flat[at : at + g.numel()].view_as(g)
            at += g.numel()

    def control(self) -> tuple[float, bool]:
        """Progress and stop flag of process 0."""
        done = (self.active - self.origin) / (self.args.minutes * 60)
        state = torch.tensor([done, float(self.stopping or done >= 1), self.active], dtype=torch.float64)
        if self.args.procs > 1:
            dist.broadcast(state, 0)
        self.active = float(state[2])
        return float(state[0]), bool(state[1])

    def run(self) -> None:
        a = self.args
        seen: dict[str, list[float]] = {}
        last_log = last_save = last_probe = time.monotonic()
        logged_tokens, busy = self.tokens, 0.0
        while True:
            begin = time.monotonic()
            done, stop = self.control()
            if stop or (a.steps and self.step >= a.steps):
                break
            stage, length = self.plan(done)
            rows = max(1, a.batch_tokens // length)
            ids, w = data.batch(self.tok, hash((a.seed, self.rank, self.step)) & 0xFFFFFFFF, stage, length, rows)
            late = done > ALL_DRAFTS or a.replan
            heads = rows if late else (rows + 1) // 2 if done > DRAFTS else 0
            out = losses(self.model, ids, w, heads, a.bf16)
            out["loss"].backward()
            self.average()
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            lr = self.rate(done)
            for opt in self.opts:
                for group in opt.param_groups:
                    group["lr"] = lr
                opt.step()
                opt.zero_grad(set_to_none=True)
            self.step += 1
            self.tokens += ids.numel() * a.procs
            now = time.monotonic()
            self.active += min(now - begin, 20.0)
            busy += min(now - begin, 20.0)
            for k, v in out.items():
                seen.setdefault(k, []).append(float(v.detach()))
            if self.rank:
                continue
            if now - last_log > a.log_s:
                text = " ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in seen.items())
                speed = (self.tokens - logged_tokens) / max(busy, 1e-9)
                log(f"step {self.step} {done:.1%} {self.tokens / 1e6:.2f}M tok {speed:.0f} tok/s lr {lr:.2e} {text}")
                seen, last_log, logged_tokens, busy = {}, now, self.tokens, 0.0
            if now - last_save > 180:
                self.save()
                last_save = now
            if now - last_probe > a.probe_s:
                self.probe()
                last_probe = now
        if self.rank == 0:
            self.save()
            self.probe()
            log(f"ended at step {self.step}, {self.tokens / 1e6:.2f}M tokens, {self.active / 60:.1f} active minutes")
        if a.procs > 1:
            dist.barrier()

    @torch.no_grad()
    def probe(self) -> None:
        """Copying and acceptance on fresh grammar text (never the held-out set), near and far."""
        for length, rows in ((256, 16), (1024, 4)):
            ids, w = data.batch(self.tok, 987654321, "mix", length, rows)
            out = losses(self.model, ids, w, rows, self.args.bf16)
            log(f"probe {length}:", " ".join(f"{k} {float(v):.3f}" for k, v in out.items()))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Trains the demo model, or exports a checkpoint (--export).")
    p.add_argument("--out", default="~/.local/share/mlxkv-train", help="folder of checkpoints, outside the repository")
    p.add_argument("--minutes", type=float, default=70, help="active minutes that the rate is planned for")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    p.add_argument("--replan", action="store_true", help="with --resume: a new plan of --minutes from here")
    p.add_argument("--start", help="begin from the weights of an exported folder (the committed ones), with a new plan")
    p.add_argument("--procs", type=int, default=2)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--batch-tokens", type=int, default=2048, help="tokens per process and step")
    p.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--intermediate", type=int, default=384)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--long-from", type=float, default=LAST, help="part of the plan from which on rows are long")
    p.add_argument("--steps", type=int, default=0, help="stop at this step (for trials)")
    p.add_argument("--log-s", type=float, default=20)
    p.add_argument("--probe-s", type=float, default=600)
    p.add_argument("--export", help="write the newest checkpoint of --out as a Hugging Face folder here, and stop")
    p.add_argument("--reference", type=Path, help="with --export: write logits of a fixed text to this .npz file")
    p.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--meet", default="", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.export:
        from .export import export

        export(Path(args.out).expanduser() / "checkpoint.pt", Path(args.export).expanduser(), args.reference)
        return 0
    out = Path(args.out).expanduser().resolve()
    if Path(__file__).resolve().parents[2] in (out, *out.parents):
        p.error("--out must lie outside the repository")
    if args.start:
        from .export import read_folder

        if args.resume:
            p.error("--start begins anew; it does not go with --resume")
        args.replan = True
        args.hidden, args.intermediate, args.layers = read_folder(Path(args.start).expanduser())[1]
    children = []
    if args.rank == 0:
        if args.start and (out / "checkpoint.pt").exists():
            p.error(f"{out} has a checkpoint already: --resume it, or name another --out")
        out.mkdir(parents=True, exist_ok=True)
        if found := corpus.check_heldout():
            print("held-out text in the training grammar:", *found, sep="\n  ", file=sys.stderr)
            return 1
        if args.start:
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(Path(args.start).expanduser() / name, out / name)
        if not (out / "tokenizer.json").exists():
            grammar = corpus.Grammar(args.seed)
            docs = [grammar.draw("mix", n) for n in (256, 256, 256, 1024) for _ in range(2500)]
            tokenizer.save(tokenizer.train(d.text for d in docs), out)
        if args.procs > 1:
            args.meet = str(out / f"meet-{uuid.uuid4().hex}")
            command = [sys.executable, sys.argv[0], *(sys.argv[1:] if argv is None else argv), "--meet", args.meet]
            for rank in range(1, args.procs):
                children.append(subprocess.Popen([*command, "--rank", str(rank)]))
    Trainer(args).run()
    for child in children:
        child.wait()
    if args.meet and args.rank == 0:
        Path(args.meet).unlink(missing_ok=True)
    return 0
