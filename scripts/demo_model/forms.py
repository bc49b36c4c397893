"""Turns with a form: JSON objects with copied values, and tool calls."""

import json
import random

from . import words as w
from .memory import CLOSE, OPEN, copied
from .text import options, spaced
from .words import Words

NOUNS = spaced(
    "weather time price route news stock score mail file note user order map song photo ticket room flight menu "
    "recipe word city train light door alarm event task page book table number report account"
)
VERBS = spaced("get find look_up open send read show set add delete check search list call")
ARGS = spaced("name city word number day item text query place user key value title code colour date topic label")


def value_of(r: random.Random, words: Words, key: str) -> str:
    """A value that fits ``key`` loosely."""
    if key in ("name", "user", "friend", "author", "owner"):
        return words.name()
    if key in ("city", "place", "home", "from", "to"):
        return words.city()
    if key in ("number", "age", "count", "size", "year", "price"):
        return words.digits().lstrip("0") or "7"
    if key in ("colour", "color"):
        return r.choice(w.COLOURS)
    if key in ("day", "date"):
        return r.choice(w.DAYS)
    return words.code() if r.random() < 0.4 else words.word()


JSON_KEYS = spaced(
    "name age city colour code word number day item place friend food animal job title key value size year price "
    "owner topic pet"
)
TELL = options("{k} is {v}|the {k} is {v}|{k}: {v}|{k} {v}|the {k} {v}|{k} = {v}")
ASK_JSON = options(
    "Answer as JSON with the keys {k}: {t}.|Answer as JSON: {t}.|Give me JSON with {k}. {t}.|{t}. Answer as JSON.|"
    "Write a JSON object with {k}: {t}.|Make JSON from this: {t}.|{t}. Give it to me as JSON.|As JSON, please: {t}.|"
    "Turn this into JSON: {t}.|JSON with {k}: {t}.|{t}. Please write that as a JSON object.|Only JSON. {t}.|"
    "{t}. Return JSON with the keys {k}.|Format as JSON: {t}.|Convert to a JSON object: {t}."
)


def json_turn(r: random.Random, words: Words) -> tuple[str, str]:
    """A request for JSON and the object, one line, in the order of the keys."""
    keys = r.sample(JSON_KEYS, r.choice((1, 2, 2, 3, 3, 4)))
    if r.random() < 0.15:
        keys[r.randrange(len(keys))] = words.word()
    keys = list(dict.fromkeys(keys))
    values = {k: value_of(r, words, k) for k in keys}
    tell = r.choice(TELL)
    told = r.choice((", ", " and ", "; ")).join(tell.format(k=k, v=v) for k, v in values.items())
    if r.random() < 0.25 and "name" in values and "age" in values:
        told = f"{values['name']} is {values['age']} years old"
        keys = ["name", "age"]
    ask = r.choice(ASK_JSON).format(k=" and ".join(keys), t=told)
    return ask[0].upper() + ask[1:] if r.random() < 0.5 else ask, mark_json({k: values[k] for k in keys})


def mark_json(obj: dict[str, str]) -> str:
    """``obj`` as JSON: numbers bare, copied values marked."""
    parts = []
    for k, v in obj.items():
        bare = v.isdigit() and (v == "0" or v[0] != "0")
        parts.append(f'"{k}": {copied(v) if bare else chr(34) + copied(v) + chr(34)}')
    return "{" + ", ".join(parts) + "}"


def make_tool(r: random.Random) -> dict:
    """A function description in the OpenAI form, with one or two string arguments."""
    noun = r.choice(NOUNS)
    name = f"{r.choice(VERBS)}_{noun}" if r.random() < 0.9 else noun
    args = r.sample(ARGS, r.choice((1, 1, 2)))
    return tool(name, f"{name.replace('_', ' ').capitalize()}.", args)


def tool(name: str, description: str, args: list[str]) -> dict:
    """The OpenAI form of a function with string arguments ``args``, all required."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {a: {"type": "string"} for a in args},
                "required": args,
            },
        },
    }


ASK_TOOL = options(
    "{what} for {t}.|Please {what} with {t}.|Can you {what} for {t}?|I want to {what}: {t}.|{what}, {t}.|"
    "Use {f} with {t}.|Call {f} for {t}.|{what} where {t}.|Call the function {f}: {t}.|Could you {what} with {t}?|"
    "I need you to {what}. {t}."
)


def tool_turn(r: random.Random, words: Words, tools: list[dict]) -> tuple[str, str, str, str]:
    """A request that one of ``tools`` answers: request, call, tool's result and the closing answer."""
    f = r.choice(tools)["function"]
    args = {a: value_of(r, words, a) for a in f["parameters"]["required"]}
    style = r.choice(("{k} {v}", "the {k} {v}", "{k}: {v}", "{k} is {v}"))
    told = (
        next(iter(args.values()))
        if len(args) == 1 and r.random() < 0.5
        else r.choice((" and ", ", ")).join(style.format(k=k, v=v) for k, v in args.items())
    )
    what = f["name"].replace("_", " ")
    ask = r.choice(ASK_TOOL).format(what=what, t=told, f=f["name"])
    ask = ask[0].upper() + ask[1:] if not ask.startswith(f["name"]) else ask
    result = words.code() if r.random() < 0.6 else words.digits()
    return ask, call_text(f["name"], args), json.dumps({"result": result}), f"The result is {copied(result)}."


def call_text(name: str, args: dict[str, str]) -> str:
    """The assistant's tool call as the chat template writes it, copied parts marked."""
    body = ", ".join(f'"{k}": "{copied(v)}"' for k, v in args.items())
    return f'<tool_call>\n{{"name": "{copied(name)}", "arguments": {{{body}}}}}\n</tool_call>'


def unmark(text: str) -> str:
    """``text`` without copy marks."""
    return text.replace(OPEN, "").replace(CLOSE, "")
