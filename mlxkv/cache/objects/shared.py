"""An object store as one prefix store uses it: what it lacks is asked for there, what it stores is sent there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..exchange import RemoteTier
from ..index import Index
from .tier import Counters, ObjectTier
from .uploads import Uploads

if TYPE_CHECKING:
    from ..store import PrefixStore

#: how long closing goes on sending what waits, seconds
CLOSE_WITHIN = 10.0


@dataclass(kw_only=True)
class ObjectStatus(Counters):
    """What was counted since the store was opened. ``answers``: it did when it was last asked, or was not asked yet;
    ``why``: what went wrong, else. waiting: entries that are still to be sent."""

    encrypted: bool
    answers: bool = True
    why: str = ""
    waiting: int = 0


class Shared:
    """``share`` makes one; it belongs to the engine's thread, but for ``send``."""

    def __init__(self, tier: ObjectTier, uploads: Uploads | None) -> None:
        self.tier, self.uploads = tier, uploads

    def send(self, key: bytes) -> None:
        """An entry has become durable here. Any thread."""
        if self.uploads is not None:
            self.uploads.offer(key)

    def close(self, timeout: float) -> None:
        """Send what waits, for some seconds; once the writer is closed."""
        if self.uploads is not None:
            self.uploads.close(min(timeout, CLOSE_WITHIN))

    def status(self) -> ObjectStatus:
        tier = self.tier
        return ObjectStatus(
            encrypted=tier.secret is not None,
            answers=not tier.outage.why,
            why=tier.outage.why,
            waiting=self.uploads.waiting if self.uploads is not None else 0,
            **asdict(tier.counters),
        )


def share(store: PrefixStore, tier: ObjectTier) -> None:
    """Have a store use an object store from now on; where it writes nothing, nothing is sent either."""
    uploads = None
    if store.keeps:
        identity, block = store.identity, store.block
        mine = (identity.fingerprint, identity.compute_json(), identity.layout, block)

        def roots(index: Index) -> list[bytes]:
            """The key spaces of this model, whatever their salt."""
            return [root for root, _, *of in index.roots() if tuple(of) == mine]

        uploads = Uploads(tier, store.folder, store.layout, roots)
    store.shared = Shared(tier, uploads)
    store.remote = RemoteTier(tier, seconds=tier.seconds)
