"""The model in the box: PyTorch's logits, a tokenizer and template that read back the same, a name remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlxkv
from mlxkv.config import EMBEDDED
from mlxkv.models.mtp import find

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from demo_model import corpus, evaluation  # noqa: E402

ODD = ["Café naïve", "e\u0301 1234 x  y\n\n z", "日本語 🙂", "tabs\t\tand  spaces ", "<|im_end|> as text", ""]


@pytest.fixture(scope="module")
def demo():
    return evaluation.Demo(EMBEDDED)


def test_it_is_small_and_brings_a_head_and_a_card():
    assert sum(f.stat().st_size for f in EMBEDDED.rglob("*") if f.is_file()) <= 12e6
    assert find(EMBEDDED, json.loads((EMBEDDED / "config.json").read_text())).usable
    card = (EMBEDDED / "README.md").read_text()
    assert "What it is not" in card and all(figure in card for figure in evaluation.BARS)


def test_logits_of_body_and_drafts_are_pytorchs(demo):
    """transformers' body and a head written in PyTorch from its equations, float32, on these very weights."""
    differences = evaluation.check_reference(demo, Path(__file__).parent / "demo_reference.npz")
    assert set(differences) == {"body", "mtp", "mtp_second"}
    assert max(differences.values()) <= 1e-4


def test_tokenizer_and_template_read_back_identically():
    grammar = corpus.Grammar(3)
    texts = [grammar.draw("mix", 256).text for _ in range(300 - len(ODD))] + ODD
    assert evaluation.check_tokenizer(EMBEDDED, texts) == 0
    assert evaluation.check_template(EMBEDDED, texts=300) == 0


def test_nothing_held_out_is_in_the_grammar():
    assert corpus.check_heldout(docs=400) == []


def test_it_is_the_default(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("MLXKV_MODEL", "MLXKV_CACHE_DIR")}
    env |= {"HOME": str(tmp_path), "MLXKV_CONFIG": str(tmp_path / "none.toml"), "MLXKV_CACHE_DIR": str(tmp_path / "c")}
    (tmp_path / "none.toml").write_text("")
    command = [sys.executable, "-m", "mlxkv", "run", "My name is Ruby. It is a fine day. What is my name?"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Ruby" in done.stdout, done.stderr


def test_it_remembers_a_name_across_a_restart(tmp_path):
    told = [{"role": "user", "content": "My name is Ruby."}]
    with mlxkv.load(EMBEDDED, cache_dir=tmp_path) as engine:  # another conversation that begins alike
        mlxkv.generate(engine, [{"role": "user", "content": "My name is Ruby. It rains."}], max_tokens=8)
    with mlxkv.load(EMBEDDED, cache_dir=tmp_path) as engine:
        first = mlxkv.generate(engine, told, max_tokens=32)
    asked = [*told, {"role": "assistant", "content": first.text}, {"role": "user", "content": "What is my name?"}]
    with mlxkv.load(EMBEDDED, cache_dir=tmp_path) as engine:
        second = mlxkv.generate(engine, asked, max_tokens=32)
    assert "Ruby" in second.text and second.finish_reason == "stop"
    assert second.cache.source == "ssd"
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1
    for record in tmp_path.rglob("*.state.safetensors"):
        record.unlink()
    with mlxkv.load(EMBEDDED, cache_dir=tmp_path) as engine:
        third = mlxkv.generate(engine, asked, max_tokens=32)
    assert third.token_ids == second.token_ids
    assert (third.usage.cached_tokens, third.cache.miss_reason) == (0, "no_state")
