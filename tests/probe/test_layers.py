"""Every convention of layer ids, shown on a stack of real layers in which layer i adds 2**i to the residual stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import RequestError, TargetError
from draftsmith.layers import (
    default_aux_layer_ids,
    from_sglang,
    from_specforge,
    to_sglang,
    validate_layer_ids,
)

N = 8


def canonical_state(id: int) -> float:
    """The residual stream after layers 0 … id-1, from an embedding of zeros."""
    return float(2**id - 1)


@pytest.fixture(scope="module")
def stack(tiny_target: Path) -> torch.nn.Module:
    """The Llama of transformers, whose own forward runs layers that add 2**i."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Adds(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states + 2.0**self.self_attn.layer_idx

    model = LlamaForCausalLM.from_pretrained(tiny_target).eval()
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    for index in range(N):
        model.model.layers[index] = Adds(model.config, index)
    return model


def test_canonical_ids_are_transformers_indices_below_the_last(stack: torch.nn.Module) -> None:
    with torch.no_grad():
        states = stack(torch.zeros(1, 3, dtype=torch.long), output_hidden_states=True).hidden_states
    assert len(states) == N + 1
    for index in range(N):
        assert states[index].unique().tolist() == [canonical_state(index)]


def test_the_last_entry_of_transformers_is_after_the_norm(stack: torch.nn.Module) -> None:
    seen = []
    hook = stack.model.layers[N - 1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        states = stack(torch.zeros(1, 3, dtype=torch.long), output_hidden_states=True).hidden_states
    hook.remove()
    assert seen[0].unique().tolist() == [canonical_state(N)]
    assert states[N].unique().tolist() != [canonical_state(N)]


def engine_capture(ids: tuple[int, ...]) -> list[float]:
    """What the engines' loop keeps for internal ids: the stream before layer `id`, or after the last one
    (vLLM `models/llama.py`, SGLang `layers_to_capture`)."""
    stream, kept = 0.0, []
    for index in range(N):
        if index in ids:
            kept.append(stream)
        stream += 2.0**index
    return [*kept, stream] if N in ids else kept


def test_ids_of_layers_whose_output_is_read_are_one_less() -> None:
    """SGLang's setter, and SpecForge, name the layer whose output they take: layer i ends at 2**(i+1) - 1."""
    outputs = [sum(2.0**j for j in range(i + 1)) for i in range(N)]
    for explicit in range(N):
        (id,) = from_sglang([explicit])
        assert engine_capture((id,)) == [outputs[explicit]] == [canonical_state(id)]
        assert to_sglang([id]) == (explicit,)
        assert from_specforge([explicit]) == (id,)


def test_the_default_is_the_engines_own() -> None:
    """(2, N//2, N-3) as vLLM's and SGLang's defaults; SpecForge writes [1, N//2-1, N-4] for the same layers."""
    for layers in (16, 28, 30, 32, 36, 48, 61, 94):
        ids = default_aux_layer_ids(layers)
        assert ids == (2, layers // 2, layers - 3)
        assert to_sglang(ids) == (1, layers // 2 - 1, layers - 4)


@pytest.mark.parametrize("layers", range(13))
def test_defaults_are_distinct_ascending_and_inside_or_refused(layers: int) -> None:
    if layers < 4:
        with pytest.raises(TargetError, match=f"has {layers} decoder layers"):
            default_aux_layer_ids(layers)
    else:
        low, middle, high = default_aux_layer_ids(layers)
        assert 1 <= low < middle < high <= layers - 1


@given(st.integers(4, 500))
def test_defaults_always_pass_validation(layers: int) -> None:
    ids = default_aux_layer_ids(layers)
    assert validate_layer_ids(ids, layers) == ids


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([2, 4, 8], r"layer id 8 is not in 1 … 7"),
        ([0, 4, 5], r"layer id 0 is not in"),
        ([-1, 4, 5], r"layer id -1 is not in"),
        ([5, 4, 2], r"not ascending"),
        ([2, 2, 5], r"distinct"),
        ([], r"no auxiliary layer ids"),
    ],
)
def test_wrong_ids_are_refused_by_name(ids: list[int], told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        validate_layer_ids(ids, N)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_any_number_of_ids_may_be_chosen() -> None:
    assert validate_layer_ids([7], N) == (7,)
    assert validate_layer_ids([1, 2, 3, 4, 5], N) == (1, 2, 3, 4, 5)
