"""What is read at each scrape: the engines as they are now, and the gaps between tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .record import GAP_BOUNDS, Gaps

if TYPE_CHECKING:
    from ..decode.engine import Engine


class GapCollector(Collector):
    """Seconds between the tokens of an answer, by model, added up from what each request counted itself."""

    def __init__(self, prefix: str) -> None:
        self._name = prefix + "inter_token_latency_seconds"
        self._models: dict[str, Gaps] = {}
        self._lock = threading.Lock()

    def add(self, model: str, gaps: Gaps) -> None:
        with self._lock:
            sums = self._models.setdefault(model, Gaps())
            sums.counts = [a + b for a, b in zip(sums.counts, gaps.counts, strict=True)]
            sums.total += gaps.total

    def describe(self) -> list[Metric]:
        return [self._family()]

    def _family(self) -> HistogramMetricFamily:
        text = "Gaps between the tokens of one answer as they reach the server."
        return HistogramMetricFamily(self._name, text, labels=["model_name"])

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        with self._lock:
            for model, sums in self._models.items():
                upto, buckets = 0, []
                for bound, count in zip((*map(str, map(float, GAP_BOUNDS)), "+Inf"), sums.counts, strict=True):
                    upto += count
                    buckets.append((bound, upto))
                family.add_metric([model], buckets, sums.total)
        yield family


class EngineCollector(Collector):
    """``engines``: what is loaded now, by name. An engine says what it published after its latest turn, so that a step
    that hangs holds nobody up."""

    def __init__(self, prefix: str, engines: Callable[[], Mapping[str, Engine]]) -> None:
        self._prefix, self._engines = prefix, engines

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        made: dict[str, Metric] = {}
        model = ""

        def put(kind: type[Metric], name: str, text: str, value: float, **labels: str) -> None:
            name = self._prefix + name
            names = ["model_name", *labels]
            if name not in made:
                made[name] = kind(name, text, labels=names)  # type: ignore[call-arg]
            made[name].add_metric([model, *labels.values()], value)  # type: ignore[attr-defined]

        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for name, engine in sorted(self._engines().items()):
            model = name
            now, healthy = engine.status(), engine.health().ok
            put(gauge, "engine_healthy", "1 while the engine takes requests, else 0.", float(healthy))
            put(gauge, "num_requests_running", "Requests that were admitted and have not ended.", now.active)
            put(gauge, "num_requests_waiting", "Requests that were not.", now.waiting + now.queued)
            states = ("running", "prefilling", "restoring", "waiting", "queued")
            text = "Requests by what is done for them: decoding, reading the prompt, restoring, waiting, not looked at."
            for state in states:
                put(gauge, "num_requests", text, getattr(now, state), state=state)
            for entry, size in now.memory.items():
                put(gauge, "memory_bytes", "Bytes that the engine holds, by what for.", size, entry=entry)
            put(gauge, "reserved_bytes", "Bytes charged to requests that have not ended.", now.reserved_bytes)
            put(gauge, "reserved_rows", "Rows that their caches have room for.", now.reserved_rows)
            put(gauge, "states_waiting", "Captured states that wait for the writer.", now.pool_used)
            put(counter, "decode_steps", "Decoding steps.", now.steps)
            put(counter, "decode_step_seconds", "Seconds spent on them.", now.step_s)
            put(counter, "compiled_functions", "Functions compiled.", now.traces)
            put(counter, "spec_decode_num_drafts", "Steps that verified drafts.", now.cycles)
            put(gauge, "spec_decode_depth", "Drafts of a row in the latest step.", now.depth)
            for move, times in now.handoffs.items():
                before, after = move.split(" > ")
                text = "How often the stream that speculates went from one state of the handoff to another."
                put(counter, "handoffs", text, times, before=before, after=after)
            if (store := now.store) is not None:
                for tier, size in store.read_bytes.items():
                    text = "Bytes of records read for restores and verified, by tier."
                    put(counter, "prefix_cache_read_bytes", text, size, tier=tier)
                text = "Bytes of records written: what was new, and what merging the pieces of blocks wrote again."
                put(counter, "prefix_cache_written_bytes", text, store.written_bytes, what="new")
                put(counter, "prefix_cache_written_bytes", text, store.merged_bytes, what="merged")
                put(counter, "prefix_cache_evicted_bytes", "Bytes given up to make room.", store.evicted_bytes)
                put(counter, "prefix_cache_evicted_records", "Records given up to make room.", store.evicted_records)
                put(counter, "prefix_cache_refused_bytes", "Bytes that the writer did not take.", store.refused_bytes)
                put(counter, "prefix_cache_dropped_groups", "Groups that were not stored.", store.dropped_groups)
                for reason, times in store.faults.items():
                    put(counter, "prefix_cache_faults", "Damage and failures of the store.", times, reason=reason)
                put(gauge, "prefix_cache_waiting_bytes", "Bytes that wait to be written.", store.waiting_bytes)
                if (objects := store.objects) is not None:
                    text = "1 if the object store answered when it was last asked, else 0."
                    put(gauge, "prefix_cache_objects_answer", text, float(objects.answers))
                    put(counter, "prefix_cache_objects_asked", "Requests that looked there.", objects.asked)
                    put(counter, "prefix_cache_objects_served", "Requests that got something.", objects.served)
                    put(counter, "prefix_cache_objects_sent_bytes", "Bytes sent there.", objects.uploaded_bytes)
                    put(counter, "prefix_cache_objects_sent_records", "Records sent there.", objects.uploaded_records)
                    text = "Attempts to send that failed."
                    put(counter, "prefix_cache_objects_send_faults", text, objects.upload_faults)
                    put(gauge, "prefix_cache_objects_waiting", "Entries that wait to be sent.", objects.waiting)
                    for reason, times in objects.faults.items():
                        text = "Look-ups and downloads that failed."
                        put(counter, "prefix_cache_objects_faults", text, times, reason=reason)
                put(gauge, "prefix_cache_ram_bytes", "Bytes of records that RAM holds.", store.ram_bytes)
                put(gauge, "prefix_cache_ram_budget_bytes", "Bytes that it may hold now.", store.ram_budget)
                if store.budget is not None:
                    put(gauge, "prefix_cache_budget_bytes", "Bytes that the folder may weigh.", store.budget)
                writes = float(store.stopped is None)
                put(gauge, "prefix_cache_writing", "1 while the store writes, 0 where it has stopped.", writes)
            put(gauge, "memory_limit_bytes", "Bytes that the engine may take.", now.memory_limit)
        yield from made.values()
