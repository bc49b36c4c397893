"""Random headers, and random changes to sound ones, against a reader of hostile files.

What it accepts is checked by other means: the ``safetensors`` library reads the same names and bytes, or the file is
one that only the library's taste refuses. What it refuses has a code; nothing else is raised, and nothing hangs.
"""

from __future__ import annotations

import copy
import json
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from hypothesis import strategies as st

from mlxkv.cache.legacy.header import DTYPES, HostileFile
from mlxkv.cache.legacy.journal import Journal
from mlxkv.cache.legacy.reasons import Refused
from mlxkv.cache.ram import Draft

from .damage import LAYOUTS, TOKENS, chain, taken_apart
from .harness import converted
from .omlx_writer import Block, Style, framed, packed, prepare

#: what the header of a hostile file may be refused with
CODES = {"TOO_SMALL", "HEADER_LENGTH", "HEADER_JSON", "OFFSETS", "SIZES"}

_numbers = st.one_of(
    st.integers(-4, 300),
    st.sampled_from([2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)]),
)
_odd = st.one_of(
    _numbers,
    st.floats(allow_nan=True),
    st.booleans(),
    st.none(),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.just([[[[]]]]),
)
_names = st.sampled_from(["layer_0_state_0", "layer_0_keys", "a", "", "__metadata__", "../x", "\x00", "\udc80", "🙂"])
_entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*DTYPES, "F7", "", "f32"]) | _odd,
            "shape": st.lists(_numbers | _odd, max_size=5) | _odd,
            "data_offsets": st.lists(_numbers | _odd, min_size=1, max_size=3) | _odd,
        },
        optional={"more": _odd},
    ),
    _odd,
)
_headers = st.dictionaries(_names, _entries, max_size=4)
#: headers whose numbers fit, so that what comes after them is reached as well
_shapes = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=4)), max_size=4)


def _text(header: Any) -> bytes:
    return json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")


@st.composite
def tidy(draw: Any) -> bytes:
    """A file whose tensors tile its data."""
    header, at = {}, 0
    for i, (dtype, shape) in enumerate(draw(_shapes)):
        n = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        header[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    return framed(_text(header), bytes(at))


@st.composite
def wild(draw: Any) -> bytes:
    """A header of anything, and some bytes."""
    return framed(_text(draw(_headers)), bytes(draw(st.integers(0, 300))))


_SOUND = [packed(b.metadata, b.tensors) for b in chain("list", Style())[:1]]


@st.composite
def changed(draw: Any) -> bytes:
    """A sound block of a folder whose header was changed in one or two places: a value, a key, or its raw bytes."""
    raw = draw(st.sampled_from(_SOUND))
    for _ in range(draw(st.integers(1, 2))):
        raw = draw(_mutations)(draw, raw)
    return raw


def _value(draw: Any, raw: bytes) -> bytes:
    try:
        header, data = taken_apart(raw)
        name = draw(st.sampled_from(sorted(header)))
        field = draw(st.sampled_from(sorted(header[name])))
        old = header[name][field]
        if isinstance(old, list) and old and draw(st.booleans()):
            old[draw(st.integers(0, len(old) - 1))] = draw(_odd)
        else:
            header[name][field] = draw(_odd)
    except (ValueError, TypeError, AttributeError, IndexError, struct.error):
        return raw  # changed too much before
    return framed(_text(header), data)


def _bytes(draw: Any, raw: bytes) -> bytes:
    """One to four bytes of the length or the header."""
    out = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        if out:
            out[draw(st.integers(0, min(len(out), 1_500) - 1))] = draw(st.integers(0, 255))
    return bytes(out)


def _cut(draw: Any, raw: bytes) -> bytes:
    return raw[: draw(st.integers(0, len(raw)))]


def _longer(draw: Any, raw: bytes) -> bytes:
    return raw + bytes(draw(st.integers(1, 64)))


def _twice(draw: Any, raw: bytes) -> bytes:
    """A part of the header's text stands twice."""
    try:
        n = struct.unpack("<Q", raw[:8])[0]
        text, data = raw[8 : 8 + n].rstrip(), raw[8 + n :]
        a = draw(st.integers(0, len(text)))
        return framed(text[:a] + text[a : a + draw(st.integers(1, 80))] + text[a:], data)
    except (struct.error, OverflowError):
        return raw


_mutations = st.sampled_from([_value, _value, _bytes, _cut, _longer, _twice])

files = st.one_of(st.binary(max_size=200), tidy(), wild(), changed(), changed())


def peak() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1 << 10)


def read(path: Path, raw: bytes) -> str:
    """The code that the file is refused with, or "" if it is accepted, after what it says was compared."""
    path.write_bytes(raw)
    before = peak()
    try:
        with HostileFile.open(path) as file:
            got = {name: file.read(name) for name in file.tensors}
            said = {name: (t.dtype, t.shape) for name, t in file.tensors.items()}
            metadata = file.metadata
    except Refused as e:
        assert e.code in CODES, e
        return e.code
    finally:
        assert peak() - before < 64 << 20
    assert sum(a.nbytes for a in got.values()) == len(raw) - 8 - struct.unpack("<Q", raw[:8])[0]
    n = struct.unpack("<Q", raw[:8])[0]
    assert b"".join(a.tobytes() for a in got.values()) == raw[8 + n :], "accepted with other values"
    try:
        theirs = dict(safetensors.deserialize(raw))
    except safetensors.SafetensorError as e:
        assert raw[8:9] != b"{" or "null" in str(e), f"the library refuses it: {e}"
        return ""
    assert {name: (t["dtype"], tuple(t["shape"])) for name, t in theirs.items()} == said
    assert all(bytes(t["data"]) == got[name].tobytes() for name, t in theirs.items())
    assert all(isinstance(v, str) for v in metadata.values())
    return ""


# -- whole folders ----------------------------------------------------------------------------------------------------

_values = st.one_of(
    st.sampled_from(
        ["", "0", "1", "2", "3", "4", "5", "7", "8", "9", "12", "-1", "4.0", "NaN", "1e9", "[]", "{}", "null"]
    ),
    st.sampled_from(
        ['["KVCache","KVCache"]', '[["ArraysCache"],[""]]', '["0","6","8","6"]', "pm", "tuple", "1,4,0,64"]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.text(max_size=6),
)
_ENDS = ("", "_none", "_zero_dim", "_nested")
_keys = [
    *(f"layer_{i}_sub_{j}_state_{k}{end}" for i in (0, 1, 2) for j in (0, 1, 2) for k in (0, 1, 2) for end in _ENDS),
    *(f"layer_{i}_{end}" for i in (0, 1, 2) for end in ("sub_count", "state_count", "storage_mode", "turboquant_v2")),
    *(f"layer_{i}_{name}" for i in (0, 1, 2) for name in ("keys", "values", "state_0", "state_1", "sub_0_keys")),
]


class Folder:
    """A sound chain of one layout, of which one file at a time is changed; what comes of it is a part of what comes of
    the sound one, bit for bit, whatever is refused."""

    def __init__(self, folder: Path, layout: str, style: Style) -> None:
        self.model, self.folder = LAYOUTS[layout], folder / "omlx"
        self.made = chain(layout, style)
        prepare(self.folder)
        self.paths = [b.save(self.folder) for b in self.made]
        self.journal = Journal(folder, None)
        drafts, said = converted(self.model, self.folder, self.journal)
        assert drafts and not said, said
        self.sound = pieces(drafts)

    def tried(self, draw: Any) -> set[str]:
        """Change one block or its sidecar; the codes that are said then."""
        which = draw(st.integers(0, len(self.paths) - 1))
        path, block = self.paths[which], copy.deepcopy(self.made[which])
        for _ in range(draw(st.integers(1, 2))):
            draw(st.sampled_from([_metadata, _metadata, _json, _renamed, _doubled, _lost]))(draw, block)
        sidecar = block.sidecar()
        if draw(st.integers(0, 9)) == 0:
            sidecar[draw(st.sampled_from(sorted(sidecar)))] = draw(_odd)
        path.write_bytes(packed(block.metadata, block.tensors))
        path.with_suffix(".tokens").write_text(json.dumps(sidecar), errors="surrogatepass")
        try:
            drafts, said = converted(self.model, self.folder, self.journal)
        finally:
            self.made[which].save(self.folder)
        found = pieces(drafts)
        for at, piece in found.items():
            assert piece == self.sound.get(at), f"{at} is not what it was"
        assert said or found.keys() == self.sound.keys(), "something is missing, and nothing was said"
        return said


def pieces(drafts: list[Draft]) -> dict[tuple[str, int], bytes]:
    """Each row of each tensor by (name, its token), each state by (name, where it stands), however they are cut."""
    out = {}
    for draft in drafts:
        start, end = draft.meta.start, draft.meta.end
        assert list(draft.meta.tokens) == TOKENS[start:end]
        for kind, body in draft.bodies.items():
            for name, (dtype, array) in body.arrays.items():
                if kind == "state":
                    out[name, end] = f"{dtype} {array.shape}".encode() + array.tobytes()
                    continue
                assert array.shape[2] == end - draft.meta.row_start
                for i in range(array.shape[2]):
                    out[name, draft.meta.row_start + i] = dtype.encode() + array[:, :, i].tobytes()
    return out


def _metadata(draw: Any, block: Block) -> None:
    key = draw(st.sampled_from(sorted(block.metadata)) | st.sampled_from(_keys))
    if draw(st.booleans()):
        block.metadata.pop(key, None)
    else:
        block.metadata[key] = draw(_values)


def _json(draw: Any, block: Block) -> None:
    """One value inside a list of types or meta states."""
    key = draw(st.sampled_from(["layer_cache_types", "layer_meta_states"]))
    try:
        made = json.loads(block.metadata[key])
        at = made
        while isinstance(at[i := draw(st.integers(0, len(at) - 1))], list) and at[i] and draw(st.booleans()):
            at = at[i]
        at[i] = draw(_odd | st.sampled_from(["KVCache", "ArraysCache", "RotatingKVCache", "CacheList", "8", "6"]))
        block.metadata[key] = json.dumps(made)
    except (ValueError, TypeError, KeyError, IndexError):
        return  # changed too much before


def _renamed(draw: Any, block: Block) -> None:
    """To a name that no tensor has; two renamed ones cannot change places."""
    new = draw(st.sampled_from(_keys))
    if block.tensors and new not in block.tensors:
        old = draw(st.sampled_from(sorted(block.tensors)))
        block.tensors = {new if name == old else name: a for name, a in block.tensors.items()}


def _doubled(draw: Any, block: Block) -> None:
    if block.tensors:
        old = draw(st.sampled_from(sorted(block.tensors)))
        block.tensors.setdefault(draw(st.sampled_from(_keys)), block.tensors[old])


def _lost(draw: Any, block: Block) -> None:
    if block.tensors:
        del block.tensors[draw(st.sampled_from(sorted(block.tensors)))]
