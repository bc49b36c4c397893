"""The demo model in PyTorch: transformers' Qwen3.5 text body and an MTP head written from its equations.

With h_t the body's last hidden state after the final norm and E the shared embedding:
    x_t = fc([RMSNorm(E[tok_t+1]), RMSNorm(h_t)]),  m_t = RMSNorm(layer(x_t)),  logits for tok_t+2 = E m_t
and a further draft feeds (m_t, tok_t+2). All norm weights are stored as w - 1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

THETA, PARTIAL = 10000.0, 0.25


def text_config(hidden: int = 128, intermediate: int = 384, layers: int = 8, vocab: int = 2048) -> Qwen3_5TextConfig:
    """The demo model's body; every size but hidden, intermediate and layers is fixed."""
    return Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        full_attention_interval=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": PARTIAL,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        eos_token_id=2,
        pad_token_id=None,
        use_cache=False,
    )


class Norm(nn.Module):
    """RMSNorm whose stored weight is w - 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).type_as(x)


def rope(x: Tensor, position: Tensor) -> Tensor:
    """Rotates the first quarter of the last axis; ``x`` [B, n, T, d], ``position`` [T]."""
    d = int(x.shape[-1] * PARTIAL)
    freq = THETA ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    angle = position[:, None].float() * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., : d // 2], x[..., d // 2 : d], x[..., d:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Gated full attention of the head's layer."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.n, self.k, self.d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, 2 * self.n * self.d, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.k * self.d, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.k * self.d, bias=False)
        self.o_proj = nn.Linear(self.n * self.d, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(self.d), Norm(self.d)

    def forward(self, x: Tensor, position: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple]:
        """``past`` None: causal over ``x``. Else every row sees the past entries before its own, and itself."""
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, self.n, 2 * self.d).chunk(2, -1)
        q = rope(self.q_norm(q).transpose(1, 2), position)
        k = rope(self.k_norm(self.k_proj(x).view(b, t, self.k, self.d)).transpose(1, 2), position)
        v = self.v_proj(x).view(b, t, self.k, self.d).transpose(1, 2)
        kn, vn = (y.repeat_interleave(self.n // self.k, 1) for y in (k, v))
        if past is None:
            out = F.scaled_dot_product_attention(q, kn, vn, is_causal=True)
        else:
            pk, pv = (y.repeat_interleave(self.n // self.k, 1) for y in past)
            score = q @ pk.transpose(-1, -2) / math.sqrt(self.d)
            late = torch.ones(t, pk.shape[2], dtype=torch.bool).triu(1)  # past entry j holds position j, row s is s + 1
            score = score.masked_fill(late, -torch.inf)
            own = (q * kn).sum(-1, keepdim=True) / math.sqrt(self.d)
            p = torch.cat([score, own], -1).float().softmax(-1).to(v.dtype)
            out = p[..., :-1] @ pv + p[..., -1:] * vn
        out = out.transpose(1, 2).reshape(b, t, -1) * torch.sigmoid(gate.reshape(b, t, -1))
        return self.o_proj(out), (k, v)


class Mlp(nn.Module):
    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden_size), Norm(c.hidden_size)

    def forward(self, x: Tensor, position: Tensor, past: tuple | None) -> tuple[Tensor, tuple]:
        y, kv = self.self_attn(self.input_layernorm(x), position, past)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class MtpHead(nn.Module):
    """One-layer MTP head; parameter names are those of the checkpoint below ``mtp.``."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(c)])
        self.norm = Norm(c.hidden_size)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(c.hidden_size), Norm(c.hidden_size)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=c.initializer_range)

    def forward(
        self, embedded: Tensor, hidden: Tensor, start: int = 0, past: tuple | None = None
    ) -> tuple[Tensor, tuple]:
        """``embedded`` and ``hidden`` [B, T, H] -> (m [B, T, H], keys and values of these entries)."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        position = torch.arange(start, start + x.shape[1])
        x, kv = self.layers[0](x, position, past)
        return self.norm(x), kv


class DemoModel(nn.Module):
    """Body, tied head and MTP head."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.config = config
        self.body = Qwen3_5TextModel(config)
        self.mtp = MtpHead(config)
        with torch.no_grad():  # time steps of 0.001 to 0.1, so that a fresh layer forgets slowly
            for layer in self.body.layers:
                if hasattr(layer, "linear_attn"):
                    d = layer.linear_attn
                    d.A_log.copy_(torch.empty_like(d.A_log).uniform_(1, 16).log())
                    dt = torch.exp(torch.empty_like(d.dt_bias).uniform_(math.log(1e-3), math.log(0.1)))
                    d.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def hidden(self, ids: Tensor) -> Tensor:
        """``ids`` [B, T] -> hidden states after the final norm [B, T, H]."""
        return self.body(input_ids=ids, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the tied head."""
        return F.linear(hidden, self.body.embed_tokens.weight)

    def drafts(self, ids: Tensor, hidden: Tensor, steps: int = 2) -> list[Tensor]:
        """Hidden states of the first and second draft: entry i has m for tok_i+2 (second: tok_i+3)."""
        embedded = self.body.embed_tokens(ids)
        first, kv = self.mtp(embedded[:, 1:], hidden[:, :-1])
        if steps == 1:
            return [first]
        second, _ = self.mtp(embedded[:, 2:], first[:, :-1], 1, kv)
        return [first, second]
