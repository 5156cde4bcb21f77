"""The budget against arithmetic done by hand, published figures, and the real store, draft and loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from draftsmith import recipe as recipes
from draftsmith.corpus import write_corpus
from draftsmith.draft.config import DraftConfig
from draftsmith.draft.fast_loss import STUDENT_BYTES
from draftsmith.draft.loss import teacher_of, total_loss, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.probe.budget import (
    LOGITS_BYTES,
    Devices,
    active_parameters,
    check_budget,
    draft_parameters,
    duration,
    figure,
    kv_bytes_per_token,
    plan_devices,
    room_for_store,
    size,
    text_config,
    trainer_bytes,
    training_flops_per_token,
    weight_bytes_per_device,
)
from draftsmith.probe.checks import Check
from draftsmith.probe.facts import facts_from_evidence, read_facts
from draftsmith.probe.machine import inspect_machine
from draftsmith.recipe import Probe, Recipe, Train
from draftsmith.records import Batch, Sample, TargetFacts
from draftsmith.rundir import RunPaths
from draftsmith.store.codec import CODECS
from draftsmith.store.shard_file import taught
from draftsmith.store.sizes import bytes_per_token, predict_bytes
from draftsmith.target import FinalNorm, TargetHead
from tests.probe.folders import CONFIG, CONFIGS
from tests.store.random_store import AUX_LAYERS, HIDDEN_SIZE, features, in_bf16, write_store

GIB = 2**30
H200 = {"name": "NVIDIA H200", "memory_bytes": 143_771 * 2**20}
NODE = {"gpus": [H200] * 8, "cpus": 128, "memory_bytes": 2**41}
LAPTOP: dict[str, Any] = {"gpus": [], "cpus": 8, "memory_bytes": 16 * GIB}


def config_of(model: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{model}.json").read_text())


def facts_of(config: dict[str, Any], weight_bytes: int | None = None) -> TargetFacts:
    facts = facts_from_evidence({"path": "/models/x", "config": config, "problems": []})
    return replace(facts, weight_bytes=weight_bytes)


def plan(root: Path, **sections: Any) -> Recipe:
    return recipes.parse({"name": "plan", "run_dir": str(root), "target": {"model": "x"}, **sections})


def budget(
    config: dict[str, Any], recipe: Recipe, *, weights: int | None, machine: dict[str, Any], free: int
) -> dict[str, Check]:
    """The verdicts as another machine would be judged, so that they don't depend on this one."""
    evidence = {"host": "node", "config": config, "machine": machine, "disk_free_bytes": free}
    return {check.name: check for check in check_budget(facts_of(config, weights), recipe, evidence)}


# ---- Kimi-K2.5: 540 GB of INT4 weights on 8 devices ----


def test_kimi_k25_on_eight_gpus(tmp_path: Path) -> None:
    recipe = plan(tmp_path, prepare={"draft_vocab_size": 32_000})
    checks = budget(config_of("kimi-k2.5"), recipe, weights=540 * 10**9, machine=NODE, free=3 * 2**40)
    assert {check.status for check in checks.values()} == {"ok"}
    # 540e9 / 8 / 2^30 = 62.86; 61 layers × (512 + 64) × 2 bytes = 70,272; × 4,096 tokens = 274.5 MiB
    assert "62.9 GiB of weights on each of 8 × NVIDIA H200" in checks["device memory"].detail
    assert "274 MiB of KV cache for 4,096 tokens in flight (70,272 bytes each)" in checks["device memory"].detail
    # 540e9 / (0.5 × 2^30) = 1,005.8 seconds = 16.76 minutes; 18 were measured
    assert checks["load time"].detail.startswith("16.8 minutes for 503 GiB; assuming 0.5 GiB/s")
    # 4 states × 7,168 × 2 bytes + 4 + 1 = 57,349; a million are 53.4 GiB; 3 TiB / 57,349 = 57.5 million
    assert "53.4 GiB for every million tokens, 57,349 bytes each; 3 TiB free" in checks["store size"].detail
    assert "room for 57.5 million tokens" in checks["store size"].detail
    # Arithmetic: 8 × 989e12 × 0.3 / (2 × 30.5e9) = 38,900 tokens/s; the disk: 2^30 / 57,349 = 18,723
    assert "18,723 tokens/s, bound by the disk" in checks["extraction time"].detail
    assert checks["extraction time"].detail.startswith("53.4 seconds for every million tokens")


def test_kimi_k25_multiplies_a_token_with_its_eight_experts_only() -> None:
    config = config_of("kimi-k2.5")
    queries = 7168 * 1536 + 1536 * 64 * (128 + 64)
    keys_and_values = 7168 * (512 + 64) + 512 * 64 * (128 + 128)
    attention = queries + keys_and_values + 64 * 128 * 7168
    dense, expert, router = 3 * 7168 * 18432, 3 * 7168 * 2048, 7168 * 384
    by_hand = 61 * attention + 1 * dense + 60 * (9 * expert + router)
    assert active_parameters(facts_of(config), text_config(config, "text_config")) == by_hand


# ---- The target ----


@pytest.mark.parametrize(
    ("model", "published"),  # billions of activated parameters, from the model cards
    [("kimi-k2", 32), ("deepseek-v3", 37), ("deepseek-v2", 21), ("qwen3-30b-a3b", 3.3), ("gpt-oss-20b", 3.6)],
)
def test_active_parameters_are_the_published_ones(model: str, published: float) -> None:
    config = config_of(model)
    facts = facts_of(config)
    active, head = active_parameters(facts, config), (facts.vocab_size or 0) * (facts.hidden_size or 0)
    assert active is not None
    assert (active + head) / 1e9 == pytest.approx(published, rel=0.1)


def test_active_parameters_of_a_dense_model_are_its_matrices(tiny_target: Path) -> None:
    with safe_open(tiny_target / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a mapping
    matrices = sum(shape[0] * shape[1] for name, shape in tensors.items() if ".layers." in name and len(shape) == 2)
    config = json.loads((tiny_target / "config.json").read_text())
    assert active_parameters(read_facts(str(tiny_target)), config) == matrices


def test_cache_heads_are_shared_out_and_a_latent_is_not() -> None:
    llama, kimi = facts_of(config_of("llama-3.1-8b")), facts_of(config_of("kimi-k2"))
    assert [kv_bytes_per_token(llama, gpus) for gpus in (1, 8, 16)] == [131_072, 16_384, 16_384]
    assert kv_bytes_per_token(kimi, 1) == kv_bytes_per_token(kimi, 8) == 61 * 576 * 2


def test_layers_without_attention_keep_no_cache() -> None:
    config = config_of("nemotron-nano-9b-v2")
    attention_layers = config["hybrid_override_pattern"].count("*")
    assert 0 < attention_layers < config["num_hidden_layers"]
    by_hand = attention_layers * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    assert kv_bytes_per_token(facts_of(config), 1) == by_hand


def test_a_cpu_computes_in_float32_and_so_holds_twice_the_bytes() -> None:
    facts = replace(facts_of(CONFIG, weight_bytes=1000), dtype="bfloat16")
    assert weight_bytes_per_device(facts, Devices("8 CPU cores", 1, None, 1e9, is_cpu=True)) == 2000
    assert weight_bytes_per_device(facts, Devices("NVIDIA H200", 1, None, 1e9)) == 1000


def test_a_model_that_does_not_fit_fails_with_the_devices_that_it_takes(tmp_path: Path) -> None:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * GIB}
    machine = {**NODE, "gpus": [gpu] * 4}
    check = budget(config_of("kimi-k2"), plan(tmp_path), weights=540 * 10**9, machine=machine, free=2**50)[
        "device memory"
    ]
    assert check.status == "fail"
    assert "weights alone take 7 such devices" in str(check.hint)  # 502.9 GiB / (0.9 × 80 GiB) = 6.98


def test_devices_that_the_recipe_names_are_planned_for_and_others_are_found() -> None:
    assert plan_devices(Probe(), LAPTOP).is_cpu
    assert plan_devices(Probe(), LAPTOP).flops == 8 * 80e9
    assert plan_devices(Probe(), NODE) == Devices("NVIDIA H200", 8, 143_771 * 2**20, 989e12)
    assert plan_devices(Probe(gpus=2), NODE).count == 2
    planned = plan_devices(Probe(gpus=8, gpu_memory_gib=141), LAPTOP)
    assert (planned.count, planned.memory_bytes, planned.is_cpu) == (8, 141 * GIB, False)


@pytest.mark.parametrize(
    ("body", "gpus"),
    [
        ("echo 'NVIDIA H200, 143771'\necho 'NVIDIA A10, Laptop, 23028'", [H200, ("NVIDIA A10, Laptop", 23028)]),
        ("echo 'NVIDIA GB10, [N/A]'", []),
        ("echo 'has failed because it could not communicate with the NVIDIA driver'\nexit 9", []),
    ],
)
def test_devices_are_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, gpus: list[Any]
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    expected = [g if isinstance(g, dict) else {"name": g[0], "memory_bytes": g[1] * 2**20} for g in gpus]
    assert inspect_machine()["gpus"] == expected


def test_memory_that_is_not_known_is_said_to_be(tmp_path: Path) -> None:
    checks = budget(CONFIG, plan(tmp_path, probe={"gpus": 8}), weights=10**9, machine=LAPTOP, free=2**50)
    assert checks["device memory"].status == "warn"
    assert "probe.gpu_memory_gib" in str(checks["device memory"].hint)
    assert "taken for an H100" in checks["extraction time"].detail


def test_what_the_configuration_lacks_is_not_guessed(tmp_path: Path) -> None:
    checks = budget({"model_type": "odd"}, plan(tmp_path), weights=None, machine=LAPTOP, free=2**50)
    assert {check.status for check in checks.values()} == {"warn"}
    assert all(check.detail.startswith("not known: ") for check in checks.values())


def test_every_figure_states_what_it_assumes(tmp_path: Path) -> None:
    checks = budget(CONFIG, plan(tmp_path, prepare={"max_length_tokens": 64}), weights=10**9, machine=NODE, free=2**50)
    del checks["store size"]  # follows from the format
    assert all("assuming" in check.detail for check in checks.values())


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
        ({"rope_type": "linear", "factor": 2}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 64),
    ],
)
def test_samples_longer_than_the_targets_positions_are_warned_of_by_name(
    tmp_path: Path, scaling: Any, positions: int
) -> None:
    config = {**CONFIG, "max_position_embeddings": 64, "rope_scaling": scaling}

    def found(most_tokens: int) -> Check | None:
        recipe = plan(tmp_path, prepare={"max_length_tokens": most_tokens})
        return budget(config, recipe, weights=10**6, machine=NODE, free=2**50).get("sample length")

    assert found(positions) is None
    check = found(positions + 1)
    assert check is not None
    assert check.status == "warn"
    assert check.detail.startswith(f"prepare.max_length_tokens is {positions + 1}, and the target has {positions} ")
    assert f"to at most {positions}" in str(check.hint)


# ---- The store ----


@pytest.mark.parametrize("codec", list(CODECS))
def test_the_store_is_as_large_as_foretold(tmp_path: Path, codec: str) -> None:
    lengths = [700, 1300, 2000, 500]
    samples = [in_bf16(features(i, tokens)) for i, tokens in enumerate(lengths)]
    folder = write_store(tmp_path, samples, codec=codec, dtype="bfloat16")
    written = sum(file.stat().st_size for file in folder.iterdir())
    kept = [int(taught(one.loss_mask).sum()) for one in samples]
    foretold = bytes_per_token(HIDDEN_SIZE, AUX_LAYERS, codec, sum(kept) / sum(lengths)) * sum(lengths)
    sizes = zip(lengths, kept, strict=True)
    assert foretold == pytest.approx(predict_bytes(sizes, aux_layers=3, hidden_size=8, codec=codec), rel=0.05)
    headers = 2 * 1000 + 2000  # two shards', the ledger and the manifest; 8 numbers wide, states don't dwarf them
    assert foretold == pytest.approx(written - headers, rel=0.05)


def store_check(root: Path, free: int, **prepare: Any) -> Check:
    recipe = plan(root, prepare=prepare)
    return budget(CONFIG, recipe, weights=10**6, machine=NODE, free=free)["store size"]


PER_TOKEN = 4 * 8 * 2 + 5  # of CONFIG in bf16


def test_a_disk_that_cannot_hold_the_corpus_fails(tmp_path: Path) -> None:
    write_corpus(tmp_path / "prepare/corpus.parquet", [Sample("a", "a", "x", "train", [1] * 1000, [1] * 1000)], {})
    fits, fails = (store_check(tmp_path, PER_TOKEN * 1000 - short) for short in (0, 1))
    assert (fits.status, fails.status) == ("ok", "fail")
    assert fits.detail.startswith("67.4 KiB for 0.001 million tokens, 69 bytes each")
    assert "set run_dir to a larger disk" in str(fails.hint)


def test_a_bound_that_does_not_fit_is_a_warning(tmp_path: Path) -> None:
    sources = [{"path": "a.json", "limit": 30}, {"path": "b.json", "limit": 20}]
    need = PER_TOKEN * 50 * 128
    fits, warns = (store_check(tmp_path, need - short, sources=sources, max_length_tokens=128) for short in (0, 1))
    assert (fits.status, warns.status) == ("ok", "warn")
    assert "for at most 0.0064 million tokens" in warns.detail


def test_without_limits_the_figures_are_per_million_tokens(tmp_path: Path) -> None:
    check = store_check(tmp_path, 10**9, sources=[{"path": "a.json", "limit": 30}, {"path": "b.json"}])
    assert check.detail.startswith("65.8 MiB for every million tokens")  # 69e6 bytes
    assert check.detail.endswith("room for 14.5 million tokens")


def test_what_the_store_holds_already_counts_as_room(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "not there yet")
    before = room_for_store(paths)
    paths.store.mkdir(parents=True)
    with open(paths.store / "shard-00000.safetensors", "wb") as file:
        file.truncate(2**40)  # sparse: takes nothing of what is free
    assert room_for_store(paths) - before == pytest.approx(2**40, rel=0.01)


# ---- The draft ----


def draft_config(**changes: Any) -> DraftConfig:
    settings: dict[str, Any] = {
        "vocab_size": 2048,
        "draft_vocab_size": 1024,
        "hidden_size": 128,
        "target_hidden_size": 128,
        "aux_layer_ids": (2, 4, 5),
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
    }
    return DraftConfig(**{**settings, **changes})


def make_head(config: DraftConfig) -> TargetHead:
    torch.manual_seed(0)
    shape = (config.vocab_size, config.target_hidden_size)
    return TargetHead(torch.randn(shape), FinalNorm(torch.ones(shape[1]), None, 1e-6, "rms"), torch.randn(shape))


def matrices(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 2]


@pytest.mark.parametrize("changes", [{}, {"head_dim": 48, "num_key_value_heads": 4}, {"aux_layer_ids": (2, 3, 4, 5)}])
def test_draft_parameters_are_those_of_the_real_draft(changes: dict[str, Any]) -> None:
    config = draft_config(**changes)
    draft = Draft(config)
    parts = (draft.fc, draft.layers[0], draft.lm_head)
    assert draft_parameters(config) == tuple(sum(p.numel() for p in matrices(part)) for part in parts)


@pytest.mark.parametrize(("documents", "length", "steps"), [(4, 64, 3), (16, 16, 5)])
def test_training_costs_what_the_real_loss_costs(documents: int, length: int, steps: int) -> None:
    """Operations as torch counts them, and memory as autograd saves it; attention scores are left out of the first."""
    config = draft_config()
    draft, head = Draft(config), make_head(config)
    draft.initialise(head, list(range(0, 2048, 2)), seed=0)
    tokens = documents * length
    batch = Batch(
        sample_ids=tuple(str(i) for i in range(documents)),
        input_ids=torch.randint(0, 2048, (tokens,)),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        document=torch.arange(documents).repeat_interleave(length),
        position=torch.arange(length).repeat(documents),
        aux=torch.randn(tokens, 3, 128),
        last=torch.randn(tokens, 128),
    )
    own = {parameter.data_ptr() for parameter in draft.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # storages kept alive, so that no two share an address

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        teacher = teacher_of(draft, head, batch.last)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            results = unrolled_loss(draft, batch, teacher, steps, mask_out_of_vocab=False)
            loss = total_loss(results, [result.loss_count for result in results], 0.8)
        loss.backward()
    assert training_flops_per_token(config, steps) * tokens == pytest.approx(counter.get_total_flops(), rel=0.15)

    settings = Train(batch_tokens=tokens, unroll_steps=steps)
    weights, kept = trainer_bytes(config, settings, document_tokens=length, state_bytes=4, plain=True)
    assert 0.7 * kept < sum(storage.nbytes() for storage in saved.values()) <= kept
    trained = [p for p in matrices(draft) if p.requires_grad]
    assert weights == 4 * 4 * sum(p.numel() for p in trained) + 4 * sum(p.numel() for p in matrices(head))


def full_workload(tokens: int, steps: int, document_tokens: int) -> int:
    """Bytes of a trainer in bfloat16 as `benchmarks/train_step.py` measures it with `--workload full`."""
    config = draft_config(
        vocab_size=128_256, draft_vocab_size=32_000, hidden_size=4096, target_hidden_size=4096, head_dim=128,
        intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    return sum(trainer_bytes(config, Train(batch_tokens=tokens, unroll_steps=steps), document_tokens, state_bytes=2))


def test_a_trainer_needs_what_was_measured_on_a_gpu_and_little_less() -> None:
    results = Path(__file__).parents[2] / "benchmarks/results/train_step.json"
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"]
    assert runs
    for run in runs:
        assert 1 <= full_workload(run["tokens"], run["steps"], 1024) / GIB / run["peak_gib"] < 1.15


@pytest.mark.parametrize("train", [{"kernels": "plain"}, {"autocast": "none"}, {}])
def test_a_trainer_on_a_gpu_computes_plainly_where_it_is_told_to_and_without_bfloat16(
    tmp_path: Path, train: dict[str, Any]
) -> None:
    """By what it needs for documents of other lengths, which the fast computation does not care for."""
    told = [
        budget(
            config_of("llama-3.1-8b"),
            plan(tmp_path, prepare={"draft_vocab_size": 32_000, "max_length_tokens": length}, train=train),
            weights=10**9, machine=NODE, free=2**50,
        )["trainer memory"].detail.split(" of the backward")[0].split("assuming")[0]
        for length in (1024, 4096)
    ]  # fmt: skip
    assert (told[0] == told[1]) is (not train)


def test_longer_documents_need_no_more_memory() -> None:
    assert full_workload(8192, 7, 8192) == full_workload(8192, 7, 1024)
    assert LOGITS_BYTES == STUDENT_BYTES


def test_training_time_counts_epochs_or_steps(tmp_path: Path) -> None:
    config = config_of("llama-3.1-8b")
    per_token = 6 * (3 * 4096**2 + 5 * (2 * 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 4096 * 32_000))
    per_token += 2 * 4096 * 128_256
    checks = [
        budget(config, plan(tmp_path, prepare=prepare, train=train), weights=10**9, machine=NODE, free=2**50)
        for prepare, train in (
            ({"draft_vocab_size": 32_000, "validation_fraction": 0.25}, {"epochs": 4}),
            ({"draft_vocab_size": 32_000}, {"max_steps": 1000, "batch_tokens": 3000}),
        )
    ]
    said = duration(3_000_000 * per_token / (0.3 * 989e12))
    assert checks[0]["training time"].detail.startswith(f"{said} for 4 epochs over 75% of every million tokens")
    assert checks[1]["training time"].detail.startswith(f"{said} for 1,000 steps of 3,000 tokens")


def test_a_trainer_that_does_not_fit_is_told_what_to_lower(tmp_path: Path) -> None:
    small = {"gpus": [{"name": "NVIDIA L4", "memory_bytes": 22 * GIB}], "cpus": 8, "memory_bytes": 2**36}
    check = budget(config_of("llama-3.1-8b"), plan(tmp_path), weights=10**9, machine=small, free=2**50)
    assert check["trainer memory"].status == "warn"
    assert "train.batch_tokens" in str(check["trainer memory"].hint)


def test_a_draft_whose_shape_is_not_known_names_the_missing_fact(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "intermediate_size"}
    check = budget(config, plan(tmp_path), weights=10**9, machine=NODE, free=2**50)["training"]
    assert check.status == "warn"
    assert "intermediate_size" in check.detail


def test_figures_have_three_digits_and_no_exponent() -> None:
    assert [figure(n) for n in (0.001234, 1.5, 99.95, 1023.4, 1234567)] == [
        "0.00123",
        "1.5",
        "100",
        "1,023",
        "1,234,567",
    ]
    assert [size(n) for n in (512, 1024, 540 * 10**9, 3 * 2**40)] == ["512 bytes", "1 KiB", "503 GiB", "3 TiB"]
    assert [duration(s) for s in (45, 1006, 7200, 400_000)] == ["45 seconds", "16.8 minutes", "2 hours", "4.63 days"]
