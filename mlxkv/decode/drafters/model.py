"""Drafts from a smaller model with the same tokenizer, on caches of its own.

It reads what the target has read: the prompt in chunks between two steps, then the root and its own drafts, a token a
forward. Afterwards rows of refused drafts are dropped. Where a layer cannot drop rows (a window, a recurrent state) its
state after the root is kept until the cycle is over, and accepted drafts are read again with the next root: exact for
every kind, without a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...cache.layout import probe
from ...cache.state import SequenceState
from ...errors import ConfigError, MlxkvError
from ...models import Loaded, load
from ..memory import Memory, live_bytes
from ..reservation import OPEN_END, lookahead, reserve
from . import Asked, Drafted, DrafterName, Heads, Round

#: tokens that may be missing when drafts are wanted: the first draft's own forward reads them
NEAR = 16
#: tokens of one forward that reads
CHUNK = 512


class DraftModel:
    """A loaded model that drafts for ``vocabulary`` logits. Its caches are charged to ``memory``, while there is room
    for them; a sequence for which there is none gets no drafts. Raises ConfigError where a layer's state is of no known
    kind."""

    name: ClassVar[DrafterName] = "draft_model"
    steady: ClassVar[bool] = True

    def __init__(
        self, model: nn.Module, vocabulary: int, *, context_length: int | None = None, memory: Memory | None = None
    ) -> None:
        self.model = model
        self._call: Callable[..., mx.array] = model
        self._vocabulary, self._context, self.memory = vocabulary, context_length, memory
        try:
            self.layout = probe(self._call, self._make_cache)
        except MlxkvError as e:
            raise ConfigError(f"The draft model cannot be used: {e.message}", "Use another one, or --draft off.") from e
        self._readers: dict[Drafted, _Reader] = {}

    def _make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def bytes_for(self, rows: int) -> int:
        """Bytes of its caches for a sequence with room for ``rows`` rows."""
        return live_bytes(self.layout, rows, CHUNK)

    def begin(self, heads: Heads | None, slots: Sequence[int]) -> None:
        """Nothing: ``ready`` reads."""

    def ready(self, rows: Mapping[int, Asked], budget: int) -> bool:
        """Reads at most ``budget`` tokens of these rows. False, for as long as it lasts, where memory has no room for a
        row's caches, or the model's context none for its tokens."""
        for asked in rows.values():
            reader = self._reader(asked.sequence)
            if reader is None:
                return False
            missing = reader.missing
            while budget and missing >= NEAR:
                n = min(missing, budget, CHUNK)
                reader.read(n)
                budget -= n
                missing -= n
            if missing >= NEAR:
                return False
        return True

    def _reader(self, sequence: Drafted) -> _Reader | None:
        """With room for the sequence and a cycle's drafts."""
        most = len(sequence.tokens) + lookahead(self.name, NEAR)
        if self._context is not None and most > self._context:
            return None
        reader = self._readers.get(sequence)
        if reader is not None and most <= reader.rows:
            return reader
        rows = reserve(len(sequence.tokens) + OPEN_END, max_len=self._context)
        if self.memory is not None:
            more = self.bytes_for(rows) - (self.bytes_for(reader.rows) if reader is not None else 0)
            if not self.memory.room(more, self._owner(sequence) if reader is not None else None).fits:
                return None
            self.memory.charge("caches", self._owner(sequence), self.bytes_for(rows))
        if reader is None:
            reader = self._readers[sequence] = _Reader(sequence, self._call, SequenceState.new(self._make_cache()))
        reader.reserve(rows)
        return reader

    def propose(self, round: Round, k: int) -> mx.array | None:
        if k < 1 or any(row.sequence not in self._readers for row in round.rows.values()):
            return None
        drafts = [mx.zeros((k,), mx.int32)] * round.slots
        for slot, row in round.rows.items():
            reader = self._readers[row.sequence]
            found = [row.trial.draft(self._fitted(reader.root()))]
            while len(found) < k and row.trial.open:
                found.append(row.trial.draft(self._fitted(reader.draft(found[-1]))))
            rest = [mx.zeros((k - len(found),), mx.int32)] if len(found) < k else []
            drafts[slot] = mx.concatenate([*found, *rest])
            mx.async_eval(drafts[slot], reader.state.live())
        return mx.stack(drafts)

    def _fitted(self, logits: mx.array) -> mx.array:
        """[1, vocabulary]: models of one family pad their output matrices differently, beyond the tokenizer's ids."""
        missing = self._vocabulary - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self._vocabulary]
        return mx.concatenate([logits, mx.full((1, missing), -mx.inf, logits.dtype)], axis=-1)

    def committed(self, round: Round, kept: Mapping[int, int]) -> None:
        for slot, row in round.rows.items():
            if row.sequence in self._readers:
                self._readers[row.sequence].settle(kept.get(slot, 0))

    def forget(self, sequence: Drafted) -> None:
        if self._readers.pop(sequence, None) is not None and self.memory is not None:
            self.memory.release(self._owner(sequence))

    def _owner(self, sequence: Drafted) -> tuple[str, Drafted]:
        return self.name, sequence


class _Reader:
    """Its state of one sequence, which stands behind committed tokens but between ``root`` and ``settle``. The root is
    read already where its drafts were made and never verified."""

    def __init__(self, sequence: Drafted, model: Callable[..., mx.array], state: SequenceState) -> None:
        self.sequence, self._model, self.state = sequence, model, state
        self.rows = 0
        #: drafts of the cycle under way that were read, None between cycles, and what members that drop no rows were
        #: before them
        self._read: int | None = None
        self._held: dict[int, Any] = {}
        #: after the root, for drafts that are made again
        self._logits: mx.array | None = None

    def reserve(self, rows: int) -> None:
        self.rows = rows
        self.state.reserve(rows)

    @property
    def missing(self) -> int:
        """Committed tokens, the root left out, that it has not read."""
        self.settle(0)
        return len(self.sequence.tokens) - 1 - self.state.position

    def read(self, n: int) -> None:
        """One forward over the next ``n`` tokens, evaluated."""
        self._forward(mx.array(self._tokens(n), mx.int32))
        mx.eval(self.state.live())
        mx.clear_cache()

    def root(self) -> mx.array:
        """Logits [1, V] after all committed tokens."""
        self.settle(0)
        rest = len(self.sequence.tokens) - self.state.position
        logits = self._forward(mx.array(self._tokens(rest), mx.int32)) if rest else self._logits
        assert logits is not None
        self._read, self._logits = 0, logits
        return logits

    def draft(self, token: mx.array) -> mx.array:
        """Logits [1, V] after one draft more, int32 [1]."""
        assert self._read is not None
        if self._read == 0:
            members = enumerate(self.state.members or ())
            self._held = {i: member.hold() for i, member in members if member.record != "rows"}
        self._read += 1
        return self._forward(token)

    def settle(self, kept: int) -> None:
        """Stand behind committed tokens only: the root, and drafts of which ``kept`` − 1 were accepted."""
        if self._read is None:
            return
        read = self._read  # of its drafts; the last one never is
        right = min(max(kept - 1, 0), read)
        if right < read:
            back = read if self._held else read - right
            for i, member in enumerate(self.state.members or ()):
                if i in self._held:
                    member.put_back(self._held[i])
                else:
                    member.rewind(back)
            self.state.position -= back
            self.state.advance(0)  # all members agree
        self._read, self._held = None, {}

    def _tokens(self, n: int) -> list[int]:
        at = self.state.position
        return list(self.sequence.tokens[at : at + n])

    def _forward(self, ids: mx.array) -> mx.array:
        logits = self._model(ids[None], cache=self.state.caches)
        self.state.advance(ids.size)
        return logits[:, -1]


def open_draft_model(
    path: str | Path, target: Loaded, *, dtype: str = "auto", memory: Memory | None = None
) -> DraftModel:
    """Load the model in ``path`` to draft for ``target``. Raises ModelError, and ConfigError where its tokenizer is
    another one."""
    loaded = load(path, dtype=dtype)
    check_tokenizers(loaded, target)
    return DraftModel(loaded.model, target.vocab_size, context_length=loaded.context_length, memory=memory)


def check_tokenizers(draft: Loaded, target: Loaded) -> None:
    """Raises ConfigError unless both models mean the same by each id."""
    hint = "Use a draft model of the same family, or --draft off."
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        other = sum(theirs.get(word) != i for word, i in ours.items()) + sum(word not in ours for word in theirs)
        raise ConfigError(
            f"The draft model {draft.name} has another vocabulary than {target.name}: {other:,} of {len(ours):,} "
            "entries differ.",
            hint,
        )
    special, other = set(target.tokenizer.all_special_ids), set(draft.tokenizer.all_special_ids)
    ends, theirs = target.eos_token_ids, draft.eos_token_ids
    if special != other or (ends != theirs and not ends & theirs):
        raise ConfigError(
            f"The draft model {draft.name} has other special tokens than {target.name}: {sorted(other)} and not "
            f"{sorted(special)}, ends of text {sorted(theirs)} and not {sorted(ends)}.",
            hint,
        )
