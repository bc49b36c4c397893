"""An oMLX cache folder as a source of imports: every file gets its verdict, every chain of known tokens its prefix.

A block file holds no tokens, only their hash. They are known from ``.tokens`` sidecars, or from a prompt that the user
gives: its blocks are then looked for by name. The folder may hold millions of files: of each only its hash, and that of
the block before it, is kept.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .omlx_chain import Outcome, follow
from .omlx_file import read_block
from .omlx_keys import BLOCK_SIZES, SUFFIX, chain, file_of, our_names, same_model
from .omlx_layers import Fitted, fit
from .omlx_tokens import read_tokens, sidecar_of
from .prefix import Prefix
from .reasons import Refused
from .source import Context, Found, Signature

_SHARDS = frozenset("0123456789abcdef")
#: other folders with files of blocks -> why those are not imported
_OTHERS = {"_gdn_sidecars": "SIDECAR", "_boundary_snapshots": "NAME"}
_DEPTH = 4
#: model names and block sizes that are remembered for looking a prompt up
_NAMES, _SIZES = 16, 16
#: headers that are kept
_RECENT = 512


class OmlxSource:
    kind = "omlx"

    def __init__(self, path: Path, context: Context) -> None:
        self.folder, self.context = path, context
        self._ours = our_names(context.target.identity.name)
        self._names: dict[str, None] = {}
        self._sizes: dict[int, None] = dict.fromkeys(BLOCK_SIZES)
        #: sound blocks whose tokens are known -> the block before
        self._before: dict[bytes, bytes | None] = {}
        #: sound blocks without a sidecar -> the model that they say
        self._nameless: dict[bytes, str] = {}
        self._prompts: list[tuple[list[bytes], int]] = []
        self._recent: OrderedDict[bytes, Fitted] = OrderedDict()
        self._used: set[bytes] = set()
        self._refused: dict[bytes, Refused] = {}

    # the survey

    def survey(self) -> Iterator[Found]:
        for path, code in self._files():
            found = self._look(path) if code is None else _found(path, code)
            if found is not None:
                yield found
        on_prompt = self._on_prompt() if self.context.prompt else set()
        for digest in sorted(self._nameless):
            code = "NO_TOKENS" if digest not in on_prompt else self._consent()
            yield _found(file_of(self.folder, digest), code)
        self._nameless = {d: self._nameless[d] for d in on_prompt if self.context.same_weights and d in self._nameless}

    def _files(self) -> Iterator[tuple[Path, str | None]]:
        """Every file that may be a block, with a code where its place says why it is not imported. Raises OSError for
        the folder itself."""
        with os.scandir(self.folder) as items:
            for item in items:
                path = Path(item.path)
                if item.name.endswith(SUFFIX):
                    yield path, "NAME"
                elif item.name in _SHARDS and item.is_symlink():
                    yield path, "NOT_A_FILE"
                elif item.name in _SHARDS and item.is_dir(follow_symlinks=False):
                    yield from ((p, None) for p in _blocks(path, 1))
                elif item.name in _OTHERS and item.is_dir(follow_symlinks=False):
                    yield from ((p, _OTHERS[item.name]) for p in _blocks(path, _DEPTH))

    def _look(self, path: Path) -> Found | None:
        """The verdict on one file; None where the prompt will decide."""
        try:
            fitted = self._read(path)
        except Refused as e:
            return _found(path, e.code, e.detail)
        block = fitted.block
        signature, digest = block.file.signature, block.digest
        if len(self._sizes) < _SIZES:
            self._sizes |= dict.fromkeys(n for n in (block.tokens, block.block) if n)
        if len(self._names) < _NAMES:
            self._names[block.model] = None
        try:
            _, self._before[digest], _ = read_tokens(sidecar_of(path), digest, block.model)
        except Refused as e:
            if e.code == "NO_TOKENS" and self.context.prompt:
                self._nameless[digest] = sys.intern(block.model)
                return None
            return Found(path, signature.size, e.code, e.detail, signature)
        return Found(path, signature.size, self._consent(), "", signature)

    def _consent(self) -> str | None:
        return None if self.context.same_weights else "NO_CONSENT"

    def _read(self, path: Path) -> Fitted:
        """Checks 1 to 5, and that it fits the model. Raises Refused."""
        said = self.context.source_model
        ours = said.__eq__ if said is not None else lambda name: same_model(name, self._ours)
        return fit(read_block(path, ours), self.context.target.layout)

    def _on_prompt(self) -> set[bytes]:
        """The blocks of the prompt that are there, under any name and block size."""
        prompt = self.context.prompt or ()
        found: set[bytes] = set()
        for name in self._names:
            for size in self._sizes:
                digests = list(chain(name, prompt, size))
                there = [d for d in digests if self._nameless.get(d) == name or d in self._before]
                if there and there[-1] not in self._before:  # else sidecars say all this, and more
                    self._prompts.append((digests, size))
                    found.update(there)
        return found

    # what can be imported

    def prefixes(self) -> Iterator[tuple[Prefix, list[Path]]]:
        for digests, tokens, size in self._chains() if self.context.same_weights else ():
            files: list[Path] = []

            def spoiled(i: int, digests: list[bytes] = digests, files: list[Path] = files) -> None:
                """Not all of it can be used, as is seen only now: it is not to be noted as imported."""
                path = file_of(self.folder, digests[i])
                if path in files:
                    files.remove(path)
                self._used.discard(digests[i])

            outcome = self._follow(digests, tokens, size, spoiled)
            if outcome.prefix is not None:
                used = [digests[i] for i in outcome.used]
                self._used.update(used)
                files += [file_of(self.folder, digest) for digest in used]
                yield outcome.prefix, files
            for i, why in outcome.refused.items():
                self._refused.setdefault(digests[i], why)

    def refused(self) -> Iterator[Found]:
        for digest, why in self._refused.items():
            if digest not in self._used:
                yield _found(file_of(self.folder, digest), why.code, why.detail)

    def _follow(self, digests: list[bytes], tokens: list[int], size: int, spoiled: Callable[[int], None]) -> Outcome:
        def find(i: int) -> Fitted | None:
            there = digests[i] in self._before or digests[i] in self._nameless
            return self._read_once(digests[i]) if there else None

        return follow(self.context.target.layout, tokens, size, find, spoiled)

    def _read_once(self, digest: bytes) -> Fitted:
        """What many chains begin with is read once; a file that changes meanwhile is found out by its signature."""
        if (fitted := self._recent.get(digest)) is None:
            fitted = self._recent[digest] = self._read(file_of(self.folder, digest))
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(digest)
        return fitted

    def _chains(self) -> Iterator[tuple[list[bytes], list[int], int]]:
        """Hashes, tokens and block size of every longest chain."""
        inner = set(self._before.values())
        for digest in self._before:
            if digest not in inner and (found := self._back(digest)) is not None:
                yield found
        for digests, size in self._prompts:
            yield digests, list(self.context.prompt or ())[: size * len(digests)], size

    def _back(self, last: bytes) -> tuple[list[bytes], list[int], int] | None:
        """The chain that ends at a block, from sidecars; None where its beginning is not known."""
        digests: list[bytes] = []
        blocks: list[list[int]] = []
        at: bytes | None = last
        try:
            model: str | None = read_block(file_of(self.folder, last)).model
            while at is not None:
                # the hash proves each step, so that there is no way in a circle
                tokens, before, model = read_tokens(sidecar_of(file_of(self.folder, at)), at, model)
                digests.append(at)
                blocks.append(tokens)
                at = before
        except Refused as e:
            code = "CHAIN" if e.code in ("NO_TOKENS", "HASH") and at != last else e.code
            for digest in [*digests, last]:
                self._refused.setdefault(digest, Refused(code, "" if code == "CHAIN" else e.detail))
            return None
        digests.reverse()
        blocks.reverse()
        size = len(blocks[0])
        good = next((i for i, tokens in enumerate(blocks) if len(tokens) != size), len(blocks))
        for i, digest in enumerate(digests[good:]):
            self._refused.setdefault(digest, Refused("CHAIN" if i else "BLOCK_SIZE"))
        return digests[:good], [t for tokens in blocks[:good] for t in tokens], size


def _blocks(folder: Path, depth: int) -> Iterable[Path]:
    """Safetensors files below a folder, links to them too; links to folders are not followed."""
    try:
        with os.scandir(folder) as items:
            for item in items:
                if item.name.endswith(SUFFIX):
                    yield Path(item.path)
                elif depth > 1 and item.is_dir(follow_symlinks=False):
                    yield from _blocks(Path(item.path), depth - 1)
    except OSError:
        return  # it went away, or cannot be read: it is as good as empty


def _found(path: Path, code: str | None, detail: str = "") -> Found:
    try:
        info = os.lstat(path)
    except OSError:
        return Found(path, 0, code, detail)
    return Found(path, info.st_size, code, detail, Signature.of(info))
