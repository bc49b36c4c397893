"""The runtime: a loaded, probed model with its prefix store. Belongs to the thread that opens it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .. import numerics

numerics.prepare()  # before mlx is imported

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from ..cache.head import HeadCache  # noqa: E402
from ..cache.inside import obstacle  # noqa: E402
from ..cache.keys import Identity  # noqa: E402
from ..cache.layout import Layout, probe  # noqa: E402
from ..cache.legacy.omlx_keys import our_names  # noqa: E402
from ..cache.legacy.tier import LegacyTier  # noqa: E402
from ..cache.objects.shared import share  # noqa: E402
from ..cache.objects.tier import ObjectTier  # noqa: E402
from ..cache.policy import LADDER, Policy  # noqa: E402
from ..cache.ring import with_rings  # noqa: E402
from ..cache.store import PrefixStore  # noqa: E402
from ..cache.unwritten import UnwrittenStore, open_store  # noqa: E402
from ..errors import ConfigError, MlxkvError  # noqa: E402
from ..models import load  # noqa: E402
from ..models.mtp import WithHead  # noqa: E402
from ..models.spans import Spans, install  # noqa: E402
from .drafting import Drafting, prepare  # noqa: E402
from .grammar import Grammars  # noqa: E402
from .memory import Memory, physical, recommended, weigh  # noqa: E402
from .options import EngineInfo, Options  # noqa: E402
from .prompt import build  # noqa: E402
from .request import Request  # noqa: E402
from .reservation import lookahead  # noqa: E402
from .segments import Split  # noqa: E402

log = logging.getLogger("mlxkv.engine")


@dataclass(frozen=True)
class Runtime:
    """What a generation needs. ``layout`` is None for a model whose state has no known kinds; ``store`` is None when
    nothing is kept. ``memory`` is the guard over what weights, live caches and the store's
    RAM tier take together. ``chunk`` and ``ladder`` (its
    first rung) in tokens, ``async_kv_limit`` in bytes. ``barrier`` returns once the device has finished everything
    that this thread submitted, and raises its error otherwise."""

    model: Any
    tokenizer: Any
    make_cache: Callable[[], list[Any]]
    layout: Layout | None
    store: PrefixStore | None
    eos: set[int]
    vocab_size: int
    context_length: int | None
    chunk: int
    async_kv_limit: int
    load_s: float
    memory: Memory
    grammars: Grammars
    #: the layout of its caches as they run, however they are stored; None where it is unknown
    live: Layout | None = None
    device: str = "cpu"
    #: where forwards are split; announces those that are not
    split: Split = field(default_factory=Split)
    spans: Spans = field(default_factory=Spans)
    #: None where nothing drafts
    drafting: Drafting | None = None
    ladder: int = LADDER
    barrier: Callable[[], None] = mx.synchronize

    @property
    def lookahead(self) -> int:
        """Rows that a cycle may need past those of what a request can have."""
        return 0 if self.drafting is None else lookahead(self.drafting.drafter.name, self.drafting.most)


def open_runtime(options: Options) -> tuple[Runtime, EngineInfo]:
    """Load the model, probe its layout, open the store. Raises ModelError, ConfigError."""
    started = time.monotonic()
    _prepare_device(options.wired)
    loaded = load(options.model, dtype=options.dtype, adapter=options.adapter, memo_dir=options.cache_dir)
    now = numerics.current()
    warming = threading.Thread(target=_first_prompt, args=(loaded.tokenizer, loaded.eos_token_ids), daemon=True)
    warming.start()

    model: Any = loaded.model
    drafts = options.draft != "off"
    # a head's rows are worth making only where they are kept, or used
    headed = None
    if loaded.head is not None and (options.cache_dir is not None or options.draft in ("auto", "mtp")):
        headed = WithHead(loaded.model, loaded.head)

    def fresh(spare: int) -> list[Any]:
        caches = with_rings(make_prompt_cache(loaded.model), spare)
        return caches if headed is None else [*caches, HeadCache(headed.runner(), joint=headed.head.n_layers == 1)]

    make_cache = partial(fresh, options.ring_spare if drafts else 0)
    spans = Spans()
    if drafts or options.split != "always":
        spans, done = install(loaded.model)
        log.debug("layers that run by sub-spans, or write a journal: %s", ", ".join(done) or "none")
    drafting, drafts_off = prepare(options, loaded, headed, make_cache, spans)
    if drafting is None:
        make_cache = partial(fresh, 0)
        if options.cache_dir is None:
            headed = None

    layout: Layout | None = None
    live: Layout | None = None
    store: PrefixStore | None = None
    off = None if options.cache_dir is not None else "it was switched off"
    tier: ObjectTier | None = None
    if options.object_store is not None and options.cache_dir is not None:  # what cannot work is told before loading
        tier = ObjectTier(
            options.object_store, options.block_size, options.object_secret, seconds=options.object_timeout
        )
    disk_off: str | None = None
    try:
        layout = live = probe(headed or model, make_cache)
    except MlxkvError as e:  # unknown cache class, unstable shapes: the model runs, nothing is kept
        off = e.message
        headed = None
    more = drafting.models if drafting is not None else []
    weights = weigh(loaded.model, *([loaded.head] if loaded.head is not None else []), *more)
    spare = options.ring_spare if drafting is not None else None
    memory = Memory(options.memory_limit or recommended(), weights, live, spare=spare)
    memory.check_limit()
    if drafting is not None:
        drafting.charge_to(memory)
    notes = list(loaded.notes)
    if layout is not None and options.cache_dir is not None and options.store_bits is not None:
        layout = layout.packed(options.store_bits)
        if layout.store_bits is None:
            notes.append(
                "store_bits changes nothing here: no layer of this model keeps rows that can be stored quantised "
                "(plain keys and values in floating numbers, of a width that 32 divides)."
            )
    if layout is not None and options.cache_dir is not None:
        head = "mtp" if headed else "none"
        ram = ram_budget(options.ram_budget, layout, loaded.context_length, options.block_size)
        policy = Policy() if options.write_budget is None else Policy(daily=options.write_budget)
        compute = {**now.identity(), "dtype": loaded.dtype, "dequantised": str(loaded.dequantised), "head": head}
        store, refused = open_store(
            options.cache_dir,
            Identity(loaded.fingerprint, tuple(sorted(compute.items())), layout.digest, loaded.name),
            layout,
            block=options.block_size,
            budget=options.cache_budget,
            ram_budget=ram,
            policy=policy,
            allow_unprotected=options.allow_unprotected,
            software=f"mlx {now.mlx_version}, BLAS {now.blas}",
            progress=partial(options.progress, "rebuilding the cache index") if options.progress else None,
        )
        if refused is not None:
            disk_off = str(refused)
            off = disk_off if store is None else None
            log.warning("nothing is kept on disk: %s", refused)
    if store is not None and options.legacy_dirs:
        store.legacy = LegacyTier(options.legacy_dirs, our_names(loaded.name, loaded.path))
    if store is not None:
        memory.share(store.ram)
        if tier is not None:
            share(store, tier)
    if options.object_store is not None and (store is None or tier is None):
        notes.append(f"The object store is not used: the prefix store is off ({off or disk_off}).")
    split = Split()
    if layout is not None:
        split = _split(options.split, now.device, headed or model, make_cache, layout, spans)
    warming.join()
    load_s = time.monotonic() - started
    info = EngineInfo(
        name=loaded.name,
        path=loaded.path,
        context_length=loaded.context_length,
        dtype=loaded.dtype,
        device=now.device,
        numerics=now.mode,
        blas=now.blas,
        load_s=load_s,
        layout=layout.describe() if layout is not None else "unknown",
        store_off=off,
        disk_off=disk_off,
        reads_disk=store is not None and (not isinstance(store, UnwrittenStore) or store.reads),
        cache_dir=options.cache_dir,
        notes=tuple(notes),
        object_store=options.object_store if store is not None else None,
        drafter=drafting.drafter.name if drafting is not None else None,
        drafts=drafting.most if drafting is not None else 0,
        drafts_off=drafts_off,
    )
    runtime = Runtime(
        model=headed or model,
        tokenizer=loaded.tokenizer,
        make_cache=make_cache,
        layout=layout,
        store=store,
        eos=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        chunk=options.prefill_chunk or (512 if now.device == "cpu" else 2048),
        async_kv_limit=options.async_kv_limit,
        load_s=load_s,
        memory=memory,
        live=live,
        device=now.device,
        grammars=Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids),
        split=split,
        spans=spans,
        drafting=drafting,
        ladder=-(-LADDER // options.block_size) * options.block_size,
    )
    return runtime, info


def _first_prompt(tokenizer: Any, eos: set[int]) -> None:
    """Compile the chat template and have the tokenizer make what it makes at first use, beside the probe of the layout
    and the opening of the store: or the first request would wait for it."""
    with contextlib.suppress(Exception):  # what is wrong with a template, a request is told
        build(Request(messages=[{"role": "user", "content": "a"}]), tokenizer, eos, lambda ids, text: None)


def _split(
    setting: str, device: str, model: Any, make_cache: Callable[[], list[Any]], layout: Layout, spans: Spans
) -> Split:
    """Where this model's forwards are split, whose layers have their form without a split."""
    split = Split.by(setting, device, layout)
    if not split.near or layout.growing_only:
        return Split()
    if reason := obstacle(model, make_cache, layout, spans.inside):
        log.info("every boundary splits the forward: %s", reason)
        return Split()
    return split


def ram_budget(wanted: int | None, layout: Layout, context: int | None, block: int) -> int:
    """Bytes of records to keep in RAM. ``wanted`` must hold one full sequence (of ``context`` tokens, or one block
    where no context is known) with a state, or be 0. Raises ConfigError. None: 1/16 of memory, at most 2 GiB, which may
    be less: what does not fit is read from disk."""
    if wanted is None:
        return min(physical() // 16, 2 << 30)
    tokens = context or block
    need = sum(t.nbytes(tokens) for kind in ("rows", "window", "state") for t in layout.tensors(kind))
    if 0 < wanted < need:
        raise ConfigError(
            f"The RAM budget of {wanted:,} bytes does not hold one full sequence: {tokens:,} tokens of this model need "
            f"{need:,} bytes.",
            "Give ram_budget at least that, 0 to keep nothing in RAM, or leave it out for a part of memory.",
        )
    return wanted


def _prepare_device(wired: int | None) -> None:
    if not mx.metal.is_available():
        return
    working_set = int(mx.device_info().get("max_recommended_working_set_size", 0))
    mx.set_cache_limit(max(1 << 30, working_set // 20))
    if wired is not None:
        log.warning("wiring %d bytes: a raised wired limit has made machines panic", wired)
        mx.set_wired_limit(wired)
