"""LongRoPE (Phi-3 128k, Phi-4-mini): which of its two sets of factors the states are of.

vLLM takes the long ones for every token where `max_model_len` is above the original length, else the short ones
(`Phi3LongRoPEScaledRotaryEmbedding`); without a `max_model_len` it serves up to the original length
(`config/model.py`, `_get_and_verify_max_len`). transformers takes them by the longest sequence of a batch. States are
captured with those of serving, however long the samples are.
"""

from __future__ import annotations

from typing import Literal

from draftsmith.errors import RequestError
from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts

Factors = Literal["short", "long"]


def served_factors(recipe: Recipe, facts: TargetFacts) -> Factors | None:
    """Those that serving takes, or that `extract.engine_args.max_model_len` asks for; None without LongRoPE."""
    original = _original_tokens(facts)
    if original is None:
        return None
    chosen = (args.get("max_model_len") for args in (recipe.extract.engine_args, recipe.serve.engine_args))
    return "long" if int(next(filter(None, chosen), original)) > original else "short"


def model_tokens(recipe: Recipe, facts: TargetFacts, needed_tokens: int) -> int:
    """`max_model_len` of a capture: what is needed, and what makes the engine take the factors of serving.

    Raises:
        RequestError: serving ends where samples go on.
    """
    original = _original_tokens(facts)
    if original is None:
        return needed_tokens
    if served_factors(recipe, facts) == "long":
        return max(needed_tokens, original + 1)
    if needed_tokens > original:
        raise RequestError(
            f"samples need {needed_tokens:,} tokens, and vLLM serves this target up to {original:,}, with the short "
            "factors of its LongRoPE: the states of longer ones would be of other factors",
            where="serve.engine_args.max_model_len",
            hint=f"set it above {original}, which serves and captures every length with the long factors, or "
            f"prepare.max_length_tokens to {original - 2}, as the engine needs two tokens more",
        )
    return needed_tokens


def _original_tokens(facts: TargetFacts) -> int | None:
    scaling = facts.rope_scaling or {}
    return scaling.get("original_max_position_embeddings") if scaling.get("rope_type") == "longrope" else None
