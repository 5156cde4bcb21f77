"""The EAGLE-3 draft: one decoder layer that reads a token's embedding beside the target's fused state before it.

    aux [S, A, Ht] ─(norm)─ fc ─→ hidden [S, H] ─┐                       ┌─ norm ─ lm_head → logits [S, Vd]
                                                 ├─ layer ─→ out [S, H] ─┤
    next token ─ embed_tokens → embeds [S, H] ───┘                       └─ fed back as `hidden` of the next step

Li et al., EAGLE-3, arXiv 2503.01840. Parameter names are those of vLLM's and speculators' checkpoints
(vLLM `model_executor/models/llama_eagle3.py`), so that a state dict is an export.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from draftsmith.draft.config import DraftConfig
from draftsmith.target import TargetHead

# Queries [S, heads, d], keys and values [S, kv_heads, d] of one step → [S, heads, d].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: [S, d]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class DraftAttention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """[S, 2H] → [S, H]"""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = attend(rotate(query, rotation), rotate(key, rotation), value)
        return self.o_proj(attended.flatten(-2))


class DraftMLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = DraftMLP(config)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """[S, H], [S, H] → [S, H], before the final norm."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        state = residual + self.self_attn(both, rotation, attend)
        return state + self.mlp(self.post_attention_layernorm(state))


class Draft(nn.Module):
    """The draft with its embedding (the target's, frozen) and its vocabulary map.

    Buffers `d2t` [Vd] int64 (target id = i + d2t[i]) and `t2d` [Vt] bool exist only where Vd < Vt.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        fused_size = len(config.aux_layer_ids) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.requires_grad_(False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layer_ids
            )
        self.fc = nn.Linear(fused_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.inv_freq, self.rope_scale = rope_frequencies(config)  # no buffer: a cast of the draft must not round it
        if self.has_vocab_map:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def has_vocab_map(self) -> bool:
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Target ids of the draft's vocabulary, ascending: [Vd] int64. None where it is the whole vocabulary."""
        if not self.has_vocab_map:
            return None
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the draft's vocabulary → ids of the target's."""
        return draft_ids + self.d2t[draft_ids] if self.has_vocab_map else draft_ids

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """The target's auxiliary states as the draft's first hidden state: [..., A, Ht] → [..., H]."""
        if self.config.fc_norm:
            aux = torch.stack([norm(aux[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        fused = aux.flatten(-2)
        return self.fc(self.input_norm(fused) if self.config.norm_before_fc else fused)

    def step(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the layer.

        Args:
            token_ids: [S] target ids of the token after each slot.
            hidden: [S, H] fused target states, or what the step before fed back.
            position: [S] RoPE positions.

        Returns:
            (what to feed back, what `lm_head` reads), both [S, H].
        """
        embeds = self.embed_tokens(token_ids).to(hidden.dtype)
        out = self.layers[0](embeds, hidden, self.rotation(position, hidden.dtype), attend)
        normed = self.norm(out)
        return (normed if self.config.norm_output else out), normed

    def rotation(self, position: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin of RoPE: [S] → 2 × [S, d]."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angle = position.to(wide)[:, None] * self.inv_freq.to(position.device, wide)
        angle = torch.cat([angle, angle], dim=-1)
        return (angle.cos() * self.rope_scale).to(dtype), (angle.sin() * self.rope_scale).to(dtype)

    @torch.no_grad()
    def initialise(self, head: TargetHead, draft_ids: list[int] | None, seed: int) -> None:
        """Start from what the target knows (docs/decisions/0002).

        The embedding is its own; the head and last norm are its head's, for the draft's vocabulary; `fc` hands on the
        deepest auxiliary state, from which that head reads a sensible word already. The rest is drawn from
        N(0, 0.02²), and what the layer adds to the residual stream a tenth of it, so that it starts almost silent.
        `draft_ids` ascends; None means the whole vocabulary.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("_proj.weight") or name == "fc.weight":
                scale = 0.002 if name.endswith(("o_proj.weight", "down_proj.weight")) or name == "fc.weight" else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if self.config.hidden_size == self.config.target_hidden_size:
            self.fc.weight[:, -self.config.hidden_size :] += torch.eye(self.config.hidden_size)
        self.embed_tokens.weight.copy_(head.embedding)
        rows = head.lm_head if draft_ids is None else head.lm_head[torch.tensor(draft_ids, device=head.lm_head.device)]
        self.lm_head.weight.copy_(rows)
        if head.norm.kind == "rms":
            self.norm.weight.copy_(head.norm.weight)
        elif head.norm.kind == "rms_plus_one":
            self.norm.weight.copy_(1.0 + head.norm.weight)
        if draft_ids is not None:
            ids = torch.tensor(draft_ids)
            self.d2t.copy_(ids - torch.arange(len(ids)))
            self.t2d.zero_()
            self.t2d[ids] = True


def rope_frequencies(config: DraftConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [d/2] and the factor on cos and sin, from transformers' own table of RoPE kinds."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    table = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=config.rope_parameters(),
        )
    )
    return table.inv_freq.detach().clone(), float(table.attention_scaling)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """RoPE in the half-split layout of Llama: [S, heads, d] → [S, heads, d]."""
    cos, sin = (part[:, None] for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
