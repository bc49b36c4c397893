"""How many tokens to draft: learned from what drafts and cycles did here. Plain Python, no MLX.

A cycle with k drafts gives each row 1 + Σ_j Π_{i≤j} a_i tokens on average, where a_i is how often the draft at place i
is accepted when all before it were. What it costs against a plain step is measured. Chosen is the k with the most
tokens a second, 0 (a plain step) where none pays.

What is not known is tried. All that is tried for knowledge's sake is paid from one small *allowance*, in plain steps:
it begins with a few, earns a part of each token, and loses what a cycle cost above what its tokens would have cost
plainly. So useless drafts cost a bounded part of any run, whatever cycles cost on this machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

#: depths that are chosen from, besides the deepest one allowed: each is a width of its own for compiled steps
RUNGS = (1, 2, 3, 4, 6, 8)
#: the deepest that may be configured
DEEPEST = 8
#: the allowance: plain steps it may hold, and what each plain step earns
ALLOWANCE, EARNED = 2.5, 0.006
#: another depth is taken where it gives so many times the tokens a second; drafting is begun, or given up, likewise
BETTER, BEGIN, GIVE_UP = 1.03, 1.03, 0.99
#: of a batch by so much more: what it costs depends on its rows, and they do not all gain
BATCH = 1.06
#: plain steps until a parked sequence is tried again, at first and at most; doubled each time that fails
PARK, PARKED = 4, 256
#: plain steps until it is asked again whether a try can be paid, at most
ASK = 64
#: of the plain steps of a parked sequence one in so many is measured
MEASURED = 32
#: plain steps until a drafter that had nothing to propose is asked again, at first and at most
QUIET, QUIETEST = 1, 16
#: cycles until plain steps are timed again, at first and at most, and how many of them there are then
LOOK, LOOKS, LOOK_STEPS = 64, 1024, 4
#: cycles until the depths beside the one in use are tried, at first and at most
TRY, TRIES = 4, 256
#: measurements that are kept of one shape, and how many plain ones are needed before anything is tried
KEPT, NEEDED = 7, 3
#: a shape whose times changed by so much: the machine is faster or slower than it was
SHIFT = 1.25
#: a cycle costs at least so many plain steps: it does all that one does
LEAST = 1.05
#: cycles of a depth in a rehearsal
REHEARSED = 2
#: what a cycle counts for against the next one: of a sequence, and of the engine
FADE, FADE_ENGINE = 0.96, 0.99
#: of the first drafts of earlier sequences, more than so many, so few were accepted that the next one's hardly will be
TRIED, HOPELESS = 2.5, 0.2
#: (first drafts seen, more than; at best so many times the tokens a second would come of drafting): new sequences sleep
FAR = ((1.9, 0.8), (0.9, 0.5))
#: so many of them until one tries again, at first and at most
NAP, NAPS = 4, 32
#: before anything was seen: how often a draft is taken to be accepted, and how many drafts that counts for
GUESS, WEIGHT = 0.6, 1.0
#: what earlier sequences did counts for as many drafts as a guess does, and for so many more once SEEN were seen
PRIOR, SEEN = 1.0, 16
#: the step after a plain one is built while that runs; a cycle is not, nor the plain step after it
LEAVE = 0.4
#: a cycle that was never made is taken to cost so many plain steps, and so many more for each draft
CYCLE, DRAFT = 1.15, 0.25


def deepest(group: int = 0, rings: int | None = None) -> int:
    """Drafts of a cycle at most. ``group``: on Metal, query heads of each head of keys and values, 0 elsewhere: its
    vector kernel takes 32 // group rows, 8 at most (``reference/metal.md`` 8). ``rings``: what the state can take back,
    None for any."""
    most = max(1, min(8, 32 // group) - 1) if group else DEEPEST
    return most if rings is None else min(most, rings)


def typical(times: Iterable[float]) -> float:
    """Of some measurements: what most of them were not below, whatever the slow ones waited for."""
    rising = sorted(times)
    return rising[(len(rising) - 1) // 3]


class Accepted:
    """How often drafts were accepted at each place, given that those before were; what is older counts less."""

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._right = [0.0] * DEEPEST
        self._seen = [0.0] * DEEPEST

    def add(self, drafted: int, accepted: int) -> None:
        self._right = [n * self._fade for n in self._right]
        self._seen = [n * self._fade for n in self._seen]
        for place in range(min(drafted, accepted + 1)):
            self._seen[place] += 1
            self._right[place] += place < accepted

    def seen(self, place: int) -> float:
        return self._seen[place]

    def rate(self, place: int, guess: float, weight: float = WEIGHT) -> float:
        """Of the draft at ``place`` (from 0), where ``guess`` counts for ``weight`` drafts."""
        return (self._right[place] + weight * guess) / (self._seen[place] + weight)

    @property
    def reached(self) -> int:
        """Places at which a draft was accepted lately."""
        return next((place + 1 for place in reversed(range(DEEPEST)) if self._right[place] >= 0.3), 0)


class Course:
    """What a stream does now: a sequence by itself, or all batches of so many rows. ``k``: drafts of its cycles, 0
    while parked."""

    def __init__(self, park: int = PARK) -> None:
        self.k = 0
        self.park = park
        #: plain steps until drafts are tried again
        self.wait = 0
        #: the same for one that had nothing to propose
        self.quiet, self.silent = QUIET, 0
        self.look = LOOK
        #: cycles since plain steps were timed
        self.cycles = 0
        #: cycles until a depth beside this one is tried
        self.tries, self.untried = TRY, TRY
        #: plain steps still to be timed
        self.steps = 0


class Naps:
    """Of the sequences of a kind, whose turn it is to draft where that does not pay; more and more of them sleep."""

    def __init__(self) -> None:
        self._long, self._slept = NAP, 0

    def sleeps(self, far: bool) -> bool:
        """Whether the next one sleeps, where drafting is ``far`` from paying."""
        if not far:
            self._long, self._slept = NAP, 0
        elif self._slept < self._long:
            self._slept += 1
            return True
        else:
            self._long, self._slept = min(NAPS, 2 * self._long), 0
        return False


class History:
    """Of one sequence, from its first draft to its end. Made by ``Depth.history``."""

    def __init__(self, engine: Accepted, naps: Naps) -> None:
        self.accepted, self.engine, self.naps = Accepted(FADE), engine, naps
        # where earlier ones had nothing accepted, the first try waits, for the head has to read the prompt for it, and
        # the second one waits longer
        self.hopeless = engine.seen(0) > TRIED and engine.rate(0, GUESS) < HOPELESS
        self.course = Course(8 * PARK if self.hopeless else PARK)
        self.course.wait = self.course.park if self.hopeless else 0

    def rates(self, k: int) -> list[float]:
        """How likely each of ``k`` drafts is accepted if those before are: what this sequence has shown, and besides
        the first place as with earlier sequences, each further one as the one before it is here, and was there."""
        found: list[float] = []
        before = GUESS
        for place in range(k):
            there = self.engine.rate(place, before)
            guess = there if place == 0 else min(0.98, found[-1] * there / max(before, 1e-3))
            weight = WEIGHT + PRIOR * min(1.0, self.engine.seen(place) / SEEN)
            found.append(self.accepted.rate(place, guess, weight if place == 0 else 2 * weight))
            before = there
        return found

    def tokens(self, k: int) -> list[float]:
        """Tokens that a cycle with 0 to ``k`` drafts gives, on average."""
        found, chance = [1.0], 1.0
        for rate in self.rates(k):
            chance *= rate
            found.append(found[-1] + chance)
        return found

    @property
    def reach(self) -> int:
        """Drafts that may be tried: twice as many as were accepted, a few where earlier sequences had them."""
        return max(1, 2 * self.accepted.reached, min(3, self.engine.reached))


class Costs:
    """Seconds of plain steps and cycles of so many rows. Where shapes that are still met become slower or faster, the
    others are taken to have changed with them: contexts grow, machines grow hot."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        #: what was typical of a shape when the others were last changed with it
        self._was: dict[int, float] = {}
        #: answers, until there is another measurement
        self._usual: dict[int, float] = {}
        self._answers: dict[int, float] = {}

    def add(self, k: int, seconds: float) -> None:
        times = self._times.setdefault(k, deque(maxlen=KEPT))
        times.append(seconds)
        self._answers.clear()
        self._usual[k] = usual = typical(times)
        if len(times) < KEPT:
            return
        change = usual / self._was.setdefault(k, usual)
        if not 1 / SHIFT < change < SHIFT:
            for other in self._times:
                if other != k:
                    self._times[other] = deque((t * change for t in self._times[other]), maxlen=KEPT)
                    self._usual[other] *= change
                    self._was.pop(other, None)
            self._was[k] = usual

    def forget(self, k: int) -> None:
        """What is known of it is old."""
        for known in (self._times, self._was, self._usual):
            known.pop(k, None)
        self._answers.clear()

    def known(self, k: int) -> int:
        """How often it was measured, lately."""
        return len(self._times.get(k, ()))

    @property
    def deepest(self) -> int:
        """The most drafts of a cycle that was measured."""
        return max(self._times, default=0)

    @property
    def plain(self) -> float:
        """Seconds of a plain step; 0 before there was one."""
        return self._usual.get(0, 0.0)

    def cycle(self, k: int, like: Costs | None = None) -> float:
        """Seconds of a cycle with ``k`` drafts. Where that was not measured: as those that were and cost most nearly as
        much, then in proportion as with ``like``, then as one may guess. Plain steps were measured."""
        if k in self._answers:
            return self._answers[k]
        if not any(n and self.known(n) >= NEEDED for n in self._times):
            return self._cycle(k, like)
        self._answers[k] = seconds = self._cycle(k, None)
        return seconds

    def _cycle(self, k: int, like: Costs | None) -> float:
        times, least = self._times.get(k, ()), LEAST * self.plain
        if len(times) >= NEEDED:
            return max(self._usual[k], least)
        # first ones may have waited for a kernel, or their trace: they are not believed until there are others
        return max(least, min([1.25 ** len(times) * self._guess(k, like), *times]))

    def _guess(self, k: int, like: Costs | None) -> float:
        known = sorted(n for n in self._times if n and n != k and self.known(n) >= NEEDED)
        known = known or sorted(n for n in self._times if n and n != k)
        plain = self.plain
        if not known:
            return self._prior(k, like)
        below, above = [n for n in known if n < k], [n for n in known if n > k]
        if below and above:
            (a, b) = (below[-1], above[0])
        elif len(known) > 1:
            (a, b) = (below[-2], below[-1]) if below else (above[0], above[1])
        else:  # a part of what is above a plain step is the drafts'
            at = self._at(known[0], like)
            return max(plain, at + (at - plain) * DRAFT / (CYCLE - 1 + DRAFT * known[0]) * (k - known[0]))
        at_a, at_b = self._at(a, like), self._at(b, like)
        slope = max(0.0, (at_b - at_a) / (b - a))
        return max(at_b + slope * (k - b), plain)

    def _at(self, k: int, like: Costs | None) -> float:
        """Of one that was measured, what others are guessed from: of first ones no more than is believed."""
        times = self.known(k)
        return self._usual[k] if times >= NEEDED else min(self._usual[k], 1.25**times * self._prior(k, like))

    def _prior(self, k: int, like: Costs | None) -> float:
        """Where nothing was measured."""
        if like is not None and like.known(0) and like.deepest:
            return self.plain * like.cycle(k) / like.plain
        return self.plain * (CYCLE + DRAFT * k)


class Depth:
    """Drafts of the cycles of one engine. ``most``: as the state and the device allow; ``fixed``: what the user wants,
    always."""

    def __init__(self, most: int, fixed: int | None = None) -> None:
        self.most, self.fixed = most, fixed
        self.rungs = tuple(sorted({k for k in (*RUNGS, most) if 0 < k <= most}))
        self.allowance = ALLOWANCE
        self._costs: dict[int, Costs] = {}
        #: by kind, what all its sequences share
        self._engine: dict[Hashable, tuple[Accepted, Naps]] = {}
        self._courses: dict[int, Course] = {}
        #: while it rehearses: depths that are still to be made, by rows
        self._rehearsal: dict[int, list[int]] | None = None
        self._timed = False
        #: whether the latest was a cycle
        self._cycles = False

    def history(self, kind: Hashable = None) -> History:
        """For a new sequence. ``kind``: what its acceptance depends on, greedy or not for one: earlier sequences of
        that kind say what is to be expected."""
        if self._rehearsal is not None:  # what its drafts are worth says nothing
            return History(Accepted(FADE_ENGINE), Naps())
        return History(*self._engine.setdefault(kind, (Accepted(FADE_ENGINE), Naps())))

    def rehearse(self, on: bool) -> None:
        """From now on, or no longer, cycles are made to be timed: every depth a few times, whatever comes of it."""
        self._rehearsal = {} if on else None
        self._courses.clear()

    def learn(self, other: Depth) -> None:
        """Take over what steps and cycles cost there, where no cycle was measured here."""
        self._costs |= {n: costs for n, costs in other._costs.items() if not self._costs_of(n).deepest}

    def _rehearsed(self, rows: Sequence[History]) -> list[int]:
        assert self._rehearsal is not None
        ends_first = sorted(self.rungs, key=lambda k: (k not in (1, self.most), k))
        return self._rehearsal.setdefault(len(rows), [k for k in ends_first for _ in range(REHEARSED)])

    # what to do

    def hopeless(self, rows: Sequence[History]) -> bool:
        """Whether drafts of these new rows are hardly worth preparing for."""
        return self.fixed is None and all(row.hopeless for row in rows)

    def sleeps(self, row: History) -> bool:
        """Whether this new sequence does without drafts from beginning to end, and so without all that is done to find
        out whether they pay: with those before it they were far from that. To be asked once."""
        if self.fixed is not None or self._rehearsal is not None:
            return False
        costs, gain = self._costs_of(1), math.inf
        if costs.known(0) >= NEEDED:
            gain = max(self._gains([row], costs, self.most).values(), default=0.0)
        return row.naps.sleeps(any(row.engine.seen(0) > seen and gain < least for seen, least in FAR))

    def next(self, rows: Sequence[History], most: int | None = None) -> int:
        """Drafts for the next cycle of a group of these rows; 0: a plain step. ``most``: what is left of their answers
        and their room allow."""
        limit = self.most if self.fixed is None else self.fixed
        limit = limit if most is None else max(0, min(limit, most))
        if self.fixed is not None or not limit or not rows:
            return limit
        course, costs = self._course(rows), self._costs_of(len(rows))
        if self._rehearsal is not None:
            return min(limit, next(iter(self._rehearsed(rows)), 0)) if costs.known(0) >= NEEDED else 0
        if costs.known(0) < NEEDED or course.steps or course.silent or (course.wait and not course.k):
            return 0
        best, gain = self._best(rows, course, costs, limit)
        if best:
            if self._looks(course, costs, gain):
                return 0
            course.k = best
            return self._tried(rows, course, costs, limit) or best
        expected = sum(row.tokens(1)[1] for row in rows) / len(rows)
        lost = min(ALLOWANCE, LEAVE + costs.cycle(1, self._like(len(rows))) / costs.plain - expected)
        if self.allowance >= lost:
            return 1
        # nothing that this depends on changes much before so many plain steps have been made: they do not ask
        course.k, course.wait = 0, min(ASK, math.ceil((lost - self.allowance) / EARNED))
        return 0

    def _best(self, rows: Sequence[History], course: Course, costs: Costs, limit: int) -> tuple[int, float]:
        """The depth that gives the most tokens a second, 0 for plain steps, and what it gains: its tokens a second over
        those of plain steps. A change must be worth it."""
        reach = min(limit, max(row.reach for row in rows), max(1, 2 * costs.deepest))
        gains = self._gains(rows, costs, reach)
        best = max(gains, key=lambda k: gains[k]) if gains else 0
        if not best:
            return 0, 1.0
        if course.k in gains and gains[best] < BETTER * gains[course.k]:
            best = course.k
        least = (GIVE_UP if course.k else BEGIN) * (BATCH if len(rows) > 1 else 1)
        return (best, gains[best]) if gains[best] > least else (0, 1.0)

    def _gains(self, rows: Sequence[History], costs: Costs, reach: int) -> dict[int, float]:
        depths = [k for k in self.rungs if k <= reach]
        if not depths:
            return {}
        tokens, like = [row.tokens(depths[-1]) for row in rows], self._like(len(rows))
        return {k: sum(each[k] for each in tokens) / len(rows) * costs.plain / costs.cycle(k, like) for k in depths}

    def _tried(self, rows: Sequence[History], course: Course, costs: Costs, limit: int) -> int:
        """A depth beside the one in use that is to be tried, of which less is known; 0 for none."""
        if course.untried > 0 or not course.k:
            return 0
        at = self.rungs.index(course.k) if course.k in self.rungs else 0
        beside = [k for k in (*self.rungs[max(0, at - 1) : at], *self.rungs[at + 1 : at + 2]) if k <= limit]
        if not beside:
            return 0
        gains = self._gains(rows, costs, max(*beside, course.k))
        k = max(beside, key=lambda k: (costs.known(k) < NEEDED, gains[k]))
        lost = (gains[course.k] - gains[k]) * costs.cycle(k) / costs.plain
        if self.allowance < lost:
            return 0
        course.tries = course.untried = min(TRIES, 2 * course.tries if costs.known(k) >= NEEDED else course.tries)
        return k

    def _looks(self, course: Course, costs: Costs, gain: float) -> bool:
        """Whether plain steps are to be timed again, which cost what drafting gains."""
        if course.cycles < course.look or self.allowance < min(ALLOWANCE, LOOK_STEPS * (gain - 1)):
            return False
        costs.forget(0)
        course.cycles, course.steps, course.look = 0, LOOK_STEPS, min(LOOKS, 2 * course.look)
        return True

    def seconds(self, rows: int, k: int) -> tuple[float, float]:
        """What a plain step of so many rows takes, and a cycle of ``k`` drafts; 0 before plain ones were measured."""
        costs = self._costs_of(rows)
        return (costs.plain, costs.cycle(k, self._like(rows))) if costs.plain else (0.0, 0.0)

    # what was done

    def cycled(
        self, rows: Sequence[History], k: int, kept: Sequence[int], seconds: float, drafted: Sequence[int] | None = None
    ) -> None:
        """A cycle of ``k`` drafts a row was made in ``seconds``, from one settled edge to the next, catching up and
        storing left out. Of each row ``kept`` tokens were kept, 1 to k + 1; rows that came to their end inside are left
        out. ``drafted``: where some had fewer drafts than k."""
        costs, course = self._costs_of(len(rows)) if rows else Costs(), self._course(rows) if rows else Course()
        self._note(costs, k, seconds)
        if self._rehearsal is not None:
            self._cycles = True
            del self._rehearsed(rows)[:1]
            return
        if costs.known(0):
            usual = costs.cycle(k, self._like(len(rows)))
            # what it took, if that can be: a first one may have waited for a kernel that was built
            took = usual if costs.known(k) < NEEDED else min(seconds, 2 * usual)
            self._pay(took / costs.plain - sum(kept) / len(rows) + (0 if self._cycles else LEAVE))
        for row, n, d in zip(rows, kept, drafted or [k] * len(rows), strict=True):
            row.accepted.add(min(d, DEEPEST), n - 1)
            row.engine.add(min(d, DEEPEST), n - 1)
        self._cycles = True
        course.cycles += 1
        course.untried -= 1
        course.quiet = QUIET
        if self.fixed is not None or not rows or not costs.known(0):
            return
        best, _ = self._best(rows, course, costs, self.most)
        if best:
            course.park = PARK
        elif sum(kept) > len(rows):  # accepted though little was hoped for: look closer
            course.k, course.wait = 0, 0
        else:
            course.k, course.wait, course.park = 0, course.park, min(PARKED, 2 * course.park)

    def stepped(self, rows: Sequence[History], seconds: float) -> None:
        """A plain step was made in ``seconds``. The first one after a cycle is no measure: nothing was in flight."""
        if not rows:
            return
        course = self._course(rows)
        if self._cycles:
            self.interrupt()
        self._note(self._costs_of(len(rows)), 0, seconds)
        self._cycles = False
        self._pay(-EARNED)
        course.wait, course.steps = max(0, course.wait - 1), max(0, course.steps - 1)
        course.silent = max(0, course.silent - 1)

    def rests(self, row: History) -> bool:
        """A plain step is made of a sequence by itself that is parked, and need not be measured: it is only counted.
        Now and then one is measured all the same."""
        course = row.course
        if self.fixed is not None or self._rehearsal is not None or self._cycles or course.k or course.steps:
            return False
        if course.wait % MEASURED == 0:
            return False
        course.wait -= 1
        course.silent = max(0, course.silent - 1)
        self._pay(-EARNED)
        return True

    def nothing(self, rows: Sequence[History]) -> None:
        """The drafter had nothing to propose."""
        course = self._course(rows)
        course.silent, course.quiet = course.quiet, min(QUIETEST, 2 * course.quiet)

    def _pay(self, steps: float) -> None:
        self.allowance = max(-ALLOWANCE, min(ALLOWANCE, self.allowance - steps))

    def interrupt(self) -> None:
        """The next time that is told has waited for something else."""
        self._timed = False

    def _note(self, costs: Costs, k: int, seconds: float) -> None:
        if self._timed and seconds > 0:
            costs.add(k, seconds)
        self._timed = True

    # where it is kept

    def _costs_of(self, rows: int) -> Costs:
        return self._costs.setdefault(rows, Costs())

    def _like(self, rows: int) -> Costs | None:
        """Costs of the nearest number of rows of which cycles were measured, fewer rather than more."""
        known = [n for n, costs in self._costs.items() if n != rows and costs.deepest and costs.known(0)]
        return self._costs[min(known, key=lambda n: (n > rows, abs(n - rows)))] if known else None

    def _course(self, rows: Sequence[History]) -> Course:
        return rows[0].course if len(rows) == 1 else self._courses.setdefault(len(rows), Course())
