"""State of another model, dtype, numerics mode, block size or salt: a miss with its reason, never a hit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxkv.decode.request import Request, SamplingParams
from tests import tiny
from tests.cache.stores import LENGTH, Written, records, reopened
from tests.probe import Probe, equal, run, runtime


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    return Written(tiny_model("qwen3_5"), tmp_path_factory.mktemp("other") / "cache")


def ask(rt, tokens):
    cold, _ = run(rt, tokens, use_cache=False)
    logits, completion = run(rt, tokens)
    assert equal(logits, cold)
    rt.store.writer.flush()
    again, hit = run(rt, tokens)
    assert equal(again, cold) and hit.cache.miss_reason is None
    rt.store.close()
    assert (completion.usage.cached_tokens, completion.cache.source) == (0, "none")
    return completion.cache.miss_reason


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Other weights of the same shapes."""
    return tiny.make("qwen3_5", tmp_path_factory.mktemp("twin") / "m", seed=1)


def test_other_weights_of_the_same_shapes(written, twin, tmp_path):
    shutil.copytree(written.folder, tmp_path / "c")
    assert ask(runtime(twin, tmp_path / "c"), written.tokens) == "other_model"
    assert written.ask_anew(tmp_path / "c") == (LENGTH - 1, None)  # both live in one folder


def test_other_block_size(written, tmp_path):
    assert ask(written.copy(tmp_path / "c", block=4), written.tokens) == "other_layout"


@pytest.mark.parametrize("block", [1, 2, 64])
def test_any_block_size_works(written, tmp_path, block):
    rt = reopened(written.rt, tmp_path / "c", block=block)
    written.ask(rt, keep=True)
    assert written.ask(rt) == (LENGTH - 1, None)
    rt.store.close()


CHILD = """
import sys
from pathlib import Path
from tests.probe import run, runtime
model, cache, tokens = Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3])
for dtype in ("fp32", "bf16", "bf16"):
    rt = runtime(model, cache, dtype=dtype)
    cold, _ = run(rt, tokens, use_cache=False)
    logits, completion = run(rt, tokens)
    close = abs(logits - cold).max() <= 5e-5 * abs(cold).max()
    print(completion.usage.cached_tokens, completion.cache.miss_reason, close)
    rt.store.close()
"""


def test_other_numerics_and_dtypes(written, tiny_model, tmp_path):
    """``fast`` in a process of its own: float32, then bfloat16 in the same folder, then this process in ``exact``."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny_model("qwen3_5")), str(tmp_path / "c"), str(written.tokens)],
        env=os.environ | {"MLXKV_NUMERICS": "fast"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["0 empty True", "0 other_numerics True", f"{LENGTH - 1} None True"], done.stderr
    assert written.ask_anew(tmp_path / "c", keep=True) == (0, "other_numerics")
    assert written.ask_anew(tmp_path / "c") == (LENGTH - 1, None)


def test_a_record_renamed_to_fit(written, twin, tmp_path):
    """Every record of another model put under the names of ours."""
    rt = runtime(twin, tmp_path / "theirs")
    run(rt, written.tokens)
    rt.store.close()
    shutil.copytree(written.folder, tmp_path / "c")
    rt = written.at(tmp_path / "c")
    for kind in ("rows", "state"):
        theirs = sorted(records(tmp_path / "theirs", kind), key=lambda p: p.stat().st_size)
        ours = sorted(records(tmp_path / "c", kind), key=lambda p: p.stat().st_size)
        for mine, other in zip(ours, theirs, strict=True):
            shutil.copy(other, mine)
    assert written.ask(rt) == (0, "corrupt")
    rt.store.close()


def test_a_salt_shares_nothing(written, tmp_path):
    rt = written.copy(tmp_path / "c")
    for salt in ("a", "b", "\ud800", "\0"):
        assert run_salted(rt, written.tokens, salt) == (0, "empty")
        rt.store.writer.flush()
        assert run_salted(rt, written.tokens, salt) == (LENGTH - 1, None)
    assert run_salted(rt, written.tokens, "") == (LENGTH - 1, None)
    rt.store.close()


def test_another_models_salted_text_is_nobodys_business(written, twin, tmp_path):
    shutil.copytree(written.folder, tmp_path / "c")
    rt = runtime(twin, tmp_path / "c")
    assert run_salted(rt, written.tokens, "secret") == (0, "empty")
    rt.store.close()


def run_salted(rt, tokens, salt):
    request = Request(tokens=tokens, sampling=SamplingParams(max_tokens=1), salt=salt)
    completion = Probe(rt, request, lambda e: None, lambda: False, time.monotonic()).run()
    return completion.usage.cached_tokens, completion.cache.miss_reason
