"""Layer ids: the one canonical meaning, and every other convention by name.

Canonical id `a` is the residual stream after `a` decoder layers, which is the input of 0-based layer `a`, before any
norm; `a = N` is the last hidden state before the final norm. vLLM's `aux_hidden_state_layers` and speculators'
`eagle_aux_hidden_state_layer_ids` have this meaning (vLLM `model_executor/models/interfaces.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.errors import RequestError, TargetError


def default_aux_layer_ids(num_hidden_layers: int) -> tuple[int, ...]:
    """The low, middle and high id that EAGLE-3 reads: 2, N//2, N-3, as in the reference and both engines.

    Those coincide below 7 layers, where 1, N//2, N-1 are taken.

    Raises:
        TargetError: fewer than 4 layers, which have no three states between embedding and last state.
    """
    n = num_hidden_layers
    if n < 4:
        raise TargetError(
            f"has {n} decoder layers; three distinct auxiliary states between its embedding and its last state need 4",
            where="layer ids",
            hint="set extract.aux_layer_ids to fewer ids",
        )
    return (2, n // 2, n - 3) if n >= 7 else (1, n // 2, n - 1)


def validate_layer_ids(ids: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """The ids, if they are canonical auxiliary ids of such a model: ascending, distinct, in 1 … N-1.

    Engines sort ids and drop duplicates, so that any other order would meet the wrong columns of `fc`.

    Raises:
        RequestError: names the id that does not fit.
    """
    hint = "ids count the decoder layers that were applied; SGLang, SpecForge and DFlash write one less"
    if not ids:
        raise RequestError("no auxiliary layer ids are given", where="extract.aux_layer_ids", hint=hint)
    for id in ids:
        if not 1 <= id < num_hidden_layers:
            raise RequestError(
                f"layer id {id} is not in 1 … {num_hidden_layers - 1} of a model of {num_hidden_layers} layers",
                where="extract.aux_layer_ids",
                hint=hint,
            )
    if list(ids) != sorted(set(ids)):
        raise RequestError(
            f"layer ids {list(ids)} are not ascending and distinct",
            where="extract.aux_layer_ids",
            hint=f"write {sorted(set(ids))}: engines sort ids and drop duplicates",
        )
    return tuple(ids)


def from_sglang(ids: Sequence[int]) -> tuple[int, ...]:
    """SGLang's explicit ids name the layer whose output is read: its `set_eagle3_layers_to_capture` adds 1."""
    return tuple(id + 1 for id in ids)


def to_sglang(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(id - 1 for id in ids)


def from_specforge(ids: Sequence[int]) -> tuple[int, ...]:
    """SpecForge hands the ids of `eagle_config` to SGLang's setter."""
    return from_sglang(ids)
