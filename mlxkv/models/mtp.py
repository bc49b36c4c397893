"""Multi-token-prediction heads of the Qwen3.5 layout: found, read with the right norms, and run beside their body.

    x_t = fc([RMSNorm_e(E[tok_{t+1}]), RMSNorm_h(h_t)]),   m_t = RMSNorm(layer_0(x_t)),   logits for tok_{t+2} = E' m_t

with h_t the body's hidden state after its final norm, E the shared embedding and E' the shared output matrix (vLLM's
qwen3_next_mtp.py and transformers' MtpLayer agree). mlx-lm drops ``mtp.*`` when it loads; this reads them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.base import create_attention_mask

from . import folder

PREFIX = "mtp."


class MTPHead(nn.Module):
    """One full-attention decoder layer between two norms and a projection; the body's matrices are not part of it."""

    def __init__(self, args: qwen3_5.TextModelArgs) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.norm = nn.RMSNorm(size, eps=eps)
        # the layer of an index that ends an interval is the one with full attention
        self.layers = [qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)]

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """``embedded`` (of the following tokens) and ``hidden`` [1, n, H] -> m [1, n, H]; ``cache`` grows by n rows."""
        x = mx.concatenate([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], axis=-1)
        mask: Any = create_attention_mask(x, cache)
        return self.norm(self.layers[0](self.fc(x), mask, cache))


@dataclass(frozen=True)
class Found:
    """What a folder says of a head. ``shifted``: norms are stored as w − 1. ``reason``: why it is not used, or ''."""

    names: tuple[str, ...]
    shifted: bool
    reason: str

    @property
    def usable(self) -> bool:
        return bool(self.names) and not self.reason


def find(path: Path, config: dict[str, Any]) -> Found:
    """Look for a head in the headers of a folder's weight files; reads no tensor."""
    shapes: dict[str, list[int]] = {}
    for file in folder.weight_files(path):
        shapes |= {n: e["shape"] for n, e in folder.read_header(file).items() if n != "__metadata__"}
    names = tuple(sorted(n for n in shapes if n.startswith(PREFIX)))
    if not names:
        return Found((), False, "")
    text = config.get("text_config", config)
    if config.get("model_type") not in ("qwen3_5", "qwen3_5_moe"):
        return Found(names, False, f"heads of {config.get('model_type')} are not supported")
    if text.get("num_experts", 0) or any(".experts." in n for n in names):
        return Found(names, False, "heads with experts are not supported")
    if any(n.endswith((".scales", ".biases")) for n in names):
        return Found(names, False, "quantised heads are not supported")
    if any(n.startswith("mtp.layers.1.") for n in names):
        return Found(names, False, "heads of more than one layer are not supported")
    convolutions = [shape for n, shape in shapes.items() if n.endswith("conv1d.weight")]
    if not convolutions:
        return Found(names, False, "the file does not show how its norms are stored")
    # Checkpoints of the original layout keep convolutions as [channels, 1, width] and norms as w − 1. A converted one
    # has moved axes, and whether its head was converted too cannot be seen.
    if any(shape[-1] == 1 for shape in convolutions):
        return Found(names, False, "the checkpoint was converted; whether its head was too cannot be seen")
    return Found(names, True, "")


def load(path: Path, config: dict[str, Any], dtype: mx.Dtype) -> MTPHead | None:
    """The head of a folder, evaluated in ``dtype``; None if there is none that can be used (``find`` says why)."""
    found = find(path, config)
    if not found.usable:
        return None
    weights: dict[str, mx.array] = {}
    for file in folder.weight_files(path):
        tensors = mx.load(str(file))
        weights |= {n.removeprefix(PREFIX): t for n, t in tensors.items() if n in found.names}  # type: ignore[union-attr]
    if found.shifted:
        weights = {n: w.astype(mx.float32) + 1.0 if w.ndim == 1 else w for n, w in weights.items()}
    head = MTPHead(qwen3_5.TextModelArgs.from_dict(config.get("text_config", config)))
    head.load_weights([(n, w.astype(dtype)) for n, w in weights.items()])
    head.eval()
    mx.eval(head.parameters())
    return head


class WithHead:
    """A Qwen3.5 model and its head as one callable for prefill and decoding.

    ``cache`` is the body's cache list and, last, a ``HeadCache`` that is shown each hidden state and the token it came
    from. The head itself runs when that cache catches up.
    """

    def __init__(self, model: Any, head: MTPHead) -> None:
        self.model, self.head = model, head
        self._text = model.language_model

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """``ids`` [1, n] -> logits [1, n, V]."""
        hidden = self._text.model(ids, cache[:-1])
        cache[-1].observe(ids, hidden)
        return self.logits(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [1, n, V] of the shared output matrix, for hidden states of the body or of the head."""
        if self._text.args.tie_word_embeddings:
            return self._text.model.embed_tokens.as_linear(hidden)
        return self._text.lm_head(hidden)

    def runner(self) -> Callable[[mx.array, mx.array, Any], mx.array]:
        """(tokens [1, n], hidden [1, n, H], key/value cache) -> m [1, n, H]."""
        return lambda tokens, hidden, cache: self.head(self._text.model.embed_tokens(tokens), hidden, cache)
