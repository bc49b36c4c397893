"""A folder that cannot be loaded is refused with the file and the cure, before anything is computed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mlxkv.errors import ModelError
from mlxkv.models import folder, load
from tests import tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny.make("llama", tmp_path_factory.mktemp("good"))


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "model"))


def refused(path, *words):
    with pytest.raises(ModelError) as caught:
        load(path)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert caught.value.cure
    return caught.value


def truncate(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_missing_folder(tmp_path):
    assert refused(tmp_path / "nothing", "nothing").exit_code == 3
    refused("no-such-model", "no-such-model", "Hugging Face")


def test_hub_out_of_reach(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused("nobody/nothing-at-all", "nobody/nothing-at-all", "cannot be reached", "folder")


def test_a_file_is_not_a_folder(copy, tmp_path):
    refused(copy / "model.safetensors", "model.safetensors", "folder")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    refused(gguf, "GGUF", "mlx_lm.convert")


def test_config(copy):
    (copy / "config.json").write_text("{")
    refused(copy, "config.json", "JSON")
    (copy / "config.json").write_text("[]")
    refused(copy, "config.json", "object")
    (copy / "config.json").write_text("{}")
    refused(copy, "config.json", "model_type")
    (copy / "config.json").unlink()
    refused(copy, "no config.json")


def test_unknown_architecture(copy):
    edit_config(copy, model_type="quux_9")
    refused(copy, "quux_9", "mlx-lm")


def test_config_of_another_model(copy):
    edit_config(copy, hidden_size=96)
    refused(copy, str(copy), "config.json")
    edit_config(copy, hidden_size=None)
    refused(copy, str(copy), "hidden_size")


def test_remote_code(copy):
    edit_config(copy, model_file="own.py")
    refused(copy, "own.py", "does not allow")


def test_weights(copy):
    weights = copy / "model.safetensors"
    size = weights.stat().st_size
    truncate(weights, size - 10)
    refused(copy, "model.safetensors", "cut off", str(size))
    with weights.open("ab") as file:
        file.write(bytes(30))
    refused(copy, "longer")
    weights.write_bytes((1 << 50).to_bytes(8, "little") + bytes(100))
    refused(copy, "model.safetensors", "whole")
    weights.write_bytes((16).to_bytes(8, "little") + b"{not json at all")
    refused(copy, "model.safetensors", "header")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused(copy, "Git LFS")
    weights.write_bytes(b"")
    refused(copy, "model.safetensors")
    weights.rename(copy / "weights.safetensors")
    refused(copy, "weights.safetensors")
    (copy / "weights.safetensors").rename(copy / "pytorch_model.bin")
    refused(copy, "PyTorch", "mlx_lm.convert")
    (copy / "pytorch_model.bin").rename(copy / "model.gguf")
    refused(copy, "GGUF", "mlx_lm.convert")
    (copy / "model.gguf").unlink()
    refused(copy, "no model*.safetensors")


def test_missing_shard(copy):
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}))
    refused(copy, "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    index.write_text("{}")
    refused(copy, "weight_map")


def test_tokenizer(copy):
    (copy / "tokenizer.json").write_text("{}")
    refused(copy, "tokenizer")
    (copy / "tokenizer.json").unlink()
    refused(copy, "no tokenizer")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_denied(copy):
    (copy / "model.safetensors").chmod(0)
    refused(copy, "model.safetensors", "permission")
    copy.chmod(0)
    try:
        refused(copy, "permission")
    finally:
        copy.chmod(0o700)


def test_header_gives_tensors(good):
    header = folder.read_header(good / "model.safetensors")
    assert header["lm_head.weight"]["shape"] == [320, 64]
