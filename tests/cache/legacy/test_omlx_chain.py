"""Hashes, names and the rules of a chain of oMLX blocks, on arrays that say where they come from."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from mlxkv.cache.keys import Identity, KeySpace
from mlxkv.cache.layout import Layout, MemberSpec
from mlxkv.cache.legacy.omlx_chain import follow
from mlxkv.cache.legacy.omlx_file import read_block
from mlxkv.cache.legacy.omlx_keys import STATIC, block_hash, chain, digest_of, file_of, our_names, same_model
from mlxkv.cache.legacy.omlx_layers import fit
from mlxkv.cache.legacy.prefix import load
from mlxkv.cache.legacy.reasons import Refused
from mlxkv.cache.tensors import TensorSpec

MODEL = "test-model"
B = 4
TOKENS = list(range(12))
VECTORS = {
    "block 0": "5f7ab17bc912c693acad1ca8d334a177c0e058be703f98a1e0c1df0a37b3002c",
    "block 1": "64d32a0aa8633ce6ecf30c40bbda96fda0c0060b875bbe8e57445dfd49049ba4",
    "block 2": "42a4af1927a740e43b39d7097aa4d3bcd4b417d5739bfed1ab15f944aa7054a0",
    "extra": "1bc8d95460c657a6fb7a72c5e689fdc6310d597d9a66bc772db747807049b146",
    "no model": "e219974c82b8f6e9363966575d84da0500c94a0679de45b91c36009f2e125071",
    "terminal": "5702f835fe558086bd78a11512bc4b2c8f136d48357b58f8d46d29dbf58fed77",
}


def test_hashes():
    made = list(chain(MODEL, TOKENS, B))
    assert [d.hex() for d in made] == [VECTORS[f"block {i}"] for i in range(3)]
    assert list(chain(MODEL, TOKENS[:11], B)) == made[:2]
    assert block_hash(MODEL, None, TOKENS[:4], ("abc",)).hex() == VECTORS["extra"]
    assert block_hash("", None, TOKENS[:4]).hex() == VECTORS["no model"]
    assert block_hash(MODEL, made[0], (4, 5), (STATIC,)).hex() == VECTORS["terminal"]
    assert digest_of(made[0].hex() + ".safetensors") == made[0]
    assert all(digest_of(n) is None for n in (made[0].hex(), made[0].hex() + "_tmp.safetensors", "../x.safetensors"))


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [
        ("/models/Qwen3-Next", "Qwen3-Next", True),
        ("/models/Qwen3-Next/", "Qwen3-Next", True),
        ("/models/qwen/Qwen3-Next", "qwen/Qwen3-Next", True),
        ("/x/models--qwen--Qwen3-Next/snapshots/0123abcd", "qwen/Qwen3-Next", True),
        ("/models/Qwen3-Next-4bit", "Qwen3-Next", False),
        ("/Qwen3-Next/other", "Qwen3-Next", False),
        ("", "Qwen3-Next", False),
    ],
)
def test_names_of_a_model(theirs, ours, same):
    assert same_model(theirs, our_names(ours)) is same


def member(path, kind, **more):
    record = {"growing": "rows", "window": "window", "recurrent": "state"}[kind]
    name = ".".join(map(str, path))
    if kind == "recurrent":
        tensors = tuple(TensorSpec(f"{name}.slot{k}", "F32", (1, 2)) for k in more["filled"])
        return MemberSpec(path, kind, record, (("slots", more["slots"]),), None, 0, tensors)
    tensors = tuple(TensorSpec(f"{name}.{a}", "F32", (1, 1, 0, 2)) for a in ("keys", "values"))
    return MemberSpec(path, kind, record, (), more.get("window"), more.get("keep", 0), tensors)


class Folder:
    """Writes blocks over TOKENS whose row p is p and whose state at p is p."""

    def __init__(self, path, layout):
        self.path, self.layout = path, layout
        self.digests = list(chain(MODEL, TOKENS, B))
        self.space = KeySpace.of(Identity(b"", (), layout.digest), 8)

    def write(self, i, layers, types, metas, **more):
        """``layers``: per layer a list of elements, or (mode, lists of elements of members)."""
        tensors, marks = {}, {}
        for n, layer in enumerate(layers):
            groups = {f"layer_{n}": layer}
            if isinstance(layer, tuple):
                mode, subs = layer
                marks[f"layer_{n}_sub_count"] = str(len(subs))
                marks |= {f"layer_{n}_storage_mode": "pm"} if mode == "pm" else {}
                groups = {f"layer_{n}_sub_{j}": sub for j, sub in enumerate(subs)}
            for here, elements in groups.items():
                marks[f"{here}_state_count"] = str(len(elements))
                for k, element in enumerate(elements):
                    if element is None:
                        marks[f"{here}_state_{k}_none"] = "1"
                    tensors[f"{here}_state_{k}"] = np.zeros(1, np.float32) if element is None else element
        meta = {
            "omlx_cache_format_version": "3",
            "block_hash": self.digests[i].hex(),
            "token_count": str(B),
            "num_layers": str(len(layers)),
            "model_name": MODEL,
            "layer_cache_types": json.dumps(types),
            "layer_meta_states": json.dumps(metas),
        }
        header, at = {"__metadata__": meta | marks | more}, 0
        for name, array in tensors.items():
            end = at + array.nbytes
            header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        file = file_of(self.path, self.digests[i])
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))

    def follow(self, tokens=TOKENS):
        def find(i):
            file = file_of(self.path, self.digests[i])
            return fit(read_block(file), self.layout) if file.exists() else None

        return follow(self.layout, tokens, B, find)


def rows(a, b, shift=0.0):
    return [np.arange(a, b, dtype=np.float32).repeat(2).reshape(1, 1, -1, 2) + shift] * 2


def state(p, slots=2):
    return [np.full((1, 2), p, np.float32)] * slots


HOLDER = [np.zeros(1, np.float32)] * 2
MIXED = Layout((member((0, 0), "growing"), member((0, 1), "recurrent", slots=2, filled=(0, 1))))
LIST = ["CacheList"]
NAMES = [[["KVCache", "ArraysCache"], ["", ""]]]


def composite(folder, i, upto=None, mode="legacy", first=0, shift=0.0):
    end = (i + 1) * B if upto is None else upto
    folder.write(i, [(mode, [rows(first, end, shift), state(end)])], LIST, NAMES)


def what(outcome):
    """Positions that can be stood on, checked: each state says where it stands, each row which it is."""
    if outcome.prefix is None:
        return []
    prefix = outcome.prefix
    read = prefix.rows(1, len(prefix.tokens))
    assert all(np.array_equal(a[0, 0, :, 0], np.arange(1, len(prefix.tokens))) for _, a in read.values())
    for stand in prefix.stands:
        assert all((a == stand.position).all() for _, a in load(stand.state).values())
    return [stand.position for stand in prefix.stands]


def codes(outcome):
    return {i: why.code for i, why in outcome.refused.items()}


def test_composites_become_slices(tmp_path):
    folder = Folder(tmp_path, MIXED)
    for i in range(3):
        composite(folder, i)
    assert what(outcome := folder.follow()) == [4, 8, 12]
    assert (outcome.used, codes(outcome)) == ([0, 1, 2], {})


def test_one_late_composite_has_the_rows_of_all(tmp_path):
    folder = Folder(tmp_path, MIXED)
    for i in range(2):
        folder.write(i, [HOLDER], LIST, [[]])
    composite(folder, 2)
    assert what(outcome := folder.follow()) == [12]
    assert (outcome.used, codes(outcome)) == ([2], {0: "NO_STATE", 1: "NO_STATE"})


def test_what_is_over_advanced_gives_no_state(tmp_path):
    folder = Folder(tmp_path, MIXED)
    composite(folder, 0)
    composite(folder, 1, upto=10)
    assert what(outcome := folder.follow()) == [4]
    assert codes(outcome) == {1: "OVER_ADVANCED"}
    composite(folder, 2)  # the rows of the block before are in it, and that block is of no use
    assert what(folder.follow()) == [4, 12]


def test_what_is_short_gives_nothing(tmp_path):
    folder = Folder(tmp_path, MIXED)
    composite(folder, 0)
    composite(folder, 1, upto=7)
    assert what(outcome := folder.follow()) == [4]
    assert codes(outcome) == {1: "SHORT"}


def test_storage_modes_are_never_joined(tmp_path):
    folder = Folder(tmp_path, MIXED)
    for i in range(3):
        composite(folder, i, mode="pm", first=i * B)
    assert what(folder.follow()) == [4, 8, 12]
    composite(folder, 1)
    assert what(outcome := folder.follow()) == [4]
    assert codes(outcome) == {1: "MIXED", 2: "CHAIN"}


def test_composites_that_contradict_each_other(tmp_path):
    folder = Folder(tmp_path, MIXED)
    composite(folder, 0)
    composite(folder, 1)
    assert what(folder.follow()) == [4, 8]
    composite(folder, 2, shift=1.0)  # two say one thing and one another: the two may be the wrong ones
    outcome = folder.follow()
    assert (outcome.prefix, codes(outcome)) == (None, dict.fromkeys(range(3), "OTHER_ROWS"))


def test_a_state_without_proof_of_its_position(tmp_path):
    flat = Layout((member((0,), "growing"), member((1,), "recurrent", slots=2, filled=(0, 1))))
    folder = Folder(tmp_path, flat)
    types = ["KVCache", "ArraysCache"]
    for i in range(3):  # each has the rows of its block, whatever its state stands at
        folder.write(i, [rows(i * B, i * B + B), state(i * B + B)], types, [[], []])
    outcome = folder.follow()
    assert (outcome.prefix, set(codes(outcome).values())) == (None, {"NO_PROVENANCE"})


@pytest.mark.parametrize("offset", [8, 9])
def test_a_window_proves_where_a_state_stands(tmp_path, offset):
    layout = Layout((member((0,), "window", window=6), member((1,), "recurrent", slots=2, filled=(0, 1))))
    folder = Folder(tmp_path, layout)
    ring = [np.concatenate([a[:, :, 4:], a[:, :, :4]], axis=2) for a in rows(2, 8)]  # turned: 2 … 5 stand last
    metas = [["0", "6", str(offset), "2"], []]
    folder.write(1, [ring, state(8)], ["RotatingKVCache", "ArraysCache"], metas)
    outcome = folder.follow()
    if offset == 9:
        assert (outcome.prefix, codes(outcome)) == (None, {1: "WINDOW"})
        return
    (stand,) = outcome.prefix.stands
    ((_, keys), _) = load(stand.strips[0].arrays).values()
    assert (stand.strips[0].start, stand.strips[0].end, keys[0, 0, :, 0].tolist()) == (2, 8, [2, 3, 4, 5, 6, 7])


def test_first_rows_that_are_kept_are_a_strip_of_their_own(tmp_path):
    folder = Folder(tmp_path, Layout((member((0,), "window", window=5, keep=1),)))
    ring = [np.concatenate([rows(0, 1)[0], rows(10, 12)[0], rows(7, 10)[0]], axis=2)] * 2
    folder.write(2, [ring], ["RotatingKVCache"], [["1", "6", "12", "3"]])
    (stand,) = folder.follow().prefix.stands
    read = [(s.start, s.end, load(s.arrays)["0.keys"][1][0, 0, :, 0].tolist()) for s in stand.strips]
    assert read == [(0, 1, [0]), (7, 12, [7, 8, 9, 10, 11])]


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        (state(4, 3), []),
        (state(4, 2), "SLOTS"),
        ([*state(4, 2), None], "SLOTS"),
    ],
)
def test_slots(tmp_path, elements, expected):
    layout = Layout((member((0, 0), "growing"), member((0, 1), "recurrent", slots=3, filled=(0, 1, 2))))
    folder = Folder(tmp_path, layout)
    folder.write(0, [("legacy", [rows(0, 4), elements])], LIST, NAMES)
    outcome = folder.follow()
    assert what(outcome) == [4] if not expected else codes(outcome) == {0: expected}


def test_a_slot_that_is_none_on_both_sides(tmp_path):
    layout = Layout((member((0, 0), "growing"), member((0, 1), "recurrent", slots=2, filled=(1,))))
    folder = Folder(tmp_path, layout)
    folder.write(0, [("legacy", [rows(0, 4), [None, state(4)[0]]])], LIST, NAMES)
    outcome = folder.follow()
    assert what(outcome) == [4]
    assert list(load(outcome.prefix.stands[0].state)) == ["0.1.slot1"]


def test_a_state_that_is_not_finite_is_found_when_it_is_read(tmp_path):
    folder = Folder(tmp_path, MIXED)
    bad = [state(4)[0], np.full((1, 2), np.nan, np.float32)]
    folder.write(0, [("legacy", [rows(0, 4), bad])], LIST, NAMES)
    outcome = folder.follow()
    assert load(outcome.prefix.stands[0].state) is None
    assert codes(outcome) == {0: "NOT_FINITE"}


def test_a_missing_block_ends_what_is_cut_by_block(tmp_path):
    folder = Folder(tmp_path, Layout((member((0,), "growing"),)))
    for i in (0, 2):
        folder.write(i, [rows(i * B, i * B + B)], ["KVCache"], [[]])
    outcome = folder.follow()
    assert (outcome.prefix.tokens, codes(outcome)) == (TOKENS[:4], {2: "CHAIN"})


def test_a_file_that_is_replaced_is_refused_when_it_is_read(tmp_path):
    folder = Folder(tmp_path, MIXED)
    composite(folder, 0)
    outcome = folder.follow()
    file_of(tmp_path, folder.digests[0]).unlink()
    composite(folder, 0)
    with pytest.raises(Refused, match="CHANGED"):
        outcome.prefix.rows(0, 4)
