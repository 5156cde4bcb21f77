"""The draft's shape, derived from the target before it is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from draftsmith import recipe
from draftsmith.errors import RequestError
from draftsmith.records import TargetFacts

# RoPE scalings that a Llama-style draft computes as every engine does. Others need what only the target's own
# attention has (YaRN's mscale inside MLA, sections of a multimodal position): the draft then uses plain RoPE.
PORTABLE_ROPE = ("default", "linear", "llama3", "yarn")
MLA_DRAFT_HEAD_DIM = 128


@dataclass(frozen=True)
class DraftConfig:
    """One Llama-style decoder layer over [embedding ; fused auxiliary states]. Names as in transformers."""

    vocab_size: int  # Vt: rows of the target's embedding, padding included
    draft_vocab_size: int  # Vd
    hidden_size: int  # H
    target_hidden_size: int  # Ht
    aux_layer_ids: tuple[int, ...]  # canonical, ascending
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise RequestError(
                "norm_before_fc and fc_norm exclude each other: one norm over all states, or one for each",
                where="train.draft",
                hint="set one of them to false",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise RequestError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads",
                where="train.draft",
                hint="the number of attention heads must be a multiple of that of key-value heads",
            )
        if self.head_dim % 2:
            raise RequestError(
                f"a head_dim of {self.head_dim} is odd, and RoPE turns pairs",
                where="train.draft",
                hint="give an even one",
            )
        if self.draft_vocab_size > self.vocab_size:
            raise RequestError(
                f"a draft vocabulary of {self.draft_vocab_size} exceeds the target's {self.vocab_size}", where="draft"
            )

    def rope_parameters(self) -> dict[str, Any]:
        """RoPE in the form of transformers 5."""
        return {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DraftConfig:
        return cls(**{**data, "aux_layer_ids": tuple(data["aux_layer_ids"])})


def draft_config(
    facts: TargetFacts, settings: recipe.Draft, draft_vocab_size: int | None, aux_layer_ids: tuple[int, ...]
) -> DraftConfig:
    """The draft for a target: its width, norm and RoPE; its heads too, unless its attention is MLA.

    Raises:
        RequestError: a fact that the shape depends on is missing; names the setting that replaces it.
    """
    heads, kv_heads, head_dim = _attention_shape(facts)
    return DraftConfig(
        vocab_size=_need(facts.vocab_size, "vocab_size"),
        draft_vocab_size=draft_vocab_size or _need(facts.vocab_size, "vocab_size"),
        hidden_size=_need(facts.hidden_size, "hidden_size"),
        target_hidden_size=_need(facts.hidden_size, "hidden_size"),
        aux_layer_ids=aux_layer_ids,
        intermediate_size=settings.intermediate_size or _need(facts.intermediate_size, "intermediate_size"),
        num_attention_heads=settings.num_attention_heads or _need(heads, "num_attention_heads"),
        num_key_value_heads=settings.num_key_value_heads or _need(kv_heads, "num_key_value_heads"),
        head_dim=settings.head_dim or _need(head_dim, "head_dim"),
        rms_norm_eps=facts.rms_norm_eps if facts.rms_norm_eps is not None else 1e-6,
        max_position_embeddings=facts.max_position_embeddings or 4096,
        rope_theta=facts.rope_theta if facts.rope_theta is not None else 10000.0,
        rope_scaling=facts.rope_scaling if rope_is_portable(facts.rope_scaling) else None,
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )


def rope_is_portable(scaling: dict[str, Any] | None) -> bool:
    """Whether a Llama-style draft can carry the target's RoPE scaling and mean the same by it in every engine."""
    if scaling is None:
        return True
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return kind in PORTABLE_ROPE and not scaling.get("mscale_all_dim") and "mrope_section" not in scaling


def _attention_shape(facts: TargetFacts) -> tuple[int | None, int | None, int | None]:
    """Heads, key-value heads and head size. MLA's head size says nothing of a Llama layer (pitfall 20): there, heads
    of 128 in a power of two of at least the hidden size, so that tensor parallelism divides them."""
    if facts.attention != "mla" or facts.hidden_size is None:
        return facts.num_attention_heads, facts.num_key_value_heads or facts.num_attention_heads, facts.head_dim
    heads = 1
    while heads * MLA_DRAFT_HEAD_DIM < facts.hidden_size:
        heads *= 2
    return heads, max(1, heads // 8), MLA_DRAFT_HEAD_DIM


def _need(value: int | None, name: str) -> int:
    if value is None:
        settable = name in recipe.Draft.model_fields
        raise RequestError(
            f"the target's configuration does not say {name}, which the draft's shape follows",
            where="train.draft",
            hint=f"set train.draft.{name}" if settable else f"write {name} into the target's config.json",
        )
    return value
