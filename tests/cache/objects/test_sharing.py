"""What one machine stored another resumes: every layout, prompts that share, branch and end anywhere, by real S3."""

from __future__ import annotations

import random

import pytest

from mlxkv.cache.objects.shared import share
from mlxkv.cache.objects.tier import ObjectTier
from mlxkv.cache.record import Reader
from mlxkv.cache.unwritten import UnwrittenStore
from tests.cache.objects.machines import sent
from tests.cache.objects.server import objects
from tests.cache.stores import records
from tests.cache.synthetic import MODELS, ask, verify

SECRET = "a secret of some length"


def prompts(seed: int = 1) -> list[list[int]]:
    """The same stem, longer, shorter, and going on in other ways."""
    rng = random.Random(seed)
    stem = [rng.randrange(50) for _ in range(37)]
    return [stem, [*stem, 1, 2, 3], stem[:20] + [9] * 15, stem[:30], stem + [5] * 30, stem[:11] + [8] * 3]


@pytest.mark.parametrize("name", MODELS)
def test_what_one_stored_the_other_resumes_as_far(name, machine, tmp_path):
    """``ask`` compares every bit of what is restored; the second machine gets as far as the first would."""
    url = f"file://{tmp_path}/shared"
    a, b = machine(MODELS[name], "a", url), machine(MODELS[name], "b", url)
    sources = []
    for prompt in prompts():
        ask(MODELS[name], a, prompt, ends=(10, 20))
        sent(a)
        found = ask(MODELS[name], b, prompt, keep=False)
        assert (found.tokens, found.reason) == (len(prompt) - 1, None)
        sources.append(found.source)
    assert sources[:3] == ["object"] * 3
    assert b.writer.flush(20)
    verify(b.folder.path, b)
    assert not a.faults and not b.faults


def test_what_was_downloaded_enters_the_store_like_its_own(machine, tmp_path):
    """Once the object store is gone, it comes from this machine's disk."""
    model, url = MODELS["mixed"], f"file://{tmp_path}/shared"
    a = machine(model, "a", url)
    prompt = prompts()[0]
    ask(model, a, prompt, more=(7, 8, 9))
    sent(a)
    b = machine(model, "b", url)
    said = [*prompt, 7, 8, 9, 1, 2]
    assert ask(model, b, said, keep=False).source == "object"
    assert b.answer_ids(prompt, "7 8 9") == [7, 8, 9], "an answer is known by its text"
    b.close()
    alone = model.open(tmp_path / "b", block=8)
    found = ask(model, alone, said, keep=False)
    assert (found.tokens, found.source) == (len(prompt) + 2, "ssd")
    alone.close()


def test_both_ways_and_nothing_twice(machine, bucket):
    """By a real server: each goes on from what the other stored, and no record is sent by both."""
    model = MODELS["recurrent"]
    a, b = machine(model, "a", bucket), machine(model, "b", bucket)
    said = prompts()[0]
    for turn in range(3):
        store, other = (a, b) if turn % 2 == 0 else (b, a)
        found = ask(model, store, said, messages=True)
        assert turn == 0 or (found.source == "object" and found.tokens >= len(said) - 9)
        sent(store)
        assert other.shared is not None
        said = [*said, 1, *[turn] * 8]
    there = objects(bucket)
    assert a.shared and b.shared
    counters = [s.shared.tier.counters for s in (a, b)]
    assert sum(c.uploaded_records for c in counters) == len(there) > 0
    assert sum(c.uploaded_bytes for c in counters) == sum(map(len, there.values()))
    assert not a.faults and not b.faults


def test_a_restart_sends_what_was_not_sent(machine, tmp_path):
    """A store that was filled while there was no object store, or it could not be reached, is sent from behind."""
    model, url = MODELS["window"], f"file://{tmp_path}/shared"
    before = model.open(tmp_path / "a", block=8)
    for prompt in prompts():
        ask(model, before, prompt)
    before.close()
    a, b = machine(model, "a", url), machine(model, "b", url)
    assert a.shared and a.shared.uploads and a.shared.uploads.wait_compared(20)
    found = ask(model, b, prompts()[4], keep=False)
    assert (found.source, found.reason) == ("object", None)


def test_names_say_nothing_and_payloads_do_not_open_without_the_secret(machine, bucket, tmp_path):
    model, prompt = MODELS["mixed"], prompts()[0]
    a = machine(model, "a", bucket, SECRET)
    ask(model, a, prompt)
    sent(a)
    there = objects(bucket)
    keys = set()
    for path in records(tmp_path / "a"):
        with Reader.open(path) as reader:
            keys |= {reader.meta.key.hex(), reader.meta.root.hex()}
    assert there and not any(key in path for key in keys for path in there)
    assert not any(b"checksums" in data or b"mlxkv-record" in data for data in there.values())
    right = ask(model, machine(model, "b", bucket, SECRET), prompt, keep=False)
    assert (right.source, right.reason) == ("object", None)
    for i, secret in enumerate((None, SECRET + "!")):
        other = ask(model, machine(model, f"c{i}", bucket, secret), prompt, keep=False)
        assert (other.tokens, other.reason) == (0, "empty")


def test_a_salt_keeps_apart(machine, tmp_path):
    model, url, prompt = MODELS["growing"], f"file://{tmp_path}/shared", prompts()[0]
    a, b = machine(model, "a", url), machine(model, "b", url)
    ask(model, a, prompt, salt="one")
    sent(a)
    assert ask(model, b, prompt, salt="two", keep=False).tokens == ask(model, b, prompt, keep=False).tokens == 0
    assert ask(model, b, prompt, salt="one", keep=False).source == "object"


def test_merged_blocks_and_branches_are_found(machine, tmp_path):
    """A block that filled bit by bit and was merged, a branch that hangs on it, and a restart between."""
    model, url = MODELS["mixed"], f"file://{tmp_path}/shared"
    a = model.open(tmp_path / "a", block=16)
    talk = prompts()[0][:5]
    for turn in range(6):
        ask(model, a, talk, messages=True)
        talk = [*talk, 1, *[turn] * 5]
    a.writer.write_tips()
    assert a.writer.merge() and a.writer.flush(20)
    branch = talk[:24] + [77] * 12
    ask(model, a, branch)
    a.close()
    a, b = machine(model, "a", url, block=16), machine(model, "b", url, block=16)
    assert a.shared and a.shared.uploads and a.shared.uploads.wait_compared(20)
    assert ask(model, b, branch, keep=False).reason is None
    fresh = machine(model, "c", url, block=16)
    here, there = ask(model, a, talk, keep=False), ask(model, fresh, talk, keep=False)
    assert (there.tokens, there.reason) == (here.tokens, here.reason) and there.source == "object"


@pytest.mark.parametrize("name", ["recurrent", "mixed"])
def test_a_state_alone_where_all_rows_are_here(name, machine, tmp_path):
    """Rows reach to the end, their states are gone; elsewhere one is left, in the middle of a block."""
    import obstore

    from mlxkv.cache.objects.place import open_store

    model, url, prompt = MODELS[name], f"file://{tmp_path}/shared", prompts()[0]
    b = model.open(tmp_path / "b", block=8)
    ask(model, b, prompt)
    b.close()
    for path in records(tmp_path / "b", "state"):
        path.unlink()
    a = machine(model, "a", url)
    ask(model, a, prompt, ends=(20,), messages=True)
    sent(a)
    ends = {}
    for path in records(tmp_path / "a", "state"):
        with Reader.open(path) as reader:
            ends[reader.meta.key.hex()] = reader.meta.end
    gone = [path for path in objects(url) if path.endswith("state") and ends[path.split("/")[-1].split(".")[0]] != 20]
    obstore.delete(open_store(url), gone)
    b = machine(model, "b", url)
    found = ask(model, b, prompt, keep=False)
    assert (found.tokens, found.source, found.reason) == (20, "object", "no_state")
    assert b.writer.flush(20)
    verify(b.folder.path, b)
    b.close()
    alone = model.open(tmp_path / "b", block=8)
    found = ask(model, alone, prompt, keep=False)
    assert (found.tokens, found.source) == (20, "ssd")
    alone.close()


def test_where_nothing_is_kept_on_disk_it_is_kept_in_ram(machine, tmp_path):
    """A store whose folder was refused resumes from the object store, sends nothing, and has it in RAM afterwards."""
    model, url, prompt = MODELS["mixed"], f"file://{tmp_path}/shared", prompts()[0]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    there = objects(url)
    b = UnwrittenStore(None, model.identity, model.layout, "it was refused", block=8, ram_budget=1 << 20)
    share(b, ObjectTier(url, 8))
    assert [ask(model, b, prompt, more=(4, 5)).source for _ in range(2)] == ["object", "ram"]
    b.close()
    assert objects(url) == there


def test_too_much_to_download_ends_earlier(machine, tmp_path):
    model, url, prompt = MODELS["growing"], f"file://{tmp_path}/shared", prompts()[4]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    whole = sum(map(len, objects(url).values()))
    b = machine(model, "b", url, nbytes=whole // 2)
    found = ask(model, b, prompt, keep=False)
    assert 0 < found.tokens < len(prompt) - 1 and found.source == "object"
    assert b.shared is not None and b.shared.tier.counters.downloaded_bytes <= whole // 2
