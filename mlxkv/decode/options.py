"""What an engine is configured with, and what it says about itself. Plain values, no MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..cache.objects.url import check_url
from ..cache.tensors import check_store_bits
from ..errors import ConfigError

#: what may draft
DRAFTS = ("auto", "mtp", "ngram", "model", "off")
#: drafts of a cycle at most
MOST_DRAFTS = 8


@dataclass(frozen=True)
class Options:
    """Settings of one engine; ``Engine`` documents them. Raises ConfigError for what cannot work."""

    model: str | Path
    dtype: str = "auto"
    adapter: str | Path | None = None
    cache_dir: Path | None = None
    cache_budget: int | None = None
    store_bits: int | None = None
    block_size: int = 256
    prefill_chunk: int | None = None
    split: str = "auto"
    max_gap_ms: float | None = None
    max_rows: int = 16
    compile: Literal["auto", "on", "off"] = "auto"
    draft: Literal["auto", "mtp", "ngram", "model", "off"] = "auto"
    draft_model: str | Path | None = None
    draft_depth: int | None = None
    ring_spare: int = 8
    async_kv_limit: int = 0
    wired: int | None = None
    allow_unprotected: bool = False
    ram_budget: int | None = None
    write_budget: int | None = None
    legacy_dirs: tuple[Path, ...] = ()
    object_store: str | None = None
    object_timeout: float = 5.0
    object_secret: str | None = field(default=None, repr=False)
    memory_limit: int | None = None
    progress: Callable[[str, int, int], None] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 65536:
            raise ConfigError(f"The block size is {self.block_size}.", "It must be from 1 to 65536 tokens.")
        check_store_bits(self.store_bits)
        if min(self.ram_budget or 0, self.write_budget or 0) < 0:
            raise ConfigError("A budget is negative.", "Give bytes, or 0 for off.")
        if self.memory_limit is not None and self.memory_limit < 1:
            raise ConfigError(f"The memory limit is {self.memory_limit} bytes.", "It must be at least 1.")
        if self.prefill_chunk is not None and not 1 <= self.prefill_chunk <= 65536:
            raise ConfigError(f"The prefill chunk is {self.prefill_chunk}.", "It must be from 1 to 65536 tokens.")
        if self.split not in ("always", "auto", "never"):
            raise ConfigError(f"The setting of split is {self.split!r}.", "It must be always, auto or never.")
        if self.max_gap_ms is not None and not 1 <= self.max_gap_ms <= 600_000:
            raise ConfigError(f"The gap between tokens is {self.max_gap_ms} ms.", "It must be from 1 to 600,000 ms.")
        if not 1 <= self.max_rows <= 256:
            raise ConfigError(f"The number of rows is {self.max_rows}.", "It must be from 1 to 256.")
        if self.compile not in ("auto", "on", "off"):
            raise ConfigError(f"The setting of compile is {self.compile!r}.", "It must be auto, on or off.")
        if self.object_store is not None:
            check_url(self.object_store)
        if not 0 < self.object_timeout <= 3600:
            raise ConfigError(
                f"The object store's time is {self.object_timeout} seconds.", "It must be more than 0, at most 3600."
            )
        self._check_drafts()

    def _check_drafts(self) -> None:
        if self.draft not in DRAFTS:
            raise ConfigError(f"The setting of draft is {self.draft!r}.", f"It must be {', '.join(DRAFTS)}.")
        if self.draft == "model" and self.draft_model is None:
            raise ConfigError("A draft model is to be used, and none was named.", "Name one with --draft-model.")
        if self.draft_depth is not None and not 1 <= self.draft_depth <= MOST_DRAFTS:
            raise ConfigError(
                f"The depth of drafts is {self.draft_depth}.",
                f"It must be from 1 to {MOST_DRAFTS} tokens; without it the depth adapts, and --draft off is for none.",
            )
        if not 1 <= self.ring_spare <= 256:
            raise ConfigError(f"The spare room of rings is {self.ring_spare}.", "It must be from 1 to 256 rows.")


@dataclass(frozen=True)
class EngineInfo:
    """What is loaded. ``store_off`` says why nothing is kept, None if the prefix store is on; ``disk_off`` why nothing
    is kept on disk, though in RAM, None if it is; ``reads_disk``: what is on disk is served. ``layout`` names the state
    kinds of the model, for instance ``6 recurrent, 2 growing``. load_s in seconds, context_length in tokens.
    ``object_store``: the URL of the store that is shared, None where there is none.
    ``drafter``: what drafts, None where nothing does (``drafts_off`` says why); ``drafts``: at most so many a cycle."""

    name: str
    path: Path
    context_length: int | None
    dtype: str
    device: str
    numerics: str
    blas: str
    load_s: float
    layout: str
    store_off: str | None
    cache_dir: Path | None
    disk_off: str | None = None
    reads_disk: bool = True
    notes: tuple[str, ...] = ()
    object_store: str | None = None
    drafter: str | None = None
    drafts: int = 0
    drafts_off: str | None = None
