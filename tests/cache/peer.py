"""A remote connector for tests: it holds the records of a folder in memory, and can be made to lie."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlxkv.cache.connectors import Delivery, Question, Remote
from mlxkv.cache.hits import NOTHING, Offer
from mlxkv.cache.planner import Plan, Planner
from mlxkv.cache.ram import Draft, Ram
from mlxkv.cache.record import Body, Reader

PATIENCE = 20.0


class Peer(Remote):
    """``capable``: it restores states where rows reach further. ``told``: the questions it was asked; ``brought``: the
    (start, end, kind) of what it has delivered, ``ended``: the requests that want no more. ``spoil`` may change what is
    delivered. While ``gate`` is set it does not answer, whatever the time."""

    source = "object"

    def __init__(self, folder: Path, capable: bool = True) -> None:
        self.ram, self.capable = Ram(1 << 40), capable
        self.told: list[Question] = []
        self.ended: list[int] = []
        self.brought: set[tuple[int, int, str]] = set()
        self.closed = False
        self.spoil: Callable[[Delivery], Delivery] = lambda delivery: delivery
        self.answer: Callable[[Offer | None], Offer | None] = lambda offer: offer
        self.gate: threading.Event | None = None
        self._plans: dict[int, Plan] = {}
        for path in sorted((folder / "records").rglob("*.safetensors")):
            with Reader.open(path) as reader:
                arrays = {name: (dtype, reader.read(name)) for name, (dtype, *_) in reader.tensors.items()}
                self.ram.put(Draft(reader.meta, {reader.meta.kind: Body(arrays, dict(reader.sums))}, ()))

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self.capable

    def ask(self, question: Question) -> Offer | None:
        self.told.append(question)
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)
        plan = Planner(self.ram, question.space, question.layout).plan(list(question.tokens), question.limit)
        self._plans[question.request] = plan
        offer = NOTHING
        if plan.position > question.asked:
            offer = Offer(plan.position - question.asked)
        elif plan.position > question.common:
            offer = Offer(stands=plan.position)
        return self.answer(offer)

    def load(self, question: Question, offer: Offer) -> Delivery:
        plan, drafts = self._plans[question.request], []
        spans = [s for m in question.layout.members if m.record == "window" for s in m.needs(plan.position)]
        leaf = plan.position - plan.position % question.space.block  # whose rows are not those of a full block
        wanted = [(p.entry.key, "rows") for p in plan.pieces if p.end > min(question.asked, leaf)]
        wanted += [(p.entry.key, "window") for p in plan.pieces if any(p.start < b and a < p.end for a, b in spans)]
        if plan.state is not None:
            wanted.append((plan.state.key, "state"))
        for key in dict.fromkeys(key for key, _ in wanted):
            bodies = {}
            for kind in (kind for k, kind in wanted if k == key):
                reader = self.ram.open(key, kind)
                assert reader is not None
                meta, bodies[kind] = reader.meta, reader.body
                self.brought.add((meta.start, meta.end, kind))
            needs = (meta.parent, *([meta.base] if meta.base else []), *(() if "rows" in bodies else [key]))
            drafts.append(Draft(replace(meta, kind=""), bodies, needs))
        return self.spoil(Delivery(drafts))

    def end(self, question: Question) -> None:
        self.ended.append(question.request)

    def close(self, timeout: float) -> None:
        self.closed = True
