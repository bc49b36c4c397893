"""The bytes of single tokens: what a token is, where its text alone may be no whole character."""

from __future__ import annotations

import json
import re
from typing import Any

from .text import decode, plain

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """``spelling(id)``: the bytes that the token stands for inside a text, b"" for an id without text. The bytes of an
    answer's ids, joined, are its text's; some tokenizers leave out a space at its start. Any thread may use this."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = plain(tokenizer)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._backend = backend
        self._added: dict[int, str] = {}
        steps: list[dict[str, Any]] = []
        if backend is not None:
            self._added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
            steps = _steps(backend.decoder)
        kinds = {step["type"] for step in steps}
        self._bytes = _byte_alphabet() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._pieces = self._fallback or "Metaspace" in kinds  # otherwise tokens are no text by themselves
        self._spaces = [mark for step in steps if (mark := _space(step))]

    def __call__(self, id: int) -> bytes:
        if self._backend is None or not (self._bytes or self._pieces):
            return self._decoded(id)
        if id in self._added:
            return self._added[id].encode()
        token = self._backend.id_to_token(id)
        if token is None:  # padded embeddings
            return b""
        if self._bytes is not None:
            try:
                return bytes(self._bytes[character] for character in token)
            except KeyError:  # no token of the byte alphabet
                return token.encode()
        if self._fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for mark in self._spaces:
            token = token.replace(mark, " ")
        return token.encode()

    def _decoded(self, id: int) -> bytes:
        try:
            return decode(self._tokenizer, [id]).encode("utf-8", "replace")
        except Exception:  # an id outside the vocabulary has no text
            return b""


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """What a decoder does, one after the other."""
    if decoder is None:
        return []
    said = json.loads(decoder.__getstate__())
    return said["decoders"] if said["type"] == "Sequence" else [said]


def _space(step: dict[str, Any]) -> str | None:
    """What a step of a decoder turns into a space."""
    if step["type"] == "Metaspace":
        return step["replacement"]
    if step["type"] == "Replace" and step["content"] == " ":
        return step["pattern"].get("String")
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the rest for what comes after Latin-1."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}
