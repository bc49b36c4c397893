"""The memory of one engine: one ledger of what is held, one limit, and who gives way.

    entry      what                                                     where
    weights    the model, and whatever else stays as long as it does    device
    caches     live sequences and batches, at their full capacity       device
    joins      what a join or a wider batch makes beside the old one    device
    snapshots  captured states in the pool                              device
    restores   caches that are being filled from the store              device
    queue      prompts that wait                                        host
    ram        the store's RAM tier, what waits for the writer too      host, counted by ``Ram``

An entry is charged to an *owner* (any hashable tag: a request, a batch) before the bytes are allocated, and released
with it. Nothing latches: what fits is computed anew from the ledger and the last ``measure()`` each time it is asked.
The RAM tier gives way before a request waits, and has its budget back when others end. What a forward needs besides is
measured, not charged, and counts as ``other``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..cache.batch.head_rows import SPARE as HEAD_SPARE
from ..cache.head import HEAD_BEHIND
from ..cache.layout import Layout, MemberSpec
from ..cache.ram import Ram
from ..cache.ring import spare_bytes
from ..errors import ConfigError, RequestTooLarge
from .pressure import NORMAL, admits, ram_allowed, read_level
from .reservation import GRANULE, chunked_peak, ring_peak

log = logging.getLogger("mlxkv.engine")

DEVICE = ("weights", "caches", "joins", "snapshots", "restores")
#: what may be charged
ENTRIES = (*DEVICE, "queue")
#: what a running request holds
RUNNING = ("caches", "joins", "restores")
#: bytes that a token of a waiting prompt takes
TOKEN_BYTES = 4

Shape = tuple[int, int]


def physical() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def recommended() -> int:
    """Bytes that an engine may take on this machine: on a Mac the working set that Metal recommends, else three
    quarters of memory."""
    if mx.metal.is_available():
        return int(mx.device_info().get("max_recommended_working_set_size", 0)) or physical() * 3 // 4
    return physical() * 3 // 4


def weigh(*models: nn.Module) -> int:
    """Bytes of their parameters; those that several have count once."""
    pairs: Any = tree_flatten([model.parameters() for model in models])
    arrays = {id(array): array for _, array in pairs}
    return sum(array.nbytes for array in arrays.values())


def member_rows(member: MemberSpec, rows: int, chunk: int = 1) -> int:
    """The most rows that a member ever holds in a sequence with room for ``rows``, read in chunks of ``chunk``."""
    if member.kind == "window":
        return ring_peak(rows, member.keep + (member.window or 0), chunk)
    if member.kind == "chunked":
        return chunked_peak(rows, member.window or 0, chunk)
    if member.kind == "latents":  # its ring and a dummy row, what was in it before the last forward, and that one's
        return 2 * ((member.window or 0) + 2) + chunk
    return rows


def member_bytes(member: MemberSpec, rows: int, chunk: int = 1) -> int:
    """Bytes of a member in such a sequence: what growing and recurrent ones allocate, the most that others do."""
    # hidden states wait for the head, so many at most
    times = min(rows, max(chunk, HEAD_BEHIND)) if member.kind == "hidden" else 1
    if member.kind == "pending":  # as of "latents"; a ring without spare rows is as long as what is stored of it
        return sum(t.nbytes(0) * (2 * (t.shape[2] + 1) + chunk) // t.shape[2] for t in member.tensors)
    return times * sum(t.nbytes(member_rows(member, rows, chunk)) for t in member.tensors)


def batch_row_bytes(member: MemberSpec, capacity: int) -> int:
    """Bytes that one slot of a batch has of a member; windows never grow there."""
    if member.kind == "window":
        return sum(t.nbytes(min(member.keep + (member.window or 0), capacity)) for t in member.tensors)
    # of compressed attention, each with a row more that nobody reads
    if member.kind == "latents":
        return sum(t.nbytes((member.window or 0) + 2) for t in member.tensors)
    if member.kind == "pending":
        return sum(t.nbytes(0) + t.nbytes(0) // t.shape[2] for t in member.tensors)
    if member.kind == "entries":
        return sum(t.nbytes(capacity + t.per) for t in member.tensors)
    return member_bytes(member, capacity + HEAD_SPARE if member.kind == "head" else capacity)


def live_bytes(layout: Layout, rows: int, chunk: int = 1) -> int:
    """Bytes of the caches of a sequence that has room for ``rows`` rows and is read in chunks of ``chunk``."""
    return sum(member_bytes(m, rows, chunk) for m in layout.members)


def cycle_bytes(layout: Layout, spare: int) -> int:
    """Bytes that a sequence, or a slot of a batch, takes besides where drafts are verified: rings' ``spare`` rows, and
    the recurrent state before a forward, until it is known what of that is kept."""
    return spare_bytes(layout, spare) + sum(member_bytes(m, 1) for m in layout.members if m.kind == "recurrent")


def give_back() -> None:
    """Give host memory that was freed back to the system: an allocator keeps what lies between what is still used. For
    an idle moment; does nothing where the C library has no such call."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS; of all zones, as much as can be
        library.malloc_zone_pressure_relief(ctypes.c_void_p(None), ctypes.c_size_t(0))


@dataclass(frozen=True)
class Room:
    """What ``Memory.room`` says, in bytes. fits: there is room now. ever: there would be if nothing else ran. free:
    what there is now, RAM emptied as far as it can be. limit: of all that is counted."""

    fits: bool
    ever: bool
    need: int
    free: int
    limit: int


def measured_on_device() -> tuple[int, int]:
    """Bytes of all live arrays of this process, and of buffers that MLX keeps for reuse."""
    return mx.get_active_memory(), mx.get_cache_memory()


class Memory:
    """The guard over the ledger. Any thread may charge, release and ask; ``measure`` belongs to the engine's."""

    def __init__(
        self,
        limit: int,
        weights: int,
        live: Layout | None,
        ram: Ram | None = None,
        *,
        spare: int | None = None,
        device: Callable[[], tuple[int, int]] = measured_on_device,
        pressure: Callable[[], int] = read_level,
    ) -> None:
        """``limit``: bytes for all that is counted; ``weights``: bytes of the model; ``live``: the layout of its caches
        as they run, however they are stored, None where it is unknown; ``ram``: the tier that gives way. ``spare``:
        rows that rings have for drafts, None where nothing is drafted. ``device`` and ``pressure`` are what ``measure``
        reads."""
        self.limit, self.live, self.ram = limit, live, ram
        #: of each sequence, and each slot of a batch
        self.cycle_bytes = cycle_bytes(live, spare) if live is not None and spare is not None else 0
        self._device, self._pressure = device, pressure
        self._held: dict[tuple[str, Hashable], int] = {}
        self._sums: dict[str, int] = dict.fromkeys(ENTRIES, 0)
        self._other = 0
        self._level = NORMAL
        self._lock = threading.RLock()
        self.charge("weights", "model", weights)

    def share(self, ram: Ram) -> None:
        """From now on ``ram`` is what gives way."""
        self.ram = ram
        self._give_way()

    # what is held

    def charge(self, name: str, owner: Hashable, nbytes: int) -> None:
        """``owner`` holds ``nbytes`` under ``name`` from now on, in place of what it held there; RAM gives way. Raises
        ValueError for a name that is not in ENTRIES or fewer than 0 bytes."""
        if name not in self._sums or nbytes < 0:
            raise ValueError(f"{name!r} cannot be charged with {nbytes} bytes; entries are {', '.join(ENTRIES)}")
        with self._lock:
            self._sums[name] += nbytes - self._held.pop((name, owner), 0)
            if nbytes:
                self._held[name, owner] = nbytes
        self._give_way()

    def release(self, owner: Hashable, name: str | None = None) -> int:
        """``owner`` holds nothing any more (under ``name``, if given). Gives back how many bytes that were: 0 the
        second time."""
        freed = 0
        with self._lock:
            for entry in ENTRIES if name is None else (name,):
                gone = self._held.pop((entry, owner), 0)
                self._sums[entry] -= gone
                freed += gone
            if not self.reserved:
                self._other = 0  # nobody's activations: RAM does not wait for the next measurement
        self._give_way()
        return freed

    def move(self, owner: Hashable, name: str, to: str) -> None:
        """What ``owner`` holds under ``name`` is held under ``to`` from now on: a restore that is done, for one."""
        with self._lock:
            nbytes = self._held.pop((name, owner), 0)
            self._sums[name] -= nbytes
            self.charge(to, owner, self._held.get((to, owner), 0) + nbytes)

    def held_by(self, owner: Hashable) -> int:
        """Bytes that are charged to ``owner``."""
        with self._lock:
            return sum(self._held.get((name, owner), 0) for name in ENTRIES)

    @property
    def weights(self) -> int:
        return self._sums["weights"]

    @property
    def reserved(self) -> int:
        """Bytes charged besides weights: 0 when nothing runs or waits."""
        return sum(self._sums.values()) - self.weights

    @property
    def other(self) -> int:
        """Bytes on the device that nobody was charged for, when last measured: activations, other engines."""
        return self._other

    @property
    def level(self) -> int:
        """The memory-pressure level when last measured: 1, on a Mac 2 or 4 too."""
        return self._level

    def ledger(self) -> dict[str, int]:
        """All entries in bytes, ``ram`` among them."""
        with self._lock:
            return self._sums | {"ram": self.ram.nbytes if self.ram is not None else 0}

    def check_integrity(self, alive: Iterable[Hashable] | None = None) -> None:
        """Raises AssertionError where sums and owners disagree, or where an owner that is not ``alive`` (and not the
        model) still holds something."""
        with self._lock:
            for name, total in self._sums.items():
                held = sum(n for (entry, _), n in self._held.items() if entry == name)
                if held != total:
                    raise AssertionError(f"{name} stands at {total} bytes, its owners hold {held}")
            if alive is not None:
                known = {*alive, "model"}
                lost = {f"{name} of {owner!r}": n for (name, owner), n in self._held.items() if owner not in known}
                if lost:
                    raise AssertionError(f"memory was not released: {lost}")

    # what fits

    def room(self, need: int, owner: Hashable | None = None) -> Room:
        """Whether ``need`` bytes more fit. RAM counts with what it cannot give up: what waits for the writer. While
        nothing runs, whatever would ever fit does, so that no request waits for nobody; under critical memory pressure
        nothing does. ``owner``: runs already and needs so much more than it holds. What it holds is no reason to wait,
        and pressure does not end what runs."""
        with self._lock:
            own = {name: self._held.get((name, owner), 0) for name in ENTRIES} if owner is not None else {}
            ever = self.weights + sum(own.values()) + need <= self.limit
            pinned = self.ram.pinned if self.ram is not None else 0
            free = self.limit - sum(self._sums.values()) - self._other - pinned
            alone = all(self._sums[name] == own.get(name, 0) for name in RUNNING)
            may = owner is not None or admits(self._level)
            return Room(may and (need <= free or (alone and ever)), ever, need, max(0, free), self.limit)

    def check_limit(self) -> None:
        """Raises ConfigError where not even the shortest request would fit beside the model."""
        need = self.sequence_bytes(GRANULE)
        if not self.room(need).ever:
            raise ConfigError(
                f"The memory limit of {self.limit:,} bytes does not hold the model and one short request: "
                f"{self.weights:,} and {need:,} bytes.",
                "Raise --memory-limit or take a smaller model.",
            )

    def too_large(self, room: Room, rows: int, param: str = "max_tokens") -> RequestTooLarge:
        """The error for a request that needs room for ``rows`` tokens and can never have it."""
        return RequestTooLarge(
            f"The request needs {room.need:,} bytes of memory for {rows:,} tokens; the limit of {room.limit:,} leaves "
            f"{max(0, room.limit - self.weights):,} beside the model.",
            "Ask for fewer tokens (max_tokens), shorten the prompt, or raise --memory-limit.",
            param=param,
        )

    def measure(self) -> None:
        """Look at the device and the system, once a step and while requests wait: buffers kept for reuse go first if
        all of it is over the limit, then RAM gives way."""
        active, spare = self._device()
        with self._lock:
            if (level := self._pressure()) != self._level:
                log.warning("memory pressure level %d (was %d)", level, self._level)
            self._level = level
            charged = sum(self._sums[name] for name in DEVICE)
            host = self._sums["queue"] + (self.ram.nbytes if self.ram is not None else 0)
            over = max(active, charged) + spare + host > self.limit
            if spare and (over or not admits(level)):
                mx.clear_cache()
            self._other = max(0, active - charged)
        self._give_way()

    def _give_way(self) -> None:
        if self.ram is None:
            return
        with self._lock:
            most = self.ram.most
            lent = sum(self._sums.values()) + self._other + most - self.limit
            lent = max(lent, most - ram_allowed(self._level, most))
        self.ram.lend(lent)

    # what is needed

    def sequence_bytes(self, rows: int, chunk: int = 1) -> int:
        """Bytes of the caches of one sequence with room for ``rows`` rows, read in chunks of ``chunk``; with what
        verifying drafts takes besides."""
        return live_bytes(self.live, rows, chunk) + self.cycle_bytes if self.live is not None and rows else 0

    def batch_bytes(self, slots: int, capacity: int) -> int:
        """Bytes of a batch of ``slots`` slots with room for ``capacity`` rows each, the heads of its rows too; with
        what verifying drafts takes besides."""
        return sum(self._batch_members((slots, capacity))) + slots * self.cycle_bytes

    def join_peak(self, before: Shape | None, after: Shape, rows: int) -> int:
        """Bytes at the peak of a join, in which a sequence with room for ``rows`` rows is copied into a batch that
        goes from the shape ``before`` (slots, capacity; None: there was none) to ``after``."""
        old = self.batch_bytes(*before) if before is not None else 0
        return old + self.sequence_bytes(rows) + self.join_extra(before, after)

    def join_extra(self, before: Shape | None, after: Shape) -> int:
        """The part of that peak which is not charged as caches yet: charge it as ``joins`` meanwhile. Members are
        copied one after the other, each evaluated before the next: one of them exists twice at a time."""
        new = self._batch_members(after)
        old = self._batch_members(before) if before is not None else [0] * len(new)
        extra = most = 0
        for was, becomes in zip(old, new, strict=True):
            most = max(most, extra + becomes)
            extra += becomes - was
        return most

    def _batch_members(self, shape: Shape) -> list[int]:
        slots, capacity = shape
        return [slots * batch_row_bytes(m, capacity) for m in (self.live.members if self.live is not None else ())]
