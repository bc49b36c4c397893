"""The tiny models other tests stand on: they load through mlx-lm with the very weights and ids they were made with."""

import json

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from tests import tiny

TEXT = "Hello the world and of Größe, 日本語  in\n\nthing's 123 <|im_start|>x"


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_round_trip_through_mlx_lm(arch, tmp_path):
    tiny.make(arch, tmp_path, seed=3)
    model, _ = tiny.build(arch, seed=3)
    loaded, tokenizer = load(str(tmp_path))
    x = mx.array([tiny.ids(24, 1)])
    assert mx.array_equal(model(x), loaded(x))
    assert tokenizer.encode(TEXT) == tiny.tokenizer().encode(TEXT).ids
    assert tokenizer.eos_token_ids == {tiny.VOCAB - 1}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert tokenizer.decode(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_greedy_text_varies_and_does_not_end(arch):
    model, _ = tiny.build(arch)
    cache = make_prompt_cache(model)
    logits, out = model(mx.array([tiny.ids(20, 1)]), cache=cache), []
    for _ in range(48):
        out.append(int(mx.argmax(logits[0, -1])))
        logits = model(mx.array([out[-1:]]), cache=cache)
    assert len(set(out)) > 16
    assert max(out) < tiny.VOCAB - 3


def test_overrides_and_seeds(tmp_path):
    tiny.make("qwen3_5", tmp_path, num_hidden_layers=2, eos_token_id=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == 2 and config["eos_token_id"] == 5
    one, two = tiny.build("llama", seed=1)[0], tiny.build("llama", seed=2)[0]
    assert not mx.array_equal(one.lm_head.weight, two.lm_head.weight)
    assert tiny.ids(50, 1) == tiny.ids(50, 1) != tiny.ids(50, 2)
    assert max(tiny.ids(5000)) < tiny.VOCAB - 3
