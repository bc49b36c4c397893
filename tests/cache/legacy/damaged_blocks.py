"""Damaged files of a legacy folder that are sound safetensors files: what they say of themselves, their tensors, their
values, their place in a chain, and their sidecars."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.cache.synthetic import twin

from .damage import KEYS, LAYOUTS, TOKENS, VALUES, add, block, chain, file, moved, save_all, taken_apart, told, written
from .omlx_writer import Block, Style, blocks
from .stories import hashed

# -- what it says of itself -------------------------------------------------------------------------------------------


def meta(name: str, codes: str, key: str, value: str | None, *, layout: str = "growing", at: int = 1, **style: Any):
    """A metadata value is changed, or taken away with None."""

    def change(b: Block) -> None:
        if value is None:
            del b.metadata[key]
        else:
            b.metadata[key] = value

    block(name, codes, change, layout=layout, at=at, **style)


VERSION = "omlx_cache_format_version"
meta("no version", "TOO_OLD", VERSION, None)
meta("version 1", "TOO_OLD", VERSION, "1")
for _v in ("4", "5", "6", "1000000"):
    meta(f"version {_v}", "TOO_NEW", VERSION, _v)
meta("version of words", "TOO_NEW|TOO_OLD", VERSION, "two")
meta("version with a space", "TOO_NEW|TOO_OLD", VERSION, " 3")
meta("version of 10,000 digits", "TOO_NEW", VERSION, "3" * 10_000)
meta("another block's hash", "HASH", "block_hash", "0" * 64)
meta("hash like a path", "HASH", "block_hash", "../../../../etc/passwd")
meta("hash in upper case", "HASH", "block_hash", "ABCDEF" * 10 + "ABCD")
meta("no hash", "HASH", "block_hash", None)
meta("another model's name", "MODEL", "model_name", "other-model")
meta("model name like a path", "MODEL", "model_name", "../../../../etc/passwd")
meta("no model name", "MODEL", "model_name", None)
meta("a layer too many", "COUNTS", "num_layers", "3")
meta("a layer too few", "COUNTS", "num_layers", "1")
meta("no number of layers", "COUNTS", "num_layers", None)
meta("layers in words", "COUNTS", "num_layers", "two")
meta("2^70 layers", "COUNTS", "num_layers", str(1 << 70))
meta("negative layers", "COUNTS", "num_layers", "-2")
meta("layers in other digits", "COUNTS", "num_layers", "٢")
meta("types too short", "COUNTS", "layer_cache_types", '["KVCache"]')
meta("types that are no JSON", "COUNTS", "layer_cache_types", "[KVCache")
meta("types that are no list", "COUNTS", "layer_cache_types", '{"0":"KVCache","1":"KVCache"}')
meta("types that are no strings", "COUNTS|CLASS", "layer_cache_types", "[1,2]")
meta("types nested 100,000 deep", "COUNTS", "layer_cache_types", "[" * 100_000 + "]" * 100_000)
meta("meta states too short", "COUNTS", "layer_meta_states", "[[]]")
meta("meta states that are no JSON", "COUNTS", "layer_meta_states", "[[],[")
meta("NaN in meta states", "COUNTS", "layer_meta_states", "[[],NaN]")
meta("token count of 999", "COUNTS", "token_count", "999")
meta("token count of 3", "COUNTS", "token_count", "3")
meta("token count of 0", "COUNTS", "token_count", "0")
meta("negative token count", "COUNTS", "token_count", "-4")
meta("token count of 4.0", "COUNTS", "token_count", "4.0")
meta("no token count", "COUNTS", "token_count", None)
meta("another block size", "BLOCK_SIZE", "block_size", "8", stamped=True)
meta("block size in words", "BLOCK_SIZE|COUNTS", "block_size", "four", stamped=True)


def _renamed_hash(b: Block) -> None:
    """Name and metadata agree on a hash that is not that of the tokens."""
    b.hash = bytes(32)
    b.metadata["block_hash"] = b.name


def _turboquant(b: Block) -> None:
    types = json.loads(b.metadata["layer_cache_types"])
    b.metadata["layer_cache_types"] = json.dumps(["TurboQuantKVCache", *types[1:]])
    b.metadata["layer_0_turboquant_v2"] = "1"
    for side, letter in ((KEYS, "k"), (VALUES, "v")):
        b.metadata[f"layer_0_tq_{'key' if letter == 'k' else 'value'}_fields"] = '["codes"]'
        b.tensors[f"layer_0_tq_{letter}_codes"] = b.tensors.pop(side).view(np.uint8)


def _class(name: str) -> Callable[[Block], None]:
    def change(b: Block) -> None:
        types = json.loads(b.metadata["layer_cache_types"])
        b.metadata["layer_cache_types"] = json.dumps([name, *types[1:]])

    return change


block("hash of other tokens", "HASH", _renamed_hash)
block("sidecar with other tokens", "HASH", lambda b: b.tokens.__setitem__(0, 9))
file(
    "under the name of another block",
    "HASH",
    moved(lambda p: p.parent.parent / "0" / ("0" * 64 + p.suffix)),
)
block("TurboQuant", "TURBOQUANT", _turboquant)
block("TurboQuant by its mark alone", "TURBOQUANT", lambda b: b.metadata.update(layer_0_turboquant_v2="1"))
block("class without a kind", "CLASS", _class("PoolingCache"))
block("class of a path", "CLASS", _class("../../KVCache"))
block("class of quantised rows", "CLASS|LAYOUT", _class("QuantizedKVCache"))
block("class that is not the model's", "LAYOUT|CLASS", _class("RotatingKVCache"))


def _of_other_layout(folder: Path) -> Path:
    return save_all(folder, chain("window", Style()))[0]


def _of_other_model(folder: Path) -> Path:
    return save_all(folder, chain("growing", Style(model="/models/other")))[0]


add("all of another layout", "LAYOUT", "growing", _of_other_layout)
add("all of another model", "MODEL", "growing", _of_other_model)

# -- tensors and markers ----------------------------------------------------------------------------------------------


def tensor(name: str, codes: str, at_name: str, change: Callable[[np.ndarray], np.ndarray], **more: Any):
    """One tensor is changed."""
    block(name, codes, lambda b: b.tensors.__setitem__(at_name, change(b.tensors[at_name])), **more)


def _unknown(name: str) -> Callable[[Block], None]:
    return lambda b: b.tensors.__setitem__(name, np.zeros(2, np.float32))


def _set(key: str, value: str) -> Callable[[Block], None]:
    return lambda b: b.metadata.__setitem__(key, value)


def _popped(name: str) -> Callable[[Block], None]:
    def change(b: Block) -> None:
        del b.tensors[name]

    return change


def _marked(key: str, value: str, layout_tensor: str) -> Callable[[Block], None]:
    def change(b: Block) -> None:
        b.metadata[key] = value
        b.tensors[layout_tensor] = np.zeros(1, np.float32)

    return change


block("unknown tensor", "TENSORS", _unknown("layer_0_state_9"))
block("tensor of a path", "TENSORS", _unknown("../../../../tmp/x"))
block("tensor of a layer too many", "TENSORS", _unknown("layer_2_state_0"))
block("keys under both names", "TENSORS", lambda b: b.tensors.__setitem__("layer_0_keys", b.tensors[KEYS]))
block("missing tensor", "TENSORS", _popped(VALUES))
block("missing layer", "TENSORS", lambda b: (_popped("layer_1_state_0")(b), _popped("layer_1_state_1")(b)))
block("no tensors", "TENSORS", lambda b: b.tensors.clear())
block("seventeen elements", "ELEMENTS", _set("layer_0_state_count", "17"))
block("no elements", "ELEMENTS", _set("layer_0_state_count", "0"))
block("2^64 elements", "ELEMENTS", _set("layer_0_state_count", str(1 << 64)))
block("elements in words", "ELEMENTS", _set("layer_0_state_count", "two"))
block("2^64 members", "ELEMENTS", _set("layer_0_sub_count", str(1 << 64)), layout="list")
block("a member too many", "TENSORS|LAYOUT|COUNTS", _set("layer_0_sub_count", "3"), layout="list")
block("unknown storage", "TENSORS|MARKERS|LAYOUT|TOO_NEW", _set("layer_0_storage_mode", "zz"), layout="list")
_SLOT = "layer_0_sub_0_state_0"
for _name, _key, _value in (
    ("none of 2", "none", "2"),
    ("none of nothing", "none", ""),
    ("zero dim without a zero", "zero_dim", "1,4,5,64"),
    ("zero dim that is negative", "zero_dim", "1,-4,0,64"),
    ("zero dim of minus zero", "zero_dim", "1,4,-0,64"),
    ("zero dim in words", "zero_dim", "1,four,0"),
    ("zero dim of nothing", "zero_dim", ""),
    ("zero dim of 10,000 digits", "zero_dim", "0," + "9" * 10_000),
    ("zero dim of 100,000 axes", "zero_dim", ",".join(["0"] * 100_000)),
):
    block(_name, "MARKERS", _marked(f"{_SLOT}_{_key}", _value, _SLOT), layout="list")
block("marked none, with values", "MARKERS", _set(f"{_SLOT}_none", "1"), layout="list")
block("a slot marked none", "SLOTS|LAYOUT|MARKERS", _marked(f"{_SLOT}_none", "1", _SLOT), layout="list")
block("rows marked none", "MARKERS|LAYOUT|SHAPE|TENSORS|SLOTS", _marked(f"{KEYS}_none", "1", KEYS))

# -- values -----------------------------------------------------------------------------------------------------------


def _put(at: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        out = array.copy()
        out.reshape(-1)[at] = value
        return out

    return change


def _rows(n: int) -> Callable[[np.ndarray], np.ndarray]:
    """n rows: cut, or with the last one again."""
    return lambda a: np.concatenate([a] + [a[:, :, -1:]] * max(0, n - a.shape[2]), axis=2)[:, :, :n]


def both(name: str, codes: str, state: str, change: Callable[[np.ndarray], np.ndarray], **more: Any):
    """Keys and values are changed alike."""

    def change_both(b: Block) -> None:
        for side in ("0", "1"):
            b.tensors[f"{state}_{side}"] = change(b.tensors[f"{state}_{side}"])

    block(name, codes, change_both, **more)


tensor("half precision", "DTYPE", KEYS, lambda a: a.astype(np.float16))
both("all in half precision", "DTYPE", "layer_0_state", lambda a: a.astype(np.float16))
tensor("integers", "DTYPE", KEYS, lambda a: a.astype(np.int32))
tensor("a state in half precision", "DTYPE", _SLOT, lambda a: a.astype(np.float16), layout="list")
tensor("keys of five axes", "SHAPE", KEYS, lambda a: a[None])
tensor("keys of three axes", "SHAPE", KEYS, lambda a: a[0])
both("two sequences", "SHAPE", "layer_0_state", lambda a: np.concatenate([a, a]))
both("a head too few", "SHAPE", "layer_0_state", lambda a: a[:, :1])
tensor("narrow keys", "SHAPE", KEYS, lambda a: a[..., :-1])
tensor("fewer keys than values", "SHAPE|SHORT", KEYS, _rows(3))
tensor("a state of another shape", "SHAPE", _SLOT, lambda a: a[..., :-1], layout="list")
for _at, _value in ((0, float("nan")), (31, float("inf")), (17, -float("inf"))):
    tensor(f"rows with {_value}", "NOT_FINITE", KEYS, _put(_at, _value))
tensor("a state with NaN", "NOT_FINITE", _SLOT, _put(2, float("nan")), layout="list")
tensor("a window with NaN", "NOT_FINITE", "layer_0_state_1", _put(5, float("nan")), layout="window", at=2)
tensor("bfloat16 NaN", "NOT_FINITE", "layer_1_state_0", _put(5, 0x7FC1), layout="mixed")

# -- its place in a chain ---------------------------------------------------------------------------------------------

both("a row too many", "OVER_ADVANCED", "layer_0_state", _rows(5))
both("a row too few", "SHORT", "layer_0_state", _rows(3))
both("a cumulative row too many", "OVER_ADVANCED", "layer_0_sub_1_state", _rows(9), layout="list")
both("a cumulative row too few", "SHORT", "layer_0_sub_1_state", _rows(7), layout="list")
both("a per-member row too many", "OVER_ADVANCED", "layer_0_sub_1_state", _rows(5), layout="list", composite="pm")
both("a per-member row too few", "SHORT", "layer_0_sub_1_state", _rows(3), layout="list", composite="pm")


def _over_advanced(layout: str) -> Callable[[Path], Path]:
    """No snapshots, 14 tokens live: the last block's state stands at 14 and its chain ends at 12."""

    def write(folder: Path) -> Path:
        return save_all(folder, chain(layout, Style(snapshots=frozenset(), live=14)))[-1]

    return write


add("stored two tokens too late", "OVER_ADVANCED", "pair", _over_advanced("pair"))
add("stored two tokens too late, windows", "OVER_ADVANCED|WINDOW", "list", _over_advanced("list"))
add("stored two tokens too late, flat window", "OVER_ADVANCED|WINDOW", "window", _over_advanced("window"))
add("stored two tokens too late, flat state", "NO_PROVENANCE", "bare", _over_advanced("bare"))
add("caught in time, flat state", "NO_PROVENANCE", "bare", lambda f: save_all(f, chain("bare", Style()))[-1])


def _mixed(modes: str) -> Callable[[Path], None]:
    """A chain of cumulative (c) and per-member (p) blocks."""

    def write(folder: Path) -> None:
        made = {"c": chain("pair", Style()), "p": chain("pair", Style(composite="pm"))}
        save_all(folder, [made[mode][i] for i, mode in enumerate(modes)])

    return write


for _modes in ("ccp", "cpp", "pcc", "ppc", "cpc", "pcp"):
    add(f"a chain of {_modes}", "MIXED", "pair", _mixed(_modes))


def _foreign(which: slice, name: str) -> Callable[[Block], None]:
    """Rows of other weights."""

    def change(b: Block) -> None:
        other = blocks(hashed(twin(LAYOUTS["pair"]), TOKENS, (4, 8, 12)), Style())[b.index].tensors[name]
        out = b.tensors[name].copy()
        out[:, :, which] = other[:, :, which]
        b.tensors[name] = out

    return change


_VALUES = "layer_0_sub_0_state_1"
block("first block of other weights", "OTHER_ROWS", _foreign(slice(None), _VALUES), layout="pair", at=0)
block("second block of other weights", "OTHER_ROWS", _foreign(slice(None), _VALUES), layout="pair", at=1)
block("first rows of other weights", "OTHER_ROWS", _foreign(slice(0, 8), _VALUES), layout="pair", at=2)
block("one early row of other weights", "OTHER_ROWS", _foreign(slice(5, 6), _VALUES), layout="pair", at=2)
block("all rows of other weights", "OTHER_ROWS", _foreign(slice(None), _VALUES), layout="pair", at=2)


def _end_of(path: Path, name: str) -> int:
    found, _ = taken_apart(path.read_bytes())
    n = struct.unpack("<Q", path.read_bytes()[:8])[0]
    return 8 + n + found[name]["data_offsets"][1]


def _zeroed(path: Path) -> None:
    """A tail that never reached the disk: from the middle of the last head's rows on."""
    raw, end = bytearray(path.read_bytes()), _end_of(path, _VALUES)
    raw[end - 12 * 6 * 4 :] = bytes(len(raw) - end + 12 * 6 * 4)
    path.write_bytes(raw)


def _flipped(path: Path) -> None:
    """A byte of an early row."""
    raw, end = bytearray(path.read_bytes()), _end_of(path, _VALUES)
    raw[end - 12 * 6 * 4 + 3] ^= 1
    path.write_bytes(raw)


file("zeroed tail", "OTHER_ROWS", _zeroed, layout="pair", at=2)
file("flipped byte", "OTHER_ROWS", _flipped, layout="pair", at=2)


def _metas(i: int, j: int, value: str) -> Callable[[Block], None]:
    """Value j of the meta state of flat layer i."""

    def change(b: Block) -> None:
        made = json.loads(b.metadata["layer_meta_states"])
        made[i][j] = value
        b.metadata["layer_meta_states"] = json.dumps(made)

    return change


block("window one token on", "WINDOW", _metas(0, 2, "13"), layout="window", at=2)
block("window one token back", "WINDOW", _metas(0, 2, "11"), layout="window", at=2)
block("write index beyond the window", "WINDOW|COUNTS", _metas(0, 3, "7"), layout="window", at=2)
block("negative write index", "WINDOW|COUNTS", _metas(0, 3, "-1"), layout="window", at=2)
block("offset in words", "WINDOW|COUNTS", _metas(0, 2, "eight"), layout="window", at=2)
block("another window", "WINDOW|LAYOUT", _metas(0, 1, "7"), layout="window", at=2)
block("another keep", "WINDOW|LAYOUT", _metas(0, 0, "1"), layout="window", at=2)
both("more rows than the window", "WINDOW", "layer_0_state", _rows(7), layout="window", at=2)
both("fewer rows than the window", "WINDOW|SHORT", "layer_0_state", _rows(5), layout="window", at=2)

add("slots cut to two", "SLOTS", "slots", lambda f: save_all(f, chain("slots", Style(cut_slots=True)))[-1])
add(
    "slots cut by version 2",
    "SLOTS",
    "slots",
    lambda f: save_all(f, chain("slots", Style(version="2", names="keys")))[-1],
)


def _fewer_slots(b: Block) -> None:
    del b.tensors["layer_0_sub_1_state_1"]
    b.metadata["layer_0_sub_1_state_count"] = "1"


def _more_slots(b: Block) -> None:
    b.tensors["layer_0_sub_1_state_2"] = b.tensors["layer_0_sub_1_state_1"]
    b.metadata["layer_0_sub_1_state_count"] = "3"


block("a slot too few", "SLOTS", _fewer_slots, layout="pair")
block("a slot too many", "SLOTS", _more_slots, layout="pair")


def _only_placeholders(folder: Path) -> Path:
    return save_all(folder, chain("only", Style(snapshots=frozenset())))[0]


def _no_first(folder: Path) -> Path:
    made = save_all(folder, chain("growing", Style()))
    made[0].unlink()
    return made[1]


def _no_sidecars(folder: Path) -> Path:
    return save_all(folder, chain("growing", Style(sidecars=False)))[0]


add("nothing but a placeholder", "NO_STATE", "only", _only_placeholders)
add("hangs on a block that is gone", "CHAIN", "growing", _no_first)
add("tokens unknown", "NO_TOKENS", "growing", _no_sidecars)

# -- sidecars ---------------------------------------------------------------------------------------------------------


def sidecar(name: str, codes: str, change: Callable[[Path], Any]):
    """The ``.tokens`` file of one block is changed."""
    file(f"sidecar {name}", codes, lambda path: change(path.with_suffix(".tokens")) and None)


def _said(**fields: Any) -> Callable[[Path], None]:
    return lambda path: written(path, json.dumps(json.loads(path.read_text()) | fields).encode())


def _sidecar_link(path: Path) -> None:
    target = path.parent.parent.parent / f"{path.parent.parent.name}-elsewhere.tokens"
    path.rename(target)
    path.symlink_to(target)


_UNKNOWN = "NO_TOKENS|HASH"
sidecar("that is no JSON", _UNKNOWN, lambda p: written(p, b"{]"))
sidecar("that is a list", _UNKNOWN, lambda p: written(p, b"[1,2,3,4]"))
sidecar("nested 100,000 deep", _UNKNOWN, lambda p: written(p, b"[" * 100_000))
sidecar("that is a link", _UNKNOWN + "|NOT_A_FILE", _sidecar_link)
sidecar("that is a pipe", _UNKNOWN + "|NOT_A_FILE", lambda p: (p.unlink(), os.mkfifo(p)))
sidecar("without tokens", _UNKNOWN, _said(token_ids=[]))
sidecar("of words", _UNKNOWN, _said(token_ids=["1", "0", "255", "256"]))
sidecar("of floats", _UNKNOWN, _said(token_ids=[1.0, 0.0, 255.0, 256.0]))
sidecar("of truth values", _UNKNOWN, _said(token_ids=[True, False, 255, 256]))
sidecar("of NaN", _UNKNOWN, _said(token_ids=[float("nan")] * 4))


def _odd_tokens(first: int) -> Callable[[Path], Path]:
    """Every hash agrees, but no model has such a token."""

    def write(folder: Path) -> Path:
        story = replace(told("growing"), tokens=[first, *TOKENS[1:]])
        return save_all(folder, blocks(story, Style()))[0]

    return write


add("a negative token", _UNKNOWN + "|COUNTS", "growing", _odd_tokens(-1))
add("a token of 2^32", _UNKNOWN + "|COUNTS", "growing", _odd_tokens(1 << 32))
add("a token of 2^70", _UNKNOWN + "|COUNTS", "growing", _odd_tokens(1 << 70))
add(
    "keys that stand for an image",
    "EXTRA_KEYS",
    "growing",
    lambda f: save_all(f, chain("growing", Style(extra=("ab" * 32,))))[0],
)
