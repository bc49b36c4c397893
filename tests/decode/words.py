"""Conversations that differ in one word, all at once, in a folder and a RAM tier that hold a part of them: each answer
has its own word and nobody else's. The model in the box was trained to recall such words."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxkv.cache.store import stats
from mlxkv.config import EMBEDDED
from mlxkv.decode.request import Request, SamplingParams
from tests.decode.many import Alone, Planned, drive, load

ROOT = Path(__file__).parents[2]
if str(ROOT / "scripts") not in sys.path:
    sys.path.insert(0, str(ROOT / "scripts"))

from demo_model.evaluation import said  # noqa: E402
from demo_model.heldout import CODES, FILLERS  # noqa: E402

#: tokens of context, so that a small RAM tier holds a sequence
CONTEXT = 512
#: bytes: a part of what 16 of the shorter conversations leave in RAM, and more of it on disk
RAM, BUDGET = 4 << 20, 10 << 20
BLOCK = 16


@dataclass
class Report:
    """Answers; how many of them resumed on something from disk, stood on everything but the last token, and had lost
    what was stored for them; bytes written in all and at the end. ``wrong`` must stay empty."""

    answers: int = 0
    from_disk: int = 0
    whole: int = 0
    lost: int = 0
    written: int = 0
    kept: int = 0
    wrong: list[str] = field(default_factory=list)


def short_model(folder: Path) -> Path:
    """The model in the box, with a context of ``CONTEXT`` tokens."""
    folder.mkdir(parents=True)
    for file in EMBEDDED.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config: dict[str, Any] = json.loads((EMBEDDED / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def conversation(word: str, before: int, after: int) -> list[dict[str, str]]:
    """``word`` is told between small talk that all share; then it is asked for."""
    turns = [*FILLERS[:before], (f"The code word is {word}.", "OK."), *FILLERS[before : before + after]]
    said = [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn, strict=True)]
    return [*said, {"role": "user", "content": "What is the code word?"}]


ROLES = ("user", "assistant")


def request(word: str, before: int, after: int) -> Request:
    return Request(messages=conversation(word, before, after), sampling=SamplingParams(max_tokens=14))


def measure(
    folder: Path,
    rng: random.Random,
    *,
    rounds: int = 2,
    before: int = 2,
    after: int = 1,
    words: Sequence[str] = CODES[:16],
    compared: int = 4,
) -> Report:
    """``rounds`` of all words at once, in changing order. ``compared``: so many of the answers are compared
    with what the question gets alone, too."""
    found, model = Report(), short_model(folder / "model")
    alone = Alone(model)
    right = {word: alone(request(word, before, after)) for word in rng.sample(list(words), compared)}
    alone.close()
    order = list(words)
    with load(
        model, folder / "cache", block_size=BLOCK, prefill_chunk=64, ram_budget=RAM, cache_budget=BUDGET
    ) as engine:
        for turn in range(rounds):
            # at every other time the newest first: of those, something is left
            order = rng.sample(list(words), len(words)) if turn % 2 == 0 else order[::-1]
            outcomes = drive(engine, [Planned(request(word, before, after)) for word in order])
            for word, outcome in zip(order, outcomes, strict=True):
                if (done := outcome.completion) is None:
                    found.wrong.append(f"round {turn}, {word}: {outcome.error!r}")
                    continue
                found.answers += 1
                whole = done.usage.cached_tokens == done.usage.prompt_tokens - 1
                found.from_disk += done.cache.source == "ssd"
                found.whole += whole
                found.lost += turn > 0 and not whole
                heard = [each for each in words if said(each, done.text)]
                if heard != [word]:
                    found.wrong.append(f"round {turn}, {word}: {done.text!r} after {done.usage.cached_tokens} cached")
                if word in right and done.token_ids != right[word].token_ids:
                    found.wrong.append(f"round {turn}, {word}: {done.text!r}, alone {right[word].text!r}")
    left = stats(folder / "cache")
    found.written, found.kept = left["written_today"], left["bytes"]
    if found.kept > BUDGET:
        found.wrong.append(f"the folder weighs {found.kept} bytes of {BUDGET}")
    return found
