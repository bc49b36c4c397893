"""Exact acceptance: which drafts are kept, so that a speculative text is distributed as a plain one.

Greedy: a draft is kept where it is the likeliest token of the target's processed logits. With a temperature and a seed
of the user's, and for drafts that were looked up: the target's own token is drawn with the key that plain sampling
would use for that index, and a draft is kept where it is that token; so the text is plain sampling's, bit for bit, and
a looked-up draft is kept with probability p(draft), which is min(1, p/q) for it. Drafts of a seeded request are drawn
with the same keys, which makes them agree often. With a temperature and no seed: speculative sampling (Leviathan et
al. 2023, Chen et al. 2023): a draft d from q is kept with probability min(1, p(d)/q(d)); the first that is not kept is
replaced by a token from max(p − q, 0), normalised; after all of them comes one from p. p and q are what is sampled
from: after bias, penalties as after the drafts before it, grammar, filters and temperature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import mlx.core as mx

from .constraint import allows
from .request import TokenLogprob
from .sampling import DRAFT, TOKEN, Place, Report, Sampler, draw, drawn, gumbel, report, told


class Trial:
    """The drafts of one sequence in one cycle. ``sampler`` is only read, so a trial may be dropped at any time; it is
    over once the sampler has advanced."""

    def __init__(self, sampler: Sampler, most: int = 0) -> None:
        """``most``: drafts that are expected; random numbers for them are made together."""
        self._sampler, self._most = sampler, most
        self._noise: dict[tuple[int, int], mx.array] = {}  # what is added to the weights at each place
        self._stateless = sampler.stateless
        #: as Sampler.plain
        self.plain = sampler.plain
        self._drafts: list[mx.array] = []
        self._q: list[mx.array | None] = []  # what each was drawn from, as Sampler.weights
        self._known: list[int] = []  # the drafts, where the sampler must know them
        self._first = sampler.place
        self._places: list[Place | None] = [self._first]  # of each draft, and of what follows; None: nothing does
        self._cut = False  # a draft that was given may not come

    def __len__(self) -> int:
        """Drafts that are to be judged."""
        return len(self._drafts)

    @property
    def open(self) -> bool:
        """Another draft may follow. It may not where a grammar has all it asked for, leads nowhere, or does not allow
        a draft that was given."""
        return not self._cut and self._places[-1] is not None

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self._sampler.vocab_size

    def draft(self, logits: mx.array) -> mx.array:
        """The next draft's id, int32 [1]; ``logits``: [1, V] of the drafter (its vocabulary may be padded otherwise).
        Lazy, unless the sampler must know what came before: then it waits for it. Where no other draft may follow: some
        id, which will not be judged."""
        place, sampler = self._places[-1], self._sampler
        if self._cut or place is None:
            return mx.zeros(1, mx.int32)
        logits = _fit(logits, sampler.vocab_size)
        if self.plain:
            return self.drafted(mx.argmax(logits, axis=-1).astype(mx.int32))
        logits = sampler.processed(logits.astype(mx.float32), place)
        if sampler.likeliest:
            return self.drafted(mx.argmax(logits, axis=-1).astype(mx.int32))
        weights, i = sampler.weights(logits), len(self._drafts)
        # a seeded draft shares its token's noise, of which one more is needed behind the last draft
        purpose, likely = (TOKEN, self._most + 1) if sampler.seeded else (DRAFT, self._most)
        noise = self._noises(purpose, i + 1, likely, weights.shape[-1])
        return self.drafted(drawn(weights, noise[i : i + 1]), None if sampler.seeded else weights)

    def _noises(self, purpose: int, n: int, likely: int, size: int) -> mx.array:
        """Of the first ``n`` places, or more, [>= n, size]; of ``likely`` ones where it has to be made."""
        known = self._noise.get((purpose, size))
        if known is None or len(known) < n:
            keys = self._sampler.keys(self._first.index, max(n, likely), purpose)
            known = self._noise[purpose, size] = gumbel(keys, size)
        return known

    def given(self, tokens: Sequence[int]) -> None:
        """Drafts from a look-up. They end before one that may not come."""
        for token in tokens:
            place = self._places[-1]
            if self._cut or place is None:
                return
            may = place.allowed is None or allows(place.allowed, token)
            if not may or not 0 <= token < self._sampler.vocab_size:
                self._cut = True
                return
            self.drafted(mx.array([token], mx.int32))

    def drafted(self, token: mx.array, weights: mx.array | None = None) -> mx.array:
        """``token``, int32 [1], is the next draft of an open trial: drawn from ``weights`` with a key of its own, or
        (None) found without one. Gives it back."""
        if self._stateless:
            self._places.append(Place(self._first.index + len(self._drafts) + 1))
        else:
            self._known.append(int(token.item()))  # type: ignore[arg-type]
            self._places.append(self._sampler.after(self._known))
        self._drafts.append(token)
        self._q.append(weights)
        return token

    def judge(self, logits: mx.array) -> Verdict:
        """``logits``: [D, V] of the target after the root and each of at least its drafts; rows that follow are not
        looked at. Lazy."""
        return judge([self], logits[None])[0]

    def _judge(self, logits: mx.array, shared: mx.array | None, row: int) -> Verdict:
        """``logits``: [D, V]. ``shared``, [slots, D], has the likeliest tokens in ``row``, if the sampler is plain."""
        sampler, drafts = self._sampler, self._drafts[: logits.shape[0] - 1]
        places = [place for place in self._places[: len(drafts) + 1] if place is not None]
        n = len(places)
        if shared is not None:
            return Compared(drafts, n, shared, row, self._reports(logits, n, lambda i: shared[row, i : i + 1]))
        processed = self._processed(logits[:n].astype(mx.float32), places)
        if sampler.likeliest:
            tokens = mx.argmax(processed, axis=-1).astype(mx.int32)
            return Compared(drafts, n, tokens[None], 0, self._reports(logits, n, lambda i: tokens[i : i + 1]))
        p = sampler.weights(processed)
        if all(q is None for q in self._q[: len(drafts)]):
            tokens = drawn(p, self._noises(TOKEN, n, n, p.shape[-1])[:n])
            return Compared(drafts, n, tokens[None], 0, self._reports(logits, n, lambda i: tokens[i : i + 1]))
        keys = sampler.keys(self._first.index, n)
        ids = mx.arange(p.shape[-1])
        q = [
            mx.where(ids == token, 0.0, -float("inf"))[None] if each is None else each
            for each, token in zip(self._q, drafts, strict=False)
        ]
        u = sampler.chances(self._first.index, len(q))
        together = mx.concatenate(drafts)
        kept, last = accepted(p, mx.concatenate(q), together, u, keys)
        ends = [*drafts, last]
        reports = self._reports(logits, n, lambda i: mx.where(i < kept, ends[i], last))
        return Drawn(together, n, kept, last, reports)

    def _processed(self, logits: mx.array, places: list[Place]) -> mx.array:
        """[n, V] after the sampler's processors at ``places``."""
        if self._stateless:
            return self._sampler.processed(logits, places[0])
        rows = [self._sampler.processed(logits[i : i + 1], place) for i, place in enumerate(places)]
        return mx.concatenate(rows)

    def _reports(self, logits: mx.array, n: int, token: Callable[[int], mx.array]) -> list[Report]:
        params = self._sampler.params
        if not params.logprobs:
            return []
        return [report(logits[i : i + 1], token(i), params.top_logprobs) for i in range(n)]


def accepted(p: mx.array, q: mx.array, drafts: mx.array, u: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
    """Speculative sampling over one run: how many of the drafts are kept, int32 [], and the token after them, int32
    [1], which counts unless ``n`` are kept.

    ``p``: [n, V], unnormalised log-probabilities of the target; ``q``: [m, V], of the drafter, n − 1 ≤ m ≤ n (m = n: no
    token may follow the last draft); ``drafts``: int32 [m], drawn from ``q``; ``u``: [m], uniform in [0, 1); ``keys``:
    [n, 2], one for a draw at each place. All independent of each other. No token of probability 0 is given, but where
    all weights of a row of ``p`` are -inf or one is NaN, which plain sampling does not survive either.
    """
    n, m = p.shape[0], q.shape[0]
    of_target, of_drafter = mx.softmax(p[:m], axis=-1), mx.softmax(q, axis=-1)
    at = drafts[:, None]
    of_p, of_q = (mx.take_along_axis(each, at, axis=-1)[:, 0] for each in (of_target, of_drafter))
    # u < p/q without a division: a q of 0 keeps what p allows, a p of 0 is never kept
    kept = mx.cumprod((u * of_q < of_p).astype(mx.int32)).sum()
    place, row = mx.minimum(kept, n - 1), mx.minimum(kept, m - 1)
    rest = mx.log(mx.maximum(of_target[row] - of_drafter[row], 0.0))
    # p where nothing was drafted, and where rounding left nothing of the rest: a chance of one in some millions
    weights = mx.where((kept < m) & (mx.max(rest) > -float("inf")), rest, p[place])
    return kept, draw(weights[None], keys[place])


class Verdict(ABC):
    """What of a run counts, lazily: drafts that are kept, and the token after them."""

    def __init__(self, n: int, reports: list[Report]) -> None:
        """``n``: tokens that count at most. ``reports``: of each of them, or none."""
        self._n, self._reports = n, reports

    @abstractmethod
    def _arrays(self) -> list[mx.array]: ...

    @abstractmethod
    def _counted(self) -> list[int]: ...

    def live(self) -> list[mx.array]:
        """What is to be evaluated with the forward."""
        out = self._arrays()
        for each in self._reports:
            out += [each.logprob, *(each.top or ())]
        return out

    def read(self) -> list[tuple[int, TokenLogprob | None]]:
        """The tokens that may be emitted, in order, each with its report; waits for them. At least one, at most all
        drafts and one more."""
        tokens = self._counted()[: self._n]
        if not self._reports:
            return [(token, None) for token in tokens]
        return [(token, told(token, each)) for token, each in zip(tokens, self._reports, strict=False)]


class Compared(Verdict):
    """Drafts count while they are the target's own tokens."""

    def __init__(self, drafts: list[mx.array], n: int, tokens: mx.array, row: int, reports: list[Report]) -> None:
        """``tokens``: int32 [slots, at least ``n``], of which ``row`` is meant."""
        super().__init__(n, reports)
        self._drafts, self._tokens, self._row = drafts, tokens, row

    def _arrays(self) -> list[mx.array]:
        return [self._tokens, *self._drafts]

    def _counted(self) -> list[int]:
        tokens: list[int] = self._tokens[self._row].tolist()  # type: ignore[assignment]
        kept = 0
        while kept < len(self._drafts) and self._drafts[kept].item() == tokens[kept]:
            kept += 1
        return tokens[: kept + 1]


class Drawn(Verdict):
    """A number of drafts counts, and the token after them."""

    def __init__(self, drafts: mx.array, n: int, kept: mx.array, last: mx.array, reports: list[Report]) -> None:
        super().__init__(n, reports)
        self._drafts, self._kept, self._last = drafts, kept, last

    def _arrays(self) -> list[mx.array]:
        return [self._drafts, self._kept, self._last]

    def _counted(self) -> list[int]:
        drafts: list[int] = self._drafts.tolist()  # type: ignore[assignment]
        return [*drafts[: self._kept.item()], self._last.item()]  # type: ignore[list-item,misc]


def judge(trials: Sequence[Trial | None], logits: mx.array) -> list[Verdict]:
    """A verdict for each row, lazily; ``logits``: [slots, D, V], row i for ``trials[i]``. None: a row that nobody
    reads. Plain rows share one argmax; any other is computed from its own rows alone, so none depends on its
    neighbours."""
    plain = [trial is None or trial.plain for trial in trials]
    likeliest = mx.argmax(logits, axis=-1).astype(mx.int32) if any(plain) else None
    out: list[Verdict] = []
    for i, trial in enumerate(trials):
        if trial is None:
            assert likeliest is not None
            out.append(Compared([], 0, likeliest, i, []))
        else:
            out.append(trial._judge(logits[i], likeliest if trial.plain else None, i))
    return out


def draft(trials: Sequence[Trial | None], logits: mx.array) -> mx.array:
    """The next draft of each row, int32 [slots]; ``logits``: [slots, V] of the drafter. As Trial.draft, but that plain
    rows share one argmax."""
    likeliest: mx.array | None = None
    out = []
    for i, trial in enumerate(trials):
        if trial is not None and not trial.plain:
            out.append(trial.draft(logits[i : i + 1]))
            continue
        if likeliest is None:
            size = next((t.vocab_size for t in trials if t is not None), logits.shape[-1])
            likeliest = mx.argmax(_fit(logits, size), axis=-1).astype(mx.int32)
        out.append(likeliest[i : i + 1])
        if trial is not None:
            trial.drafted(out[-1])
    return mx.concatenate(out)


def _fit(logits: mx.array, size: int) -> mx.array:
    """``logits`` [n, V] for a vocabulary of ``size``: what is beyond it was padding."""
    more = size - logits.shape[-1]
    if more <= 0:
        return logits[:, :size] if more else logits
    return mx.concatenate([logits, mx.full((len(logits), more), -float("inf"), logits.dtype)], axis=-1)
