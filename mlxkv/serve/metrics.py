"""Prometheus metrics and the log line of a request. The names are those of the field (vLLM's, with ``mlxkv:`` before
them) where they mean the same; every app has a registry of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .gauges import EngineCollector, GapCollector
from .record import LEFT, Outcome, Record

if TYPE_CHECKING:
    from ..decode.engine import Engine

log = logging.getLogger("mlxkv.access")

PREFIX = "mlxkv:"
#: classes of seconds, of tokens per second turned round, and of tokens
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PER_TOKEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

#: requests that are remembered for /v1/status
RECENT = 50


class Metrics:
    """``engines``: what is loaded now, by name; asked at each scrape, on any thread."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]] = dict) -> None:
        self.registry = CollectorRegistry()
        self.http = Counter(
            PREFIX + "http_requests_total",
            "Requests over HTTP, refused ones too. A stream counts when its last byte was sent.",
            ["method", "handler", "status"],
            registry=self.registry,
        )
        self._requests = self._counter(
            "requests_total",
            "Requests for an answer that are over, by status (499: the client left) and the reason of their end.",
            "route",
            "status",
            "finished_reason",
        )
        self._success = self._counter("request_success_total", "Answers that were given whole.", "finished_reason")
        self._prompt = self._counter("prompt_tokens_total", "Prompt tokens of all choices, restored ones too.")
        self._generated = self._counter("generation_tokens_total", "Tokens that were sampled.")
        self._stored = self._counter("prefix_cache_stored_tokens_total", "Tokens handed to the prefix store.")
        self._queries = self._counter("prefix_cache_queries_total", "Prompt tokens that the store was asked for.")
        self._hits = self._counter("prefix_cache_hits_total", "Prompt tokens restored, by slowest tier used.", "tier")
        self._lookups = self._counter(
            "prefix_cache_lookups_total", "Prompts looked up, by the slowest tier used (none: nothing found).", "tier"
        )
        self._misses = self._counter(
            "prefix_cache_misses_total", "Prompts of which not all but the last token was restored, and why.", "reason"
        )
        self._missed = self._counter("prefix_cache_missed_tokens_total", "Their tokens not restored, by why.", "reason")
        self._drafted = self._counter("spec_decode_num_draft_tokens_total", "Tokens that were proposed.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens_total", "Those that were kept.")
        self._ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token.", _SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", "From the request to the queue's end.", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Reading what was not restored.", _SECONDS)
        self._restore = self._histogram("request_restore_time_seconds", "Looking up and restoring.", _SECONDS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first, by request.", _PER_TOKEN
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the request to its last byte.", _SECONDS)
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._gaps = GapCollector(PREFIX)
        self.registry.register(self._gaps)
        self.registry.register(EngineCollector(PREFIX, engines))
        #: the requests that ended last
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self._lock = threading.Lock()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)

    def observe(self, record: Record, model: str) -> None:
        """A request is over: one log line, without a word of what was said, and the counters. ``model``: its name in
        the registry, "" for one that is not there: what anybody may make up is no label. Any thread."""
        level = logging.INFO if record.status < 500 else logging.WARNING
        log.log(level, "%s", record.line(), extra={"request": record.to_json()})
        finish = record.finish
        self.recent.append(record)
        self._requests.labels(model, record.route, str(record.status), finish).inc()
        if record.status == 200 and record.error is None:
            self._success.labels(model, finish).inc()
            self._e2e.labels(model).observe(record.seconds)
        if record.queued_s is not None:
            self._queued.labels(model).observe(record.queued_s)
        with self._lock:
            for outcome in record.outcomes:
                self._outcome(model, outcome)
            for gaps in record.gaps:
                self._gaps.add(model, gaps)

    def _outcome(self, model: str, o: Outcome) -> None:
        self._prompt.labels(model).inc(o.prompt_tokens)
        self._generated.labels(model).inc(o.completion_tokens)
        self._stored.labels(model).inc(o.stored_tokens)
        self._prompts.labels(model).observe(o.prompt_tokens)
        self._answers.labels(model).observe(o.completion_tokens)
        if o.miss_reason != "off":
            self._queries.labels(model).inc(o.prompt_tokens)
            self._lookups.labels(model, o.source).inc()
            self._hits.labels(model, o.source).inc(o.cached_tokens)
            self._restore.labels(model).observe(o.lookup_s + o.restore_s)
        if o.miss_reason is not None:
            self._misses.labels(model, o.miss_reason).inc()
            self._missed.labels(model, o.miss_reason).inc(o.prompt_tokens - o.cached_tokens)
        self._drafted.labels(model).inc(o.drafted)
        self._accepted.labels(model).inc(o.accepted)
        if o.completion_tokens:
            self._ttft.labels(model).observe(o.ttft_s)
            self._prefill.labels(model).observe(o.prefill_s)
        if o.completion_tokens > 1 and o.tps > 0:
            self._tpot.labels(model).observe(1 / o.tps)

    def totals(self) -> dict[str, Any]:
        """Since the server was started, of all models: for /v1/status."""
        return {
            "requests": _sums(self._requests, "finished_reason"),
            "prompt_tokens": _sum(self._prompt),
            "cached_tokens": _sum(self._hits),
            "generated_tokens": _sum(self._generated),
            "hit_tokens": _sums(self._hits, "tier"),
            "lookups": _sums(self._lookups, "tier"),
            "misses": _sums(self._misses, "reason"),
            "missed_tokens": _sums(self._missed, "reason"),
            "drafted": _sum(self._drafted),
            "accepted": _sum(self._accepted),
        }

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) for a scraper that accepts ``accept``: Prometheus' text or OpenMetrics."""
        encode, kind = choose_encoder(accept)
        return encode(_Plain(self.registry)), kind  # type: ignore[arg-type]


def _sums(counter: Counter, label: str) -> dict[str, int]:
    """What a counter stands at, by one of its labels."""
    sums: dict[str, int] = {}
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                sums[sample.labels[label]] = sums.get(sample.labels[label], 0) + int(sample.value)
    return sums


def _sum(counter: Counter) -> int:
    return sum(_sums(counter, "model_name").values())


class _Plain:
    """A registry without the times at which its counters were made, which double the text and nobody reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class CountHttp:
    """Counts every request that reaches the server by method, route and status, the refused ones too."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            # the router notes the route that matched; a path of somebody's own making is no label
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.http.labels(method, handler, str(status)).inc()


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
