"""The configuration: the fields of DeepSeek-V4's config.json, of Hugging Face's form of it, and those that mlx-lm's
``deepseek_v41`` has for the same things."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models import deepseek_v41 as v41

from ...errors import ModelError

#: the ratio whose windows overlap, and whose layers choose entries by an indexer; no other ratio does either
OVERLAPPING = 4
_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_CURE = "Check config.json; this runtime has DeepSeek-V4's architecture and no variants of it."


@dataclass
class ModelArgs(v41.ModelArgs):
    """Fields by their names in config.json; lengths in tokens. Raises ModelError for what the model cannot do."""

    model_type: str = "deepseek_v4"
    hidden_size: int = 4096
    num_hidden_layers: int = 43
    q_lora_rank: int = 1024
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    index_n_heads: int = 64
    rms_norm_eps: float = 1e-6
    #: the first layers, whose experts are looked up by token id
    num_hash_layers: int = 0
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    # the same in Hugging Face's form
    layer_types: list[str] | None = None
    compress_rates: dict[str, int] | None = None
    mlp_layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None

    #: the compressed layers' YaRN; empty for plain angles
    yarn: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        n = self.num_hidden_layers
        if self.layer_types is not None and not self.compress_ratios:
            rates = {**_LAYER_TYPES, **(self.compress_rates or {})}
            if rates["compressed_sparse_attention"] != OVERLAPPING:
                self._refuse(
                    "compress_rates", self.compress_rates, f"overlapping windows have a ratio of {OVERLAPPING}"
                )
            self.compress_ratios = tuple(rates.get(kind, -1) for kind in self.layer_types)
        # one more ratio may stand there, that of the prediction head
        ratios = tuple(int(ratio) for ratio in self.compress_ratios[:n])
        self.compress_ratios = ratios + (0,) * (n - len(ratios))
        if self.mlp_layer_types is not None:
            self.num_hash_layers = self.mlp_layer_types.count("hash_moe")
            if "hash_moe" in self.mlp_layer_types[self.num_hash_layers :]:
                self._refuse("mlp_layer_types", self.mlp_layer_types, "layers with hashed experts come first")
        if self.partial_rotary_factor is not None:
            self.qk_rope_head_dim = int(self.head_dim * self.partial_rotary_factor)
        self.yarn = self._yarn()
        self._check()

    @property
    def ratios(self) -> tuple[int, ...]:
        """By layer, tokens in an entry; 0: the layer has its window only."""
        return self.compress_ratios

    def _yarn(self) -> dict[str, Any]:
        found = self.rope_scaling or {}
        if self.rope_parameters is not None:
            parameters = self.rope_parameters
            self.rope_theta = parameters.get("main", parameters).get("rope_theta", self.rope_theta)
            found = parameters.get("compress", found)
            self.compress_rope_theta = found.get("rope_theta", self.compress_rope_theta)
        kind = found.get("rope_type", found.get("type", "default"))
        if kind not in ("yarn", "default"):
            self._refuse("rope_scaling", kind, "angles are scaled by YaRN or not at all")
        return found if kind == "yarn" else {}

    def _check(self) -> None:
        compressed = [i for i, ratio in enumerate(self.ratios) if ratio]
        indexed = [i for i, ratio in enumerate(self.ratios) if ratio == OVERLAPPING]
        for name, value, allowed in (
            ("kv_source_layer_ids", self.kv_source_layer_ids, compressed),
            ("index_source_layer_ids", self.index_source_layer_ids, indexed),
        ):
            if len(value) and sorted(value) != allowed:
                self._refuse(name, list(value), "each layer here makes its own entries and chooses for itself")
        for name, value, allowed in (
            ("candidate_source_layer_id", self.candidate_source_layer_id, (-1,)),
            ("num_key_value_heads", self.num_key_value_heads, (1,)),
            ("n_shared_experts", self.n_shared_experts, (1,)),
            ("hidden_act", self.hidden_act, ("silu",)),
            ("scoring_func", self.scoring_func, ("sqrtsoftplus", "sigmoid", "softmax")),
            ("attention_bias", self.attention_bias, (False,)),
            ("mlp_bias", self.mlp_bias, (False,)),
            ("tie_word_embeddings", self.tie_word_embeddings, (False,)),
        ):
            if value not in allowed:
                self._refuse(name, value, f"only {' or '.join(map(repr, allowed))} can be")
        if wrong := [ratio for ratio in self.ratios if ratio < 0 or ratio == 1]:
            self._refuse("compress_ratios", wrong[0], "an entry stands for two tokens or more; 0 is for none")
        if self.sliding_window < 2:
            self._refuse("sliding_window", self.sliding_window, "a query sees its own token and one before it at least")
        if self.num_attention_heads % self.o_groups:
            self._refuse("o_groups", self.o_groups, f"it divides the {self.num_attention_heads} heads")
        if indexed and self.index_topk < 1:
            self._refuse("index_topk", self.index_topk, "a query reads at least one entry")
        smallest = min(self.head_dim, self.index_head_dim) if indexed else self.head_dim
        if not 0 < self.qk_rope_head_dim <= smallest or self.qk_rope_head_dim % 2:
            self._refuse("qk_rope_head_dim", self.qk_rope_head_dim, f"it is even, and {smallest} at most")

    def _refuse(self, name: str, value: Any, why: str) -> None:
        raise ModelError(f"{name} is {value!r} in this DeepSeek-V4 config: {why}.", _CURE)
