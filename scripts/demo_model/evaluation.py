"""The held-out evaluation in MLX: greedy answers, drafts of the MTP head, forms, perplexity. Float32, no torch."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxkv import models
from mlxkv.models import mtp

from . import heldout

BARS = {"recall near": 0.90, "recall at 600": 0.75, "first draft": 0.94, "second draft": 0.86, "forms": 0.95}


@dataclass
class Answer:
    """What the model wrote for a case, and how its drafts fared: (right, of) for the first and second."""

    text: str
    ids: list[int]
    first: tuple[int, int] = (0, 0)
    second: tuple[int, int] = (0, 0)


class Demo:
    """A loaded folder: body, head and tokenizer."""

    def __init__(self, folder: Path) -> None:
        loaded = models.load(folder, dtype="fp32")
        self.model, self.inner = loaded.model, loaded.model.language_model.model
        self.embed = self.inner.embed_tokens
        if loaded.head is None:
            raise SystemExit(f"{folder} has no MTP head that can be used: {mtp.find(folder, loaded.config).reason}")
        self.head, self.tok = loaded.head, loaded.tokenizer

    def prompt(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        ids = self.tok.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=True)
        return list(ids["input_ids"] if hasattr(ids, "keys") else ids)

    def answer(self, ids: list[int], limit: int) -> Answer:
        """Greedy answer; at every position the head drafts two tokens from the true hidden state."""
        cache, rows = make_prompt_cache(self.model), KVCache()
        hidden = self.inner(mx.array([ids]), cache=cache)
        if len(ids) > 1:
            self.head(self.embed(mx.array([ids[1:]])), hidden[:, :-1], rows)
        hidden = hidden[:, -1:]
        token = int(mx.argmax(self.embed.as_linear(hidden)[0, -1]))
        out, drafts = [token], []
        while len(out) < limit and out[-1] not in (2, 0):
            embedded = self.embed(mx.array([[token]]))
            one = self.head(embedded, hidden, rows)
            a = mx.argmax(self.embed.as_linear(one)[0, -1])
            two = self.head(self.embed(a[None, None]), one, rows)
            b = mx.argmax(self.embed.as_linear(two)[0, -1])
            hidden = self.inner(mx.array([[token]]), cache=cache)
            c = mx.argmax(self.embed.as_linear(hidden)[0, -1])
            mx.eval(a, b, c, hidden)
            rows.trim(1)
            drafts.append((int(a), int(b)))
            token = int(c)
            out.append(token)
        first = [a == t for (a, _), t in zip(drafts, out[1:], strict=True)]
        second = [b == t for ok, (_, b), t in zip(first, drafts, out[2:], strict=False) if ok]
        text = self.tok.decode([t for t in out if t not in (0, 2)])
        return Answer(text, out, (sum(first), len(first)), (sum(second), len(second)))

    def surprise(self, ids: list[int]) -> tuple[float, int]:
        """Negative log likelihood of a text, and its tokens."""
        logits = self.model(mx.array([ids[:-1]]))[0]
        loss = nn.losses.cross_entropy(logits, mx.array(ids[1:]), reduction="sum")
        return float(loss), len(ids) - 1


def said(value: str, text: str) -> bool:
    """``value`` stands in ``text`` as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def json_form(case: heldout.Case, text: str) -> tuple[bool, bool]:
    """(parses as one object, holds the copied value)."""
    try:
        obj = json.loads(text.strip())
    except ValueError:
        return False, False
    key, value = (case.value or "=").split("=")
    return isinstance(obj, dict), isinstance(obj, dict) and obj.get(key) == value


def tool_form(case: heldout.Case, text: str) -> tuple[bool, bool]:
    """(parses as a call, of the function that was meant and with its required arguments)."""
    found = re.fullmatch(r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", text, re.S)
    try:
        call = json.loads(found.group(1)) if found else None
    except ValueError:
        call = None
    ok = isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
    wanted = {t["function"]["name"]: t["function"]["parameters"]["required"] for t in case.tools}
    return ok, ok and call["name"] == case.value and set(call["arguments"]) == set(wanted[case.value])


@dataclass
class Result:
    """Figures of a run: rates with their counts, and every answer."""

    rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    perplexity: float = 0.0
    answers: list[dict] = field(default_factory=list)

    def count(self, key: str, right: int, of: int = 1) -> None:
        a, b = self.rates.get(key, (0, 0))
        self.rates[key] = (a + right, b + of)

    def to_json(self) -> dict:
        rates = {k: {"rate": round(a / max(b, 1), 4), "right": a, "of": b} for k, (a, b) in self.rates.items()}
        gate = {k: {"bar": bar, "rate": rates[k]["rate"], "met": rates[k]["rate"] >= bar} for k, bar in BARS.items()}
        return {"gate": gate, "rates": rates, "perplexity": round(self.perplexity, 3), "answers": self.answers}


def evaluate(
    folder: Path,
    limit: int = 64,
    only: str | None = None,
    cases: Callable[[Callable[[list[dict]], int]], list[heldout.Case]] = heldout.cases,
) -> Result:
    """Runs a held-out set (its ``cases`` function) through ``folder``."""
    demo, result = Demo(folder), Result()
    loss = tokens = 0
    for case in cases(lambda m: len(demo.prompt(m))):
        if only and case.kind != only:
            continue
        ids = demo.prompt(case.messages, case.tools)
        answer = demo.answer(ids, limit)
        right = None
        if case.kind in ("near", "far"):
            right = said(case.value or "", answer.text)
            result.count("recall near" if case.kind == "near" else "recall at 600", right)
        elif case.kind in ("json", "tool"):
            form, right = (json_form if case.kind == "json" else tool_form)(case, answer.text)
            result.count("forms", form)
            result.count(f"{case.kind} forms", form)
            result.count(f"{case.kind} content", right)
        for key, (a, b) in (("first draft", answer.first), ("second draft", answer.second)):
            result.count(key, a, b)
            result.count(f"{key} {case.kind}", a, b)
        if case.kind in ("near", "free"):
            part, n = demo.surprise(ids)
            loss, tokens = loss + part, tokens + n
        result.answers.append({"id": case.id, "value": case.value, "right": right, "answer": answer.text})
    result.perplexity = math.exp(loss / max(tokens, 1))
    return result


FIGURES = "\n## Figures\n"


def figures(heldout_set: Result, blind_set: Result) -> str:
    """The model card's section of figures, in Markdown."""
    a, b = heldout_set.to_json(), blind_set.to_json()
    lines = [
        FIGURES,
        "`scripts/eval_demo.py FOLDER --card`: greedy, float32. Names and code words of both sets, and the templates",
        "of the held-out set, are absent from the training text; a few of the blind set's short questions are not. The",
        "grammar was widened after wrong answers to the held-out set were read; no answer to the blind set was, so",
        "trust the blind set more.",
        "",
        "| figure | bar | held-out | blind |",
        "| --- | --- | --- | --- |",
    ]
    for name, bar in BARS.items():
        cells = (f"{g['rate']:.3f} ({g['right']}/{g['of']})" for g in (a["rates"][name], b["rates"][name]))
        lines.append(f"| {name} | {bar:.2f} | {' | '.join(cells)} |")
    lines.append(f"| perplexity of the prompts | | {a['perplexity']:.1f} | {b['perplexity']:.1f} |")
    return "\n".join(lines) + "\n"


def check_reference(demo: Demo, reference: Path) -> dict[str, float]:
    """Largest differences to the logits that PyTorch wrote (export.write_reference): body, first and second draft."""
    kept = np.load(reference)
    ids, at = mx.array(kept["ids"])[None], kept["rows"].tolist()
    hidden = demo.inner(ids)
    one = demo.head(demo.embed(ids[:, 1:]), hidden[:, :-1], None)
    second = []
    for i in at:  # its key and value follow those of the first draft's rows
        rows = KVCache()
        demo.head(demo.embed(ids[:, 1 : i + 2]), hidden[:, : i + 1], rows)
        second.append(demo.head(demo.embed(ids[:, i + 2 : i + 3]), one[:, i : i + 1], rows)[0, 0])
    found = {"body": hidden[0, mx.array(at)], "mtp": one[0, mx.array(at)], "mtp_second": mx.stack(second)}
    return {n: float(np.abs(np.array(demo.embed.as_linear(h)) - kept[n]).max()) for n, h in found.items()}


def check_tokenizer(folder: Path, texts: list[str]) -> int:
    """Texts that transformers' AutoTokenizer and the plain tokenizers file encode differently."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    plain, auto = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    return sum(plain.encode(t, add_special_tokens=False).ids != auto.encode(t, add_special_tokens=False) for t in texts)


def check_template(folder: Path, seed: int = 5, texts: int = 300) -> int:
    """Chats of the grammar that the chat template renders differently from what the model was trained on."""
    from transformers import AutoTokenizer

    from .corpus import Chat, Grammar
    from .forms import make_tool, tool_turn, unmark
    from .memory import make_ask, make_fact

    auto, wrong = AutoTokenizer.from_pretrained(folder), 0
    for i in range(texts):
        g = Grammar(seed + i)
        tools = [make_tool(g.rng, g.words) for _ in range(i % 3)]
        system = "Be short and clear." if i % 2 else None
        chat, messages = Chat(system, tools or None), [{"role": "system", "content": system}] if system else []
        fact = make_fact(g.rng, g.words)
        for ask, answer in ((fact.tell, fact.ack), (make_ask(g.rng, g.words, fact), fact.answer)):
            chat.user(ask)
            chat.assistant(answer)
            messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": unmark(answer)}]
        if tools:
            ask, call, answer, _ = tool_turn(g.rng, g.words, tools)
            chat.user(ask)
            chat.assistant(call)
            chat.user(f"<tool_response>\n{answer}\n</tool_response>")
            body = json.loads(unmark(call).split("\n")[1])
            messages += [
                {"role": "user", "content": ask},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": body}]},
                {"role": "tool", "content": answer},
            ]
        wrong += auto.apply_chat_template(messages, tools=tools or None, tokenize=False) != chat.doc.text
    return wrong
