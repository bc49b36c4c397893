"""``mlxkv cache import`` of a file that ``mlx_lm.cache_prompt`` has written, with the prompt that it was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mlx_lm import cache_prompt

from tests import tiny

TEXT = "The ships of the north set out at dawn, and the harbour is quiet again."


def written_by_mlx_lm(model: Path, path: Path, text: str) -> Path:
    """``mlx_lm.cache_prompt --model MODEL --prompt TEXT --prompt-cache-file PATH``"""
    argv = ["mlx_lm.cache_prompt", "--model", str(model), "--prompt", text, "--prompt-cache-file", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        cache_prompt.main()
    return path


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory) -> tuple[Path, Path]:
    model = tiny_model("qwen3_5")
    return model, written_by_mlx_lm(model, tmp_path_factory.mktemp("made") / "saved.safetensors", TEXT)


@pytest.fixture
def file(made, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MLXKV_MODEL", str(made[0]))
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path / "c"))
    return made[1]


def rendered() -> int:
    return len(tiny.tokenizer().encode(f"<|im_start|>user\n{TEXT}", add_special_tokens=False).ids)


def test_the_prompt_of_cache_prompt_is_proven_imported_and_served(cli, file, tmp_path):
    before = file.read_bytes()
    dry = cli("cache", "import", file, "--prompt", TEXT, "--dry-run", "--json").json
    assert dry["kind"] == "mlx-lm" and dry["imported"]["files"] == 1 and not (tmp_path / "c").exists()
    done = cli("cache", "import", file, "--prompt", TEXT)
    assert done.code == 0
    assert "the prompt as a user message that goes on: the rows of layer 1 are the prompt's" in done.out
    ran = cli("run", f"{TEXT} But for the gulls.", "--max-tokens", "1", "--json").json
    assert ran["usage"]["cached_tokens"] == rendered()
    cold = cli("run", f"{TEXT} But for the gulls.", "--max-tokens", "1", "--no-cache", "--json").json
    assert ran["text"] == cold["text"]
    assert cli("cache", "import", file, "--prompt", TEXT, "--json").json["already"]["files"] == 1
    for args in ((), ("--dry-run",)):  # that it was imported is known without its prompt
        again = cli("cache", "import", file, *args, "--json")
        assert again.code == 0 and again.json["already"]["files"] == 1 and not again.json["refused"]
    assert file.read_bytes() == before


def test_the_prompt_may_come_from_a_file_as_messages_or_as_ids(cli, file, tmp_path):
    (tmp_path / "p.txt").write_text(TEXT)
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": TEXT}]))
    ids = tiny.tokenizer().encode(f"<|im_start|>user\n{TEXT}", add_special_tokens=False).ids
    (tmp_path / "t.json").write_text(json.dumps(ids))
    for option, name in (("--prompt-file", "p.txt"), ("--messages", "m.json"), ("--prompt-tokens", "t.json")):
        found = cli("cache", "import", file, option, tmp_path / name, "--dry-run", "--json")
        assert found.code == 0 and found.json["imported"]["files"] == 1, option


def test_another_prompt_is_refused_with_the_place_where_it_parts(cli, file, tmp_path):
    changed = TEXT.replace("quiet", "quick")  # as long, in tokens
    found = cli("cache", "import", file, "--prompt", changed, "--json")
    assert found.code == 1
    (code,) = found.json["refused"]
    assert code == "PROMPT" and "token " in found.json["refused"]["PROMPT"]["examples"][0]["detail"]
    longer = cli("cache", "import", file, "--prompt", TEXT + " And on.", "--json")
    assert longer.code == 1 and f"made from {rendered()} tokens" in str(longer.json["refused"]["PROMPT"])
    none = cli("cache", "import", file, "--json")
    assert none.code == 1 and set(none.json["refused"]) == {"NO_TOKENS"}
