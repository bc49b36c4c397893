"""Why a legacy file is not imported: one code a file, with what it means to a person."""

from __future__ import annotations

from pathlib import Path

#: code -> what it means
REASONS = {
    # the file
    "NAME": "the name is not that of a cache block",
    "NOT_A_FILE": "it is a link, a folder or a device, not a regular file",
    "UNREADABLE": "it cannot be read",
    "CHANGED": "it changed while it was read",
    "TOO_SMALL": "it is too small to be a safetensors file",
    "HEADER_LENGTH": "its header is longer than the file, or than any header is",
    "HEADER_JSON": "its header is not the JSON of a safetensors file",
    "OFFSETS": "its tensors overlap, leave gaps, are out of order or end elsewhere than the file",
    "HOLE": "its end is all zeros: it was never written, as after a loss of power",
    "SIZES": "a tensor's dtype and shape do not fit its bytes",
    # what it says of itself
    "TOO_OLD": "its format version is from before buffers were cut to their rows",
    "TOO_NEW": "its format version is newer than what is known",
    "TURBOQUANT": "it holds TurboQuant-compressed rows",
    "SIDECAR": "its recurrent state is kept in a sidecar file of a newer format",
    "HASH": "its name, its block hash and the hash of its tokens are not the same",
    "EXTRA_KEYS": "its hash covers more than text tokens: images, or the static prompt of another way of prefilling",
    "MODEL": "it was stored for another model",
    "COUNTS": "its numbers of layers, types or tokens do not fit each other",
    "BLOCK_SIZE": "its block size is not that of its chain",
    "TENSORS": "tensors are missing, doubled or unknown",
    "FORM": "it is no prompt cache in a form that mlx-lm has written",
    "TRIMMED": "it was written by a version that drops rows while they are still attended to",
    "ELEMENTS": "a number of state elements or members in it is not from 1 to 16",
    "MARKERS": "a marker of an empty or absent array is not one",
    "CLASS": "it holds a cache class that has no state kind",
    "LAYOUT": "its layers are not those of the model",
    "SHAPE": "a tensor has another shape than the model's state",
    "DTYPE": "a tensor has another dtype than the model's state",
    "NOT_FINITE": "it holds NaN or infinity",
    # its place in a chain
    "OVER_ADVANCED": "it holds more rows than its chain has tokens, so its state stands too far on",
    "SHORT": "it holds fewer rows than its tokens",
    "MIXED": "its chain mixes cumulative and per-member blocks",
    "CHAIN": "it hangs on a block that is missing or refused",
    "OTHER_ROWS": "its first rows are not those of the blocks before it",
    "NO_PROVENANCE": "nothing in it proves at which token its recurrent state stands",
    "SLOTS": "it holds another number of state slots than the model",
    "PADDED": "its recurrent state is that of a padded batch",
    "WINDOW": "a sliding window in it does not end where its tokens end",
    "NO_STATE": "it holds no state to resume from, and no rows that others need",
    # what is not known
    "NO_TOKENS": "its tokens are not known",
    "NO_CONSENT": "the file cannot say which weights made it, and nobody has vouched for them",
    "NO_PROOF": "nothing in it can be compared with the prompt",
    "PROMPT": "it was not made from this prompt",
    "NUMERICS": "it was computed with other numerics, and this mode promises the bits",
    "WEIGHTS": "its first tokens have other rows in upper layers than these weights give",
    "STATE": "a layer below the rows that were compared holds something else than the prompt gives",
    "HEAD": "the model's MTP head needs rows that the file does not have",
}


class Refused(Exception):
    """A legacy file, or what hangs on it, is not imported. ``code`` is a key of REASONS, ``detail`` says what was
    found, ``path`` which file it is."""

    def __init__(self, code: str, detail: str = "", path: Path | None = None) -> None:
        assert code in REASONS, code
        super().__init__(f"{code}: {detail or REASONS[code]}")
        self.code, self.detail, self.path = code, detail or REASONS[code], path
