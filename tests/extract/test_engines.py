"""What the driver makes of its engines' answers, without an engine."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.errors import CaptureError, RequestError
from draftsmith.extract.engine_errors import explain_death
from draftsmith.extract.engine_settings import device_shares, engine_args
from draftsmith.extract.engines import Engine, Plan
from draftsmith.extract.from_vllm import _proven
from draftsmith.extract.parity import SEQUENCES, Expected, compare, expect
from draftsmith.extract.quarantine import set_aside
from draftsmith.extract.vllm_worker import internals, spool
from draftsmith.extract.vllm_worker.chunks import PREFIX
from draftsmith.extract.vllm_worker.client import EngineDied
from draftsmith.extract.vllm_worker.engine import captured_parts, refuse_endless_wait
from draftsmith.extract.vllm_worker.failures import describe
from draftsmith.extract.vllm_worker.spool import Ended, SpoolWriter, take_sequence
from draftsmith.extract.work import Captured
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Recipe, Target, parse
from draftsmith.records import EncodedFeatures, Features, Sample
from draftsmith.store.codec import CODECS
from tests.store.random_store import largest_error

LAYER_IDS, HIDDEN = (2, 4, 5, 8), 5
IDS = [7, 8, 9, 10, 11]


def sample(number: int = 0, input_ids: list[int] = IDS) -> Sample:
    return Sample(f"s{number}", "c", "chat", "train", input_ids, [1] * len(input_ids))


def states(tokens: int = 5, layers: int = 4) -> torch.Tensor:
    return torch.randn(tokens, layers, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    found = Engine(Plan({}, {}, "native", LAYER_IDS, HIDDEN, tmp_path, 1.0), 0)
    found.spool = tmp_path / "spool"
    found.spool.mkdir()
    found.process = SimpleNamespace(parts=[list(LAYER_IDS)])  # type: ignore[assignment]
    return found


def put(engine: Engine, input_ids: list[int], states: torch.Tensor) -> None:
    shutil.rmtree(engine.spool)
    engine.spool.mkdir()
    writer = SpoolWriter(engine.spool, LAYER_IDS, engine.plan.codec)
    writer.put([Ended(0, torch.tensor(input_ids, dtype=torch.int32), 0)], states)


# ---- what comes back is what was asked for ------------------------------------------------------------------------


def test_what_comes_back_as_sent_is_taken(engine: Engine) -> None:
    put(engine, IDS, states())
    features, problem = engine.read(0, sample())
    assert not problem
    assert features is not None
    assert features.input_ids.tolist() == IDS
    assert torch.equal(torch.cat([features.aux, features.last[:, None]], dim=1), states())
    assert [file.name[: len(PREFIX)] for file in engine.spool.iterdir()] == [PREFIX]


@pytest.mark.parametrize(
    ("input_ids", "states", "problem"),
    [
        (IDS, states(tokens=3), r"shape \[3, 4, 5\], where \[5, 4, 5\]"),
        (IDS, states(layers=3), r"shape \[5, 3, 5\], where \[5, 4, 5\]"),
        (IDS, states().transpose(0, 1).contiguous(), r"shape \[4, 5, 5\], where \[5, 4, 5\]"),
        ([1, *IDS], states(tokens=6), "6 tokens that are not the 5"),
        ([1, *IDS[:-1]], states(), "5 tokens that are not the 5"),
    ],
    ids=["fewer rows", "fewer layers", "axes in another order", "a token more", "other tokens"],
)
def test_what_comes_back_otherwise_is_refused(
    engine: Engine, input_ids: list[int], states: torch.Tensor, problem: str
) -> None:
    put(engine, input_ids, states)
    features, found = engine.read(0, sample())
    assert features is None
    with pytest.raises(ValueError, match=problem):
        raise ValueError(found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_not_finite_is_named_by_layer_and_token(
    engine: Engine, value: float, dtype: torch.dtype
) -> None:
    bad = states().to(dtype)
    bad[3, 1, 2] = value
    put(engine, IDS, bad)
    assert engine.read(0, sample()) == (None, "the state of layer id 4 is not finite at token 3")


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_what_the_workers_encoded_is_taken_as_it_is_and_named_where_it_is_not_finite(
    engine: Engine, codec: str
) -> None:
    engine.plan = replace(engine.plan, codec=codec)
    put(engine, IDS, states())
    features, problem = engine.read(0, sample())
    assert not problem
    assert isinstance(features, EncodedFeatures)
    for ours, due in ((features.aux, states()[:, :-1]), (features.last, states()[:, -1])):
        assert torch.equal(CODECS[codec].decode(ours), CODECS[codec].decode(CODECS[codec].encode(due)))
    bad = states()
    bad[3, 1, 2] = torch.inf
    put(engine, IDS, bad)
    assert engine.read(0, sample()) == (None, "the state of layer id 4 is not finite at token 3")


def test_workers_that_capture_other_layers_than_asked_for_are_refused() -> None:
    def engine(*ids: tuple[int, ...]) -> Any:
        return SimpleNamespace(collective_rpc=lambda method: list(ids))

    assert captured_parts(engine((), (5, 8), (2, 4)), [2, 4, 5, 8]) == [[2, 4], [5, 8]]
    for wrong in (((2, 4), ()), ((2, 4), (2, 4, 5, 8)), ((2, 4), (6, 8))):
        with pytest.raises(RuntimeError, match="were asked for"):
            captured_parts(engine(*wrong), [2, 4, 5, 8])


# ---- the spool ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 2000])
def test_sequences_put_together_come_out_alone_and_whole(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    rows = states(tokens=2 * tokens + 7).to(dtype)
    ids = torch.arange(tokens, dtype=torch.int32)
    writer = SpoolWriter(tmp_path, LAYER_IDS)
    writer.put([Ended(3, ids, 0), Ended(9, ids + 1, tokens + 7)], rows)
    writer.flush()
    for number, first, start in ((3, 0, 0), (9, 1, tokens + 7)):
        input_ids, found = take_sequence(tmp_path, number, [LAYER_IDS])
        assert torch.equal(input_ids, ids + first)
        assert torch.equal(found[""], rows[start : start + tokens])
        assert found[""].dtype == dtype


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_sequences_that_are_encoded_together_are_each_their_own(tmp_path: Path, codec: str) -> None:
    rows, ids = torch.randn(20, 4, 128), torch.arange(7, dtype=torch.int32)
    writer = SpoolWriter(tmp_path, LAYER_IDS, codec)
    writer.put([Ended(0, ids, 2), Ended(1, ids, 13)], rows)
    writer.flush()
    for number, start in ((0, 2), (1, 13)):
        _, found = take_sequence(tmp_path, number, [LAYER_IDS])
        assert largest_error(CODECS[codec].decode(found), rows[start : start + 7]) < 2 * CODECS[codec].error


def test_a_sequence_is_named_only_once_it_is_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, link = [], os.symlink

    def watched(text: str, path: Path) -> None:
        assert not os.path.lexists(path)
        link(text, path)
        found.append(take_sequence(tmp_path, 0, [LAYER_IDS])[1][""].clone())

    monkeypatch.setattr(spool.os, "symlink", watched)
    SpoolWriter(tmp_path, LAYER_IDS).put([Ended(0, torch.tensor(IDS, dtype=torch.int32), 0)], states())
    assert torch.equal(found[0], states())


def test_memory_is_used_again_only_once_nobody_has_what_was_in_it(tmp_path: Path) -> None:
    writer, ids = SpoolWriter(tmp_path, LAYER_IDS), torch.arange(5, dtype=torch.int32)

    def put(*numbers: int) -> None:
        rows = torch.cat([torch.full((5, 4, HIDDEN), float(number)) for number in numbers])
        writer.put([Ended(number, ids, 5 * place) for place, number in enumerate(numbers)], rows)

    def take(number: int) -> torch.Tensor:
        return take_sequence(tmp_path, number, [LAYER_IDS])[1][""]

    def chunks() -> int:
        return len(list(tmp_path.glob(f"{PREFIX}*")))

    put(0, 1)
    part_of_first, second = take(0)[1:, -1], take(1)
    put(2)
    put(3)
    assert chunks() == 3, "of 2 nothing was read yet, and of 0 and 1 something is in use"
    del second
    third = take(2)
    put(4)
    assert chunks() == 4, "a part of 0 is in use, 2 is, and 3 was not read"
    assert (part_of_first.unique().item(), third.unique().item(), take(3).unique().item()) == (0, 2, 3)
    del part_of_first, third
    for number in range(5, 8):
        put(number)
    assert chunks() == 4, "those of 0, 2 and 3 are free"
    assert [take(number).unique().item() for number in range(4, 8)] == [4, 5, 6, 7]


def test_memory_of_a_reader_that_is_killed_is_used_again(tmp_path: Path) -> None:
    writer, ids = SpoolWriter(tmp_path, LAYER_IDS), torch.arange(5, dtype=torch.int32)
    reads = "import sys, pathlib; from draftsmith.extract.vllm_worker.spool import take_sequence as take\n"
    reads += "found = take(pathlib.Path(sys.argv[1]), 0, [[2]]); print('read', flush=True); sys.stdin.read()"
    writer.put([Ended(0, ids, 0)], states())
    with subprocess.Popen(
        [sys.executable, "-c", reads, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"read\n"
        writer.put([Ended(1, ids, 0)], states())
        assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
        reader.kill()
    writer.put([Ended(2, ids, 0)], states())
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2


# ---- parity -------------------------------------------------------------------------------------------------------


def test_nothing_is_given_out_before_the_first_samples_are_proven(tmp_path: Path) -> None:
    empty = torch.empty(0)
    batches = [[Captured(Features(f"s{n}", "", "", empty, empty, empty, empty), 0)] for n in range(5)]
    seen: list[list[str]] = []

    def prove(first: list[Captured]) -> None:
        seen.append([one.features.id for one in first])
        raise CaptureError("no")

    given = []
    with pytest.raises(CaptureError):
        given += [one for batch in _proven(iter(batches), {"s0", "s2"}, tmp_path, prove) for one in batch]
    assert seen == [["s0", "s2"]]
    assert not given
    later = list(_proven(iter(batches), {"s0", "s2"}, tmp_path, lambda first: None))
    assert [len(batch) for batch in later] == [0, 0, 3, 1, 1]


def test_where_the_first_samples_are_set_aside_others_are_proven_and_none_are_held_back(tmp_path: Path) -> None:
    empty = torch.empty(0)
    for number in range(2):
        set_aside(tmp_path, sample(number), ["too long", "too long"])
    for others in (0, 1, SEQUENCES + 5):
        batches = [[Captured(Features(f"s{2 + n}", "", "", empty, empty, empty, empty), 0)] for n in range(others)]
        seen: list[int] = []
        stream = _proven(iter([[], *batches]), {"s0", "s1"}, tmp_path, lambda first, to=seen: to.append(len(first)))  # type: ignore[misc]
        assert sum(map(len, stream)) == others
        assert seen == [min(others, SEQUENCES)][:others]


def ministral(folder: Path) -> Path:
    from transformers import Ministral3Config, Ministral3ForCausalLM

    torch.manual_seed(0)
    config = Ministral3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        dtype="float32",
    )
    config.architectures = ["Ministral3ForCausalLM"]
    Ministral3ForCausalLM(config).save_pretrained(folder)
    return folder


def captured_from(model: Path, samples: list[Sample]) -> tuple[Expected, list[Features]]:
    found = expect(
        read_facts(str(model)), Target(model=str(model)), LAYER_IDS, torch.device("cpu"), torch.float32, samples
    )
    assert isinstance(found, Expected)
    rows = {id: torch.stack([places[layer] for layer in LAYER_IDS], dim=1) for id, places in found.states.items()}
    empty = torch.empty(0)
    return found, [Features(id, "", "", empty, empty, these[:, :-1], these[:, -1]) for id, these in rows.items()]


def test_a_missing_llama_4_scaling_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.ministral3 import modeling_ministral3

    model, samples = ministral(tmp_path / "model"), [sample(0, [3 + i % 60 for i in range(60)])]
    expected, right = captured_from(model, samples)
    compare(right, expected, LAYER_IDS, torch.float32, experts=False)
    monkeypatch.setattr(modeling_ministral3, "get_llama_4_attn_scale", lambda *_: torch.ones(1))
    _, unscaled = captured_from(model, samples)
    with pytest.raises(CaptureError, match=r"layer id 2: .* differs from the reference's"):
        compare(unscaled, expected, LAYER_IDS, torch.float32, experts=False)


def test_a_later_chunk_that_went_wrong_is_found(tiny_target: Path) -> None:
    samples = [sample(0, list(range(3, 60)))]
    expected, right = captured_from(tiny_target, samples)
    wrong = [replace(one, last=torch.cat([one.last[:-8], one.last[-8:] * 1.5])) for one in right]
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CaptureError, match="layer id 8"):
            compare(wrong, expected, LAYER_IDS, dtype, experts=False)


# ---- settings, and what is wrong with them ------------------------------------------------------------------------


def recipe(**extract: Any) -> Recipe:
    return parse({"name": "t", "target": {"model": "m"}, "extract": {"engine": "vllm", **extract}})


def test_each_engine_has_devices_of_its_own(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,4,7")
    assert device_shares(recipe(tensor_parallel_size=2)) == (None,)
    assert device_shares(recipe(data_parallel_size=2, tensor_parallel_size=2)) == ("0,3", "4,7")
    with pytest.raises(RequestError, match="3 engines of 2 devices need 6, and there are 4"):
        device_shares(recipe(data_parallel_size=3, tensor_parallel_size=2))
    with pytest.raises(RequestError, match=r"extract\.data_parallel_size"):
        engine_args(recipe(engine_args={"data_parallel_size": 2}), read_facts(str(tiny_target)), "float32", 10)


@pytest.mark.parametrize(("on_gpu", "refused"), [(False, "on a CPU"), (True, "in one piece")])
def test_stages_of_layers_are_refused_where_the_engine_would_die_of_them(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, refused: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    facts = read_facts(str(tiny_target))
    for stages in ({"pipeline_parallel_size": 2}, {"engine_args": {"pipeline_parallel_size": 2}}):
        with pytest.raises(RequestError, match=rf"(?s){refused}.*extract.tensor_parallel_size"):
            engine_args(recipe(capture="native", **stages), facts, "float32", 10)
        if on_gpu:
            engine_args(recipe(capture="auto", **stages), facts, "float32", 10)


def test_no_more_sequences_than_tokens_are_asked_for_in_a_step(tiny_target: Path) -> None:
    args = engine_args(recipe(max_num_batched_tokens=64), read_facts(str(tiny_target)), "float32", 10)
    assert args["max_num_seqs"] == 64


def test_a_prompt_that_would_wait_for_ever_is_refused() -> None:
    def config(chunked: bool, step: int) -> Any:
        scheduler = SimpleNamespace(
            max_num_scheduled_tokens=None, max_num_batched_tokens=step, enable_chunked_prefill=chunked
        )
        return SimpleNamespace(scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=502))

    refuse_endless_wait(config(chunked=True, step=64))
    refuse_endless_wait(config(chunked=False, step=502))
    with pytest.raises(ValueError, match=r"extract\.max_num_batched_tokens must be 502 at the least"):
        refuse_endless_wait(config(chunked=False, step=64))


@pytest.mark.parametrize(
    ("during", "setting"),
    [("load_model", "extract.tensor_parallel_size"), ("execute_model", "extract.max_num_batched_tokens")],
)
def test_no_memory_left_says_by_how_much_and_which_setting_helps(tmp_path: Path, during: str, setting: str) -> None:
    log = tmp_path / "engine.log"
    log.touch()
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB, of which 3.00 GiB are free.\nMore")
    error = explain_death(EngineDied(describe(short, "worker 0", during, None, []), 1), log, 0, lambda numbers: [])
    assert error.what.endswith("Tried to allocate 20.00 GiB, of which 3.00 GiB are free.")
    assert setting in str(error.hint)


def no_memory_on_the_cpu() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    ("error", "during", "remedy"),
    [
        (  # of vLLM 0.32's v1/worker/utils.py
            ValueError(
                "Free memory on device cuda:0 (3.0/79.1 GiB) on startup is less than desired GPU memory utilization "
                "(0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
            ),
            "init_device",
            "lower extract.gpu_memory_utilization",
        ),
        (  # of its v1/core/kv_cache_utils.py
            ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"),
            "start",
            "raise extract.gpu_memory_utilization",
        ),
        (no_memory_on_the_cpu(), "load_model", "lower extract.kv_cache_memory_bytes"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "execute_model", "make room in /dev/shm"),
    ],
    ids=["shared device", "no room for the cache", "memory of a CPU", "spool"],
)
def test_what_fills_up_says_what_to_change_and_in_which_direction(
    tmp_path: Path, error: Exception, during: str, remedy: str
) -> None:
    (tmp_path / "engine.log").touch()
    death = EngineDied(describe(error, "worker 0", during, None, []), 1)
    assert remedy in str(explain_death(death, tmp_path / "engine.log", 0, lambda numbers: []).hint)


def test_an_engine_that_lacks_what_is_relied_on_is_refused_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "RELIED_ON", {"json:JSONDecoder": ("decode", "capture"), "json:Gone": ()})
    with pytest.raises(RuntimeError, match=r"json\.JSONDecoder\.capture, json\.Gone; extract\.engine=transformers"):
        internals.refuse_unknown_engine("0.99")
    monkeypatch.setattr(internals, "RELIED_ON", {})
    monkeypatch.setattr(internals, "_speculative_methods", lambda: {"eagle3"})
    with pytest.raises(RuntimeError, match="the speculative method extract_hidden_states"):
        internals.refuse_unknown_engine("0.18")
