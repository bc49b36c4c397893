"""From a request to token ids and the boundaries at which state is worth keeping.

Boundaries of messages are the longest common prefixes of renderings: the template renders ``messages[:i]``, and where
that stops agreeing with the whole text, message i ends. Text that a client sends back as an assistant message is
replaced by the very ids it was sampled as, where those are known and decode to exactly that text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from ..messages import check_text, normalise
from .request import Request
from .template import Template, refusal
from .text import decode, plain

#: with more messages than this, older ends are kept at doubling distances only: rendering and states stay affordable
RECENT = 48

FindAnswer = Callable[[list[int], str], "list[int] | None"]
#: messages, whether a new answer begins -> text
Render = Callable[[list[dict[str, Any]], bool], str]


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the positions (0 < b < len(tokens), ascending) where a message ends.

    ``head``: the end of system prompt and tools; ``turn``: the end of the last message before the newest user message;
    0 where there is none.
    """

    tokens: list[int]
    boundaries: list[int]
    head: int = 0
    turn: int = 0

    def roles(self, ladder: Sequence[int] = ()) -> dict[int, str]:
        """What each place is where a state is worth keeping, up to n−1: position -> one of ``policy.ROLES``."""
        end = len(self.tokens) - 1
        roles = {rung: "ladder" for rung in ladder} | {end: "tip"} | {b: "message" for b in self.boundaries if b <= end}
        if self.head in roles:
            roles[self.head] = "system"
        return {b: roles[b] for b in sorted(roles) if b > 0}


@dataclass
class Rendered:
    """What a request's prompt is as text, and what its ids are without the answers that a store remembers.

    tail: the character from which on nothing is of the caller's messages, but for the start of an answer that is to be
    gone on from. cuts: characters at which messages end; head and turn as in Prompt, in characters. ids: of a raw
    prompt; of one that was given as ids there is no text.
    """

    text: str
    tokenizer: Any = field(repr=False)
    source: tuple[Any, ...] = field(repr=False)
    tail: int = 0
    cuts: frozenset[int] = frozenset()
    head: int = 0
    turn: int = 0
    answers: list[_Answer] = field(default_factory=list)
    ids: list[int] | None = None
    _starts: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(request: Request, tokenizer: Any) -> Rendered:
        """Of this request, rendered now unless that was done before. Raises RequestError for messages that the model's
        template refuses, and for what is no text and no token id."""
        before = request.prepared.rendered if request.prepared is not None else None
        if before is not None and before.tokenizer is tokenizer and before.source == _source(request):
            return before
        return _render(request, tokenizer) if request.messages is not None else _raw(request, tokenizer)

    def encode(self, at: int, upto: int, before: str) -> tuple[list[int], list[int]]:
        """Ids of text[at:upto], behind the answer ``before``, and for each the character at which it ends."""
        if at == 0 and upto in self._starts:
            return self._starts[upto]
        ids, offsets = _encode_behind(before, self.text[at:upto], self.tokenizer)
        found = ids, [at + end for end in offsets]
        if at == 0:
            self._starts[upto] = found
        return found


def build(request: Request, tokenizer: Any, eos: Set[int], find_answer: FindAnswer) -> Prompt:
    """Tokenise a request. Raises RequestError for messages that the model's template refuses."""
    return tokenised(Rendered.of(request, tokenizer), eos, find_answer)


def tokenised(rendered: Rendered, eos: Set[int], find_answer: FindAnswer = lambda ids, text: None) -> Prompt:
    if rendered.ids is not None:
        tokens = list(rendered.ids)
        ends = [i + 1 for i, token in enumerate(tokens[:-1]) if token in eos]
        # the last end is the newest message's, if what follows begins an answer
        return Prompt(tokens, [end for i, end in enumerate(ends) if _worth(len(ends) - i)], turn=([0, 0, *ends])[-2])
    tokens, at = _tokenise(rendered, eos, find_answer)
    boundaries = sorted({b for b in at.values() if 0 < b < len(tokens)})
    return Prompt(tokens, boundaries, head=at[rendered.head], turn=at[rendered.turn] if rendered.turn else 0)


def _source(request: Request) -> tuple[Any, ...]:
    """All that a rendering depends on."""
    return (
        request.messages,
        request.prompt,
        request.tokens,
        request.tools,
        request.template_kwargs,
        request.continue_final,
    )


def _raw(request: Request, tokenizer: Any) -> Rendered:
    if request.prompt is not None:
        text = check_text(request.prompt, "prompt")
        ids = list(plain(tokenizer)(text, add_special_tokens=True)["input_ids"])
        if not ids:
            raise RequestError("The prompt has no tokens.", "Give some text.", param="prompt")
        return Rendered(text, tokenizer, _source(request), ids=ids)
    ids = list(request.tokens or [])
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise RequestError(f"{token!r} is not a token id.", "Ids are whole numbers from 0.", param="tokens")
    return Rendered("", tokenizer, _source(request), ids=ids)


@dataclass
class _Answer:
    """An assistant message whose rendered text spans [start, end) and whose ids are known or may be."""

    start: int
    end: int
    text: str
    ids: list[int] | None


def _render(request: Request, tokenizer: Any) -> Rendered:
    messages = normalise(request.messages, token_ids=True)
    known = [m.pop("token_ids", None) for m in messages]
    template = Template(tokenizer, request.tools, request.template_kwargs)
    render = template.render
    try:
        whole = _continued(messages, render, tokenizer) if request.continue_final else render(messages, True)
    except RequestError:
        raise
    except Exception as e:  # templates raise what they like
        raise refusal(e) from e
    template.check(messages, whole)

    def common(some: list[dict[str, Any]], generate: bool = False) -> int:
        """Characters of ``whole`` that the rendering of ``some`` agrees with; 0 where the template refuses ``some``."""
        try:
            text = render(some, generate)
        except Exception:
            return 0
        return len(text) if whole.startswith(text) else _agreement(text, whole)

    last = len(messages) - request.continue_final  # an answer that goes on has no end yet
    looked_at = [i for i in range(1, last + 1) if _worth(len(messages) - i)]
    ends = {i: common(messages[:i]) for i in looked_at}
    newest = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    return Rendered(
        whole,
        tokenizer,
        _source(request),
        tail=ends.get(last, 0),
        cuts=frozenset(ends.values()),
        head=_head(messages, common),
        turn=ends.get(newest, 0),
        answers=_answers(messages, known, whole, render, common, not request.continue_final),
    )


def _continued(messages: list[dict[str, Any]], render: Render, tokenizer: Any) -> str:
    """The prompt whose last message is the start of the answer: as far as the template writes before its text, then
    that text as it is. Where it begins with a thought, that begins where the model's own would."""
    final = messages[-1]
    text = final["content"]
    if final["role"] != "assistant" or not text or final.get("tool_calls"):
        raise RequestError(
            "An answer is to be gone on from, but the last message is none with text.",
            "It must have the role assistant, and content.",
            param="messages",
        )
    start = getattr(tokenizer, "think_start", None)
    if start and text.lstrip().startswith(start):
        before = render(messages[:-1], False)
        head = render(messages[:-1], True)
        at = head.find(start, _agreement(before, head))
        return (head if at < 0 else head[:at]) + text
    mark = _stem(render(messages, False))
    head, found, _ = render([*messages[:-1], {**final, "content": mark}], False).rpartition(mark)
    if not found:
        raise RequestError(
            "The model's chat template does not write the last message, so no answer can go on from it.",
            param="messages",
        )
    return head + text


def _answers(
    messages: list[dict[str, Any]],
    known: list[list[int] | None],
    whole: str,
    render: Render,
    common: Callable[[list[dict[str, Any]], bool], int],
    generate: bool,
) -> list[_Answer]:
    """Where the texts of assistant messages stand in ``whole``: between the same pieces as marks do in their place.

    All of them and in one rendering, so that a message keeps its ids however long the conversation grows. Left out is a
    text that the template changes, or puts elsewhere than where a generation prompt ends: its ids do not fit there.
    """
    said = {i: m["content"] for i, m in enumerate(messages) if m["role"] == "assistant" and m["content"]}
    stem = _stem(whole)
    try:
        marked = render([{**m, "content": f"{stem}{i}z"} if i in said else m for i, m in enumerate(messages)], generate)
    except Exception:
        return []
    answers: list[_Answer] = []
    fits: dict[str, bool] = {}  # by the last characters before a text: asking costs a rendering
    seen = at = 0
    for i, text in said.items():
        mark = f"{stem}{i}z"
        found = marked.find(mark, seen)
        if found < 0:
            continue
        piece = marked[seen:found]
        seen = found + len(mark)
        start = whole.find(piece, at)  # at ``at``, unless the template changed the text before it
        if start < 0:
            continue
        at = start + len(piece)
        if whole.startswith(text, at):
            if piece[-4:] not in fits:
                fits[piece[-4:]] = common(messages[:i], True) == at
            if not fits[piece[-4:]]:
                continue
            answers.append(_Answer(at, at + len(text), text, known[i]))
            at += len(text)
    return answers


def _stem(text: str) -> str:
    """What does not stand in ``text``."""
    stem = "answer"
    while stem in text:
        stem += "x"
    return stem


def _worth(distance: int) -> bool:
    return distance <= RECENT or distance & (distance - 1) == 0


def _head(messages: list[dict[str, Any]], common: Callable[[list[dict[str, Any]]], int]) -> int:
    """End of everything that stands before the first user text: system prompt, tools and what the template adds."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        return 0
    other = "B" if str(messages[first]["content"]).startswith("A") else "A"
    return common([*messages[:first], {**messages[first], "content": other}])


def _agreement(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokenise(rendered: Rendered, eos: Set[int], find_answer: FindAnswer) -> tuple[list[int], dict[int, int]]:
    """Ids of the text with known answers' ids in place, and each cut (a character) as a token position, rounded
    down."""
    whole, tokenizer = rendered.text, rendered.tokenizer
    tokens: list[int] = []
    ends: list[int] = []  # for each token, the character at which it ends
    at = 0  # the end of what ``tokens`` covers: the start, or the end of a known answer
    before = ""  # that answer

    def encode(upto: int) -> tuple[list[int], list[int]]:
        return rendered.encode(at, upto, before)

    probe, probe_ends, probed = [], [], 0  # the tokens of [at, probed), to ask for answers with
    for answer in rendered.answers:
        ids = answer.ids
        if ids is None:
            if probed < answer.start:  # twice as far each time: answers that nobody knows cost linear time together
                probed = min(len(whole), max(answer.start, 2 * probed - at))
                probe, probe_ends = encode(probed)
            k = bisect_right(probe_ends, answer.start)
            if answer.start == (probe_ends[k - 1] if k else at):
                ids = find_answer(tokens + probe[:k], answer.text)
        if ids and ids[-1] in eos:
            ids = ids[:-1]
        if not ids or decode(tokenizer, ids) != answer.text:
            continue  # not those ids: let the text flow on, so that tokens may span this place
        flow, flow_ends = encode(answer.start)
        tokens += flow + ids
        ends += flow_ends + [answer.end] * len(ids)
        at = probed = answer.end
        before = answer.text
    flow, flow_ends = encode(len(whole))
    tokens += flow
    ends += flow_ends
    cuts = rendered.cuts | {rendered.head}
    return tokens, {cut: bisect_right(ends, cut) for cut in cuts}  # a cut inside a token is moved before it


def _encode_behind(before: str, text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """``_encode`` of text that stands behind other text: some tokenizers put a space before what they see first."""
    if before and text:
        ids, ends = _encode(before + text, tokenizer)
        k = bisect_right(ends, len(before))
        if k and ends[k - 1] == len(before):  # no token spans the two
            return ids[k:], [end - len(before) for end in ends[k:]]
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of a piece of rendered text, and the character at which each ends."""
    if not text:
        return [], []
    inner = plain(tokenizer)
    ends, at = [], 0
    if getattr(inner, "is_fast", False):
        out = inner(text, add_special_tokens=False, return_offsets_mapping=True)
        for _, end in out["offset_mapping"]:
            at = max(at, end)
            ends.append(at)
        return list(out["input_ids"]), ends
    # slow tokenizers tell no offsets: the text that each token adds to those before, as far as it agrees
    ids = list(inner(text, add_special_tokens=False)["input_ids"])
    first = done = 0  # ids[first:done] were whole characters
    for i in range(len(ids)):
        known, more = decode(tokenizer, ids[first:done]), decode(tokenizer, ids[first : i + 1])
        added = _agreement(more[len(known) :], text[at : at + len(more)])
        if added:  # tokens without a character of their own are part of the one that comes
            at += added
            ends += [at] * (i + 1 - len(ends))
        if added or (len(more) > len(known) and not more.endswith("\ufffd")):
            first, done = done, i + 1
    return ids, ends + [at] * (len(ids) - len(ends))
