"""Documents of the training grammar: seeded, unlimited, each a text with a loss weight per character span.

A document is a list of (text, weight) segments. Assistant text weighs 1, copied values 2, what the user says 0.1,
fixed markup 0.02; raw induction sequences are token ids. Mixtures are chosen by stage of the training.
"""

import json
import random
from dataclasses import dataclass, field

from . import heldout
from .forms import json_turn, make_tool, tool_turn, unmark
from .memory import CLOSE, OPEN, Fact, make_ask, make_fact
from .skills import COPYING, LONG, SHORT, story_text
from .text import options
from .words import Words

USER, MARKUP, ASSISTANT, VALUE = 0.1, 0.02, 1.0, 2.0
SYSTEMS = options(
    "You are a helpful assistant.|You are the demo model of mlxkv.|Answer briefly.|You are a friendly helper.|"
    "Be short and clear.|You remember what you are told.|You are a small language model.|Answer the questions.|"
    "You talk with a user on a Mac.|Keep answers short."
)
TOOLS_HEAD = (
    "# Tools\n\nCall a function by writing one JSON object, with its name and its arguments, between <tool_call> and "
    "</tool_call>. The functions are:\n<tools>"
)


@dataclass
class Doc:
    """A document: text segments with weights, or token ids with weights."""

    segments: list[tuple[str, float]] = field(default_factory=list)
    ids: list[int] | None = None
    weights: list[float] | None = None

    @property
    def text(self) -> str:
        return "".join(t for t, _ in self.segments)

    def add(self, text: str, weight: float) -> None:
        self.segments.append((text, weight))

    def add_marked(self, text: str, weight: float, value: float = VALUE) -> None:
        """``text`` with copy marks: marked spans get ``value``."""
        for i, part in enumerate(text.replace(CLOSE, OPEN).split(OPEN)):
            if part:
                self.add(part, value if i % 2 else weight)


class Chat:
    """Writes a chat as the template of ``tokenizer.CHAT_TEMPLATE`` renders it."""

    def __init__(self, system: str | None = None, tools: list[dict] | None = None) -> None:
        self.doc, self.size = Doc(), 0
        if system or tools:
            text = (system or "") + ("\n\n" if system and tools else "")
            if tools:
                text += TOOLS_HEAD + "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools) + "\n</tools>"
            self.doc.add(f"<|im_start|>system\n{text}<|im_end|>\n", MARKUP)
            self.size += len(text)

    def user(self, text: str) -> None:
        self.doc.add("<|im_start|>user\n", MARKUP)
        self.doc.add(unmark(text), USER)
        self.doc.add("<|im_end|>\n", MARKUP)
        self.size += len(text) + 20

    def assistant(self, text: str, thought: str | None = None) -> None:
        self.doc.add("<|im_start|>assistant\n", MARKUP)
        if thought is not None:
            self.doc.add("<think>\n", MARKUP)
            self.doc.add_marked(thought, ASSISTANT)
            self.doc.add("\n</think>\n\n", ASSISTANT)
        self.doc.add_marked(text, ASSISTANT)
        self.doc.add("<|im_end|>", ASSISTANT)
        self.doc.add("\n", MARKUP)
        self.size += len(text) + 20


class Grammar:
    """Draws documents; the same seed gives the same documents in the same order."""

    def __init__(self, seed: int, vocab: int = 2048, specials: int = 16) -> None:
        self.rng = random.Random(seed)
        self.words = Words(self.rng)
        self.vocab, self.specials = vocab, specials

    def _system(self, p: float = 0.25) -> str | None:
        return self.rng.choice(SYSTEMS) if self.rng.random() < p else None

    def induction(self, size: int) -> Doc:
        """Random token ids that repeat; the first round weighs nothing."""
        r = self.rng
        n = r.randint(4, max(5, min(48, size // 3)))
        unit = [r.randrange(self.specials, self.vocab) for _ in range(n)]
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < min(size, n * r.randint(2, 4)):
            start = 0 if r.random() < 0.5 else r.randrange(n)
            part = unit[start:] if start < n - 2 else unit
            known = bool(ids)
            weights += [1.0 if known and i else 0.0 for i in range(len(part))]
            ids += part
            gap = r.choice((0, 0, 1, 3, 8))
            ids += [r.randrange(self.specials, self.vocab) for _ in range(gap)]
            weights += [0.0] * gap
        return Doc(ids=ids[:size], weights=weights[:size])

    def recall(self, chars: int, near: bool = False) -> Doc:
        """A chat in which facts are told and asked back; ``chars`` bounds its length."""
        r = self.rng
        chat = Chat(self._system())
        facts: list[Fact] = []
        if near or r.random() < 0.2:  # told and asked in one turn
            fact = make_fact(r, self.words)
            more = [fact]
            if r.random() < 0.5:
                more.append(make_fact(r, self.words))
            if len({f.key for f in more}) < len(more):
                more = [fact]
            r.shuffle(more)
            target = r.choice(more)
            chat.user(
                " ".join(f.tell for f in more) + r.choice((" ", " ", " ... ", "\n")) + make_ask(r, self.words, target)
            )
            chat.assistant(target.answer, self._thought(target))
            facts = more
        for _ in range(r.choice((1, 1, 2, 3))):
            self._tell(chat, facts)
        while chat.size < chars:
            p = r.random()
            if p < 0.4 and facts:
                fact = facts[0] if r.random() < 0.4 else r.choice(facts)
                chat.user(make_ask(r, self.words, fact))
                chat.assistant(fact.answer, self._thought(fact))
            elif p < 0.52:
                self._tell(chat, facts)
            else:
                skill = r.choice(LONG if chars > 700 and r.random() < 0.3 else SHORT)
                chat.user((turn := skill(r, self.words))[0])
                chat.assistant(turn[1])
        fact = facts[0]
        chat.user(make_ask(r, self.words, fact))
        chat.assistant(fact.answer, self._thought(fact))
        return chat.doc

    def _tell(self, chat: Chat, facts: list[Fact]) -> None:
        r = self.rng
        fact = make_fact(r, self.words)
        if any(f.key == fact.key for f in facts):
            return
        facts.append(fact)
        if r.random() < 0.25:  # with something else in the same turn, so that the answer does not repeat the value
            ask, answer = r.choice(SHORT)(r, self.words)
            chat.user(f"{fact.tell} {ask}")
            chat.assistant(answer)
        else:
            chat.user(fact.tell)
            chat.assistant(fact.ack)
            if r.random() < 0.4:  # half of the acknowledgements are short in what the model reads
                last = len(chat.doc.segments) - 1
                start = max(i for i in range(last) if chat.doc.segments[i][0] == "<|im_start|>assistant\n")
                chat.doc.segments[start + 1 :] = [("OK.", 0.0), ("<|im_end|>\n", MARKUP)]

    def _thought(self, fact: Fact) -> str | None:
        return f"I was told: {OPEN}{fact.value}{CLOSE}." if self.rng.random() < 0.06 else None

    def talk(self, chars: int, skills=SHORT) -> Doc:
        """A chat of single questions."""
        r = self.rng
        chat = Chat(self._system())
        while True:
            ask, answer = r.choice(LONG if r.random() < 0.12 else skills)(r, self.words)
            chat.user(ask)
            chat.assistant(answer, "This is simple." if r.random() < 0.03 else None)
            if chat.size >= chars:
                return chat.doc

    def json(self, chars: int) -> Doc:
        r = self.rng
        chat = Chat(self._system())
        while True:
            ask, answer = json_turn(r, self.words) if r.random() < 0.8 else r.choice(SHORT)(r, self.words)
            chat.user(ask)
            chat.assistant(answer)
            if chat.size >= chars:
                return chat.doc

    def tools(self, chars: int) -> Doc:
        """A chat with tools: calls, their results, and now and then a question that needs none."""
        r = self.rng
        tools = [make_tool(r, self.words) for _ in range(r.choice((1, 1, 2, 2, 3) if chars > 500 else (1, 1, 2)))]
        chat = Chat(self._system(0.4), tools)
        while True:
            if r.random() < 0.2:
                ask, answer = r.choice(SHORT)(r, self.words)
                chat.user(ask)
                chat.assistant(answer)
            else:
                ask, call, result, answer = tool_turn(r, self.words, tools)
                chat.user(ask)
                chat.assistant(call)
                if r.random() < 0.5:
                    chat.user(f"<tool_response>\n{result}\n</tool_response>")
                    chat.assistant(answer)
            if chat.size >= chars:
                return chat.doc

    def prose(self, _: int) -> Doc:
        doc = Doc()
        doc.add_marked(story_text(self.rng, self.words), 0.3, 1.0)
        return doc

    def draw(self, stage: str, length: int) -> Doc:
        """A document for rows of ``length`` tokens; ``stage`` is "start" (copying first) or "mix"."""
        r = self.rng
        p = r.random()
        chars = int(r.choice((0.25, 0.5, 0.9)) * 2.6 * length)
        if length > 300:
            chars = int(r.choice((0.6, 0.9, 1.0)) * 2.7 * length)
        if stage == "start":
            if p < 0.35:
                return self.induction(length)
            if p < 0.6:
                return self.talk(min(chars, 150), COPYING)
            return self.recall(min(chars, 200), near=r.random() < 0.6)
        if p < 0.08:
            return self.induction(min(length, 256))
        if p < (0.54 if length <= 300 else 0.75):  # what was told far back is asked in long rows only
            return self.recall(chars, near=r.random() < 0.35)
        if p < 0.62 or (length > 300 and p < 0.78):
            return self.talk(chars, COPYING)
        if p < 0.77:
            return self.talk(chars)
        if p < 0.86:
            return self.json(min(chars, 900))
        if p < 0.97:
            return self.tools(min(chars, 1200))
        return self.prose(chars)


def check_heldout(seed: int = 7, docs: int = 3000) -> list[str]:
    """Held-out names, code words and template strings that ``docs`` drawn documents contain: must be none."""
    grammar, found = Grammar(seed), []
    texts = [grammar.draw(stage, n).text for stage, n in (("mix", 256), ("mix", 1024)) for _ in range(docs // 2)]
    low = "\n".join(texts).lower()
    spaced = set("".join(c if c.isalpha() else " " for c in low).split())
    found += [word for word in heldout.FORBIDDEN if word in spaced]
    found += [part for part in heldout.template_strings() if part.lower() in low]
    return found
