"""The responses that a later request may go on from, in memory only and bounded.

A response is kept with its own input and output and the one that it went on from, so that a conversation of n turns
costs its length once. What has been used longest ago is forgotten first; it stays in memory as long as a response that
is still to be found goes on from it, and counts until then.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: responses that are to be found at most, and bytes of JSON that they take together
COUNT = 1000
BYTES = 64 * 2**20


@dataclass(eq=False)
class Kept:
    """A response object, the input items that its request gave, and the response that they followed."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    parent: Kept | None = None
    bytes: int = field(init=False)
    followers: int = field(default=0, init=False)  # that are counted
    found: bool = field(default=False, init=False)
    counted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.bytes = len(json.dumps([self.response, self.input]))

    def chain(self) -> list[Kept]:
        """The conversation up to here, its first response first."""
        made: list[Kept] = []
        at: Kept | None = self
        while at is not None:
            made.append(at)
            at = at.parent
        return made[::-1]

    def items(self) -> Iterator[dict[str, Any]]:
        """The items of the conversation up to here: what was said, in order."""
        for kept in self.chain():
            yield from kept.input
            yield from kept.response["output"]


class Responses:
    """Used by one thread, the event loop's."""

    def __init__(self, count: int = COUNT, bytes: int = BYTES) -> None:
        self.count = count
        self.limit = bytes
        self.bytes = 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # longest unused first
        self._items: dict[str, dict[str, Any]] = {}  # output items by their ids, for references

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: Kept) -> None:
        """Keep a response; what there is no room for is forgotten, itself too if it is too large."""
        self._kept[kept.response["id"]] = kept
        kept.found = True
        for item in kept.response["output"]:
            self._items[item["id"]] = item
        at: Kept | None = kept
        while at is not None and not at.counted:  # what it goes on from may have been forgotten while it was made
            at.counted = True
            self.bytes += at.bytes
            at = at.parent
            if at is not None:
                at.followers += 1
        while self._kept and (self.bytes > self.limit or len(self._kept) > self.count):
            self.remove(next(iter(self._kept)))

    def get(self, id: str) -> Kept | None:
        """The response of that id; it and what it went on from count as used."""
        kept = self._kept.get(id)
        if kept is not None:
            for link in kept.chain():
                if link.found:
                    self._kept.move_to_end(link.response["id"])
        return kept

    def item(self, id: str) -> dict[str, Any] | None:
        """An output item of a response that is kept."""
        return self._items.get(id)

    def remove(self, id: str) -> bool:
        """Forget a response; whether there was one. What follows it can still be gone on from."""
        kept = self._kept.pop(id, None)
        if kept is None:
            return False
        kept.found = False
        for item in kept.response["output"]:
            self._items.pop(item["id"], None)
        at: Kept | None = kept
        while at is not None and not at.found and not at.followers:
            at.counted = False
            self.bytes -= at.bytes
            at = at.parent
            if at is not None:
                at.followers -= 1
        return True
