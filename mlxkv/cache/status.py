"""What a store is doing and has done since it was opened: plain numbers that cost nothing to ask for. No index is
read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .objects.shared import ObjectStatus
    from .store import PrefixStore


@dataclass(frozen=True)
class StoreStatus:
    """Bytes are record bytes. written, merged: what reached the disk, the second to merge the pieces of blocks. read:
    what was read for restores and verified, by tier. evicted: what was given up to make room. refused_bytes: what the
    writer did not take, since too much waited or nothing is written any more. dropped_groups: groups that it could not
    store. waiting_bytes: what waits to be written, waiting_tips: states that wait in RAM until it is worth while.
    restoring: requests whose records are read. faults: damage and failures, by reason. stopped: why nothing is written
    any more, None while it is. ram_bytes, ram_budget: what RAM holds, and may hold now. budget: bytes of the whole
    folder, None where there is none. block: tokens of a full block. objects: of the object store, None where there is
    none; what was read from there counts as of tier ``object`` too."""

    written_bytes: int = 0
    written_records: int = 0
    merged_bytes: int = 0
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    evicted_bytes: int = 0
    evicted_records: int = 0
    refused_bytes: int = 0
    dropped_groups: int = 0
    waiting_bytes: int = 0
    waiting_tips: int = 0
    restoring: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    stopped: str | None = None
    ram_bytes: int = 0
    ram_budget: int = 0
    budget: int | None = None
    block: int = 0
    objects: ObjectStatus | None = None

    @classmethod
    def of(cls, store: PrefixStore) -> StoreStatus:
        """On the engine's thread."""
        writer, counters = store.writer, store.writer.counters
        faults = dict(store.faults)
        for kind, times in counters.faults.copy().items():
            faults[kind] = faults.get(kind, 0) + times
        objects = store.shared.status() if store.shared is not None else None
        read = dict(store.restores.nbytes_read)
        if objects is not None:
            read["object"] = objects.downloaded_bytes
        return cls(
            written_bytes=counters.written_bytes,
            written_records=counters.written_records,
            merged_bytes=counters.merged_bytes,
            read_bytes=read,
            evicted_bytes=counters.evicted_bytes,
            evicted_records=counters.evicted_records,
            refused_bytes=counters.refused_bytes,
            dropped_groups=counters.dropped_groups,
            waiting_bytes=writer.waiting_bytes,
            waiting_tips=writer.tips,
            restoring=store.restores.under_way,
            faults=faults,
            stopped=writer.stopped_because or None,
            ram_bytes=store.ram.nbytes,
            ram_budget=store.ram.budget,
            budget=store.budget,
            block=store.block,
            objects=objects,
        )
