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

from collections.abc import Sequence

import mlx.core as mx

from .constraint import allows
from .request import TokenLogprob
from .sampling import ACCEPT, DRAFT, Place, Report, Sampler, draw, report, told


class Trial:
    """The drafts of one sequence in one cycle. ``sampler`` is only read, so a trial may be dropped at any time; it is
    over once the sampler has advanced."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
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
    def plain(self) -> bool:
        """As Sampler.plain."""
        return self._sampler.plain

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
        if sampler.plain:
            return self.drafted(mx.argmax(logits, axis=-1).astype(mx.int32))
        logits = sampler.processed(logits.astype(mx.float32), place)
        if sampler.likeliest:
            return self.drafted(mx.argmax(logits, axis=-1).astype(mx.int32))
        weights = sampler.weights(logits)
        if sampler.seeded:
            return self.drafted(draw(weights, sampler.key(place.index)))
        return self.drafted(draw(weights, sampler.key(place.index, DRAFT)), weights)

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
        if self._sampler.stateless:
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
        drafts = self._drafts[: logits.shape[0] - 1]
        places = [place for place in self._places[: len(drafts) + 1] if place is not None]
        n, count = len(places), None
        if shared is None:
            tokens, count = self._tokens(logits[:n], places, drafts)
            shared, row = tokens[None], 0
        params = self._sampler.params
        reports = []
        if params.logprobs:
            reports = [report(logits[i : i + 1], shared[row, i : i + 1], params.top_logprobs) for i in range(n)]
        return Verdict(shared, row, n, drafts, count, reports)

    def _tokens(
        self, logits: mx.array, places: list[Place], drafts: list[mx.array]
    ) -> tuple[mx.array, mx.array | None]:
        """int32 [n], and how many of them count, where comparing them with the drafts does not tell. ``logits``: [n, V]
        at ``places``."""
        sampler = self._sampler
        logits = logits.astype(mx.float32)
        if sampler.stateless:
            logits = sampler.processed(logits, places[0])
        else:
            logits = mx.concatenate([sampler.processed(logits[i : i + 1], place) for i, place in enumerate(places)])
        if sampler.likeliest:
            return mx.argmax(logits, axis=-1).astype(mx.int32), None
        weights = sampler.weights(logits)
        keys = [sampler.key(place.index) for place in places]
        if all(q is None for q in self._q[: len(drafts)]):
            return mx.concatenate([draw(weights[i : i + 1], key) for i, key in enumerate(keys)]), None
        ids = mx.arange(weights.shape[-1])
        q = [
            mx.where(ids == token, 0.0, -float("inf"))[None] if each is None else each
            for each, token in zip(self._q, drafts, strict=False)
        ]
        u = mx.random.uniform(shape=(len(q),), key=sampler.key(self._first.index, ACCEPT))
        return accepted(weights, mx.concatenate(q), mx.concatenate(drafts), u, mx.stack(keys))


def accepted(p: mx.array, q: mx.array, drafts: mx.array, u: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
    """Speculative sampling over one run: int32 [n], and how many of these tokens count, 1 to n.

    ``p``: [n, V], unnormalised log-probabilities of the target; ``q``: [m, V], of the drafter, n − 1 ≤ m ≤ n (m = n: no
    token may follow the last draft); ``drafts``: int32 [m], drawn from ``q``; ``u``: [m], uniform in [0, 1); ``keys``:
    [n, 2], one for a draw at each place. All independent of each other. No token of probability 0 counts, but where all
    weights of a row of ``p`` are -inf or one is NaN, which plain sampling does not survive either.
    """
    n, m = p.shape[0], q.shape[0]
    probs, drawn = mx.softmax(p[:m], axis=-1), mx.softmax(q, axis=-1)
    at = drafts[:, None]
    of_p, of_q = (mx.take_along_axis(each, at, axis=-1)[:, 0] for each in (probs, drawn))
    # u < p/q without a division: a q of 0 keeps what p allows, a p of 0 is never kept
    kept = mx.cumprod((u * of_q < of_p).astype(mx.int32)).sum()
    place, row = mx.minimum(kept, n - 1), mx.minimum(kept, m - 1)
    rest = mx.log(mx.maximum(probs[row] - drawn[row], 0.0))
    # p where nothing was drafted, and where rounding left nothing of the rest: a chance of one in some millions
    weights = mx.where((kept < m) & (mx.max(rest) > -float("inf")), rest, p[place])
    last = draw(weights[None], keys[place])
    tokens = mx.where(mx.arange(n) < kept, mx.concatenate([drafts, last])[:n], last)
    return tokens, mx.minimum(kept + 1, n)


class Verdict:
    """What of a run counts, lazily: tokens that were kept, and the one after them."""

    def __init__(
        self,
        tokens: mx.array,
        row: int,
        n: int,
        drafts: list[mx.array],
        count: mx.array | None,
        reports: list[Report],
    ) -> None:
        """``tokens``: int32 [slots, at least ``n``], of which ``row`` is meant. ``count``: how many of them count;
        None: all up to the first that is not its draft."""
        self._tokens, self._row, self._n = tokens, row, n
        self._drafts, self._count, self._reports = drafts, count, reports

    def live(self) -> list[mx.array]:
        """What is to be evaluated with the forward."""
        out = [self._tokens]
        out += self._drafts if self._count is None else [self._count]
        for each in self._reports:
            out += [each.logprob, *(each.top or ())]
        return out

    def read(self) -> list[tuple[int, TokenLogprob | None]]:
        """The tokens that may be emitted, in order, each with its report; waits for them. At least one, at most all
        drafts and one more."""
        tokens: list[int] = self._tokens[self._row].tolist()  # type: ignore[assignment]
        if self._count is not None:
            count = int(self._count.item())  # type: ignore[arg-type]
        else:
            count = 0
            while count < min(len(self._drafts), self._n) and self._drafts[count].item() == tokens[count]:
                count += 1
            count = min(count + 1, self._n)
        reports = self._reports or [None] * count
        return [
            (token, None if each is None else told(token, each))
            for token, each in zip(tokens[:count], reports, strict=False)
        ]


def judge(trials: Sequence[Trial | None], logits: mx.array) -> list[Verdict]:
    """A verdict for each row, lazily; ``logits``: [slots, D, V], row i for ``trials[i]``. None: a row that nobody
    reads. Plain rows share one argmax; any other is computed from its own rows alone, so none depends on its
    neighbours."""
    plain = [trial is None or trial.plain for trial in trials]
    likeliest = mx.argmax(logits, axis=-1).astype(mx.int32) if any(plain) else None
    out = []
    for i, trial in enumerate(trials):
        if trial is None:
            assert likeliest is not None
            out.append(Verdict(likeliest, i, 0, [], None, []))
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
