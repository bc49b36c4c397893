"""The log: one line a request, in words or as JSON, and nothing of what was said."""

from __future__ import annotations

import io
import json
import logging
import stat
from pathlib import Path

import pytest

from mlxkv.decode.request import CacheReport, Completion, DraftReport, Request, Timings, Usage
from mlxkv.errors import ConfigError, QueueFull
from mlxkv.serve import log as logs
from mlxkv.serve.log import configure
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.parts import Asked
from mlxkv.serve.record import GAP_BOUNDS, Gaps, Outcome, Record

ASKED = Asked("m", Request(prompt="a secret"), "chat")


def outcome(**more) -> Outcome:
    return Outcome.of(
        Completion(
            text="a secret",
            finish_reason="stop",
            token_ids=[1, 2, 3],
            usage=Usage(100, 3, 80),
            cache=CacheReport("ssd", "evicted", 80, 20),
            timings=Timings(0.0, 0.01, 0.02, 0.25, 0.3, 12.5),
            drafts=DraftReport(4, 2),
        ),
        **more,
    )


@pytest.fixture
def log():
    """What is written, as a function of whether it is JSON; the root logger is as it was afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("mlxkv")
    handlers, level, own = root.handlers[:], root.level, ours.level
    stream = io.StringIO()

    def begin(as_json: bool, file: Path | None = None) -> io.StringIO:
        root.handlers[:] = []
        configure(as_json, stream, file)
        return stream

    yield begin
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(own)


def test_a_line_a_request(log):
    stream = log(False)
    Metrics().observe(Record.of("chatcmpl-1", ASKED, [outcome(finish="tool_calls")], began=0.0), "m")
    line = stream.getvalue()
    assert line.count("\n") == 1 and " INFO chatcmpl-1 " in line and "secret" not in line
    for word in ("model=m", "route=/v1/chat/completions", "status=200", "prompt=100", "cached=80", "source=ssd"):
        assert f" {word} " in line
    for word in ("miss=evicted@80", "generated=3", "prefill_s=0.250", "tok/s=12.5", "drafts=2/4", "finish=tool_calls"):
        assert f" {word} " in line


def test_the_same_as_json(log):
    stream = log(True)
    gaps = Gaps()
    for now in (1.0, 1.04, 3.0):
        gaps.tick(now)
    two = Record.of("chatcmpl-2", ASKED, [outcome(), outcome()], began=0.0, begun=0.5, gaps=[gaps])
    Metrics().observe(two, "m")
    logging.getLogger("mlxkv.serve").warning("something else")
    try:
        raise OSError("what went wrong")
    except OSError:
        logging.getLogger("uvicorn.error").exception("a failure")
    request, other, failure = map(json.loads, stream.getvalue().splitlines())
    assert request["request"]["id"] == "chatcmpl-2" and request["level"] == "info" and "message" not in request
    told = request["request"]
    assert (told["choices"], told["completion_tokens"], told["prompt_tokens"]) == (2, 6, 100)
    assert (told["queued_s"], told["longest_gap_s"]) == (0.5, 1.96)
    assert (other["message"], other["logger"]) == ("something else", "mlxkv.serve")
    assert other["time"].endswith("+00:00")
    assert "what went wrong" in failure["error"] and failure["level"] == "error"
    assert "secret" not in stream.getvalue()


def test_a_name_cannot_begin_a_line_of_its_own(log):
    stream = log(False)
    asked = Asked("m\n2026 INFO forged\x1b[31m" + "x" * 1000, ASKED.request, "chat")
    Metrics().observe(Record.of("chatcmpl-3", asked, began=0.0, error=QueueFull("no")), "")
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue() and len(stream.getvalue()) < 500
    assert "status=429" in stream.getvalue() and "finish=error error=queue_full" in stream.getvalue()


def test_how_a_request_ended():
    assert Record.of("i", ASKED, [outcome()], began=0.0).finish == "stop"
    left = Record.of("i", ASKED, [outcome(finish="stop")], began=0.0, left=True)
    assert (left.status, left.finish, left.error) == (499, "cancelled", None)
    broken = Record.of("i", ASKED, began=0.0, error=RuntimeError("inside"))
    assert (broken.status, broken.finish, broken.error) == (500, "error", "internal_error")
    assert "inside" not in broken.line()


def test_gaps_are_counted_by_class():
    gaps = Gaps()
    for now in (0.0, 0.004, 0.024, 100.0):
        gaps.tick(now)
    assert sum(gaps.counts) == 3 and gaps.counts[0] == 1 and gaps.counts[-1] == 1
    assert gaps.counts[GAP_BOUNDS.index(0.02)] == 1 and gaps.longest == pytest.approx(99.976)


def test_a_file_that_stays_small(log, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "FILE_BYTES", 2000)
    file = tmp_path / "made" / "serve.log"
    stream = log(False, file)
    for i in range(100):
        logging.getLogger("mlxkv.serve").info("line %d %s", i, "\udc80")
    before = file.with_name("serve.log.1")
    assert sorted(file.parent.iterdir()) == [file, before] and stream.getvalue() == ""
    assert file.stat().st_size <= 2000 and before.stat().st_size <= 2000
    lines = before.read_text().splitlines() + file.read_text().splitlines()
    assert [line.split()[-2] for line in lines] == [str(i) for i in range(100)][-len(lines) :] and len(lines) > 20
    assert {stat.S_IMODE(path.stat().st_mode) for path in (file, before)} == {0o600}
    with pytest.raises(ConfigError, match="cannot be written"):
        log(False, file / "below")
