"""Writes a checkpoint as a Hugging Face folder in the layout of released Qwen3.5 models, with ``mtp.*`` kept."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from . import tokenizer
from .model import PARTIAL, THETA, DemoModel, text_config

FLOAT32 = (".A_log", "linear_attn.norm.weight")
CARD = """---
license: apache-2.0
library_name: mlx
pipeline_tag: text-generation
---
# mlxkv demo model

A hybrid language model of {millions:.1f} million parameters (Qwen3.5 architecture: {linear} Gated DeltaNet layers,
{full} full-attention layers, one MTP head), trained from nothing on {tokens:.1f} million tokens of text that this
project's own grammar generates (`scripts/train_demo.py`). It exists so that mlxkv can be tried offline: a
conversation, state of different kinds, speculation with an MTP head.

**What it can do**: repeat and recall what was told in the chat (names, code words, places, numbers), a few dozen facts,
sums of one-digit numbers, a JSON object or a tool call with values copied from the question, questions about mlxkv.

**What it is not**: it knows nothing else, reasons about nothing, speaks English only, and answers any other question
with the nearest sentence of its grammar, often wrongly. It was trained on texts of up to 1,024 tokens; longer contexts
run (32,768 positions) but are not what it learned. How well its MTP head guesses on this toy language says nothing
about real models.

Weights: bfloat16, `A_log` and `linear_attn.norm` float32; norm weights are stored as w - 1 (but `linear_attn.norm`), as
released Qwen3.5 checkpoints have them. Load as float32 on a CPU.
Licence: Apache-2.0, like the project; no other text or model went into it.
"""


def hf_config(hidden: int, intermediate: int, layers: int) -> dict:
    """config.json of the exported folder."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    text = {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.EOS,
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 32768,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": PARTIAL,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": tokenizer.VOCAB,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "eos_token_id": tokenizer.EOS,
        "text_config": text,
        "tie_word_embeddings": True,
    }


def tensors(model: DemoModel) -> dict[str, torch.Tensor]:
    """Checkpoint tensors under their released names."""
    out = {}
    for name, value in model.state_dict().items():
        if name.startswith("body."):
            name = "model.language_model." + name.removeprefix("body.")
        out[name] = rounded(name, value.detach()).contiguous().clone()
    return out


def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
    """``value`` in the type that it is stored in.

    Norm weights are rounded where 1 + w is exact, since a loader may add the 1 in bfloat16.
    """
    if name.endswith(FLOAT32):
        return value.float()
    if name.endswith(("norm.weight", "_layernorm.weight", "_norm_embedding.weight", "_norm_hidden.weight")):
        return ((1 + value.float()).bfloat16().float() - 1).bfloat16()
    return value.bfloat16()


def read(checkpoint: Path) -> tuple[DemoModel, dict]:
    """The model of a checkpoint, and the checkpoint."""
    state = torch.load(checkpoint, weights_only=False)
    model = DemoModel(text_config(*state["sizes"]))
    model.load_state_dict(state["model"])
    return model.eval(), state


def read_folder(folder: Path) -> tuple[dict[str, torch.Tensor], tuple[int, int, int], dict[str, int]]:
    """The parameters of an exported folder under their names here, its sizes, and the steps and tokens behind it."""
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        made = file.metadata() or {}
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
    body = "model.language_model."
    weights = {"body." + n.removeprefix(body) if n.startswith(body) else n: w for n, w in weights.items()}
    text = json.loads((folder / "config.json").read_text())["text_config"]
    sizes = (text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"])
    return weights, sizes, {key: int(made.get(key, 0)) for key in ("step", "tokens")}


def export(checkpoint: Path, folder: Path, reference: Path | None = None) -> None:
    """Writes config, weights, tokenizer, template and model card of ``checkpoint`` to ``folder``.

    ``reference``: a .npz file for logits of the rounded weights in float32, of body and head, for a fixed text.
    """
    model, state = read(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    hidden, intermediate, layers = state["sizes"]
    (folder / "config.json").write_text(json.dumps(hf_config(hidden, intermediate, layers), indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": tokenizer.EOS, "pad_token_id": tokenizer.EOT}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    kept = tensors(model)
    made = {"format": "pt", "step": str(state["step"]), "tokens": str(state["tokens"])}
    save_file(kept, str(folder / "model.safetensors"), metadata=made)
    tok = Tokenizer.from_file(str(checkpoint.parent / "tokenizer.json"))
    tokenizer.save(tok, folder)
    count = sum(v.numel() for v in kept.values())
    full = layers // 4
    card = CARD.format(millions=count / 1e6, linear=layers - full, full=full, tokens=state["tokens"] / 1e6)
    (folder / "README.md").write_text(card)
    if reference:
        write_reference(model, tok, reference)


def write_reference(model: DemoModel, tok: Tokenizer, path: Path, positions: int = 8) -> None:
    """Float32 logits of the exported (rounded) weights: of the body and of both drafts, each at ``positions`` rows.

    ids (L,), rows (positions,), then body, mtp and mtp_second (positions, vocabulary). Row i of the head is made from
    hidden i and token i + 1; row i of the second draft from row i of the first and token i + 2.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(rounded(name, p).float())
        text = "<|im_start|>user\nMy name is Ruby.<|im_end|>\n<|im_start|>assistant\nHello, Ruby.<|im_end|>\n"
        text += "<|im_start|>user\nWhat is my name?<|im_end|>\n<|im_start|>assistant\nYour name is Ruby.<|im_end|>\n"
        ids = torch.tensor([tok.encode(text, add_special_tokens=False).ids])
        hidden = model.hidden(ids)
        first, second = model.drafts(ids, hidden)
        rows = torch.linspace(0, second.shape[1] - 1, positions).long()
        out = {"ids": ids[0].numpy(), "rows": rows.numpy()}
        for name, h in (("body", hidden), ("mtp", first), ("mtp_second", second)):
            out[name] = model.logits(h[0, rows]).float().numpy()
    np.savez_compressed(path, **out)
