"""Records on disk: plain safetensors that anyone can read, private, aligned, and as many bytes as there are tokens."""

from __future__ import annotations

import dataclasses
import json
import os
import stat

import numpy as np
import pytest
from safetensors import safe_open

from mlxkv.cache.record import Reader
from mlxkv.cache.store import stats
from mlxkv.decode.request import Request, SamplingParams
from tests import tiny
from tests.cache.stores import Written, prompt, records, reopened
from tests.probe import BLOCK, Probe, run, runtime


@pytest.fixture(scope="module", params=["qwen3_5", "gemma3_text"])
def written(request, tiny_model, tmp_path_factory):
    return Written(tiny_model(request.param), tmp_path_factory.mktemp("records") / "cache")


def test_anyones_safetensors_library_reads_them(written):
    seen: dict[tuple[int, int], set[str]] = {}
    for path in records(written.folder):
        with safe_open(path, framework="numpy") as f:
            meta = f.metadata()
            names = [n for n in f.keys() if not n.startswith("__pad")]  # noqa: SIM118
            tensors = {name: f.get_tensor(name) for name in names}
        start, end, row_start = (int(meta[k]) for k in ("start", "end", "row_start"))
        tokens = json.loads(meta["tokens"])
        assert meta["format"] == "mlxkv-record" and meta["kind"] in path.name and meta["key"] in path.name
        if end <= len(written.tokens):
            assert tokens == written.tokens[start:end]
        assert len(tokens) == end - start <= BLOCK and start % BLOCK == 0
        assert set(json.loads(meta["checksums"])) == set(tensors)
        with Reader.open(path) as ours:
            for name, tensor in tensors.items():
                assert np.array_equal(ours.read(name), tensor)
                if meta["kind"] != "state":
                    assert tensor.shape[2] == end - row_start
        seen.setdefault((start, end), set()).add(meta["kind"])
    if written.rt.layout.needs_state:
        assert {end for (_, end), kinds in seen.items() if "state" in kinds} == {10, 20, 29, 30}


def test_tensors_are_aligned(written):
    for path in records(written.folder):
        with Reader.open(path) as reader:
            for name, (_, _, start, _) in reader.tensors.items():
                assert (reader.data_start + start) % 64 == 0, name


def test_big_tensors_are_aligned_to_pages(tmp_path):
    from mlxkv.cache.keys import KeySpace
    from mlxkv.cache.record import Body, Meta, write

    space = KeySpace(b"r" * 32, BLOCK)
    key = space.key(space.root, [1])
    meta = Meta("rows", key, space.root, space.root, 0, 1, 0, None, (1,), BLOCK, b"l" * 32)
    big = {"a": ("F32", np.ones((3,), np.float32)), "b": ("F32", np.ones((1 << 18,), np.float32))}
    write(tmp_path / "x", meta, Body.of(big))
    with Reader.open(tmp_path / "x") as reader:
        assert (reader.data_start + reader.tensors["b"][2]) % 16384 == 0
        assert np.array_equal(reader.read("b"), big["b"][1])


def test_nobody_else_may_read(written):
    for base, folders, files in os.walk(written.folder):
        for name in folders:
            assert stat.S_IMODE(os.stat(os.path.join(base, name)).st_mode) == 0o700, name
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(base, name)).st_mode) == 0o600, name
    assert stat.S_IMODE(written.folder.stat().st_mode) == 0o700


def test_a_folder_with_other_things_keeps_its_mode(written, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "mine.txt").touch()
    rt = reopened(written.rt, tmp_path)
    written.ask(rt, keep=True)
    rt.store.close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir() if p.name != "mine.txt"} <= {0o600, 0o700}


def test_bytes_grow_with_new_tokens_only(tiny_model, tmp_path):
    """A conversation that grows turn by turn costs the same each turn, not more with its length."""
    rt = runtime(tiny_model("llama"), tmp_path / "c")
    tokens: list[int] = []
    sizes = []
    for turn in range(12):
        tokens = tokens + tiny.ids(16, seed=turn)
        run(rt, tokens)
        rt.store.writer.flush()
        sizes.append(sum(p.stat().st_size for p in records(tmp_path / "c")))
    rt.store.close()
    steps = np.diff(sizes)
    assert max(steps) <= 1.1 * min(steps)
    held = stats(tmp_path / "c")
    assert held["bytes"] == sum(p.stat().st_size for p in (tmp_path / "c").rglob("*") if p.is_file())
    assert held["records"] == len(records(tmp_path / "c"))


def test_the_same_prompt_again_writes_nothing(written, tmp_path):
    rt = written.copy(tmp_path / "c")
    before = {p: p.stat().st_mtime_ns for p in records(tmp_path / "c")}
    written.ask(rt, keep=True)
    rt.store.close()
    assert {p: p.stat().st_mtime_ns for p in records(tmp_path / "c")} == before


def test_what_changes_after_the_hand_over_changes_nothing_on_disk(written, tmp_path):
    """Every live buffer is overwritten in place between capture and commit; what was stored is still the state."""
    rt = reopened(written.rt, tmp_path / "c")

    class Scribbling(Probe):
        calls = 0
        scribble_at = 0

        def barrier(self):
            self.calls += 1
            if self.calls == self.scribble_at:
                for array in self.state.live():
                    np.array(array, copy=False)[...] = 7

    def go(tokens, scribble_at):
        request = Request(tokens=tokens, sampling=SamplingParams(max_tokens=1))
        probe = Scribbling(dataclasses.replace(rt, barrier=lambda: probe.barrier()), request)
        probe.scribble_at = scribble_at
        probe.run()
        return probe.calls

    last = go(prompt(seed=3), 0)  # the last barrier is the one before the hand-over
    assert go(written.tokens, last) == last
    rt.store.writer.flush()
    cached, reason = written.ask(rt)
    assert (cached, reason) == (29, None)
    rt.store.close()
