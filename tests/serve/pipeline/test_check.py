"""The last look finds what is not what was asked for, and lets pass what is, in any order and however it was cut."""

from __future__ import annotations

import pytest

from mlxkv.decode.request import Delta, Grammar
from mlxkv.serve.parts import Tools
from mlxkv.serve.pipeline import Pipeline
from mlxkv.serve.pipeline.check import GrammarViolated

from .conftest import TOOLS, WEATHER, demo

GOOD = '<tool_call>{"name": "get_weather", "arguments": {"days": 2, "city": "Ulm"}}</tool_call>'
BAD = GOOD.replace("2", '"two"')
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
REQUIRED = Tools(TOOLS.functions, "required")
STRICT = Tools(({**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TOOLS.functions[1]))
SCHEMA = Grammar.of({"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}})


@pytest.mark.parametrize(
    ("text", "tools", "response", "good"),
    [
        (GOOD, REQUIRED, None, True),
        (NOW, REQUIRED, None, True),
        (BAD, REQUIRED, None, False),
        (BAD, TOOLS, None, True),  # nothing was promised
        (BAD, STRICT, None, False),
        (GOOD, STRICT, None, True),
        ("Hi", STRICT, None, True),
        ("Hi", REQUIRED, None, False),
        ("", REQUIRED, None, False),
        (GOOD.replace("get_weather", "other"), REQUIRED, None, False),
        (NOW, Tools(TOOLS.functions, ("name", "get_weather")), None, False),
        ('{"n": 1}', None, SCHEMA, True),
        ('<think>\nOne.\n</think>\n\n{"n": 1}', None, SCHEMA, True),
        ('{"n": "1"}', None, SCHEMA, False),
        ('{"n": 1', None, SCHEMA, False),
        ("", None, SCHEMA, False),
        (NOW, TOOLS, SCHEMA, True),
        ("[1]", None, Grammar("json_object"), False),
        ("aab", None, Grammar("regex", "a+b"), True),
        ("aabc", None, Grammar("regex", "a+b"), False),
        ("xx", None, Grammar("lark", 'start: "x"+'), True),
        ("xy", None, Grammar("lark", 'start: "x"+'), False),
    ],
)
def test_an_answer_is_looked_at_again(text: str, tools: Tools | None, response: Grammar | None, good: bool) -> None:
    pipeline = Pipeline(demo(), tools, response=response)
    pipeline.feed(Delta(text, []))
    pipeline.finish("stop")
    assert pipeline.bound or good
    if good:
        pipeline.verify()
        return
    with pytest.raises(GrammarViolated):
        pipeline.verify()
    for reason, stop in (("length", None), ("stop", "END")):  # cut off: it may be only the start
        cut = Pipeline(demo(), tools, response=response)
        cut.feed(Delta(text, []))
        cut.finish(reason, stop)  # type: ignore[arg-type]
        cut.verify()


def test_one_call_that_ended_the_answer_is_looked_at() -> None:
    pipeline = Pipeline(demo(), Tools(TOOLS.functions, "required", parallel=False))
    pipeline.feed(Delta(BAD, []))
    pipeline.finish("cancelled")
    with pytest.raises(GrammarViolated):
        pipeline.verify()
