"""Turns with a form: JSON objects with copied values, and tool calls."""

import json
import random

from . import words as w
from .memory import CLOSE, OPEN, copied, keep_words
from .phrasing import VERBS as VERBS_PAST
from .phrasing import around, jumble, phrase
from .text import lines, options, spaced
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
    "{t}. Return JSON with the keys {k}.|Format as JSON: {t}.|Convert to a JSON object: {t}.|I need JSON with {t}.|"
    "JSON, please, where {t}.|The data is {t}. I want JSON.|Build an object in JSON. {t}.|My tool wants JSON: {t}.|"
    "Send JSON that says {t}.|{t}. Put it into JSON form.|Can you write JSON for {t}?|You speak JSON: {t}.|"
    "Store it as JSON that {t}.|In JSON, what is this: {t}?|Give the JSON of {t}.|Pack {t} into JSON.|JSON! {t}.|"
    "It has to be JSON. {t}.|Would you make JSON out of {t}?|Show {t} as JSON.|Please print {t} as JSON."
)


_JSON = lines("json.txt")
ASK_JSON += [t for t in _JSON if "{t}" in t]
ASK_KEYS = {n: [t for t in _JSON if "{k1}" in t and ("{k2}" in t) == (n == 2)] for n in (1, 2)}
WRITTEN = {t["name"]: t for t in map(json.loads, lines("tools.jsonl"))}


def json_turn(r: random.Random, words: Words) -> tuple[str, str]:
    """A request for JSON and the object, one line, in the order of the keys."""
    keys = r.sample(JSON_KEYS, r.choice((1, 2, 2, 3, 3, 4)))
    if r.random() < 0.15:
        keys[r.randrange(len(keys))] = words.word()
    keys = list(dict.fromkeys(keys))
    values = {k: value_of(r, words, k) for k in keys}
    if len(keys) <= 2 and r.random() < 0.6:
        ask = r.choice(ASK_KEYS[len(keys)])
        named = {f"k{i}": k for i, k in enumerate(values, 1)} | {f"v{i}": v for i, v in enumerate(values.values(), 1)}
        ask = ask.format(**named)
        return _ask_json(r, words, ask, keys, values)
    tell = r.choice(TELL)
    told = r.choice((", ", " and ", "; ")).join(tell.format(k=k, v=v) for k, v in values.items())
    if r.random() < 0.25 and "name" in values and "age" in values:
        told = f"{values['name']} is {values['age']} years old"
        keys = ["name", "age"]
    elif r.random() < 0.25:  # keys and values with idle words between them
        told = " ".join(
            f"{r.choice(('', 'the ', 'a ', 'that the '))}{k} {v} {r.choice(VERBS_PAST)}" for k, v in values.items()
        ).rsplit(" ", 1)[0]
    return _ask_json(r, words, r.choice(ASK_JSON).format(k=" and ".join(keys), t=told), keys, values)


def _ask_json(r: random.Random, words: Words, ask: str, keys: list[str], values: dict[str, str]) -> tuple[str, str]:
    if r.random() < 0.35:
        kept = keep_words("json is =", *keys, *values.values())
        ask = jumble(r, words, ask, kept, r.choice((1, 1, 2, 3)))
    ask = around(r, words, ask, 0.15)
    return ask[0].upper() + ask[1:] if r.random() < 0.5 else ask, mark_json({k: values[k] for k in keys})


def mark_json(obj: dict[str, str]) -> str:
    """``obj`` as JSON: numbers bare, copied values marked."""
    parts = []
    for k, v in obj.items():
        bare = v.isdigit() and (v == "0" or v[0] != "0")
        parts.append(f'"{k}": {copied(v) if bare else chr(34) + copied(v) + chr(34)}')
    return "{" + ", ".join(parts) + "}"


def make_tool(r: random.Random, words: Words) -> dict:
    """A function description in the OpenAI form, with one or two string arguments."""
    if r.random() < 0.5:
        known = r.choice(list(WRITTEN.values()))
        return tool(known["name"], known["description"], known["args"])
    noun = r.choice(NOUNS)
    verb = "".join(c for c in words.word() if c.isalpha()) if r.random() < 0.25 else r.choice(VERBS)
    noun = "".join(c for c in words.word() if c.isalpha()) if r.random() < 0.25 else noun
    name = f"{verb}_{noun}" if r.random() < 0.9 else noun
    args = r.sample(ARGS, r.choice((1, 1, 2)))
    about = (
        f"{name.replace('_', ' ').capitalize()}." if r.random() < 0.6 else f"{verb.capitalize()}s {phrase(r, words)}."
    )
    return tool(name, about, args)


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
    "I need you to {what}. {t}.|{verb} a {noun} for {t}.|{verb} the {noun} with {t}.|The {noun}: {verb} it, {t}.|"
    "A {noun} with {t} is what I need.|The {noun} for {t}, please.|I would like a {noun}, {t}.|"
    "Do you have a {noun} for {t}?|"
    "My {noun} has {t}, so {verb} it.|It is about a {noun}. {verb} it for {t}.|{t}. {what}.|"
    "For {t} please {verb} a {noun}.|"
    "How is the {noun} for {t}?|Somebody should {verb} a {noun} with {t}.|With {t}, {what}."
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
    verb, _, noun = f["name"].rpartition("_")
    verb = verb.replace("_", " ") or "use"
    known = WRITTEN.get(f["name"])
    if known and known["args"] == list(args) and r.random() < 0.7:
        ask = r.choice(known["asks"]).format(**args)
    else:
        ask = r.choice(ASK_TOOL).format(what=what, t=told, f=f["name"], verb=verb, noun=noun)
    if r.random() < 0.35:
        kept = keep_words(what, f["name"], "is", *args, *args.values())
        ask = jumble(r, words, ask, kept, r.choice((1, 1, 2, 3)))
    ask = around(r, words, ask, 0.15)
    ask = ask[0].upper() + ask[1:] if not ask.startswith((f["name"], *args.values())) else ask
    result = words.code() if r.random() < 0.6 else words.digits()
    return ask, call_text(f["name"], args), json.dumps({"result": result}), f"The result is {copied(result)}."


def call_text(name: str, args: dict[str, str]) -> str:
    """The assistant's tool call as the chat template writes it, copied parts marked."""
    body = ", ".join(f'"{k}": "{copied(v)}"' for k, v in args.items())
    return f'<tool_call>\n{{"name": "{copied(name)}", "arguments": {{{body}}}}}\n</tool_call>'


def unmark(text: str) -> str:
    """``text`` without copy marks."""
    return text.replace(OPEN, "").replace(CLOSE, "")
