"""What load() gives back: dtype, fingerprint, context, ends of text, adapters and quantised checkpoints."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, quantize_model

from mlxkv import numerics
from mlxkv.errors import ConfigError, ModelError
from mlxkv.models import fingerprint, load, precision
from tests import tiny

ROOT = Path(__file__).parents[2]
on_cpu = pytest.mark.skipif(numerics.current().device != "cpu", reason="what a CPU does")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny.make("qwen3_5", tmp_path_factory.mktemp("models") / "tiny-qwen")


def quantised(good, to):
    model, config = load_model(good)
    model, config = quantize_model(model, config, group_size=32, bits=8)
    shutil.copytree(good, to)
    mx.save_safetensors(str(to / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (to / "config.json").write_text(json.dumps(config))
    return model


def adapter(good, to, scale=1.0):
    model, _ = load_model(good)
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters)
    weights = {k: v for k, v in tree_flatten(model.parameters()) if k.endswith(("lora_a", "lora_b"))}
    mx.random.seed(5)
    weights = {k: mx.random.normal(v.shape) * 0.1 * scale for k, v in weights.items()}
    to.mkdir()
    mx.save_safetensors(str(to / "adapters.safetensors"), weights)
    (to / "adapter_config.json").write_text(json.dumps({"num_layers": 2, "lora_parameters": parameters}))
    return to


@on_cpu
@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_every_architecture(arch, tmp_path):
    loaded = load(tiny.make(arch, tmp_path / arch))
    assert loaded.name == arch and loaded.path == (tmp_path / arch).resolve()
    assert loaded.context_length == 4096
    assert loaded.eos_token_ids == {319}
    assert loaded.vocab_size == 320
    assert loaded.dtype == "float32" and not loaded.dequantised
    assert len(loaded.fingerprint) == 32 and loaded.fingerprint_name.startswith(f"{arch}@")
    assert not any(module.training for module in loaded.model.modules())
    reference, _ = tiny.build(arch)
    x = mx.array([tiny.ids(30, 2)])
    error = mx.abs(loaded.model(x) - reference(x)).max() / mx.abs(reference(x)).max()
    assert error == 0 if numerics.mode() == "exact" else error < 2e-5


def test_several_ends_of_text(good, tmp_path):
    copy = shutil.copytree(good, tmp_path / "m")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 319]}))
    assert load(copy).eos_token_ids == {7, 319}


@on_cpu
def test_dtype(good):
    for wish in ("float32", "FP32", "auto"):
        assert load(good, dtype=wish).dtype == "float32"
    with pytest.raises(ConfigError, match="float99"):
        load(good, dtype="float99")
    with pytest.raises(ConfigError, match="float99"):  # before the model is looked for
        load("nobody/nothing", dtype="float99")
    if numerics.mode() == "exact":
        with pytest.raises(ConfigError, match="exact"):
            load(good, dtype="bf16")


def test_cast_keeps_what_the_architecture_keeps():
    model, _ = tiny.build("nemotron_h")
    precision.cast(model, "bfloat16")
    types = {name: array.dtype for name, array in tree_flatten(model.parameters())}
    assert all((dtype == mx.float32) == name.endswith("A_log") for name, dtype in types.items())
    assert precision.stored_dtype(model) == "bfloat16"


def test_dtype_on_a_gpu():
    model, _ = tiny.build("llama")
    assert precision.choose("auto", model, mode="fast", device="gpu") == "bfloat16"
    assert precision.choose("fp32", model, mode="exact", device="gpu") == "float32"
    precision.cast(model, "float16")
    assert precision.choose("auto", model, mode="fast", device="gpu") == "float16"


@on_cpu
def test_quantised_checkpoint_is_unpacked_to_the_same_model(good, tmp_path):
    original = quantised(good, tmp_path / "q")
    loaded = load(tmp_path / "q")
    assert loaded.dequantised and loaded.dtype == "float32" and not precision.is_quantised(loaded.model)
    x = mx.array([tiny.ids(12, 2)])
    assert mx.abs(loaded.model(x) - original(x)).max() < 1e-4
    assert loaded.fingerprint != load(good).fingerprint


@on_cpu
def test_quantised_checkpoint_stays_so_without_memory(good, tmp_path, monkeypatch):
    quantised(good, tmp_path / "q")
    monkeypatch.setattr(precision, "available_memory", lambda: 1000)
    loaded = load(tmp_path / "q")
    assert not loaded.dequantised and precision.is_quantised(loaded.model)
    assert any("quantised" in note for note in loaded.notes)
    assert loaded.model(mx.array([[1, 2]])).dtype == mx.float32


def test_available_memory():
    assert precision.available_memory() > 1 << 20


def test_fingerprint_follows_content(good, tmp_path):
    same = shutil.copytree(good, tmp_path / "elsewhere")
    mark = fingerprint.fingerprint(good)
    assert fingerprint.fingerprint(same) == mark
    (same / "tokenizer_config.json").write_text("{}")  # ids are stored with entries, the tokenizer is not
    assert fingerprint.fingerprint(same) == mark
    weights = bytearray((same / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # the same shapes, one bit of one weight
    (same / "model.safetensors").write_bytes(weights)
    assert fingerprint.fingerprint(same) != mark
    shutil.copy(good / "model.safetensors", same)
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    assert fingerprint.fingerprint(same) == mark
    config["text_config"]["rope_parameters"]["rope_theta"] = 5.0
    (same / "config.json").write_text(json.dumps(config))
    assert fingerprint.fingerprint(same) != mark


def test_adapter(good, tmp_path):
    one, two = adapter(good, tmp_path / "one"), adapter(good, tmp_path / "two", 0.5)
    plain, tuned = load(good), load(good, adapter=one)
    x = mx.array([tiny.ids(8)])
    assert mx.abs(plain.model(x) - tuned.model(x)).max() > 1e-3
    assert not any(module.training for module in tuned.model.modules())
    assert len({plain.fingerprint, tuned.fingerprint, load(good, adapter=two).fingerprint}) == 3
    with pytest.raises(ModelError, match="adapters.safetensors"):
        (two / "adapters.safetensors").unlink()
        load(good, adapter=two)
    with pytest.raises(ModelError, match="does not fit"):
        load(tiny.make("llama", tmp_path / "llama"), adapter=one)


def test_memo_of_digests(good, tmp_path):
    copy, memo = shutil.copytree(good, tmp_path / "m"), tmp_path / "memo"
    mark = fingerprint.fingerprint(copy, memo_dir=memo)
    assert not memo.exists()  # written a moment ago: its time stamp does not prove anything yet
    fingerprint._SETTLED, settled = -1.0, fingerprint._SETTLED
    try:
        assert fingerprint.fingerprint(copy, memo_dir=memo) == mark
    finally:
        fingerprint._SETTLED = settled
    stored = memo / fingerprint.MEMO_NAME
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    known = json.loads(stored.read_text())["xxh3_128"]
    assert len(known) == 1
    assert fingerprint.fingerprint(copy, memo_dir=memo) == mark
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    times = (copy / "model.safetensors").stat()
    with (copy / "model.safetensors").open("r+b") as file:  # in place, same size, its time put back
        file.write(weights)
    os.utime(copy / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint.fingerprint(copy, memo_dir=memo) != mark
    for damage in ("", "[]", '{"xxh3_128": {"a": 5}}', '{"xxh3_128": 3}'):
        stored.write_text(damage)
        assert fingerprint.fingerprint(good, memo_dir=memo) == mark
    assert [p.name for p in memo.iterdir()] == [fingerprint.MEMO_NAME]


def test_memo_that_cannot_be_written(good, tmp_path):
    (tmp_path / "file").write_text("")
    assert fingerprint.fingerprint(good, memo_dir=tmp_path / "file") == fingerprint.fingerprint(good)


@on_cpu
def test_exact_leaves_layers_alone_and_fast_replaces_them(good):
    code = (
        "import sys; from mlxkv.models import load\n"
        "print(sorted({type(m).__module__.split('.')[0] for m in load(sys.argv[1]).model.modules()}))"
    )
    for mode, mine in (("exact", False), ("fast", True)):
        environment = os.environ | {"MLXKV_NUMERICS": mode}
        command = [sys.executable, "-c", code, str(good)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        assert ("mlxkv" in done.stdout) == mine
