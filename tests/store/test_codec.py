import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.store.codec import CODECS

floats = st.floats(width=32, allow_nan=False)


def as_tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(floats, min_size=4, max_size=4), min_size=1, max_size=5))
def test_fp32_returns_every_value_bit_for_bit(rows: list[list[float]]) -> None:
    states = as_tensor(rows)
    codec = CODECS["fp32"]
    back = codec.decode(codec.encode(states))
    assert torch.equal(back.view(torch.int32), states.view(torch.int32))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(floats, min_size=4, max_size=4), min_size=1, max_size=5))
def test_bf16_returns_states_computed_in_bf16_bit_for_bit(rows: list[list[float]]) -> None:
    states = as_tensor(rows).to(torch.bfloat16)
    codec = CODECS["bf16"]
    back = codec.decode(codec.encode(states))
    assert torch.equal(back.view(torch.int16), states.view(torch.int16))


def test_bf16_is_within_half_a_unit_in_the_last_place_of_float32() -> None:
    states = torch.randn(64, 3, 16) * 100
    codec = CODECS["bf16"]
    error = (codec.decode(codec.encode(states)).float() - states).abs()
    assert (error <= states.abs() * 2.0**-8).all()


@pytest.mark.parametrize("name", sorted(CODECS))
def test_any_span_of_tokens_decodes_alone(name: str) -> None:
    states = torch.randn(20, 3, 16)
    codec = CODECS[name]
    parts = codec.encode(states)
    span = codec.decode({part: values[5:9] for part, values in parts.items()})
    assert torch.equal(span, codec.decode(parts)[5:9])


@pytest.mark.parametrize("name", sorted(CODECS))
def test_vector_bytes_is_what_the_parts_hold(name: str) -> None:
    codec = CODECS[name]
    parts = codec.encode(torch.randn(20, 3, 16))
    assert sum(values.nbytes for values in parts.values()) == 20 * 3 * codec.vector_bytes(16)
