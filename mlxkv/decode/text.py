"""From token ids to text, as it may be shown: complete characters only, stop strings never shown.

Cut-invariant: however the ids arrive, the joined pieces are the same text.
"""

from __future__ import annotations

from typing import Any


def plain(tokenizer: Any) -> Any:
    """The Hugging Face tokenizer inside mlx-lm's wrapper, or the tokenizer itself."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer


def shared(tokenizer: Any) -> None:
    """From now on several threads may use ``tokenizer``: a fast one takes its own truncation and padding off at its
    first use, which fails while another thread uses it ("Already borrowed")."""
    backend = getattr(plain(tokenizer), "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()


class Detokenizer:
    """Ids in, text out. ``feed`` returns what became complete, ``finish`` the rest (U+FFFD for broken UTF-8).

    Fast tokenizers decode through ``tokenizers``' own stream decoder; others through mlx-lm's streaming detokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = plain(tokenizer)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._ids: list[int] = []
        self._sent = ""
        self._naive: Any = None
        self._stream: Any = None
        if backend is not None:
            from tokenizers.decoders import DecodeStream

            self._backend = backend
            self._stream = DecodeStream(skip_special_tokens=False)
        else:
            from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

            self._naive = NaiveStreamingDetokenizer(self._tokenizer)

    def feed(self, token: int) -> str:
        self._ids.append(token)
        if self._naive is not None:
            self._naive.add_token(token)
            return self._naive.last_segment
        try:
            piece = self._stream.step(self._backend, token) or ""
        except Exception:  # an id outside the vocabulary (padded embeddings) has no text
            piece = ""
        self._sent += piece
        return piece

    def finish(self) -> str:
        if self._naive is not None:
            self._naive.finalize()
            return self._naive.last_segment
        whole = decode(self._tokenizer, self._ids)
        return whole[len(self._sent) :] if whole.startswith(self._sent) else ""


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The exact text of ``ids``, special tokens included, no clean-up of spaces."""
    inner = plain(tokenizer)
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is not None:
        return backend.decode(ids, skip_special_tokens=False)
    return inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopStrings:
    """Holds back what might be the start of a stop string and cuts the text before the first that is complete: of those
    that are complete at the same character, the longest."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        #: the stop string that was seen
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The part of what was fed so far that may be shown now; nothing once a stop string was seen."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(s), at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            _, at, self.hit = min(found)
            out, self._held = self._held[:at], ""
            return out
        keep = max((n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        """What was held back and turned out to be text."""
        out, self._held = self._held, ""
        return out
