"""How answers are shown: Markdown blocks, control characters, numbers, and errors as one line."""

from __future__ import annotations

import pytest
import typer

from mlxkv.cli.options import guarded
from mlxkv.cli.render import split_blocks, stats_line
from mlxkv.decode.request import CacheReport, Completion, DraftReport, Timings, Usage
from mlxkv.errors import DeviceError, ModelError

TEXT = (
    "# Title\n\nOne\nparagraph.\n\n```py\na = 1\n\nb = 2\n```\n\n- one\n\n- two\n\n"
    "1. x\n\n2. y\n\nEnd\n\n~~~\n```\n\n~~~\n\nlast"
)


@pytest.mark.parametrize("size", range(1, 20))
def test_blocks_are_whole_wherever_the_text_is_cut(size):
    done, tail = [], ""
    for i in range(0, len(TEXT), size):
        whole, tail = split_blocks(tail + TEXT[i : i + size])
        if whole:
            done.append(whole)
    assert [line for part in [*done, tail] for line in part.split("\n") if line] == [x for x in TEXT.split("\n") if x]
    for part in done:
        assert part.count("```py") == part.count("b = 2")
        assert part.count("- one") == part.count("- two") and part.count("1. x") == part.count("2. y")


def completion(**changes):
    made = {
        "text": "x",
        "finish_reason": "stop",
        "token_ids": [1],
        "usage": Usage(1000, 5, 900),
        "cache": CacheReport("ssd", "no_state", 900, 0),
        "timings": Timings(0, 0, 0, 0, 0.5, 12.34),
    }
    return Completion(**(made | changes))


def test_numbers():
    line = stats_line(completion())
    assert line.split(" · ") == [
        "12.3 tok/s",
        "1,000 prompt + 5 answer tokens",
        "900 cached (ssd; no_state from 900)",
        "first token after 0.50 s",
    ]
    assert "7 of 9 drafts accepted" in stats_line(completion(drafts=DraftReport(9, 7))).split(" · ")
    whole = completion(cache=CacheReport("ram", None, None, 0), finish_reason="length")
    assert "900 cached (ram) ·" in stats_line(whole) and stats_line(whole).endswith("token limit")
    # given up while the prompt was read: nothing came first, at no speed
    none = stats_line(completion(usage=Usage(1000, 0, 900), finish_reason="cancelled", token_ids=[]))
    assert none == "1,000 prompt + 0 answer tokens · 900 cached (ssd; no_state from 900) · cancelled"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ModelError("It is broken.", "Mend it."), 3, "error: It is broken. Mend it."),
        (DeviceError("Gone."), 70, "error: Gone."),
        (ZeroDivisionError("division by zero"), 1, "error: unexpected ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(capsys, error, code, says):
    def fail():
        raise error

    with pytest.raises(typer.Exit) as caught:
        guarded(fail, debug=False)
    assert caught.value.exit_code == code
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith(says) and "Traceback" not in found.err


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(typer.Exit):
        guarded(lambda: [][1], debug=True)
    assert "Traceback" in capsys.readouterr().err
