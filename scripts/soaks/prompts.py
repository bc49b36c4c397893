"""Prompt caches that mlx-lm saves, of every architecture, in the forms of several versions: imported they give the
logits of cold runs; with another prompt, or damaged where the proof looks, they are refused."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlxkv.cache.legacy.header import HostileFile
from mlxkv.cache.legacy.prompt_members import fit
from mlxkv.cache.legacy.reasons import Refused
from tests import tiny
from tests.architectures import MORE_INEXACT
from tests.cache.legacy.prompt_files import Saved, imported, prefilled, write_older
from tests.cache.test_equality import INEXACT as SUITE_INEXACT
from tests.probe import run

ARCHS = (*tiny.ARCHS, *tiny.MORE_ARCHS)
INEXACT = SUITE_INEXACT | MORE_INEXACT
VERSIONS = ("0.18", "0.19.2", "0.24.0", "0.28.1", "0.31.0", "now")


@dataclass
class Prompts:
    """``codes``: what right prompts were refused for (older forms cannot hold everything), ``damage``: what became of
    flipped bits, ``unseen`` those in what nothing computes again. ``wrong`` must stay empty."""

    files: int = 0
    imported: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    wrong_prompts: int = 0
    damage: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def prompts(folder: Path, rng: random.Random, seconds: float) -> Prompts:
    count, until = Prompts(), time.monotonic() + seconds
    made: dict[str, Saved] = {}
    while count.files < len(ARCHS) or time.monotonic() < until:
        arch = ARCHS[count.files % len(ARCHS)]
        if arch not in made:
            made[arch] = Saved(tiny.make(arch, folder / arch), folder / f"home-{arch}")
        _one(made[arch], arch, rng, count)
        count.files += 1
    return count


def _one(saved: Saved, arch: str, rng: random.Random, count: Prompts) -> None:
    tokens = tiny.ids(rng.randint(3, 60), rng.randrange(10**6))
    caches = prefilled(saved.plain, tokens, step=rng.choice((4, 7, 16, 512)))
    version = rng.choice((*VERSIONS, "now", "now"))
    what = f"{arch} {version} n={len(tokens)}"
    path = saved.home / "file.safetensors"
    saved.home.mkdir(exist_ok=True)
    try:
        saved.save(path, caches) if version == "now" else write_older(path, caches, version)
    except (AttributeError, ValueError, RuntimeError, TypeError):
        return  # that version could not write such a cache
    home = saved.home / "store"
    shutil.rmtree(home, ignore_errors=True)
    with saved.store(home) as rt:
        layout = rt.layout
        assert layout is not None
        rows = any(m.kind == "growing" for m in layout.members)
        other = list(tokens)
        other[rng.randrange(len(other))] = rng.randrange(300)
        if other != tokens:
            count.wrong_prompts += 1
            if rows and imported(rt, path, other).imported.files:
                count.wrong.append(f"{what}: another prompt was taken: {other}")
        report = imported(rt, path, tokens, trust_prompt=not rows)
        for code in report.refused:
            count.codes[f"{version} {code}"] = count.codes.get(f"{version} {code}", 0) + 1
            if version == "now" and code != "NO_PROOF":
                count.wrong.append(f"{what}: {report.refused}")
        asked = tokens + tiny.ids(rng.randint(1, 12), rng.randrange(10**6))
        logits, completion = run(rt, asked, keep=False)
        cold, _ = run(rt, asked, use_cache=False)
        difference = float(np.abs(logits - cold).max() / np.abs(cold).max())
        count.worst[arch] = max(count.worst.get(arch, 0.0), difference)
        cached = completion.usage.cached_tokens
        count.imported += report.imported.files
        # the table is for cuts at message ends; mlx-lm was cut every few tokens here, the cold run elsewhere
        if difference > 2 * INEXACT.get(arch, (0.0, ""))[0] or cached != len(tokens) * report.imported.files:
            count.wrong.append(f"{what}: cached {cached}, {difference:.1e} off")
    _damage(saved, path, tokens, rng, count, what)


def _damage(saved: Saved, path: Path, tokens: list[int], rng: random.Random, count: Prompts, what: str) -> None:
    """Flip one bit, or cut the file: refused, or where nothing computes that again, taken."""
    data = bytearray(path.read_bytes())
    assert saved.rt.layout is not None
    try:
        with HostileFile.open(path, ordered=False) as file:
            contents = fit(file, saved.rt.layout)
            held = next(
                (m.held for m in contents.members if m.spec.record != "state" and m.holds(0, len(tokens))), None
            )
            start = file.data_start
            proven = [(file.tensors[n].start, file.tensors[n].shape) for n in held.arrays.values()] if held else []
    except Refused:
        return
    places = [(a, s) for a, s in proven if s[3]]
    kind = rng.choice(("cut", "anywhere", "proven"))
    if kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "proven" and places:
        a, (_, heads, rows, width) = rng.choice(places)
        row = rng.randrange(heads) * rows + rng.randrange(len(tokens))
        data[start + a + 4 * (row * width + rng.randrange(width)) + 3] ^= 0x40  # the exponent: far off, or not finite
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with saved.store() as rt:
        taken = imported(rt, path, tokens, dry_run=True).imported.files
    if taken and (kind == "cut" or (kind == "proven" and places)):
        count.wrong.append(f"{what}: damage ({kind}) was taken")
    result = f"{kind}: {'unseen' if taken else 'refused'}"
    count.damage[result] = count.damage.get(result, 0) + 1
