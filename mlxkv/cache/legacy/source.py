"""What a legacy source is: the files of another tool, what may be made of them, and why the others are refused.

A source reads. It writes nothing, renames nothing, removes nothing, follows no link, and trusts no byte: every file is
hostile until proven. What it hands over is host bytes in the model's own layout (``prefix.Prefix``); keys, records,
budget and journal are the business of ``importing``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .convert import Target
from .header import Signature
from .journal import Journal
from .prefix import Prefix
from .prompt_text import Candidate


@dataclass(frozen=True)
class Found:
    """One file of a source. ``code`` is one of ``reasons.REASONS``, or None where nothing speaks against it so far;
    ``detail`` says what was found. ``signature`` is that of the open file that was read (``HostileFile.signature``), or
    of ``os.lstat`` where it was not opened; None where even that failed."""

    path: Path
    nbytes: int
    code: str | None = None
    detail: str = ""
    signature: Signature | None = None


class Source(Protocol):
    """The files of another tool: a folder, or one file. Made as ``OmlxSource(path, context)`` in ``omlx`` and
    ``PromptCacheSource(path, context)`` in ``prompt_cache``; making one reads nothing yet."""

    #: "omlx" or "mlx-lm"
    kind: str

    def survey(self) -> Iterable[Found]:
        """Every file that is the source's, once each, in any order: the importable with code None, the others with the
        first reason that is found. Time and memory are bounded by the number of files and by what headers may weigh;
        tensor data need not be read here. A file that fails later, while rows are read, is reported by ``Refused``.
        Files that are no business of the format (``.tokens``, ``.txt``) are not listed.

        A file that is good in itself but cannot be used here (no tokens, no consent, a broken chain) has its code too:
        NO_TOKENS, NO_CONSENT, CHAIN, … Nothing raises but OSError for the folder itself.
        """
        ...

    def prefixes(self) -> Iterable[tuple[Prefix, list[Path]]]:
        """What can be imported, called after ``survey`` has been exhausted. For each:

        * a ``Prefix`` with proven tokens. One a longest chain, not one a block: what others begin with comes once in
          each, and is stored once. ``rows`` may read files, only when it is called, and is called for ascending spans
          that together cover every token once; it raises ``Refused`` (with ``path``) where they are not what they
          were. Nothing is kept of a prefix after the next one is asked for.
        * the files that it is made of: those of which *everything useful* is in this prefix. Each has been given out by
          ``survey`` with code None. Once the prefix is durable they are journalled as imported and, if the user wants
          it, removed: a file of which something useful is left out here must not be in this list (it belongs to the
          prefix that takes all of it). A file may be in the lists of several prefixes.

        A prefix that turns out to be bad before it can be made is not yielded; its files are yielded by ``refused``.
        """
        ...

    def refused(self) -> Iterable[Found]:
        """Files that ``survey`` gave out with code None, and that ``prefixes`` then could not use: each with its code.
        Called after ``prefixes`` has been exhausted."""
        ...


class Running(Protocol):
    """What a source may use of the runtime (``decode.runtime.Runtime``), in the thread that owns it."""

    @property
    def model(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def make_cache(self) -> Callable[[], list[Any]]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def chunk(self) -> int: ...


@dataclass(frozen=True)
class Context:
    """What a source is given. ``target``: layout, identity and key space that rows and states must fit.

    ``prompt``: token ids that the user gave (a prompt, a transcript), None if none. ``source_model``: the name under
    which the other tool kept its files, if the user said one. ``same_weights``: the user has vouched for this folder,
    now or at an earlier import: its files were made by the weights of ``target``, in the dtype in which they run now.
    ``trust_prompt``: a prompt that nothing proves may be believed. ``journal``: for prompts that were trusted before;
    its ``refusal`` also tells what need not be read again.
    """

    target: Target
    running: Running
    journal: Journal
    prompt: tuple[int, ...] | None = None
    #: all that the prompt may have been for a file without tokens, likeliest first; empty: only ``prompt``
    readings: tuple[Candidate, ...] = ()
    source_model: str | None = None
    same_weights: bool = False
    trust_prompt: bool = False


def relative_name(root: Path, path: Path) -> str:
    """What a file of a source is called in the journal: its path below the folder, or its name if it is the source."""
    name = path.name if path == root else os.path.relpath(path, root)
    return os.fsencode(name).decode("utf-8", "backslashreplace")
