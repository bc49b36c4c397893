"""Prompt-cache files of mlx-lm as a source: a file, or a folder of them, and the prompt that the user says was theirs.

A file has no tokens. What may be its prompt are the *readings* of what the user gave (``prompt_text``). One of the
file's length is proven by computing again (``prompt_proof``), or, where the layout has no rows to compare, believed if
the user says so (``trust_prompt``) and there is no other reading: that is noted in the journal. Length, layout and
values are checked in either case.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..keys import pack
from ..tensors import finite
from .header import HostileFile, Signature
from .journal import NoRoom
from .prefix import Prefix
from .prompt_members import Contents, fit
from .prompt_proof import Prover
from .prompt_text import Candidate
from .reasons import Refused
from .source import Context, Found, relative_name

#: rows read at a time to look for values that are none
_ROWS = 1024


class PromptCacheSource:
    kind = "mlx-lm"

    def __init__(self, path: Path, context: Context) -> None:
        self.path, self.context = path, context
        self._good: dict[Path, Signature] = {}
        self._refused: list[Found] = []

    def survey(self) -> Iterable[Found]:
        for path in self._files():
            size, signature = 0, None
            try:
                info = os.lstat(path)
                size, signature = info.st_size, Signature.of(info)
                with HostileFile.open(path, ordered=False) as file:
                    signature = file.signature
                    self._readings(fit(file, self.context.target.layout))
            except Refused as e:
                yield Found(path, size, e.code, e.detail, signature)
            except OSError as e:
                yield Found(path, size, "UNREADABLE", e.strerror or str(e), signature)
            else:
                self._good[path] = signature
                yield Found(path, size, None, "", signature)

    def prefixes(self) -> Iterable[tuple[Prefix, list[Path]]]:
        for path, signature in self._good.items():
            try:
                with HostileFile.open(path, ordered=False) as file:
                    if file.signature != signature:
                        raise Refused("CHANGED", path=path)
                    contents = fit(file, self.context.target.layout)
                    _check_values(contents)
                    prefix = self._prefix(contents)
                    yield prefix, [path]
            except Refused as e:
                self._refused.append(Found(path, signature.size, e.code, e.detail, signature))

    def refused(self) -> Iterable[Found]:
        return list(self._refused)

    def _files(self) -> Iterator[Path]:
        if not self.path.is_dir():
            yield self.path
            return
        with os.scandir(self.path) as items:
            for item in items:
                if item.name.endswith(".safetensors"):
                    yield Path(item.path)

    def _readings(self, contents: Contents) -> list[Candidate]:
        """What may be the prompt of a file. Raises Refused: NO_TOKENS, PROMPT."""
        readings = self.context.readings
        if not readings and self.context.prompt:
            readings = (Candidate("the ids that were given", self.context.prompt),)
        if not readings:
            raise Refused(
                "NO_TOKENS", "its prompt has to be given: --prompt, --prompt-file, --messages, --prompt-tokens"
            )
        fitting = [c for c in readings if contents.length in (None, len(c.tokens))]
        if not fitting:
            lengths = ", ".join(f"{len(c.tokens)} ({c.how})" for c in readings)
            raise Refused("PROMPT", f"it was made from {contents.length} tokens, the prompt has {lengths}")
        if bad := next((t for c in fitting for t in c.tokens if not 0 <= t < self.context.running.vocab_size), None):
            raise Refused("PROMPT", f"id {bad} is outside the vocabulary")
        return fitting

    def _prefix(self, contents: Contents) -> Prefix:
        """Raises Refused."""
        reading, how = self._proven(contents, self._readings(contents))
        stand = contents.stand(len(reading.tokens))
        return Prefix(list(reading.tokens), contents.rows, (stand,), how=f"{reading.how}: {how}")

    def _proven(self, contents: Contents, readings: list[Candidate]) -> tuple[Candidate, str]:
        """The reading that is the prompt, and why. Raises Refused."""
        compute = dict(self.context.target.identity.compute)
        running = self.context.running
        exact = (compute.get("mode"), compute.get("device")) == ("exact", "cpu")
        prover = Prover(running.model, running.make_cache, running.chunk, exact)
        refusals: list[Refused] = []
        for reading in readings:
            try:
                return reading, prover.prove(contents, list(reading.tokens))
            except Refused as e:
                refusals.append(e)
        # the others name what a right prompt cannot mend
        worst = next((e for e in refusals if e.code != "PROMPT"), refusals[0])
        if worst.code == "NO_PROOF":
            open_ones = [r for r, e in zip(readings, refusals, strict=True) if e.code == "NO_PROOF"]
            return self._trusted(contents, open_ones, worst), "trusted, not proven"
        raise worst

    def _trusted(self, contents: Contents, readings: list[Candidate], why: Refused) -> Candidate:
        """The one reading that there is, if the user vouches for it now or did before. Raises Refused (NO_PROOF)."""
        if len(readings) > 1:
            several = "; ".join(f"{len(c.tokens)} tokens ({c.how})" for c in readings)
            raise Refused("NO_PROOF", f"{why.detail}, and the prompt may be {several}: give --prompt-tokens")
        path, journal, prompt = (
            contents.file.path,
            self.context.journal,
            hashlib.sha256(pack(readings[0].tokens)).digest(),
        )
        name, digest = relative_name(self.path, path), bytes.fromhex(contents.file.digest())
        if not self.context.trust_prompt and not journal.trusted(self.path, name, digest, prompt):
            raise Refused("NO_PROOF", f"{why.detail}; --trust-prompt believes it unproven")
        if journal.writable:
            try:
                journal.trust(self.path, name, digest, prompt)
            except NoRoom as e:
                raise Refused("NO_PROOF", f"{why.detail}, and that it is trusted cannot be noted: {e}") from None
        return readings[0]


def _check_values(contents: Contents) -> None:
    """Raises Refused (NOT_FINITE): a file that holds such values anywhere is damaged, and nothing of it is stored."""
    for member in contents.members:
        for run in member.runs:
            for a in range(run.start, run.end, _ROWS):
                _check_finite(member.label, member.rows(contents.file, a, min(run.end, a + _ROWS)), contents.file.path)
        if not member.runs:
            _check_finite(member.label, member.state(contents.file), contents.file.path)


def _check_finite(label: str, arrays: dict, path: Path) -> None:
    for dtype, array in arrays.values():
        if not finite(dtype, array):
            raise Refused("NOT_FINITE", f"layer {label}", path)
