"""Grammars: what an answer must match, compiled by llguidance for one tokenizer.

llguidance's parser limits bound the work of a mask; what compiling may cost is bounded in ``grammar_text``.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import DeadEnd, EngineError, RequestError
from .constraint import Constraint, allows, pack
from .grammar_text import written
from .request import Grammar
from .text import plain

log = logging.getLogger("mlxkv.grammar")

#: compiled grammars that are remembered
KEPT = 16
#: masks of the latest places of an answer that a way back need not compute again; no speculation goes further
REMEMBERED = 9
#: bytes of stack for a compiler that calls itself once for each rule of a chain, some 8 KB each: the longest text that
#: is taken has less than 7,000
STACK = 256 << 20
#: states that the matcher of a grammar's words may come to; beyond them it is refused
LEXER_STATES = 50_000
_one_at_a_time = threading.Lock()


class Grammars:
    """Grammars of one model. The tokenizer is prepared at the first use, which takes a second or two for a large one;
    ``prepare`` does it before. Any thread may use this (no array of MLX is made); a constraint has one user."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Iterable[int]) -> None:
        """``vocab_size``: how many logits the model gives, which may be more than the tokenizer has tokens."""
        self._source, self._vocab_size = tokenizer, vocab_size
        self._eos = sorted(t for t in eos if 0 <= t < vocab_size)
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, GrammarConstraint] = OrderedDict()

    def constraint(self, grammar: Grammar) -> Constraint:
        """A new constraint at the start of ``grammar``. Raises RequestError for a grammar, or a tokenizer, that cannot
        be compiled, with llguidance's reason."""
        vocabulary = self.prepare()
        with self._lock:
            start = self._compiled.get(grammar)
        if start is None:  # whoever has a grammar that is known does not wait for this
            start = _compile(grammar, vocabulary)
        with self._lock:
            start = self._compiled.pop(grammar, start)
            self._compiled[grammar] = start
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return start.fork()

    def prepare(self) -> Vocabulary:
        """Raises RequestError for a tokenizer that llguidance does not read."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._source, self._vocab_size, self._eos)
            return self._vocabulary


class Vocabulary:
    """llguidance's view of a tokenizer, and packed masks: ``text`` allows the ids that have text or are special (not
    end tokens, not padding), ``eos`` the end tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: list[int]) -> None:
        """Raises RequestError for a tokenizer that llguidance does not read."""
        from llguidance import LLTokenizer

        started = time.monotonic()
        backend = getattr(plain(tokenizer), "backend_tokenizer", None)
        if backend is None:
            raise RequestError("grammar cannot be used: this model has no fast tokenizer.", param="grammar")
        said = json.loads(backend.to_str())
        said["padding"] = said["truncation"] = None
        ids = np.fromiter(backend.get_vocab(with_added_tokens=True).values(), np.int64)
        width = max(vocab_size, int(ids.max()) + 1)
        known = [t for t in eos if t in ids]  # an end token may be one of the padding
        try:
            self.tokenizer = LLTokenizer(json.dumps(said), n_vocab=width, eos_token=known or None)
        except Exception as e:  # whatever it raises for kinds of tokenizers that it does not know
            raise RequestError(f"grammar cannot be used with this model's tokenizer: {e}.", param="grammar") from e
        self.words = -(-vocab_size // 32)
        text = np.setdiff1d(ids[ids < vocab_size], [*eos, *self.tokenizer.eos_tokens])
        self.text, self.eos = pack(text, vocab_size), pack(eos, vocab_size)
        log.debug("prepared %d tokens for grammars in %.2f s", len(ids), time.monotonic() - started)


def _compile(grammar: Grammar, vocabulary: Vocabulary) -> GrammarConstraint:
    started = time.monotonic()
    start = GrammarConstraint(_matcher(grammar, vocabulary.tokenizer), vocabulary)
    try:
        start.mask()
    except DeadEnd as e:
        raise RequestError(f"grammar ({grammar.kind}) matches nothing: {e.message}", param="grammar") from e
    log.debug("compiled a grammar in %.3f s", time.monotonic() - started)
    return start


def _matcher(grammar: Grammar, tokenizer: Any) -> Any:
    """llguidance's matcher at the start of ``grammar``. Raises RequestError, EngineError."""
    from llguidance import LLMatcher, LLParserLimits

    text = written(grammar)
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=LEXER_STATES)
    made: list[Any] = []

    def work() -> None:
        made.append(LLMatcher(tokenizer, text, log_level=0, limits=limits))

    thread = threading.Thread(target=work, name="mlxkv-grammar", daemon=True)
    with _one_at_a_time:
        usual = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError as e:
            raise EngineError(f"A grammar cannot be compiled: {e}.") from e
        finally:
            threading.stack_size(usual)
    thread.join()
    if not made:
        raise RequestError(f"grammar ({grammar.kind}) cannot be compiled.", param="grammar")
    matcher = made[0]
    if matcher.is_error():
        raise RequestError(f"grammar ({grammar.kind}) does not compile: {_brief(matcher)}", param="grammar")
    return matcher


def matches(grammar: Grammar, text: str) -> bool:
    """Whether ``text`` is, from its first character to its last, what ``grammar`` asks for, whatever tokens it is made
    of. A grammar that names special tokens matches no text. Raises RequestError for one that does not compile."""
    from llguidance import LLTokenizer

    matcher = _matcher(grammar, LLTokenizer("byte"))
    data = list(text.encode("utf-8", "surrogatepass"))
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def _stopped(matcher: Any) -> Exception:
    """Why a matcher can go no further. Its limits are the grammar's fault, not the engine's."""
    reason = _brief(matcher)
    if "imit" in reason or "too many" in reason.lower():
        return RequestError(
            f"grammar asks for more states than the matcher may have: {reason}. Make it simpler: shorter counted "
            "repetitions, fewer alternatives.",
            param="grammar",
        )
    return DeadEnd(f"The grammar cannot go on: {reason}")


def _brief(matcher: Any) -> str:
    """llguidance's reason; it may quote the whole grammar."""
    said = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return said if len(said) <= 500 else said[:500] + " …"


class GrammarConstraint:
    """A grammar at some place in an answer. End tokens are not llguidance's business: they are allowed exactly where it
    accepts, and one that was chosen ends everything."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._length = 0
        self._ended = False  # by an end token
        self._mask: np.ndarray | None = None
        self._past: deque[np.ndarray] = deque(maxlen=REMEMBERED)  # masks before the latest tokens

    @property
    def accepting(self) -> bool:
        return self._ended or self._matcher.is_accepting()

    @property
    def free(self) -> bool:
        return False

    @property
    def done(self) -> bool:
        return self._ended or (self.accepting and not (self._possible() & self._vocabulary.text).any())

    def _possible(self) -> np.ndarray:
        if self._mask is None:
            if self._ended:
                self._mask = np.zeros(self._vocabulary.words, np.uint32)
                return self._mask
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._vocabulary.words]
            if self._matcher.is_error():
                raise _stopped(self._matcher)
            mask = words & self._vocabulary.text
            self._mask = mask | self._vocabulary.eos if self._matcher.is_accepting() else mask
        return self._mask

    def mask(self) -> np.ndarray:
        mask = self._possible()
        if not mask.any() and not self.accepting:
            raise DeadEnd("No token of this model can follow what the grammar has so far.")
        return mask

    def advance(self, token: int) -> None:
        allowed = self._possible()
        if not allows(allowed, token):
            raise DeadEnd(f"Token {token} does not follow what the grammar has so far.")
        ended = allows(self._vocabulary.eos, token)
        if not ended and not self._matcher.consume_token(token):
            raise _stopped(self._matcher)
        self._length, self._ended = self._length + 1, ended
        self._past.append(allowed)
        self._mask = None

    def fork(self) -> GrammarConstraint:
        other = GrammarConstraint(self._matcher.deep_copy(), self._vocabulary)
        other._length, other._ended = self._length, self._ended
        other._mask, other._past = self._mask, self._past.copy()
        return other

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._length:
            raise ValueError(f"{n} tokens cannot be taken back: there are {self._length}")
        if n == 0:
            return
        text = n - self._ended  # the matcher has not seen an end token, and nothing follows one
        self._length, self._ended, self._mask = self._length - n, False, None
        for _ in range(n):
            self._mask = self._past.pop() if self._past else None
        if text and not self._matcher.rollback(text):
            raise DeadEnd(f"The grammar cannot go back: {_brief(self._matcher)}")
