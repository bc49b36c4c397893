"""Boundaries inside one forward (split="never"): stored, found and restored as those of a prefill cut at each of them.

In ``exact`` on a CPU the records are the same, bit for bit. Where an operation of mlx-lm's gives other bits for another
cut, the table names it with the measured difference (largest difference / largest value).
"""

from __future__ import annotations

import dataclasses
import sys
import time

import mlx.core as mx
import numpy as np
import pytest

from mlxkv import numerics
from mlxkv.decode.options import Options
from mlxkv.decode.request import Progress, Request, SamplingParams
from mlxkv.decode.segments import NEAR, Split
from mlxkv.errors import ConfigError
from tests import headed, tiny
from tests.cache import test_equality
from tests.models.test_mtp import head_logits
from tests.probe import TOLERANCE, Probe, equal, probe, run, runtime

ARCHS = ("qwen3_5", "qwen3_next", "kimi_linear", "falcon_h1", "nemotron_h", "lfm2", "gemma3_text")
LENGTH = 37
#: the first token, neighbours, pieces shorter than a convolution's kernel, the block grid (8), the last token
ENDS = (1, 2, 3, 9, 16, 17, 29, 35)
#: architecture -> (bound, why, measured on x86-64 with the reference BLAS): records, one forward against split prefill
INEXACT = {
    "kimi_linear": (2e-6, "latent attention computes one token another way than several: 7.2e-7"),
    "gemma3_text": (2e-6, "rows of a window stand at other offsets after another cut, softmax sums in lanes: 6.4e-7"),
}


def story(ends=ENDS, length=LENGTH):
    tokens = tiny.ids(length, seed=11)
    for end in ends:
        tokens[end - 1] = tiny.EOS
    return tokens


def branch(tokens, p):
    """Five other tokens after the first ``p``."""
    rest = tiny.ids(5, seed=100 + p)
    rest[0] = (tokens[p] + 1) % 300
    return tokens[:p] + rest


def ask(rt, tokens, **options):
    """Run a prompt, wait until it is written; the positions at which its forwards ended."""
    ends = []
    request = Request(tokens=list(tokens), sampling=SamplingParams(max_tokens=1), **options)

    def heard(event):
        if isinstance(event, Progress):
            ends.append(event.done)

    Probe(rt, request, heard, lambda: False, time.monotonic()).run()
    assert rt.store.writer.flush(10)
    return ends


def records(folder):
    """File name -> tensors, without padding."""
    return {
        path.name: {n: a for n, a in mx.load(str(path)).items() if not n.startswith("__pad")}
        for path in (folder / "records").rglob("*.safetensors")
    }


def differ(mine, theirs):
    """The worst relative difference between two sets of records, which must be of the same entries and layout."""
    assert mine.keys() == theirs.keys() and mine
    worst = 0.0
    for name, tensors in mine.items():
        assert tensors.keys() == theirs[name].keys()
        for key, a in tensors.items():
            b = theirs[name][key]
            assert a.shape == b.shape and a.dtype == b.dtype
            a, b = np.array(a), np.array(b)
            if a.size:
                worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


def both(model, folder, prompts, **options):
    """Records of the same prompts with and without splits, and the ends of the forwards of those without."""
    for split in ("always", "never"):
        rt = runtime(model, folder / split, split=split, **options)
        ends = [ask(rt, tokens) for tokens in prompts]
        rt.store.close()
    return records(folder / "never"), records(folder / "always"), ends


@pytest.mark.parametrize("arch", ARCHS)
def test_records_are_those_of_a_split_prefill(tiny_model, tmp_path, arch):
    mine, theirs, ends = both(tiny_model(arch), tmp_path, [story()])
    assert ends == [[0, LENGTH - 1]]  # one forward, and the last token
    states = [name for name in mine if name.endswith(".state.safetensors")]
    # a state at each message's end, at n-1, and at the end of the answer
    assert len(states) == (0 if arch == "gemma3_text" else len(ENDS) + 2)
    assert differ(mine, theirs) <= max(INEXACT.get(arch, (0.0, ""))[0], TOLERANCE)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_boundary_inside_is_resumed(tiny_model, tmp_path, arch):
    tokens = story()
    rt = runtime(tiny_model(arch), tmp_path, split="never")
    ask(rt, tokens)
    rt.store.close()
    rt = runtime(tiny_model(arch), tmp_path, split="never")
    bound = max(test_equality.INEXACT.get(arch, (0.0, ""))[0], TOLERANCE)
    for p in (1, 3, 16, 35, LENGTH - 1):
        prompt = branch(tokens, p)
        logits, done = run(rt, prompt, keep=False)
        assert done.usage.cached_tokens == p
        cold, _ = run(rt, prompt, use_cache=False)
        assert np.abs(logits - cold).max() <= bound * np.abs(cold).max()
    prompt = branch(tokens, 29)
    texts = [
        run(rt, prompt, keep=False, max_tokens=64)[1].token_ids,
        run(rt, prompt, use_cache=False, max_tokens=64)[1].token_ids,
        run(dataclasses.replace(rt, split=Split()), prompt, use_cache=False, max_tokens=64)[1].token_ids,
    ]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 64
    rt.store.close()


@pytest.mark.parametrize("arch", ["qwen3_5", "falcon_h1"])
def test_chunks_and_a_resumed_start(tiny_model, tmp_path, arch):
    """Boundaries at a chunk's edge, in a later chunk, and after a start that was restored."""
    tokens = story(ends=(5, 12, 13, 20, 24, 31))
    mine, theirs, ends = both(tiny_model(arch), tmp_path, [tokens[:16], tokens], prefill_chunk=12)
    assert ends == [[0, 12, 15], [16, 28, 36]]
    # a chunk ends at 28 here, and at 32 after a cut at 20: Mamba-2's scan sums within such pieces, 4.8e-7
    assert differ(mine, theirs) <= max(test_equality.INEXACT.get(arch, (0.0, ""))[0], TOLERANCE)


def test_a_head_tells_its_hidden_state_inside_a_forward(tmp_path):
    model = headed.make(tmp_path / "model")
    # after one token a head has no row yet, and a split prefill keeps nothing there
    mine, theirs, ends = both(model, tmp_path, [story(ends=ENDS[1:])])
    assert ends == [[0, LENGTH - 1]]
    assert any(key.endswith(".hidden") for tensors in mine.values() for key in tensors)
    assert differ(mine, theirs) <= TOLERANCE


def test_a_head_goes_on_from_a_boundary_inside(tmp_path):
    tokens = story()
    rt = runtime(headed.make(tmp_path / "model"), tmp_path / "cache", split="never")
    ask(rt, tokens)
    for p in (1, 2, 9, 35):
        restored, cold = (probe(rt, branch(tokens, p), keep=False, use_cache=use) for use in (True, False))
        assert restored.completion.usage.cached_tokens == p
        assert equal(restored.logits, cold.logits)
        assert equal(head_logits(restored, rt, 7), head_logits(cold, rt, 7))
    rt.store.close()


def test_a_model_without_the_form_is_split(tiny_model, tmp_path):
    mine, theirs, ends = both(tiny_model("mamba"), tmp_path, [story()])
    assert ends == [[0, *ENDS, LENGTH - 1]]
    assert differ(mine, theirs) <= TOLERANCE


@pytest.mark.skipif(numerics.current().device != "cpu", reason="what a CPU does")
def test_on_a_cpu_boundaries_split_unless_asked(tiny_model, tmp_path):
    rt = runtime(tiny_model("lfm2"), tmp_path)
    assert ask(rt, story()) == [0, *ENDS, LENGTH - 1]
    # and what a GPU would do with the same model
    assert Split.by("auto", "gpu", rt.layout).near == NEAR
    assert Split.by("always", "gpu", rt.layout) == Split.by("auto", "cpu", rt.layout) == Split()
    rt.store.close()


def test_a_limit_of_states_inside_one_forward(tiny_model, tmp_path):
    rt = runtime(tiny_model("lfm2"), tmp_path, split="never")
    few = dataclasses.replace(rt, split=Split(sys.maxsize, 3))
    assert ask(few, story()) == [0, 9, 35, LENGTH - 1]
    rt.store.close()


def test_segments_of_a_gpu():
    split = Split(NEAR, most=8)
    edges = [100, 511, 512, 600, 2000, 4500, 4999]
    at, cuts = 0, []
    while at < edges[-1]:
        at, inside = split.segment(at, edges, 2048)
        cuts.append((at, inside))
    assert cuts == [(512, (100, 511)), (2000, (600,)), (4048, ()), (4999, (4500,))]
    assert Split().segment(100, edges, 2048) == (511, ())
    assert split.segment(1952, [2000, 4000, 9000], 2048) == (4000, (2000,))  # an end of the chunk is a cut


def test_the_setting_is_checked():
    with pytest.raises(ConfigError, match="split"):
        Options(model="x", split="sometimes")
