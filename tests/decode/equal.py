"""A round of random requests, all at once: each must get what it gets alone, and the store must keep what one alone
would have kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlxkv.decode.request import Completion, Delta, Request
from mlxkv.decode.runtime import Runtime
from tests import tiny
from tests.architectures import DRAFTS_INEXACT, MORE_INEXACT
from tests.cache.test_equality import INEXACT as SUITE_INEXACT
from tests.decode.kept import compare, kept
from tests.decode.many import Alone, Outcome, Planned, ask, changed, drive, load, schedule, with_caches, wrong_with
from tests.decode.scripted import Scripted, drafted_by
from tests.decode.stories import Stories
from tests.decode.witness import Witness, witnessed

INEXACT = SUITE_INEXACT | MORE_INEXACT
#: where sums depend on how a prompt was cut, states may differ by as much more than logits do
DEEPER = 2.0
#: state kinds that no tiny architecture has: a llama's two layers with other cache objects
KINDS: dict[str, Callable[[], list[Any]]] = {
    "keeps its first rows": lambda: [RotatingKVCache(12, keep=3) for _ in range(2)],
    "keeps its first rows, beside all rows": lambda: [RotatingKVCache(12, keep=3), KVCache()],
    "quantised": lambda: [QuantizedKVCache(group_size=32, bits=8) for _ in range(2)],
    "quantised beside plain rows": lambda: [KVCache(), QuantizedKVCache(group_size=32, bits=4)],
    "concatenated": lambda: [ConcatenateKVCache() for _ in range(2)],
}


def of_kind(kind: str, folder: Path) -> dict[str, Any]:
    """What ``measure`` needs for caches of this kind. mlx-lm's prefill hides first rows that are kept once the window
    has wrapped, unless a forward has one token: what a prompt gives depends on its cuts. So those prompts end before
    the window does; their answers go on."""
    layers = (
        {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]} if "beside all" in kind else {}
    )
    model = tiny.make("llama", folder, **layers)
    return {"model": model, "make_cache": KINDS[kind], "short": 11 if "first rows" in kind else None}


@dataclass
class Report:
    """``together``: the most requests that were between their first and their last token at the same time. ``cycles``:
    after which it was looked where rows stand, and states that were ``compared`` then. ``wrong`` must stay empty."""

    asked: int = 0
    given_up: int = 0
    restored: int = 0
    together: int = 0
    records: int = 0
    shared: float = 0.0
    worst: float = 0.0
    cycles: int = 0
    compared: int = 0
    wrong: list[str] = field(default_factory=list)


def bound_of(arch: str) -> float:
    return INEXACT.get(arch, (0.0, ""))[0]


def drafts_bound_of(arch: str) -> float:
    """As ``bound_of``, where drafts are verified."""
    return max(bound_of(arch), DRAFTS_INEXACT.get(arch, (0.0, ""))[0])


def measure(
    model: Path,
    folder: Path,
    rng: random.Random,
    *,
    requests: int = 12,
    bound: float = 0.0,
    make_cache: Callable[[], list[Any]] | None = None,
    short: int | None = None,
    drafter: Scripted | None = None,
    ladder: int | None = None,
    thin: bool = False,
    **options: Any,
) -> Report:
    """``bound``: how far logits of this model may be off after other cuts; ``make_cache``: other caches than the
    model's own; ``short``: tokens of the longest prompt; ``drafter``: drafts for the engine that has them all, where
    its ``options`` say that something drafts; ``ladder``: the first rung, where states of answers are kept;
    ``thin``: not without a store too, and nothing is asked again."""
    found, witness = Report(), Witness(random.Random(requests), bound * DEEPER)
    step = 1 + (options.get("draft_depth") or 8)
    with with_caches(make_cache):
        alone = Alone(model)
        try:
            asked = Stories(rng, alone, *((short, 0) if short else ())).take(requests)
            if drafter is not None:
                drafter.learn([[*(each.tokens or []), *alone(each).token_ids] for each in asked])
            for cache_dir in (None, folder / "many")[thin:]:
                plan = schedule(rng, asked, cancelled=0.4)
                with (
                    changed(runtimes(ladder, drafter)),
                    witnessed(witness),
                    load(model, cache_dir, **options) as engine,
                ):
                    outcomes = drive(engine, plan)
                where = "without a store" if cache_dir is None else "with a store"
                judge(found, where, plan, outcomes, [alone(each) for each in asked], bound, step)
            many = kept(folder / "many")
            if not (thin or short):
                with load(model, folder / "many", draft="off") as engine:
                    for each in asked[::2]:
                        again(found, each, alone, lambda request: engine.submit(request).result())
            with changed(runtimes(ladder)), load(model, folder / "one", prefill_chunk=None, draft="off") as engine:
                for each in asked:
                    engine.submit(each).result()
            compared = compare(many, kept(folder / "one"), bound * DEEPER)
        finally:
            alone.close()
    found.wrong += [*compared.wrong, *witness.wrong]
    found.records, found.worst = compared.both, max(compared.worst, witness.worst)
    found.cycles, found.compared = witness.cycles, witness.compared
    found.shared = compared.both / max(1, compared.either)
    return found


def runtimes(ladder: int | None, drafter: Scripted | None = None) -> Callable[[Runtime], Runtime]:
    """What is made of an engine's runtime."""

    def change(rt: Runtime) -> Runtime:
        if drafter is not None:
            rt = drafted_by(drafter)(rt)
        return rt if ladder is None else replace(rt, ladder=ladder)

    return change


def judge(
    found: Report,
    where: str,
    plan: Sequence[Planned],
    outcomes: Sequence[Outcome],
    alone: Sequence[Completion],
    bound: float,
    step: int = 1,
) -> None:
    for number, (planned, outcome, right) in enumerate(zip(plan, outcomes, alone, strict=True)):
        found.asked += 1
        if (done := outcome.completion) is not None:
            found.given_up += done.finish_reason == "cancelled"
            found.restored += done.usage.cached_tokens > 0
        for what in wrong_with(planned, outcome, right, bound, step):
            found.wrong.append(f"{where}, request {number} of {len(planned.request.tokens or [])} tokens: {what}")
    found.together = max(found.together, overlap(outcomes))


def again(found: Report, request: Request, alone: Alone, answer: Callable[[Request], Completion]) -> None:
    """What was asked and answered stands in the store: going on from there gives what a cold run gives."""
    prompt, said = request.tokens or [], alone(request).token_ids
    longer = ask([*prompt, *said, 3])
    got, right = answer(longer), alone(longer)
    found.asked += 1
    found.restored += got.usage.cached_tokens > 0
    if (got.token_ids, got.text) != (right.token_ids, right.text):
        found.wrong.append(
            f"asked again with {got.usage.cached_tokens} of {len(prompt)} + {len(said)} tokens from the store: "
            f"{got.token_ids}, alone {right.token_ids}"
        )


def overlap(outcomes: Sequence[Outcome]) -> int:
    spans = []
    for outcome in outcomes:
        at = [n for event, n in zip(outcome.events, outcome.at, strict=True) if isinstance(event, Delta)]
        if len(at) > 1:
            spans.append((at[0], at[-1]))
    return max((sum(a <= at <= b for a, b in spans) for at, _ in spans), default=0)
