"""RAM above SSD, tips written behind, and states thinned, as someone who talks to the engine notices them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import mlxkv
from mlxkv.cache.daily import today
from mlxkv.cache.policy import Policy
from mlxkv.cache.record import Reader
from mlxkv.cache.store import stats
from mlxkv.decode.request import Request, SamplingParams
from mlxkv.errors import ConfigError
from tests import tiny
from tests.cache.stores import LENGTH, Written, prompt, records, reopened
from tests.probe import Probe, equal, run, runtime

N1 = LENGTH - 1
RAM = 1 << 30


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    return Written(tiny_model("qwen3_5"), tmp_path_factory.mktemp("tiers") / "cache")


def states(folder: Path) -> dict[int, str]:
    """Position -> role of every state on disk."""
    found = {}
    for path in records(folder, "state"):
        with Reader.open(path) as reader:
            found[reader.meta.end] = reader.meta.role
    return found


def seen(completion):
    return completion.usage.cached_tokens, completion.cache.source, completion.cache.miss_reason


def ask(written, rt):
    """The stored prompt again; the answer must be the cold one."""
    logits, completion = run(rt, written.tokens, keep=False)
    assert equal(logits, written.cold)
    return seen(completion)


def test_a_conversation_in_one_process_and_after_a_restart(tiny_model, tmp_path):
    """The second turn comes from RAM; after a restart as much comes from disk, tips included."""
    options = {"cache_dir": tmp_path / "c", "block_size": 16}
    chat = [{"role": "system", "content": "You keep a log."}, {"role": "user", "content": "Which ship came first?"}]
    with mlxkv.load(tiny_model("qwen3_5"), **options) as engine:
        first = mlxkv.generate(engine, chat, max_tokens=12)
        answer = {"role": "assistant", "content": first.text, "token_ids": first.token_ids}
        said = [*chat, answer, {"role": "user", "content": "And then?"}]
        second = mlxkv.generate(engine, said, max_tokens=12)
        again = mlxkv.generate(engine, said, max_tokens=12)
    assert first.cache.source == "none" and second.cache.source == again.cache.source == "ram"
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    with mlxkv.load(tiny_model("qwen3_5"), **options) as engine:
        restarted = mlxkv.generate(engine, said, max_tokens=12)
        promoted = mlxkv.generate(engine, said, max_tokens=12)
        cold = mlxkv.generate(engine, said, max_tokens=12, use_cache=False)
    assert seen(restarted) == (again.usage.cached_tokens, "ssd", None) and seen(promoted)[1] == "ram"
    assert second.token_ids == again.token_ids == restarted.token_ids == promoted.token_ids == cold.token_ids


def test_a_ram_budget_that_holds_no_sequence_is_refused_with_the_number(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"4,096 tokens of this model need [\d,]+ bytes"):
        mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path / "c", ram_budget=10_000)


def test_nothing_waits_for_the_writer(written, tmp_path, monkeypatch):
    """While the disk hangs, what was just computed is there already."""
    rt = reopened(written.rt, tmp_path / "c", ram_budget=RAM)
    real, hung = os.fsync, []

    def slow(fd):
        hung.append(fd)
        while len(hung) < 1000:
            time.sleep(0.01)
        real(fd)

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", slow)
        run(rt, written.tokens)
        assert ask(written, rt) == (N1, "ram", None)
        assert not rt.store.writer.flush(0.01) and not records(tmp_path / "c")
        hung += [0] * 1000
    rt.store.close()
    assert written.ask_anew(tmp_path / "c") == (N1, None)


@pytest.mark.parametrize("budget", [0, 20_000, RAM])
def test_a_ram_of_any_size_gives_the_same_answers(written, tmp_path, budget):
    """What does not fit is read from disk, and the budget holds once all is written."""
    rt = reopened(written.rt, tmp_path / "c", ram_budget=budget)
    for seed in range(4):
        run(rt, prompt(seed=seed))
    run(rt, written.tokens)
    assert rt.store.writer.flush(10)
    assert rt.store.ram.nbytes <= budget
    for seed in range(4):
        tokens = prompt(seed=seed)
        logits, completion = run(rt, tokens, keep=False)
        assert equal(logits, run(rt, tokens, use_cache=False)[0])
        assert completion.usage.cached_tokens == N1
        assert completion.cache.source == ("ram" if budget == RAM else "ssd")
        assert rt.store.ram.nbytes <= budget
    rt.store.ram.resize(0)
    assert rt.store.writer.flush(10)  # tips that waited
    assert rt.store.ram.nbytes == 0 and ask(written, rt) == (N1, "ssd", None)
    rt.store.close()


@pytest.mark.parametrize("kind", ["rows", "state"])
def test_damage_on_disk_under_a_good_copy_in_ram(written, tmp_path, kind):
    rt = written.copy(tmp_path / "c", ram_budget=RAM)
    assert ask(written, rt) == (N1, "ssd", None)
    for path in records(tmp_path / "c", kind):
        path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)
    assert ask(written, rt) == (N1, "ram", None)
    rt.store.ram.resize(0)
    assert ask(written, rt)[2] == "corrupt"
    rt.store.close()


@pytest.mark.parametrize("kind", ["rows", "state"])
def test_damage_in_ram_over_a_good_file(written, tmp_path, kind):
    """A flipped bit in the copy: the file is read, and not blamed."""
    rt = written.copy(tmp_path / "c", ram_budget=RAM)
    assert ask(written, rt) == (N1, "ssd", None)
    before = records(tmp_path / "c")
    flipped = 0
    for path in before:
        with Reader.open(path) as reader:
            held = rt.store.ram.open(reader.meta.key, kind) if kind in path.name else None
        for _, array in held.body.arrays.values() if held else ():
            array.reshape(-1).view(np.uint8)[0] ^= 1
            flipped += 1
    assert flipped
    assert ask(written, rt) == (N1, "ssd", None) and rt.store.faults["corrupt"]
    assert records(tmp_path / "c") == before and not list((tmp_path / "c" / "quarantine").iterdir())
    assert ask(written, rt) == (N1, "ram", None)
    rt.store.close()


def test_damage_in_ram_of_what_is_nowhere_else(written, tmp_path):
    rt = reopened(written.rt, tmp_path / "c", ram_budget=RAM, policy=Policy(daily=0))
    run(rt, written.tokens)
    assert rt.store.writer.flush(10) and not records(tmp_path / "c")
    assert ask(written, rt) == (N1, "ram", None)
    for held in rt.store.ram._held.values():
        for _, array in held.bodies["state"].arrays.values() if "state" in held.bodies else ():
            array[...] = 7
    assert ask(written, rt) == (0, "none", "corrupt")
    rt.store.close()


def test_without_a_disk_ram_still_serves(written, tmp_path, monkeypatch):
    rt = reopened(written.rt, tmp_path / "c", ram_budget=RAM)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        run(rt, prompt(seed=7))
        assert rt.store.writer.flush(10)
    assert rt.store.writer.stopped_because
    run(rt, written.tokens)
    assert ask(written, rt) == (N1, "ram", None)
    rt.store.close()
    assert not records(tmp_path / "c")


def test_a_full_queue_drops_the_tail_on_disk_only(written, tmp_path, monkeypatch):
    """The disk is too slow for what comes: later requests are not written, but RAM has them."""
    rt = reopened(written.rt, tmp_path / "c", ram_budget=RAM, queue_limit=1)
    real = os.fsync
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", lambda fd: (time.sleep(0.05), real(fd)))
        for seed in range(3):
            run(rt, prompt(seed=20 + seed))
        run(rt, written.tokens)
        assert ask(written, rt) == (N1, "ram", None)
        assert rt.store.writer.counters.refused_bytes > 0
    rt.store.writer.flush(20)
    # the next turn hangs on what was refused, and brings it along
    run(rt, [*written.tokens, 5, 6, 7])
    rt.store.close()
    rt = reopened(written.rt, tmp_path / "c")
    logits, completion = run(rt, [*written.tokens, 5, 6, 7], keep=False)
    assert seen(completion) == (LENGTH + 2, "ssd", None)
    assert equal(logits, run(rt, [*written.tokens, 5, 6, 7], use_cache=False)[0])
    rt.store.close()


def test_tips_wait_and_are_superseded(written, tmp_path):
    """n-1 of the first turn is never written when the second comes soon; the second's is, on closing."""
    folder = tmp_path / "c"
    rt = reopened(written.rt, folder, ram_budget=RAM)
    run(rt, written.tokens)
    longer = [*written.tokens, tiny.EOS, *tiny.ids(6, seed=3)]
    assert rt.store.writer.flush(10)
    assert states(folder) == {10: "message", 20: "message", 30: "answer"} and rt.store.writer.tips == 1
    assert ask(written, rt) == (N1, "ram", None)
    run(rt, longer)
    assert rt.store.writer.flush(10)
    assert 36 not in states(folder) and rt.store.writer.tips == 1
    rt.store.close()
    assert states(folder)[36] == "tip" and N1 not in states(folder)
    # the next turn's n-1, once it is durable, takes the place of this one
    rt = reopened(written.rt, folder, ram_budget=RAM)
    run(rt, [*longer, tiny.EOS, *tiny.ids(6, seed=4)])
    assert rt.store.writer.flush(10) and 36 in states(folder)
    rt.store.writer.write_tips()
    assert rt.store.writer.flush(10)
    assert 36 not in states(folder) and states(folder)[43] == "tip"
    rt.store.close()


def test_a_tip_is_written_when_idle_or_out_of_ram(written, tmp_path):
    rt = reopened(written.rt, tmp_path / "a", ram_budget=RAM, policy=Policy(idle_s=0.05))
    run(rt, written.tokens)
    end = time.monotonic() + 20
    while N1 not in states(tmp_path / "a") and time.monotonic() < end:
        time.sleep(0.02)
    assert states(tmp_path / "a")[N1] == "tip" and rt.store.writer.tips == 0
    rt.store.close()
    rt = reopened(written.rt, tmp_path / "b", ram_budget=RAM)
    run(rt, written.tokens)
    rt.store.ram.resize(1000)
    assert rt.store.writer.flush(10) and states(tmp_path / "b")[N1] == "tip"
    rt.store.close()


def test_closing_takes_no_longer_than_it_may(written, tmp_path, monkeypatch, caplog):
    rt = reopened(written.rt, tmp_path / "c", ram_budget=RAM)
    real = os.fsync
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", lambda fd: (time.sleep(0.02), real(fd)))
        for seed in range(3):
            run(rt, prompt(seed=seed))
        rt.store.close(timeout=0)
    assert any("were not written" in r.message for r in caplog.records)
    assert N1 not in states(tmp_path / "c")
    written.ask_anew(tmp_path / "c")


def test_a_hundred_turns_write_what_they_add(written, tmp_path):
    """Rows are written once, states stay few, n-1 states of old turns are gone, and the conversation still resumes."""
    folder = tmp_path / "c"
    one = next(p.stat().st_size for p in records(written.folder, "state"))
    rt = reopened(written.rt, folder, ram_budget=RAM, policy=Policy(floor=14 * one))
    tokens: list[int] = []
    for turn in range(100):
        tokens = [*tokens, *tiny.ids(4, seed=turn), tiny.EOS, 1, 2]
        _, completion = run(rt, tokens, max_tokens=2)
        tokens = [*tokens, *completion.token_ids, tiny.EOS]
    rt.store.close()
    rows = 0
    for path in records(folder, "rows"):
        with Reader.open(path) as reader:
            rows += sum(b - a for _, _, a, b in reader.tensors.values())
    own = sum(t.nbytes(len(tokens)) for t in rt.layout.tensors("rows"))
    assert rows <= 1.2 * own
    budget = max(own, 14 * one)
    held = states(folder)
    assert sum(p.stat().st_size for p in records(folder, "state")) <= budget
    assert sum(role == "tip" for role in held.values()) == 1
    counters = rt.store.writer.counters
    assert counters.skipped.deleted_states > 0 and not counters.faults
    # a branch: the last question of turn 50 asked in another way resumes not far before it
    rt = reopened(written.rt, folder)
    half = 50 * len(tokens) // 100
    branch = [*tokens[:half], *tiny.ids(5, seed=999)]
    logits, completion = run(rt, branch, keep=False)
    assert equal(logits, run(rt, branch, use_cache=False)[0])
    assert completion.usage.cached_tokens >= half // 4
    _, completion = run(rt, [*tokens, 5], keep=False)
    assert completion.usage.cached_tokens >= len(tokens) - 3
    rt.store.close()


def test_a_branch_resumes_at_the_last_shared_boundary(written, tmp_path):
    """Four turns, thinned to the least; then the last question is edited, and the answer is asked for again."""
    rt = reopened(written.rt, tmp_path / "c", ram_budget=RAM, policy=Policy(floor=0))
    tokens: list[int] = []
    turns = []
    for turn in range(4):
        question = [*tokens, *tiny.ids(9, seed=turn), tiny.EOS, 1, 2]
        _, completion = run(rt, question, max_tokens=4)
        turns.append((len(tokens), len(question)))
        tokens = [*question, *completion.token_ids, tiny.EOS]
    rt.store.close()
    start, end = turns[-1]
    for ram in (0, RAM):
        rt = reopened(written.rt, tmp_path / "c", ram_budget=ram)
        edited = [*tokens[:start], *tiny.ids(9, seed=77), tiny.EOS, 1, 2]
        regenerated = tokens[:end]
        for asked, cached in ((edited, start), (regenerated, end - 1)):
            logits, completion = run(rt, asked, keep=False)
            assert equal(logits, run(rt, asked, use_cache=False)[0])
            assert completion.usage.cached_tokens == cached, asked
        rt.store.close()


def test_a_long_prompt_leaves_a_ladder(written, tmp_path):
    """Cancelled, or edited near its end, it does not start from zero."""
    folder, long = tmp_path / "c", tiny.ids(100, seed=5)
    rt = dataclasses.replace(reopened(written.rt, folder, ram_budget=RAM), ladder=16, chunk=8)
    asked = iter([False] * 9)
    request = Request(tokens=long, sampling=SamplingParams(max_tokens=1))
    done = Probe(rt, request, lambda e: None, lambda: next(asked, True), time.monotonic()).run()
    assert done.finish_reason == "cancelled" and rt.store.writer.flush(10)
    assert states(folder) == {16: "ladder", 32: "ladder", 64: "ladder"}  # the place of the cut waits in RAM
    assert run(rt, long)[1].usage.cached_tokens == 72
    edited = [*long[:70], *tiny.ids(30, seed=6)]
    rt.store.close()
    rt = dataclasses.replace(reopened(written.rt, folder), ladder=16, chunk=8)
    logits, completion = run(rt, edited, keep=False)
    assert completion.usage.cached_tokens == 64
    assert equal(logits, run(rt, edited, use_cache=False)[0])
    rt.store.close()


def test_the_daily_write_budget(written, tmp_path, caplog):
    """Beyond it nothing is written, and that is said; RAM has it, another process counts the same bytes."""
    folder = tmp_path / "c"
    rt = reopened(written.rt, folder, ram_budget=RAM)
    run(rt, written.tokens)
    rt.store.close()
    used = stats(folder)["written_today"]
    assert used == sum(p.stat().st_size for p in records(folder))
    before = records(folder)
    rt = reopened(written.rt, folder, ram_budget=RAM, policy=Policy(daily=used))
    other = prompt(seed=8)
    run(rt, other)
    run(rt, prompt(seed=9))
    rt.store.writer.write_tips()
    assert rt.store.writer.flush(10)
    assert records(folder) == before and stats(folder)["written_today"] == used
    skipped = rt.store.writer.counters.skipped.daily
    assert set(skipped) == {"tip", "rows"} and min(skipped.values()) > 0
    assert sum("write budget" in r.message for r in caplog.records) == 2  # once each
    assert seen(run(rt, other, keep=False)[1]) == (N1, "ram", None)
    rt.store.close()
    # most of it used up: rows are written still, states and tips are not
    rt = reopened(written.rt, tmp_path / "d", policy=Policy(daily=20 * used))
    (tmp_path / "d" / "writes.json").write_text(json.dumps({"day": today(), "bytes": 19 * used}))
    run(rt, other)
    rt.store.close()
    assert records(tmp_path / "d", "rows") and not records(tmp_path / "d", "state")
    assert set(rt.store.writer.counters.skipped.daily) == {"tip", "state"}
    (folder / "writes.json").write_text('{"day": "2001-01-01", "bytes": 5}')
    assert stats(folder)["written_today"] == 0


def test_a_record_of_before_there_were_roles_still_opens(written, tmp_path, monkeypatch):
    from mlxkv.cache.record import Meta

    real = Meta.strings
    with monkeypatch.context() as m:
        m.setattr(Meta, "strings", lambda self: {k: v for k, v in real(self).items() if k != "role"})
        rt = reopened(written.rt, tmp_path / "c")
        run(rt, written.tokens)
        rt.store.close()
    assert set(states(tmp_path / "c").values()) == {""}
    rt = reopened(written.rt, tmp_path / "c", ram_budget=RAM)
    assert ask(written, rt) == (N1, "ssd", None)
    run(rt, [*written.tokens, 3, 4])
    rt.store.close()
    assert N1 in states(tmp_path / "c")  # it may be a message's end: only the budget removes it


def test_an_answer_in_ram_is_known_by_its_text(tiny_model, tmp_path):
    rt = runtime(tiny_model("qwen3_5"), tmp_path / "c", ram_budget=None)
    tokens = tiny.ids(12, seed=2)
    _, completion = run(rt, tokens, max_tokens=8)
    assert rt.store.answer_ids(tokens, completion.text) == completion.token_ids
    rt.store.close()
