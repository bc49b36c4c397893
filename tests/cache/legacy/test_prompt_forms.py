"""Every form in which mlx-lm has written prompt caches reads as the same; damaged and odd ones are refused by name."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlxkv.cache.layout import Layout, MemberSpec
from mlxkv.cache.legacy.header import HostileFile
from mlxkv.cache.legacy.prompt_members import fit
from mlxkv.cache.legacy.prompt_text import candidates
from mlxkv.cache.legacy.reasons import Refused
from mlxkv.cache.tensors import TensorSpec
from tests import tiny
from tests.cache.legacy.prompt_files import LENGTH, imported, prefilled, refusal, write_older
from tests.cache.test_equality import INEXACT
from tests.probe import TOLERANCE, equal, run

MORE = tiny.ids(7, seed=22)


@pytest.mark.parametrize(
    ("arch", "version", "names"),
    (
        ("llama", "0.18", {}),
        ("llama", "0.19.2", {}),
        ("gemma3_text", "0.22.0", {}),  # a ring's numbers with the step between them
        ("gemma3_text", "0.28.1", {}),  # and without
        ("nemotron_h", "0.26.0", {"ArraysCache": "MambaCache"}),
        ("qwen3_5", "0.27.0", {}),
        ("falcon_h1", "0.24.0", {}),  # lists without their classes
        ("falcon_h1", "0.31.0", {}),
    ),
)
def test_older_forms(saved, tmp_path, arch, version, names):
    s = saved(arch)
    path = write_older(tmp_path / "old.safetensors", s.caches, version, names)
    with s.store() as rt:
        assert refusal(imported(rt, path, [5, *s.tokens[1:]]))[0] == "PROMPT"
        assert imported(rt, path, s.tokens).imported.files == 1
        asked = [*s.tokens, *MORE]
        logits, completion = run(rt, asked, keep=False)
        assert completion.usage.cached_tokens == LENGTH
        cold, _ = run(rt, asked, use_cache=False)
        assert equal(logits, cold, max(INEXACT.get(arch, (0.0, ""))[0], TOLERANCE))


def test_the_oldest_form_with_rings(saved, tmp_path):
    s = saved("llama")
    path = write_older(tmp_path / "old.safetensors", s.caches, "0.18")
    arrays, metadata = mx.load(str(path), return_metadata=True)
    mx.save_safetensors(str(path), arrays, metadata | {"max_kv_size": "512"})
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, s.tokens))
        assert code == "LAYOUT" and "--max-kv-size 512" in detail


@pytest.mark.parametrize("version", ("0.24.0", "0.31.0", "0.32.2"))
def test_chunks_that_older_versions_trimmed(saved, tmp_path, version):
    """Up to 0.31.3 rows were dropped together with spare room: what was computed then is not known to be right."""
    s = saved("llama4")

    def save(length: int) -> Path:
        caches = prefilled(s.plain, s.tokens[:length])
        if version == "0.32.2":
            return s.save(tmp_path / "new.safetensors", caches)
        return write_older(tmp_path / "old.safetensors", caches, version)

    with s.store() as rt:
        assert imported(rt, save(9), s.tokens[:9]).imported.files == 1
        report = imported(rt, save(LENGTH), s.tokens)
        if version == "0.32.2":
            assert report.imported.files == 1
        else:
            assert refusal(report)[0] == "TRIMMED"


# one member of every class, in lists inside lists: no model has them all


def _rows(path: tuple[int, ...], kind: str, **params: int) -> MemberSpec:
    name = ".".join(map(str, path))
    tensors = tuple(TensorSpec(f"{name}.{n}", "F32", (1, 1, 0, 4)) for n in ("keys", "values"))
    window = {
        "growing": None,
        "window": params.get("window", 0) - params.get("keep", 0),
        "chunked": params.get("chunk"),
    }
    record = "rows" if kind == "growing" else "window"
    return MemberSpec(path, kind, record, tuple(sorted(params.items())), window[kind], params.get("keep", 0), tensors)


def _quantised(path: tuple[int, ...]) -> MemberSpec:
    name = ".".join(map(str, path))
    parts = {"packed": ("U32", 8), "scales": ("F32", 1), "biases": ("F32", 1)}
    tensors = tuple(
        TensorSpec(f"{name}.{n}.{part}", dtype, (1, 1, 0, width))
        for n in ("keys", "values")
        for part, (dtype, width) in parts.items()
    )
    return MemberSpec(path, "growing", "rows", (("bits", 8), ("group_size", 32)), None, 0, tensors)


def _slots(path: tuple[int, ...], slots: int, filled: tuple[int, ...]) -> MemberSpec:
    name = ".".join(map(str, path))
    tensors = tuple(TensorSpec(f"{name}.slot{i}", "F32", (1, 2)) for i in filled)
    return MemberSpec(path, "recurrent", "state", (("slots", slots),), None, 0, tensors)


EVERY = Layout(
    (
        _rows((0,), "growing"),
        _rows((1,), "growing"),
        _quantised((2,)),
        _rows((3,), "window", window=12, keep=2),
        _rows((4,), "chunked", chunk=12),
        _slots((5,), 3, (0, 2)),
        _rows((6, 0), "growing"),
        _slots((6, 1, 0), 1, (0,)),
        _rows((6, 1, 1), "window", window=12, keep=2),
    )
)


def every(length: int = 9) -> list[Any]:
    """Caches for EVERY: row i of keys is i, of values −i."""

    def filled(cache: Any, width: int = 4) -> Any:
        rows = mx.broadcast_to(mx.arange(length)[None, None, :, None], (1, 1, length, width)).astype(mx.float32)
        cache.update_and_fetch(rows, -rows)
        return cache

    def slots(size: int, *filled: int) -> ArraysCache:
        cache = ArraysCache(size)
        for i in filled:
            cache[i] = mx.full((1, 2), float(i))
        return cache

    inner = CacheList(slots(1, 0), filled(RotatingKVCache(12, keep=2)))
    return [
        filled(KVCache()),
        filled(ConcatenateKVCache()),
        filled(QuantizedKVCache(32, 8), 32),
        filled(RotatingKVCache(12, keep=2)),
        filled(ChunkedKVCache(12)),
        slots(3, 0, 2),
        CacheList(filled(KVCache()), inner),
    ]


def save_new(path: Path, caches: list[Any]) -> Path:
    from mlx_lm.models.cache import save_prompt_cache

    save_prompt_cache(str(path), caches, {})
    return path


def contents(path: Path, layout: Layout = EVERY):
    with HostileFile.open(path, ordered=False) as file:
        found = fit(file, layout)
        n = found.length or 0
        return n, found.rows(0, n), found.stand(n)


def refused(path: Path, layout: Layout = EVERY) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        contents(path, layout)
    assert caught.value.path == path
    return caught.value.code, caught.value.detail


def test_every_class_in_every_form(tmp_path):
    """Newer files and older ones (where an older version could write such a cache at all) hold the same."""
    n, rows, stand = contents(save_new(tmp_path / "new.safetensors", every()))
    assert n == 9 and [(x.start, x.end) for x in stand.strips] == [(0, 9)]
    for name in ("0.keys", "1.keys", "6.0.keys"):
        assert rows[name][1][0, 0, :, 0].tolist() == list(range(9))
    assert set(stand.state) == {"5.slot0", "5.slot2", "6.1.0.slot0"}
    full = every()
    full[5][1] = mx.full((1, 2), 7.0)  # a slot without an array could not be written before 0.32
    whole = Layout(tuple(_slots((5,), 3, (0, 1, 2)) if m.path == (5,) else m for m in EVERY.members))
    for version in ("0.24.0", "0.28.1", "0.31.0"):
        older = contents(write_older(tmp_path / f"{version}.safetensors", full, version), whole)
        assert older[0] == 9
        for a, b in ((rows, older[1]), (stand.strips[0].arrays, older[2].strips[0].arrays)):
            assert a.keys() == b.keys() and all(np.array_equal(a[k][1], b[k][1]) for k in a)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])
    return path


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].pop(key)


def _with(key: str, value: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update({key: value})


@pytest.mark.parametrize(
    ("change", "code"),
    (
        (_without("2.0"), "FORM"),
        (lambda header: header.pop("__metadata__"), "FORM"),
        (_without("1.3"), "TENSORS"),
        (_without("1.6"), "COUNTS"),
        (_with("1.7", "KVCache"), "COUNTS"),
        (_with("1.0", "TurboCache"), "CLASS"),
        (_with("1.0", "os.system"), "CLASS"),
        (_with("1.0", "RotatingKVCache"), "COUNTS"),
        (_with("1.5", "KVCache"), "TENSORS"),
        (_with("2.1.1", "pickle"), "TOO_NEW"),
        (_with("2.1.0", "9.9"), "TENSORS"),
        (_with("2.1.0", "0.0"), "TENSORS"),
        (_with("2.1.1", "none"), "TENSORS"),
        (_with("2.99999.0", "0.2"), "TENSORS"),
        (_with("2.1.0.0", "0.2"), "TENSORS"),
        (_with("1." + "9" * 5000, "KVCache"), "TENSORS"),
        (lambda header: header.update({"7." * 500 + "0": header.pop("0.0")}), "TENSORS"),
        (lambda header: header.update({"0.x": header.pop("0.0")}), "TENSORS"),
    ),
)
def test_metadata_that_says_something_else(tmp_path, change, code):
    path = save_new(tmp_path / "new.safetensors", every())
    assert refused(_edit(path, change))[0] == code


@pytest.mark.parametrize(
    ("change", "code"),
    (
        (_with("0.3.0", "1"), "LAYOUT"),
        (_with("0.3.0", "-1"), "COUNTS"),
        (_with("0.3.0", "1e9"), "COUNTS"),
        (_with("0.3.0", "9" * 400), "COUNTS"),
        (_with("0.3.2", "10"), "COUNTS"),
        (_with("0.3.3", "4"), "WINDOW"),
        (_with("0.3.3", "99"), "WINDOW"),
        (_with("0.3.4", "10"), "WINDOW"),  # five numbers: as if there were a step
        (_without("0.3.1"), "TENSORS"),
        (_with("0.2.0", "8"), "COUNTS"),
        (_with("0.2.2", "4"), "LAYOUT"),
        (_with("0.4.0", "16"), "LAYOUT"),
        (_with("0.4.1", "3"), "TRIMMED"),
        (_with("0.6.0.0", "ArraysCache"), "LAYOUT"),
        (_with("2.0", "None"), "CLASS"),
        (_with("2.0", "BatchKVCache"), "CLASS"),
        (_without("2.6"), "COUNTS"),
    ),
)
def test_older_metadata_that_says_something_else(tmp_path, change, code):
    full = every()
    full[5][1] = mx.full((1, 2), 7.0)
    layout = Layout(tuple(_slots((5,), 3, (0, 1, 2)) if m.path == (5,) else m for m in EVERY.members))
    path = write_older(tmp_path / "old.safetensors", full, "0.31.0")
    contents(path, layout)
    assert refused(_edit(path, change), layout)[0] == code


def _replaced(index: int, cache: Any) -> list[Any]:
    caches = every()
    caches[index] = cache
    return caches


def _batched() -> ArraysCache:
    cache = ArraysCache(3, left_padding=[1])
    cache[0] = cache[2] = mx.zeros((1, 2))
    return cache


def _batch() -> BatchKVCache:
    cache = BatchKVCache([0])
    cache.update_and_fetch(mx.zeros((1, 1, 9, 4)), mx.zeros((1, 1, 9, 4)))
    return cache


def _ring(size: int, keep: int) -> RotatingKVCache:
    cache = RotatingKVCache(size, keep=keep)
    cache.update_and_fetch(mx.zeros((1, 1, 9, 4)), mx.zeros((1, 1, 9, 4)))
    return cache


@pytest.mark.parametrize(
    ("caches", "code", "detail"),
    (
        (lambda: _replaced(0, _batch()), "CLASS", "BatchKVCache"),
        (lambda: _replaced(5, _batched()), "LAYOUT", "padded"),
        (lambda: _replaced(5, ArraysCache(3)), "SLOTS", "layer 5"),
        (lambda: _replaced(0, KVCache()), "SHORT", "layer 0"),
        (lambda: _replaced(0, _ring(64, 4)), "LAYOUT", "RotatingKVCache of 64 rows"),
        (lambda: _replaced(3, _ring(12, 0)), "LAYOUT", "keep is 0, the model's 2"),
        (lambda: _replaced(3, _ring(16, 2)), "LAYOUT", "max_size is 16"),
        (lambda: _replaced(6, CacheList(every()[0])), "LAYOUT", "list of 1"),
        (lambda: _replaced(6, every()[0]), "LAYOUT", "keeps a list"),
        (lambda: _replaced(0, CacheList(every()[0])), "LAYOUT", "layer 0 is a list"),
        (lambda: _replaced(0, every(8)[0]), "COUNTS", "different tokens"),
        (lambda: every()[:-1], "LAYOUT", "6 layers"),
    ),
)
def test_caches_that_are_not_the_models(tmp_path, caches, code, detail):
    found = refused(save_new(tmp_path / "new.safetensors", caches()))
    assert found[0] == code and detail in found[1]


def test_a_file_that_was_cut_off_or_changed_is_refused_or_holds_the_same(tmp_path):
    """Every length, and bits of the header: never a crash, never other rows without a word."""
    path = save_new(tmp_path / "whole.safetensors", every())
    data = path.read_bytes()
    n, rows, stand = contents(path)
    (header,) = struct.unpack("<Q", data[:8])
    rng = random.Random(4)
    cuts = [rng.randrange(len(data)) for _ in range(60)] + [0, 7, 8, 9, 8 + header, len(data) - 1]
    for cut in cuts:
        path.write_bytes(data[:cut])
        refused(path)
    same = changed = 0
    for _ in range(600):
        flipped = bytearray(data)
        flipped[rng.randrange(8 + header)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            found = contents(path)
        except Refused as e:
            assert e.path == path
            changed += 1
        else:
            # offsets within rows are caught by the proof; lengths and names are not other ones
            assert found[0] == n and found[1].keys() == rows.keys()
            same += 1
    assert changed > 300
    assert stand.position == n


def test_damage_in_what_is_proven_is_refused(saved, tmp_path):
    """mlx-lm's files have no checksum. A bit that flips in the rows that are computed again is noticed; one in a state
    above them, or in later rows of upper layers, is not (docs/legacy.md says so)."""
    s = saved("qwen3_5")
    path = s.save(tmp_path / "saved.safetensors")
    data = path.read_bytes()
    with HostileFile.open(path, ordered=False) as file:
        places = {name: (file.data_start + t.start, file.data_start + t.end) for name, t in file.tensors.items()}
    with s.store() as rt:
        for name in ("1.0", "1.1", "0.0.0", "0.0.1"):  # the first rows, and the state below them
            start, end = places[name]
            if name.startswith("1"):
                end = start + 4 * 32 * LENGTH  # the rest is room to grow
            values = np.frombuffer(data[start:end], np.float32)
            at = start + 4 * int(np.abs(values).argmax())
            for bit in (31, 30, 23, 12):
                flipped = bytearray(data)
                flipped[at + bit // 8] ^= 1 << bit % 8
                path.write_bytes(flipped)
                code, _ = refusal(imported(rt, path, s.tokens))
                assert code in ("PROMPT", "NUMERICS", "STATE", "NOT_FINITE"), (name, bit)
        assert run(rt, [*s.tokens, *MORE], keep=False)[1].usage.cached_tokens == 0
    s = saved("llama")  # nothing below the first rows: every bit counts
    path = s.save(tmp_path / "plain.safetensors")
    data = path.read_bytes()
    with HostileFile.open(path, ordered=False) as file:
        start = file.data_start + file.tensors["0.1"].start
    flipped = bytearray(data)
    flipped[start + 4 * 40] ^= 1
    path.write_bytes(flipped)
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, s.tokens))
        assert code == "NUMERICS" and "layer 0" in detail


def test_the_readings_of_a_prompt(saved):
    """Each list of ids once, likeliest first; what a template refuses is left out."""
    tokenizer = saved("llama").rt.tokenizer

    def texts(**given: Any) -> dict[str, str]:
        return {c.how: tokenizer.decode(list(c.tokens)) for c in candidates(tokenizer, **given)}

    assert list(texts(prompt="Hello there").values()) == ["<|im_start|>user\nHello there", "Hello there"]
    assert list(texts(text="Hello there").values()) == ["Hello there"]
    turn = "<|im_start|>user\nHello there<|im_end|>\n"
    messages = [{"role": "user", "content": "Hello there"}]
    expected = [f"{turn}<|im_start|>assistant\n", turn, "<|im_start|>user\nHello there"]
    assert list(texts(messages=messages).values()) == expected

    class Bare:
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("no template")

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + [ord(c) for c in text]

    found = candidates(Bare(), prompt="ab", messages=messages)
    assert [c.tokens for c in found] == [(1, 97, 98), (97, 98)]

    class Cut(Bare):
        """0.19: what the template puts behind the text is cut off, and the text encoded, a second start included."""

        def apply_chat_template(self, messages: Any, tokenize: bool = True, **options: Any) -> str:
            if tokenize:
                raise ValueError
            return f"<{messages[0]['content']}>/"

    assert [c.tokens for c in candidates(Cut(), prompt="ab")][-1] == (1, 60, 97, 98)
