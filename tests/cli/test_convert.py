"""``mlxkv convert``: what it prints, and what ``run`` and ``doctor`` then find."""

from __future__ import annotations

import pytest

from tests import headed, tiny


def test_a_checkpoint_and_its_head(cli, tmp_path):
    source, made = headed.make(tmp_path / "source"), tmp_path / "made"
    found = cli("convert", source, made, "--bits", 8, "--group-size", 32, "--json")
    assert found.code == 0 and found.json["head"] == {"kept": True, "family": "Qwen3.5", "reason": ""}
    assert found.json["bytes"] == sum(file.stat().st_size for file in made.iterdir())
    seen = {c["name"]: c for c in cli("doctor", "--model", made, "--json").json["checks"]}
    assert seen["MTP head"]["status"] == "ok" and "in mtp.safetensors" in seen["MTP head"]["detail"]
    answer = cli("run", "hello", "--model", made, "--max-tokens", 4, "--json")
    assert answer.code == 0 and answer.json["usage"]["completion_tokens"] == 4
    again = cli("convert", source, made)
    assert again.code == 2 and "exists already" in again.err


def test_for_people(cli, tmp_path):
    found = cli("convert", tiny.make("llama", tmp_path / "source"), tmp_path / "made", "--no-quantise")
    assert found.code == 0 and "without a head" in found.out and not found.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--no-quantise", "--bits", "4"], 2, "--no-quantise"),
        (["--mode", "ternary"], 2, "ternary"),
        (["--dtype", "fp7"], 2, "fp7"),
        ([], 3, "no model folder"),
    ],
)
def test_errors(cli, tmp_path, model, flags, code, said):
    found = cli("convert", model if flags else "nowhere", tmp_path / "made", *flags)
    assert found.code == code and said in found.err and not (tmp_path / "made").exists()
