from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftsmith.errors import RequestError, StoreError
from draftsmith.store.codec import CODECS, decode_fp8, decode_int8, encode_fp8, encode_int8
from draftsmith.store.shards import Store
from draftsmith.store.sizes import STATE_BYTES
from draftsmith.store.writer import StoreWriter
from tests.store.random_store import assert_same, features, in_bf16, largest_error, manifest, write_store

SPANS_OF_TOKENS = sorted(name for name, codec in CODECS.items() if not codec.ragged)


@st.composite
def states_of(draw: st.DrawFn, values: st.SearchStrategy[int]) -> torch.Tensor:
    """[T, Ht] or [T, A, Ht] bfloat16 of these bit patterns."""
    shape = draw(st.sampled_from([(0, 4), (1, 1), (3, 4), (0, 3, 4), (1, 3, 1), (5, 3, 4), (2, 1, 7)]))
    count = int(np.prod(shape))
    patterns = draw(st.lists(values, min_size=count, max_size=count))
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(shape)


def anything() -> st.SearchStrategy[int]:
    """NaNs of every payload, infinities, subnormals, -0.0."""
    return st.integers(0, 0xFFFF)


def ordinary() -> st.SearchStrategy[int]:
    """Bits of finite numbers from 2^-40 to 2^40, and zeros."""
    exponent, rest = st.integers(127 - 40, 127 + 40), st.integers(0, 0x80FF)
    return st.one_of(st.sampled_from([0, 0x8000]), st.builds(lambda e, r: (r & 0x807F) | e << 7, exponent, rest))


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("name", ["bf16", "lossless"])
@settings(max_examples=60, deadline=None)
@given(states=states_of(anything()))
def test_every_bit_pattern_of_bf16_comes_back(name: str, states: torch.Tensor) -> None:
    codec = CODECS[name]
    back = codec.decode(codec.encode(states))
    assert back.shape == states.shape
    assert back.dtype == torch.bfloat16
    assert same_bits(back, states)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), min_size=4, max_size=4), min_size=1, max_size=5))
def test_fp32_returns_every_value_bit_for_bit(rows: list[list[float]]) -> None:
    states = torch.tensor(rows, dtype=torch.float32)
    codec = CODECS["fp32"]
    assert torch.equal(codec.decode(codec.encode(states)).view(torch.int32), states.view(torch.int32))


def test_bf16_is_within_half_a_unit_in_the_last_place_of_float32() -> None:
    states = torch.randn(64, 3, 16) * 100
    codec = CODECS["bf16"]
    error = (codec.decode(codec.encode(states)).float() - states).abs()
    assert (error <= states.abs() * 2.0**-8).all()


@settings(max_examples=60, deadline=None)
@given(states_of(ordinary()))
def test_fp8_is_within_half_a_unit_in_its_last_place(states: torch.Tensor) -> None:
    back, exact = decode_fp8(encode_fp8(states)).float(), states.float()
    if not states.numel():
        assert back.shape == exact.shape
        return
    largest = exact.abs().amax(-1, keepdim=True)
    # 3 bits of mantissa; the smallest step is 2^-9 of the scale, and the scale is under 2/448 of the largest value
    assert ((back - exact).abs() <= torch.maximum(exact.abs() * 2.0**-4, largest * 2.0**-9 / 448)).all()


@pytest.mark.parametrize(("name", "beyond"), [("fp8", torch.inf), ("int8", 2.0**119)])
@settings(max_examples=60, deadline=None)
@given(states=states_of(anything()))
@example(states=torch.tensor([[3.2965e38]]).bfloat16())  # which e4m3 rounds up, beyond what bfloat16 holds
@example(states=torch.full((2, 64), 2.0**118).bfloat16())
@example(states=torch.full((2, 64), torch.finfo(torch.bfloat16).max).bfloat16())
@example(states=torch.cat([torch.full((3, 64), torch.nan), torch.ones(3, 64)], dim=1).bfloat16())
def test_a_state_that_is_not_finite_becomes_nan_and_no_other(name: str, beyond: float, states: torch.Tensor) -> None:
    back = CODECS[name].decode(CODECS[name].encode(states))
    assert not back.isinf().any()
    assert back[(states.abs() < beyond).all(dim=-1)].isfinite().all()
    assert back[~states.isfinite().all(dim=-1)].isnan().all()


@settings(max_examples=60, deadline=None)
@given(states_of(ordinary()))
@example(torch.tensor([[446.0, 2.0**-9]]).bfloat16())  # the largest value rounds to the largest that e4m3 has
def test_fp8_changes_nothing_the_second_time(states: torch.Tensor) -> None:
    once = decode_fp8(encode_fp8(states))
    assert torch.equal(decode_fp8(encode_fp8(once)), once)


@pytest.mark.parametrize("width", [1, 7, 16, 64, 96, 192])
def test_int8_is_within_half_a_step_of_the_largest_that_a_block_turned_by_hadamard_has(width: int) -> None:
    states = (torch.randn(50, 3, width) ** 3).bfloat16()
    size = gcd(width, 64)
    turn = torch.tensor([[(-1.0) ** (i & j).bit_count() for i in range(size)] for j in range(size)]) / size**0.5
    blocks = states.float().unflatten(-1, (-1, size)) @ turn
    back = decode_int8(encode_int8(states)).float().unflatten(-1, (-1, size)) @ turn
    step = blocks.abs().amax(-1, keepdim=True) / 127
    rounding = 2.0**-8 * blocks.norm(dim=-1, keepdim=True)  # of the scale, and of what is decoded, to bfloat16
    assert ((back - blocks).abs() <= 0.5 * step + rounding).all()


def test_int8_is_four_times_as_close_as_fp8_even_beside_channels_that_tower_above_the_rest() -> None:
    states = torch.randn(500, 3, 576)
    states[..., [17, 300]] *= 100
    by_int8, by_fp8 = (
        largest_error(CODECS[name].decode(CODECS[name].encode(states)), states.bfloat16()) for name in ("int8", "fp8")
    )
    assert by_int8 < 0.008
    assert by_int8 < by_fp8 / 4


def test_fp8_decodes_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # NaN, which is never written: the scale says it
    scale = torch.tensor([2.0**-5], dtype=torch.bfloat16)
    (ours,) = decode_fp8({"": codes.view(torch.float8_e4m3fn)[None], "scale": scale})
    assert same_bits(ours, (codes.view(torch.float8_e4m3fn).float() * 2.0**-5).bfloat16())


@pytest.mark.parametrize(("name", "error"), [("fp8", 0.04), ("int8", 0.01)])
def test_small_tokens_and_layers_are_kept_beside_large_ones(name: str, error: float) -> None:
    states = torch.randn(20, 3, 64) * torch.logspace(-6, 6, 20).view(20, 1, 1) * torch.tensor([1e-3, 1, 1e3]).view(3, 1)
    assert largest_error(CODECS[name].decode(CODECS[name].encode(states)).float(), states) < error


def test_lossless_is_well_under_the_size_of_bf16() -> None:
    states = (torch.randn(256, 3, 512) * torch.tensor([0.1, 1, 30]).view(3, 1)).bfloat16()
    size = sum(values.nbytes for values in CODECS["lossless"].encode(states).values())
    assert size <= 0.75 * states.nbytes
    assert size == pytest.approx(256 * 3 * STATE_BYTES["lossless"](512), rel=0.05)


def test_lossless_refuses_what_it_would_round() -> None:
    with pytest.raises(StoreError, match=r"torch\.float32"):
        CODECS["lossless"].encode(torch.randn(3, 4))


def test_a_lossless_store_of_a_target_that_computes_in_float32_is_not_begun(tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("run") / "store"
    with (
        pytest.raises(RequestError, match="lossless holds states in bfloat16, and the target computes in float32"),
        StoreWriter.open(folder, manifest(codec="lossless"), 1),
    ):
        pass
    assert not folder.exists()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(20, 3, 64), (20, 64), (5000, 96), (0, 3, 8)])
def test_states_are_decoded_in_the_memory_that_is_given_as_in_new(name: str, shape: tuple[int, ...]) -> None:
    codec = CODECS[name]
    parts = codec.encode(torch.randn(shape).bfloat16())
    into = torch.full(shape, 7.0, dtype=codec.decoded)
    assert codec.decode(parts, into) is into
    assert torch.equal(into, codec.decode(parts))


@pytest.mark.parametrize("name", SPANS_OF_TOKENS)
def test_any_span_of_tokens_decodes_alone(name: str) -> None:
    states = torch.randn(20, 3, 16)
    codec = CODECS[name]
    parts = codec.encode(states)
    span = codec.decode({part: values[5:9] for part, values in parts.items()})
    assert torch.equal(span, codec.decode(parts)[5:9])


@pytest.mark.parametrize("name", SPANS_OF_TOKENS)
def test_a_state_takes_as_many_bytes_as_foretold(name: str) -> None:
    parts = CODECS[name].encode(torch.randn(20, 3, 16))
    assert sum(values.nbytes for values in parts.values()) == 20 * 3 * STATE_BYTES[name](16)


def test_the_size_of_every_codec_is_known() -> None:
    assert STATE_BYTES.keys() == CODECS.keys()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.lists(st.integers(0, 9), min_size=1, max_size=7), st.randoms())
def test_sequences_are_read_in_any_order_from_every_codec(tmp_path_factory, name: str, lengths, chance) -> None:
    samples = [in_bf16(features(number, tokens)) for number, tokens in enumerate(lengths)]
    folder = write_store(tmp_path_factory.mktemp("store") / "store", samples, codec=name, dtype="bfloat16")
    store, codec = Store.open(folder), CODECS[name]
    order = list(range(len(samples)))
    chance.shuffle(order)
    for index in order:
        there = {state: codec.decode(codec.encode(getattr(samples[index], state))) for state in ("aux", "last")}
        assert_same(store[index], features(index, lengths[index], **there))
