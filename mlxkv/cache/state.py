"""State kinds: what a layer keeps between tokens, and how it is read, held, put back and resumed.

Each cache object that a model's ``make_cache()`` returns, and each member inside a ``CacheList``, becomes one *member*
of a known kind. What a class is not registered for is never guessed: ``members_of`` raises ``UnknownCache`` and the
store is off for that model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from ..errors import MlxkvError

if TYPE_CHECKING:
    from .inside import Inside

Arrays = dict[str, mx.array]


class UnknownCache(MlxkvError):
    """A cache class that no state kind is written for; the message names it and where it stands."""


class PositionError(MlxkvError):
    """A member stands at another position than it should: its state must not be stored or used."""


class Member(ABC):
    """One piece of per-layer state around one mlx-lm cache object.

    ``path`` is (layer, index inside a CacheList, …). Row arrays are ``[batch 1, heads, rows, head_dim]``; rows are
    numbered by absolute token position.
    """

    kind: ClassVar[str]
    #: which record holds this member's data: "rows", "window" or "state"
    record: ClassVar[str]

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        self.cache = cache
        self.path = path

    @property
    def label(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def position(self) -> int | None:
        """Absolute position this member stands at; None where its class does not know."""
        return None

    def params(self) -> dict[str, int]:
        """Numbers that belong to the layout, a window's size for instance."""
        return {}

    @abstractmethod
    def arrays(self) -> Arrays:
        """The live arrays by name; a slot that holds nothing is left out."""

    @abstractmethod
    def hold(self) -> Any:
        """Second handles on all that the next step rebinds. While they live, MLX cannot donate the buffers."""

    @abstractmethod
    def put_back(self, held: Any) -> None:
        """Undo what was rebound since ``hold()``."""

    def rows(self, a: int, b: int) -> Arrays:
        """Rows [a, b) as lazy slices, in order of position. Raises PositionError for rows that are not held."""
        raise NotImplementedError(self.kind)

    def window(self) -> int | None:
        """How many of the last rows must survive to resume; None for all."""
        return None

    def keep(self) -> int:
        """How many of the first rows must survive too."""
        return 0

    @abstractmethod
    def rewindable(self) -> int:
        """How many of the last tokens ``rewind`` can take back."""

    @abstractmethod
    def rewind(self, n: int) -> None:
        """Take back the last ``n`` tokens. Raises PositionError beyond ``rewindable()``."""

    def state_at(self, position: int, inside: Inside) -> Arrays:
        """What ``arrays()`` was at a boundary inside the last forward; empty where this member cannot tell, so that the
        forward must be split there. Asked of ``state`` members, before ``catch_up``."""
        return {}

    def live(self) -> list[mx.array]:
        """All arrays that a step must evaluate."""
        return list(self.arrays().values())

    def reserve(self, capacity: int) -> None:  # noqa: B027 - only rows grow
        """Buffers of rows are allocated, and later grow, in steps of ``capacity`` rows."""

    def catch_up(self) -> None:  # noqa: B027 - most kinds are always up to date
        """Compute (lazily) what may wait until it is needed: before a capture, and before rows are read."""

    def settle(self) -> None:  # noqa: B027 - most kinds have one form only
        """Bring the arrays into the one form that a restore produces, so that both give the same bits."""

    @abstractmethod
    def resume(self, arrays: Arrays, position: int) -> None:
        """Take over evaluated arrays so that this member stands at ``position``."""


class Growing(Member):
    """Plain attention: one row of keys and values a token, rewound by forgetting rows (``KVCache``)."""

    kind = "growing"
    record = "rows"
    cache: KVCache

    @property
    def position(self) -> int:
        return self.cache.offset

    def reserve(self, capacity: int) -> None:
        self.cache.step = capacity

    def arrays(self) -> Arrays:
        keys, values = self.cache.keys, self.cache.values
        return {} if keys is None or values is None else {"keys": keys, "values": values}

    def hold(self) -> Any:
        # `a[:]` is another handle on the same buffer; a second reference to the same object would follow its rebinding.
        keys, values = self.cache.keys, self.cache.values
        return (None if keys is None else keys[:], None if values is None else values[:], self.cache.offset)

    def put_back(self, held: Any) -> None:
        self.cache.keys, self.cache.values, self.cache.offset = held

    def rows(self, a: int, b: int) -> Arrays:
        if not 0 <= a <= b <= self.cache.offset:
            raise PositionError(f"Member {self.label} holds rows [0, {self.cache.offset}), not [{a}, {b}).")
        return {name: array[..., a:b, :] for name, array in self.arrays().items()}

    def rewindable(self) -> int:
        return self.cache.offset

    def rewind(self, n: int) -> None:
        if n > self.rewindable() or self.cache.trim(n) != n:
            raise PositionError(f"Member {self.label} cannot go back {n} tokens.")

    def resume(self, arrays: Arrays, position: int) -> None:
        self.cache.keys, self.cache.values, self.cache.offset = arrays["keys"], arrays["values"], position


class Window(Member):
    """Attention over the last ``max_size`` rows, the first ``keep`` among them (``RotatingKVCache``)."""

    kind = "window"
    record = "window"
    cache: RotatingKVCache

    @property
    def position(self) -> int:
        return self.cache.offset

    def params(self) -> dict[str, int]:
        return {"window": self.cache.max_size, "keep": self.cache.keep}

    def window(self) -> int:
        return self.cache.max_size - self.cache.keep

    def keep(self) -> int:
        return self.cache.keep

    def arrays(self) -> Arrays:
        keys, values = self.cache.keys, self.cache.values
        return {} if keys is None or values is None else {"keys": keys, "values": values}

    def hold(self) -> Any:
        keys, values, offset, keep, max_size, index = self.cache.state
        return (None if keys is None else keys[:], None if values is None else values[:], offset, keep, max_size, index)

    def put_back(self, held: Any) -> None:
        self.cache.state = held

    def _in_order(self) -> Arrays:
        """The rows held, oldest first: the ``keep`` first ones, then a run that ends at ``offset``."""
        _, _, offset, keep, _, index = self.cache.state

        def order(v: mx.array) -> mx.array:
            if index == v.shape[2]:
                return v
            if index < offset:  # wrapped: the oldest row stands at the write index
                return mx.concatenate([v[..., :keep, :], v[..., index:, :], v[..., keep:index, :]], axis=2)
            return v[..., :index, :]  # the buffer is larger than what was written

        return {name: order(array) for name, array in self.arrays().items()}

    def rows(self, a: int, b: int) -> Arrays:
        ordered = self._in_order()
        held = next(iter(ordered.values())).shape[2] if ordered else 0
        first = 0 if self.cache.offset <= held else self.cache.offset - (held - self.cache.keep)
        shift = 0 if first == 0 else self.cache.keep - first
        if not first <= a <= b <= self.cache.offset:
            raise PositionError(f"Member {self.label} holds rows [{first}, {self.cache.offset}), not [{a}, {b}).")
        return {name: array[..., a + shift : b + shift, :] for name, array in ordered.items()}

    def rewindable(self) -> int:
        # A ring as large as its window has overwritten what a rewind would need once it has wrapped.
        return self.cache.offset if self.cache.offset < self.cache.max_size else 0

    def rewind(self, n: int) -> None:
        if n > self.rewindable() or self.cache.trim(n) != n:
            raise PositionError(f"Member {self.label} cannot go back {n} tokens: its window has wrapped.")

    def settle(self) -> None:
        if self.cache.keys is None:
            return
        size, keep = self.cache.max_size, self.cache.keep
        ordered = self._in_order()
        held = ordered["keys"].shape[2]
        if held > size:  # a chunk leaves more rows than the window; the next step would drop them
            ordered = {
                name: mx.concatenate([v[..., :keep, :], v[..., held - (size - keep) :, :]], axis=2)
                for name, v in ordered.items()
            }
        self.resume({name: mx.contiguous(v) for name, v in ordered.items()}, self.cache.offset)

    def resume(self, arrays: Arrays, position: int) -> None:
        cache = self.cache
        keys, values = arrays["keys"], arrays["values"]
        cache.state = (keys, values, position, cache.keep, cache.max_size, keys.shape[2])


class Recurrent(Member):
    """A state of fixed size that each token rewrites: SSM, linear attention, short convolution (``ArraysCache``)."""

    kind = "recurrent"
    record = "state"
    cache: ArraysCache

    def params(self) -> dict[str, int]:
        return {"slots": len(self.cache.cache)}

    def arrays(self) -> Arrays:
        return {f"slot{i}": a for i, a in enumerate(self.cache.cache) if a is not None}

    def hold(self) -> Any:
        return list(self.cache.cache)  # steps rebind slots, they never write into them

    def put_back(self, held: Any) -> None:
        self.cache.cache = list(held)

    def rewindable(self) -> int:
        return 0

    def rewind(self, n: int) -> None:
        if n:
            raise PositionError(f"Member {self.label} is recurrent and cannot go back.")

    def state_at(self, position: int, inside: Inside) -> Arrays:
        return {f"slot{i}": a for i, a in sorted(inside.slots(self.cache, position).items())}

    def resume(self, arrays: Arrays, position: int) -> None:
        self.cache.cache = [arrays.get(f"slot{i}") for i in range(len(self.cache.cache))]


class OwnCache(ABC):
    """A cache class of mlxkv's own: it says itself which members it has."""

    @abstractmethod
    def members(self, path: tuple[int, ...]) -> list[Member]: ...


#: Exact classes only: a subclass may keep something else in the same place.
KINDS: dict[type, type[Member]] = {KVCache: Growing, RotatingKVCache: Window, ArraysCache: Recurrent}


def members_of(caches: list[Any]) -> list[Member]:
    """All members of a model's cache, depth first. Raises UnknownCache with the class and its place."""

    def walk(cache: Any, path: tuple[int, ...]) -> Iterator[Member]:
        if type(cache) is CacheList:
            for i, inner in enumerate(cache.caches):
                yield from walk(inner, (*path, i))
        elif isinstance(cache, OwnCache):
            yield from cache.members(path)
        elif type(cache) in KINDS:
            yield KINDS[type(cache)](cache, path)
        else:
            raise UnknownCache(
                f"Layer {'.'.join(map(str, path))} keeps its state in {type(cache).__name__}, "
                "for which mlxkv has no state kind."
            )

    return [member for i, cache in enumerate(caches) for member in walk(cache, (i,))]


class SequenceState:
    """The state of one running sequence: the cache list a model is called with, and the one position of all of it."""

    def __init__(self, caches: list[Any], members: list[Member] | None) -> None:
        #: what the model is called with
        self.caches = caches
        #: None when a class is unknown: the sequence can run but not be stored, held or resumed
        self.members = members
        self.position = 0

    @classmethod
    def new(cls, caches: list[Any]) -> SequenceState:
        try:
            return cls(caches, members_of(caches))
        except UnknownCache:
            return cls(caches, None)

    def advance(self, n: int) -> None:
        """A forward over ``n`` tokens was built. Raises PositionError if a member disagrees."""
        self.position += n
        for member in self.members or ():
            if member.position is not None and member.position != self.position:
                raise PositionError(
                    f"Member {member.label} ({member.kind}) stands at {member.position}, the sequence at "
                    f"{self.position}. Its state cannot be trusted."
                )

    def live(self) -> list[mx.array]:
        """All arrays that a step must evaluate."""
        if self.members is None:
            return _arrays_in([c.state for c in self.caches])
        return [a for m in self.members for a in m.live()]

    def reserve(self, capacity: int) -> None:
        for member in self.members or ():
            member.reserve(capacity)

    def catch_up(self) -> None:
        for member in self.members or ():
            member.catch_up()

    def hold(self) -> tuple[int, list[Any]]:
        return self.position, [m.hold() for m in self.members or ()]

    def put_back(self, held: tuple[int, list[Any]]) -> None:
        self.position = held[0]
        for member, handle in zip(self.members or (), held[1], strict=True):
            member.put_back(handle)

    def settle(self) -> None:
        for member in self.members or ():
            member.settle()


def _arrays_in(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [a for item in tree for a in _arrays_in(item)]
    return []
