"""A stand-in for another tool's folder: one file for every five tokens, with their rows and the state behind them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file, save_file

from mlxkv.cache.layout import tensor_name
from mlxkv.cache.legacy.header import HostileFile
from mlxkv.cache.legacy.prefix import HostArrays, Prefix, Stand
from mlxkv.cache.legacy.reasons import Refused
from mlxkv.cache.legacy.source import Context, Found
from mlxkv.cache.state import SequenceState
from mlxkv.decode.runtime import Runtime

STEP = 5


def fill(rt: Runtime, folder: Path, tokens: list[int]) -> list[Path]:
    """Run ``tokens`` in steps and put a file for each on the shelf."""
    folder.mkdir(parents=True, exist_ok=True)
    state = SequenceState.new(rt.make_cache())
    out = []
    for a in range(0, len(tokens) - len(tokens) % STEP, STEP):
        b = a + STEP
        rt.model(mx.array(tokens[a:b])[None], cache=state.caches)
        state.advance(STEP)
        state.settle()
        arrays = {}
        for member in state.members or ():
            found = member.rows(a, b) if member.record == "rows" else member.arrays()
            arrays |= {tensor_name(member, name): np.array(v) for name, v in found.items()}
        out.append(folder / f"{folder.name}-{a:03}.safetensors")
        save_file(arrays, out[-1], {"tokens": json.dumps(tokens[a:b])})
    return out


@dataclass
class Shelf:
    """A source. A file that says that it is of another model is refused; a chain ends where a file is missing."""

    root: Path
    context: Context
    kind: str = "shelf"
    reads: int = 0

    def survey(self) -> Iterable[Found]:
        self._good: list[HostileFile] = []
        for path in sorted(self.root.rglob("*.safetensors")):
            try:
                with HostileFile.open(path, ordered=False) as file:
                    if file.metadata.get("model"):
                        raise Refused("MODEL", path=path)
                    if not self.context.same_weights:
                        raise Refused("NO_CONSENT", path=path)
                self._good.append(file)
                yield Found(path, file.signature.size, signature=file.signature)
            except Refused as e:
                yield Found(path, path.lstat().st_size, e.code, e.detail)

    def prefixes(self) -> Iterable[tuple[Prefix, list[Path]]]:
        chains: dict[str, list[HostileFile]] = {}
        for file in self._good:
            chains.setdefault(file.path.name.split("-")[0], []).append(file)
        for chain in chains.values():
            tokens = [t for file in chain for t in json.loads(file.metadata["tokens"])]
            names = {t.name for t in self.context.target.layout.held("state")}
            stands = tuple(
                Stand(STEP * (i + 1), {n: a for n, a in _arrays(file.path).items() if n in names})
                for i, file in enumerate(chain)
            )
            yield Prefix(tokens, lambda a, b, chain=chain: self._rows(chain, a, b), stands), [f.path for f in chain]

    def refused(self) -> Iterable[Found]:
        return ()

    def _rows(self, chain: list[HostileFile], a: int, b: int) -> HostArrays:
        self.reads += 1
        parts = []
        for i in range(a // STEP, (b - 1) // STEP + 1):
            file = chain[i]
            file.check()
            arrays = {n: v for n, (_, v) in _arrays(file.path).items()}
            lo, hi = max(a - i * STEP, 0), min(b - i * STEP, STEP)
            rows = {t.name: arrays[t.name][:, :, lo:hi] for t in self.context.target.layout.held("rows")}
            if bad := next((n for n, v in rows.items() if not np.isfinite(v).all()), None):
                raise Refused("NOT_FINITE", bad, file.path)
            parts.append(rows)
        return {n: ("F32", np.ascontiguousarray(np.concatenate([p[n] for p in parts], axis=2))) for n in parts[0]}


def _arrays(path: Path) -> HostArrays:
    return {name: ("F32", array) for name, array in load_file(path).items()}


def rewrite(path: Path, **metadata: str) -> None:
    """The same arrays with other metadata."""
    with HostileFile.open(path, ordered=False) as file:
        kept = dict(file.metadata)
    save_file(load_file(path), path, kept | metadata)


def spoil(path: Path) -> None:
    """A NaN in its first rows."""
    with HostileFile.open(path, ordered=False) as file:
        kept = dict(file.metadata)
    arrays = {name: array.copy() for name, array in load_file(path).items()}
    name = next(n for n in sorted(arrays) if n.endswith(".keys"))
    arrays[name].flat[3] = np.nan
    save_file(arrays, path, kept)
