"""The parts of capture through vLLM that need no engine."""

from __future__ import annotations

import importlib.metadata
import json
import random
import shutil
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from draftsmith.errors import CaptureError, CheckFailed, MissingExtraError, RequestError, TargetError
from draftsmith.extract.engine_errors import explain_death
from draftsmith.extract.engine_settings import engine_args, engine_version, environment
from draftsmith.extract.from_transformers import Reference
from draftsmith.extract.parity import (
    SEQUENCES,
    TOKENS,
    Expected,
    _available_bytes,
    compare,
    expect,
    first_samples,
    next_token_agreement,
    refuse_other_tokens,
)
from draftsmith.extract.quarantine import QUARANTINE, read_quarantine, refuse_many_set_aside, set_aside
from draftsmith.extract.vllm_worker.chunks import PREFIX
from draftsmith.extract.vllm_worker.client import EngineDied
from draftsmith.extract.vllm_worker.failures import ENGINE, describe, read_failures, running_module, write_failure
from draftsmith.extract.vllm_worker.hooks import Joiner, Ran, complete_states, read_convention
from draftsmith.extract.vllm_worker.options import KEY
from draftsmith.extract.vllm_worker.spool import Ended, SpoolWriter, take_sequence
from draftsmith.extract.work import Captured, Work
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Target, parse
from draftsmith.records import Features, Sample
from draftsmith.store.codec import CODECS
from draftsmith.target import load_head, load_target
from tests.extract import scale

CPU = torch.device("cpu")


def sample(number: int, tokens: int = 4) -> Sample:
    return Sample(f"s{number}", "c", "chat", "train", list(range(number, number + tokens)), [1] * tokens)


def captured(number: int) -> Captured:
    empty = torch.empty(0)
    return Captured(Features(f"s{number}", "chat", "train", empty, empty, empty, empty), 0)


def send_all(work: Work) -> list[int]:
    sent = []
    while (one := work.next_to_send()) is not None:
        sent.append(one[0])
    return sent


def ids(ready: list[Captured]) -> list[str]:
    return [one.features.id for one in ready]


# ---- the samples between corpus and store -----------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(4, 30), st.integers(0, 1 << 32))
def test_samples_come_out_in_order_whatever_fails_and_dies(count: int, room: int, seed: int) -> None:
    chance = random.Random(seed)
    work, out, given_up = Work(map(sample, range(count)), room), [], set()
    under_way: set[int] = set()
    for _ in range(1000):
        under_way |= set(send_all(work))
        if work.done:
            break
        number = chance.choice(sorted(under_way))
        outcome = chance.choice(["settle", "settle", "fail", "die"])
        if outcome == "settle":
            work.settle(number, captured(number))
            under_way.remove(number)
        elif outcome == "fail":
            given_up |= {number} if work.fail(number, "why") else set()
            under_way.remove(number)
        else:
            given_up |= work.lose_engine(under_way, [number], "why").keys()
            under_way.clear()
        out += ids(work.take_ready())
    assert work.done
    assert out == [f"s{number}" for number in range(count) if number not in given_up]


def test_no_more_tokens_are_on_the_way_than_there_is_room_for() -> None:
    work = Work((sample(number) for number in range(5)), room_tokens=9)
    assert send_all(work) == [0, 1]
    work.settle(1, captured(1))
    assert send_all(work) == [], "what waits for its turn takes room"
    work.settle(0, captured(0))
    assert ids(work.take_ready()) == ["s0", "s1"]
    assert send_all(work) == [2, 3]


def test_a_sample_larger_than_the_room_goes_alone() -> None:
    work = Work([sample(0, tokens=50), sample(1)], room_tokens=9)
    assert send_all(work) == [0]


def test_samples_that_an_engine_died_over_are_tried_one_by_one_and_the_others_together() -> None:
    work = Work(map(sample, range(4)), 100)
    send_all(work)
    assert work.lose_engine([0, 1, 2, 3], [1, 2], "why") == {}
    assert send_all(work) == [0, 3], "a suspect starts only when nothing else is under way"
    work.settle(0, captured(0))
    assert not send_all(work)
    work.settle(3, captured(3))
    assert send_all(work) == [1]
    assert work.lose_engine([1], [1], "again") == {1: ["why", "again"]}
    assert send_all(work) == [2]
    work.settle(2, captured(2))
    assert ids(work.take_ready()) == ["s0", "s2", "s3"]
    assert work.done


def test_a_death_that_nobody_explained_has_all_under_way_tried_alone_and_is_the_failure_of_none() -> None:
    work = Work(map(sample, range(3)), 100)
    send_all(work)
    assert work.lose_engine([0, 1, 2], [], "killed") == {}
    assert send_all(work) == [0]
    assert work.lose_engine([0], [], "alone") == {}
    for number in (1, 2):
        assert send_all(work) == [number], "the others first"
        work.settle(number, captured(number))
    assert send_all(work) == [0]
    assert work.lose_engine([0], [], "again") == {0: ["alone", "again"]}


# ---- hooks on the layers ----------------------------------------------------------------------------------------


class Llama(nn.Module):
    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any: ...


class DeepseekV2(nn.Module):
    def forward(self, positions: Any, hidden_states: Any, residual: Any, llama_4_scaling: Any = None) -> Any: ...


class GptOss(nn.Module):
    def forward(self, hidden_states: Any, positions: Any, residual: Any) -> Any: ...


class Gpt2(nn.Module):
    def forward(self, hidden_states: Any) -> Any: ...


class Transformers(nn.Module):
    def forward(
        self, hidden_states: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any: ...


class DeepseekV4(nn.Module):
    def forward(self, x: Any, positions: Any, input_ids: Any, post_mix: Any = None, residual: Any = None) -> Any: ...


class Looped(nn.Module):
    def forward(self, positions: Any, hidden_states: Any, loop_idx: int) -> Any: ...


STREAM, ADDEND = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])


@pytest.mark.parametrize(
    ("layer", "args", "kwargs"),
    [
        (Llama(), (None, STREAM, ADDEND), {}),
        (Llama(), (), {"residual": ADDEND, "hidden_states": STREAM, "positions": None}),
        (DeepseekV2(), (None, STREAM, ADDEND, torch.ones(1)), {}),
        (DeepseekV2(), (None, STREAM, ADDEND), {"llama_4_scaling": None}),
        (GptOss(), (STREAM, None, ADDEND), {}),
    ],
)
def test_the_stream_is_found_by_name_in_whatever_order_a_layer_takes_it(
    layer: nn.Module, args: Any, kwargs: Any
) -> None:
    assert read_convention(layer).stream(args, kwargs).tolist() == [[11.0, 22.0]]


@pytest.mark.parametrize(
    ("layer", "args", "kwargs"),
    [
        (Llama(), (None, STREAM, None), {}),
        (Gpt2(), (STREAM,), {}),
        (Transformers(), (STREAM,), {"use_cache": False, "attention_instances": {}}),
    ],
)
def test_a_stream_in_one_piece_is_copied(layer: nn.Module, args: Any, kwargs: Any) -> None:
    found = read_convention(layer).stream(args, kwargs)
    assert found.tolist() == STREAM.tolist()
    assert found.data_ptr() != STREAM.data_ptr()


def test_a_layer_of_an_unknown_convention_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"Looped.* takes loop_idx"):
        read_convention(Looped())
    with pytest.raises(TypeError, match=r"DeepseekV4.* takes input_ids, post_mix, x"):
        read_convention(DeepseekV4())


def step(new: list[tuple[int, int, int]], cached: dict[int, int], finished: tuple[int, ...] = ()) -> Any:
    """A scheduler's output: (number, tokens of the prompt, of them computed) of new requests; computed of others."""
    return SimpleNamespace(
        finished_req_ids={f"r{number}" for number in finished},
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=f"r{number}",
                prompt_token_ids=[0] * tokens,
                num_computed_tokens=computed,
                sampling_params=SimpleNamespace(extra_args={KEY: number}),
            )
            for number, tokens, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[f"r{number}" for number in cached], num_computed_tokens=list(cached.values())
        ),
    )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 1 << 32))
def test_chunks_of_prompts_are_joined_however_they_are_cut_ordered_and_begun_again(
    lengths: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    prompts = {n: torch.arange(100 * n, 100 * n + length, dtype=torch.int32) for n, length in enumerate(lengths)}
    joiner, computed, out = Joiner(), dict.fromkeys(prompts, 0), {}
    begun: set[int] = set()
    while computed:
        for number in list(begun & computed.keys()):
            computed[number] = 0 if chance.random() < 0.05 else computed[number]  # preempted
        chosen = chance.sample(sorted(computed), chance.randint(1, len(computed)))
        chunks = {n: chance.randint(1, lengths[n] - computed[n]) for n in chosen}
        before = joiner.follow(
            step(
                [(n, lengths[n], 0) for n in chosen if n not in begun],
                {n: computed[n] for n in chosen if n in begun},
            )
        )
        tokens = torch.cat([prompts[n][computed[n] : computed[n] + chunks[n]] for n in chosen])
        ends = torch.tensor([chunks[n] for n in chosen]).cumsum(0).tolist()
        spans = {f"r{n}": (end - chunks[n], end) for n, end in zip(chosen, ends, strict=True)}
        for number, ids, states in joiner.add(before, Ran(spans, tokens), tokens[:, None, None] * 1.0):
            out[number] = ids, states
            del computed[number]
        computed |= {n: computed[n] + chunks[n] for n in chosen if n in computed}
        begun |= set(chosen)
    for number, prompt in prompts.items():
        assert torch.equal(out[number][0], prompt)
        assert torch.equal(out[number][1][:, 0, 0], prompt.float())


def test_tokens_taken_from_the_prefix_cache_are_noticed() -> None:
    joiner = Joiner()
    before = joiner.follow(step([(0, 10, 4)], {}))
    with pytest.raises(RuntimeError, match="sample number 0 goes on at token 4, and 0 were captured"):
        joiner.add(before, Ran({"r0": (0, 6)}, torch.zeros(6)), torch.zeros(6, 1, 1))


def test_what_an_engine_warms_up_with_is_no_sample() -> None:
    warm_up = step([(7, 4, 0)], {})
    warm_up.scheduled_new_reqs[0].sampling_params.extra_args = None
    joiner = Joiner()
    computed = joiner.follow(warm_up)
    assert joiner.add(computed, Ran({"r7": (0, 4)}, torch.zeros(4)), torch.zeros(4, 1, 1)) == []


def test_a_lost_chunk_is_noticed() -> None:
    joiner = Joiner()
    joiner.add(joiner.follow(step([(0, 10, 0)], {})), Ran({"r0": (0, 3)}, torch.zeros(3)), torch.zeros(3, 1, 1))
    before = joiner.follow(step([], {0: 6}))
    with pytest.raises(RuntimeError, match="goes on at token 6, and 3 were captured"):
        joiner.add(before, Ran({"r0": (0, 4)}, torch.zeros(4)), torch.zeros(4, 1, 1))


@pytest.mark.parametrize("second", [False, True])
def test_a_batch_that_is_not_the_schedulers_is_refused(second: bool) -> None:
    ids, starts, tokens = ["a", "b"], torch.tensor([0, 4, 12, 12]).numpy(), torch.arange(16)
    if second:
        batch = SimpleNamespace(req_ids=ids, query_start_loc_np=starts, input_ids=tokens)
        runner = SimpleNamespace(execute_model_state=SimpleNamespace(input_batch=batch))
    else:
        runner = SimpleNamespace(
            execute_model_state=SimpleNamespace(hidden_states=None),
            input_batch=SimpleNamespace(req_ids=ids),
            query_start_loc=SimpleNamespace(np=starts),
            input_ids=SimpleNamespace(gpu=tokens),
        )
    ran = Ran.by(runner, {"b": 8, "a": 4})
    assert ran.spans == {"a": (0, 4), "b": (4, 12)}
    assert ran.input_ids is tokens
    with pytest.raises(RuntimeError, match=r"\{'a': 4, 'b': 8\} tokens by request"):
        Ran.by(runner, {"a": 10, "b": 8})


class Block(nn.Module):
    """A decoder layer that adds 1 to the stream."""

    def __init__(self) -> None:
        super().__init__()
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        kind = type("Attention", (nn.Module, AttentionLayerBase), {"__abstractmethods__": frozenset()})
        kind.__abstractmethods__ = frozenset()
        self.attention = kind()

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
        return hidden_states + 1, residual


class OtherBlock(Block):
    def forward(self, hidden_states: Any, per_layer_input: Any, residual: Any) -> tuple[Any, Any]:  # type: ignore[override]
        return hidden_states + 1, residual


class Text(nn.Module):
    """Hands out the states before some layers, and, if `whole`, after the last."""

    aux_hidden_state_layers = (1, 3)

    def __init__(self, whole: bool, block: type[Block] = Block) -> None:
        super().__init__()
        self.layers, self.whole = nn.ModuleList(block() for _ in range(3)), whole

    def forward(self, hidden: torch.Tensor) -> Any:
        residual, states = torch.zeros_like(hidden), []
        for index, layer in enumerate(self.layers):
            if index in self.aux_hidden_state_layers:
                states.append(hidden + residual)
            hidden, residual = layer(None, hidden, residual)
        return hidden, [*states, hidden + residual] if self.whole else states


@pytest.mark.parametrize("whole", [False, True])
def test_the_last_state_is_handed_out_once(whole: bool) -> None:
    text = Text(whole)
    complete_states(text, (1, 3))
    for _ in range(2):
        _, states = text.forward(torch.zeros(1))
        assert [float(state) for state in states] == [1.0, 3.0]
    assert bool(text.layers[-1]._forward_hooks) is not whole


def test_a_model_whose_states_are_not_one_too_few_is_left_as_it_is() -> None:
    fewer, unknown, compiled = Text(False), Text(True, OtherBlock), Text(False)
    fewer.aux_hidden_state_layers = (0, 3)  # type: ignore[assignment]
    complete_states(fewer, (0, 1, 3))
    assert [float(state) for state in fewer.forward(torch.zeros(1))[1]] == [0.0]
    compiled.do_not_compile = False  # type: ignore[assignment]
    for text in (unknown, compiled):
        complete_states(text, (1, 3))
        assert "forward" not in vars(text)


# ---- parity with the reference ----------------------------------------------------------------------------------

LAYER_IDS = (2, 4, 5, 8)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    chance = random.Random(0)
    return [
        Sample(f"s{n}", "c", "chat", "train", [chance.randrange(3, 320) for _ in range(tokens)], [1] * tokens)
        for n, tokens in enumerate((3, 40, 120))
    ]


@pytest.fixture(scope="module")
def expected(tiny_target: Path, samples: list[Sample]) -> Expected:
    facts = read_facts(str(tiny_target))
    found = expect(facts, Target(model=str(tiny_target)), LAYER_IDS, CPU, torch.float32, samples)
    assert isinstance(found, Expected)
    return found


def engines(tiny_target: Path, samples: list[Sample], layer_ids: tuple[int, ...] = LAYER_IDS) -> list[Features]:
    """What an engine would give that was right, at these layer ids."""
    facts = read_facts(str(tiny_target))
    model = load_target(facts, Target(model=str(tiny_target)), CPU, torch.float32)
    return Reference(model, facts, layer_ids[:-1]).features(samples)


def changed(features: list[Features], **changes: Any) -> list[Features]:
    return [Features(**{**vars(one), **{name: change(one) for name, change in changes.items()}}) for one in features]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 20_000))
@example([3000] * 5, 8000)  # far behind the first samples
@example([100] * 100, 8192)
def test_the_sample_that_the_engine_has_to_cut_is_among_those_compared(lengths: list[int], step_tokens: int) -> None:
    samples = [sample(number, tokens) for number, tokens in enumerate(lengths)]
    ends = list(accumulate(lengths))
    cut = [n for n, end in enumerate(ends) if end - lengths[n] < step_tokens < end]
    chosen = [int(one.id[1:]) for one in first_samples(iter(samples), step_tokens)]
    first = [number for number in chosen if number not in cut]
    assert set(cut) <= set(chosen)
    assert first == list(range(len(first))) or chosen == list(range(len(chosen)))
    assert len(first) <= SEQUENCES
    assert sum(lengths[number] for number in first[1:]) <= TOKENS


def test_right_states_agree_in_every_layer(tiny_target: Path, samples: list[Sample], expected: Expected) -> None:
    report = compare(engines(tiny_target, samples), expected, LAYER_IDS, torch.float32, experts=False)
    assert (report["sequences"], report["tokens"]) == (3, 163)
    assert list(report["by_layer"]) == ["2", "4", "5", "8"]
    assert all(figures["max"] < 1e-5 for figures in report["by_layer"].values())


def test_layer_ids_one_off_are_named(tiny_target: Path, samples: list[Sample], expected: Expected) -> None:
    shifted = engines(tiny_target, samples, (3, 5, 6, 8))
    with pytest.raises(CaptureError, match=r"layer id 2: .* nearer to layer id 3"):
        compare(shifted, expected, LAYER_IDS, torch.bfloat16, experts=True)


def test_what_rounding_does_to_the_reference_itself_is_allowed_and_hides_no_other_layer(
    tiny_target: Path, samples: list[Sample], expected: Expected
) -> None:
    noisy = changed(engines(tiny_target, samples), aux=lambda one: one.aux * 1.08)
    with pytest.raises(CaptureError, match=r"layer id 2: .* where rounding explains 5e-02"):
        compare(noisy, expected, LAYER_IDS, torch.bfloat16, experts=True)
    measured = replace(expected, rounding={id: {"median": 0.05, "outlier": 0.3} for id in LAYER_IDS})
    report = compare(noisy, measured, LAYER_IDS, torch.bfloat16, experts=True)
    assert {figures["explained"] for figures in report["by_layer"].values()} == {0.1}
    with pytest.raises(CaptureError, match=r"layer id 2: .* nearer to layer id 3"):
        compare(engines(tiny_target, samples, (3, 5, 6, 8)), measured, LAYER_IDS, torch.bfloat16, experts=True)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda aux: aux * (torch.arange(len(aux)) > 0)[:, None, None], "next to no state"),  # of 3 in 163
        (lambda aux: torch.where((torch.arange(len(aux)) % 3 == 0)[:, None, None], aux.roll(1, 0), aux), "the worst"),
    ],
)
def test_states_that_are_not_there_are_no_rounding(
    tiny_target: Path, samples: list[Sample], expected: Expected, spoil: Any, says: str
) -> None:
    measured = replace(expected, rounding={id: {"median": 0.1, "outlier": 0.6} for id in LAYER_IDS})
    wrong = changed(engines(tiny_target, samples), aux=lambda one: spoil(one.aux))
    with pytest.raises(CaptureError, match=f"layer id 2: .*{says}"):
        compare(wrong, measured, LAYER_IDS, torch.bfloat16, experts=True)


def test_of_a_mixture_of_experts_the_reference_says_what_rounding_does(tmp_path: Path) -> None:
    model = str(scale.deepseek_v3(tmp_path / "model", rope="yarn"))
    chat = [Sample("s", "c", "chat", "train", [3 + n % 60 for n in range(50)], [1] * 50)]
    ids = (2, read_facts(model).num_hidden_layers)
    found, exact = (
        expect(read_facts(model), Target(model=model), ids, CPU, dtype, chat)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert isinstance(found, Expected)
    assert isinstance(exact, Expected)
    assert not exact.rounding
    for id in ids:
        of_bf16, of_float32 = found.states["s"][id].float(), exact.states["s"][id]
        error = (of_bf16 - of_float32).norm(dim=-1) / of_float32.norm(dim=-1)
        assert found.rounding[id]["median"] == pytest.approx(float(error.median()))
        assert float(error.median()) > 1e-3


def test_a_final_norm_that_was_applied_is_named(tiny_target: Path, samples: list[Sample], expected: Expected) -> None:
    head = load_head(read_facts(str(tiny_target)), CPU, torch.float32)
    normed = changed(engines(tiny_target, samples), last=lambda one: head.norm(one.last))
    with pytest.raises(CaptureError, match=r"layer id 8: .* nearer to the last state after the final norm"):
        compare(normed, expected, LAYER_IDS, torch.bfloat16, experts=True)


def test_a_head_that_scales_otherwise_than_the_targets_is_found(
    tmp_path: Path, tiny_target: Path, samples: list[Sample]
) -> None:
    """Its first choice is the target's all the same, so that the engine's next tokens do not tell."""
    shutil.copytree(tiny_target, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text(encoding="utf-8"))
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "logit_scale": 0.25}), encoding="utf-8")
    facts = read_facts(str(tmp_path / "model"))  # a Llama passes the setting over
    with pytest.raises(CaptureError, match="do not follow from its captured last state"):
        expect(facts, Target(model=facts.path), LAYER_IDS, CPU, torch.float32, samples)


def test_two_rows_that_changed_places_are_found(tiny_target: Path, samples: list[Sample], expected: Expected) -> None:
    def swap(one: Features) -> torch.Tensor:
        return one.last[[1, 0, *range(2, len(one.last))]] if one.id == "s2" else one.last

    swapped = changed(engines(tiny_target, samples), last=swap)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CaptureError, match="layer id 8"):
            compare(swapped, expected, LAYER_IDS, dtype, experts=False)


def test_a_row_too_few_and_a_sample_too_few_are_found(
    tiny_target: Path, samples: list[Sample], expected: Expected
) -> None:
    right = engines(tiny_target, samples)
    short = changed(right, aux=lambda one: one.aux[:-1], last=lambda one: one.last[:-1])
    with pytest.raises(CaptureError, match=r"\[160, 32\] states were captured, where \[163, 32\] are due"):
        compare(short, expected, LAYER_IDS, torch.float32, experts=False)
    with pytest.raises(CaptureError, match="1 samples were not captured: s2"):
        compare(right[:-1], expected, LAYER_IDS, torch.float32, experts=False)


def test_one_token_sent_to_another_expert_passes_in_a_mixture_and_not_elsewhere(
    tiny_target: Path, samples: list[Sample], expected: Expected
) -> None:
    def misroute(one: Features) -> torch.Tensor:
        return torch.cat([one.last[:1] * 1.5, one.last[1:]]) if one.id == "s2" else one.last

    misrouted = changed(engines(tiny_target, samples), last=misroute)
    compare(misrouted, expected, LAYER_IDS, torch.float32, experts=True)
    with pytest.raises(CaptureError):
        compare(misrouted, expected, LAYER_IDS, torch.float32, experts=False)


def test_the_engines_next_tokens_tell_a_last_state_before_the_norm_from_one_after_it(tiny_target: Path) -> None:
    head = load_head(read_facts(str(tiny_target)), CPU, torch.float32)
    lasts = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    own = head.logits(lasts).argmax(-1).tolist()
    assert next_token_agreement(head, lasts, own)["next_token_agreement"] == 1.0
    unrelated = next_token_agreement(head, lasts.flip(0), own)
    with pytest.raises(CaptureError, match="of 64 tokens that the engine chose"):
        refuse_other_tokens(unrelated, 64)


def test_a_reference_that_does_not_fit_in_memory_is_not_begun(tiny_target: Path) -> None:
    facts = read_facts(str(tiny_target))
    huge = type(facts)(**{**vars(facts), "weight_bytes": 10**15})
    found = expect(huge, Target(model="absent"), LAYER_IDS, CPU, torch.float32, [])
    assert isinstance(found, str)
    assert "the reference needs" in found


FP8_BLOCKS = {"config_groups": {"all": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}}
INT4_GROUPS = {"config_groups": {"all": {"weights": {"num_bits": 4}, "input_activations": None}}}


@pytest.mark.parametrize(
    ("quantization", "share", "fits"),
    [
        pytest.param(None, 0.5, True, id="as stored"),
        pytest.param({"quant_method": "mxfp4"}, 0.3, False, id="mxfp4, four times as large in bfloat16"),
        pytest.param({"quant_method": "mxfp4"}, 0.1, True, id="mxfp4 that fits"),
        pytest.param({"quant_method": "fp8"}, 0.3, True, id="fp8, twice as large"),
        pytest.param({"quant_method": "fp8"}, 0.5, False, id="fp8 that does not fit"),
        pytest.param({"quant_method": "compressed-tensors", **FP8_BLOCKS}, 0.3, True, id="bits in groups, 8"),
        pytest.param({"quant_method": "compressed-tensors", **INT4_GROUPS}, 0.3, False, id="bits in groups, 4"),
        pytest.param({"quant_method": "gptq", "bits": 2}, 0.15, False, id="bits at the top"),
    ],
)
def test_a_quantised_reference_needs_the_room_of_its_weights_in_the_dtype_of_the_computation(
    tiny_target: Path, tmp_path: Path, quantization: dict[str, Any] | None, share: float, fits: bool
) -> None:
    room = _available_bytes()
    facts = replace(
        read_facts(str(tiny_target)), path=str(tmp_path), dtype="bfloat16", weight_bytes=int(room * share),
        quantization=quantization,
    )  # fmt: skip
    found = expect(facts, Target(model="absent"), LAYER_IDS, CPU, torch.bfloat16, [])
    assert isinstance(found, str)
    assert ("cannot load" in found) == fits, found


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="needs a device that is not there")
def test_a_reference_that_fails_is_no_reference_and_the_reason_is_kept(
    tiny_target: Path, samples: list[Sample]
) -> None:
    facts, target = read_facts(str(tiny_target)), Target(model=str(tiny_target))
    outside = replace(samples[0], input_ids=[10**6])
    forward = expect(facts, target, LAYER_IDS, CPU, torch.float32, [outside])
    assert forward == "transformers cannot run the target: IndexError: index out of range in self"
    moved = expect(facts, target, LAYER_IDS, torch.device("mps"), torch.float32, samples)
    assert isinstance(moved, str)
    assert "mps" in moved
    with pytest.raises(TargetError, match=r"cannot load it: .*mps"):
        load_target(facts, target, torch.device("mps"), torch.float32)


# ---- settings ---------------------------------------------------------------------------------------------------


def recipe(**extract: Any) -> Any:
    return parse({"name": "t", "seed": 7, "target": {"model": "m"}, "extract": {"engine": "vllm", **extract}})


def test_what_the_recipe_passes_to_the_engine_goes_before_what_is_derived(tiny_target: Path) -> None:
    facts = read_facts(str(tiny_target))
    args = engine_args(recipe(tensor_parallel_size=2, engine_args={"quantization": "fp8", "seed": 1}), facts, "bf", 100)
    assert (args["tensor_parallel_size"], args["quantization"], args["seed"]) == (2, "fp8", 1)
    assert args["max_model_len"] > 100 + 1, "within one token of it, the engine caches no states"


def test_float16_is_refused_where_the_engine_scales_the_states(tiny_target: Path) -> None:
    facts = read_facts(str(tiny_target))
    engine_args(recipe(), facts, "float16", 10)
    kimi_k2 = replace(facts, model_type="kimi_k2", architecture="DeepseekV3ForCausalLM")
    kimi_k25 = replace(facts, model_type="kimi_k25", text_model_type="kimi_k2", attention="mla")
    for of_family in (replace(facts, model_type="deepseek_v3"), kimi_k2, kimi_k25):
        with pytest.raises(RequestError, match="float16"):
            engine_args(recipe(), of_family, "float16", 10)


def test_what_the_user_set_of_the_engines_environment_stays(tiny_target: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    facts = read_facts(str(tiny_target))
    assert environment(facts, 512)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert environment(facts, 512)["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1", "the tiny target ends at 512"
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in environment(facts, 500)


def test_an_engine_too_old_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(MissingExtraError, match=r"vllm 0\.17\.0 is installed, and capturing needs 0\.24"):
        engine_version()


# ---- spool, failures, quarantine --------------------------------------------------------------------------------


def test_the_stages_of_a_pipeline_are_joined_in_the_order_of_their_layers(tmp_path: Path) -> None:
    tokens, states = torch.arange(5, dtype=torch.int32), torch.randn(5, 4, 8)
    for ids, own in (((2,), states[:, :1]), ((4, 5, 8), states[:, 1:])):
        SpoolWriter(tmp_path, ids, "int8").put([Ended(3, tokens, 0)], own)
    found = take_sequence(tmp_path, 3, [[2], [4, 5, 8]])
    assert torch.equal(found[0], tokens)
    due = CODECS["int8"].encode(states)
    assert found[1].keys() == due.keys()
    assert all(torch.equal(found[1][name], due[name]) for name in due)
    assert all(file.name.startswith(PREFIX) for file in tmp_path.iterdir())


def test_an_exception_without_a_message_keeps_its_type_place_and_traceback(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ValueError

    model = nn.Sequential(nn.Identity(), nn.Sequential(Layer()))
    try:
        model(torch.zeros(1))
    except ValueError as error:
        write_failure(
            tmp_path, describe(error, "worker 1", "execute_model", running_module(model, error.__traceback__), [4])
        )
    (failure,) = read_failures(tmp_path)
    assert (failure.type, failure.message, failure.module, failure.numbers) == ("ValueError", "", "1.0", (4,))
    assert "raise ValueError" in failure.traceback


def test_what_only_the_log_knows_is_taken_from_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    before = "(EngineCore pid=1) ERROR 11-30 08:00:00 [core.py:1] of an earlier engine\n"
    log.write_text(
        before + "INFO 11-30 08:20:44 [a.py:1] fine\n"
        "(EngineCore pid=9) ERROR 11-30 08:20:45 [core.py:900] Traceback (most recent call last):\n"
        "(EngineCore pid=9) ERROR 11-30 08:20:45 [core.py:900] ValueError: not enough memory for the KV cache\n"
    )
    failure = describe(RuntimeError("Engine core initialization failed."), ENGINE, "start", None, [])
    error = explain_death(EngineDied(failure, 1), log, len(before), lambda numbers: [])
    assert "ValueError: not enough memory for the KV cache" in str(error)
    assert "extract.gpu_memory_utilization" in str(error.hint)
    assert "earlier" not in str(error)
    assert "fine" not in str(error)


def test_the_quarantine_keeps_every_reason_and_stands_a_torn_line(tmp_path: Path) -> None:
    set_aside(tmp_path, sample(1), ["first\nmore", "second"])
    set_aside(tmp_path, sample(2), ["a", "b"])
    with open(tmp_path / QUARANTINE, "a", encoding="utf-8") as file:
        file.write('{"id": "s3", "rea')
    assert read_quarantine(tmp_path) == {"s1": ["first\nmore", "second"], "s2": ["a", "b"]}
    refuse_many_set_aside(tmp_path, samples=30, allowed=0.07)
    set_aside(tmp_path, sample(4), ["c", "d"])
    assert read_quarantine(tmp_path) == {"s1": ["first\nmore", "second"], "s2": ["a", "b"], "s4": ["c", "d"]}
    with pytest.raises(CheckFailed, match=r"3 of 30 samples .* s1: second\n.*max_quarantined=0\.1"):
        refuse_many_set_aside(tmp_path, samples=30, allowed=0.0)


def test_a_torn_line_and_reasons_in_any_writing_hide_no_sample(tmp_path: Path) -> None:
    reason = "in two lines\u2028of a kind that Python splits, 理由"
    set_aside(tmp_path, sample(1), [reason, reason])
    with open(tmp_path / QUARANTINE, "ab") as file:
        file.write('{"id": "s2", "reasons": ["理'.encode()[:-1])
    assert read_quarantine(tmp_path) == {"s1": [reason, reason]}
