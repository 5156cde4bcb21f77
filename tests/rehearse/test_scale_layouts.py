"""Quantised layouts: what is stored, read by other code than ours, is the dense weight that we say it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.rehearse.layouts import read_layout
from draftsmith.rehearse.scale_model import ScaleModel, build_scale_model
from tests.probe.folders import CONFIG, evidence_of
from tests.rehearse.test_scale_model import evidence_for, weights_of


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> ScaleModel:
    return build_scale_model(evidence_for("kimi-k2.5"), tmp_path_factory.mktemp("kimi") / "model")


def test_int4_groups_unpack_to_the_dense_weights(kimi: ScaleModel) -> None:
    compressed = pytest.importorskip("compressed_tensors")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weights = compressed.quantization.QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    stored, dense = weights_of(kimi.folder), weights_of(kimi.plain)
    packed = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
    assert packed
    for name in packed:
        shape = torch.Size(stored[f"{name}_shape"].tolist())
        codes = helpers.unpack_from_int32(stored[f"{name}_packed"], 4, shape)
        theirs = compressed.quantization.dequantize(codes.float(), stored[f"{name}_scale"].float(), args=weights)
        assert torch.equal(theirs, dense[name])


def test_int4_respects_what_the_configuration_ignores(kimi: ScaleModel) -> None:
    packed = [name for name in weights_of(kimi.folder) if name.endswith("_packed")]
    assert all(".mlp.experts." in name for name in packed)
    assert len(packed) == 6 * 8 * 3  # layers with experts, experts, projections


def test_fp8_blocks_are_read_alike_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    scale = build_scale_model(evidence_for("minimax-m2"), tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(
        scale.folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = AutoModelForCausalLM.from_pretrained(scale.plain, dtype=torch.float32)
    read = theirs.state_dict()
    assert all(torch.equal(read[name].float(), tensor) for name, tensor in ours.state_dict().items())


def test_fp8_skips_whole_modules_by_name() -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "o_proj"]}
    layout = read_layout(settings)
    assert layout is not None
    names = ("mlp.gate_proj", "mlp.gate", "self_attn.o_proj")
    assert [layout.takes(f"model.layers.0.{name}.weight", (256, 256)) for name in names] == [True, False, False]


def test_fp8_blocks_may_be_cut_off_at_the_edge(tmp_path: Path) -> None:
    scale = build_scale_model(evidence_for("deepseek-v3"), tmp_path / "model")
    stored, dense = weights_of(scale.folder), weights_of(scale.plain)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    factors = stored[f"{name}_scale_inv"]
    assert stored[name].dtype == torch.float8_e4m3fn
    assert (stored[name].shape, factors.shape) == ((576, 256), (5, 2))
    for i in range(5):
        for j in range(2):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert torch.equal(stored[name][block].float() * factors[i, j], dense[name][block])
    for kept in ("lm_head.weight", "model.layers.3.mlp.gate.weight", "model.embed_tokens.weight"):
        assert f"{kept}_scale_inv" not in stored


def test_mxfp4_experts_are_read_alike_by_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scale = build_scale_model(evidence_for("gpt-oss-20b"), tmp_path / "model")
    stored, dense = weights_of(scale.folder), weights_of(scale.plain)
    packed = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert len(packed) == 2 * 8
    for name in packed:
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(theirs, dense[name])


def test_what_is_not_quantised_is_the_same_in_both(kimi: ScaleModel) -> None:
    stored, dense = weights_of(kimi.folder), weights_of(kimi.plain)
    common = stored.keys() & dense.keys()
    assert len(common) > 50
    assert all(torch.equal(stored[name].float(), dense[name]) for name in common)


@pytest.mark.parametrize("name", ["kimi-k2.5", "deepseek-v3", "gpt-oss-20b"])
def test_quantised_weights_are_about_as_large_as_others(name: str, tmp_path: Path) -> None:
    scale = build_scale_model(evidence_for(name), tmp_path / "model")
    dense, stored = weights_of(scale.plain), weights_of(scale.folder)
    quantised = [dense[name] for name in dense if name not in stored or stored[name].dtype == torch.float8_e4m3fn]
    assert quantised
    assert all(0.4 < tensor.std() * tensor.shape[-1] ** 0.5 < 2.0 for tensor in quantised)


def test_another_layout_is_said_not_to_be_kept(tmp_path: Path) -> None:
    config = {**CONFIG, "head_dim": 32, "quantization_config": {"quant_method": "awq", "bits": 4}}
    packed = {f"model.layers.0.self_attn.q_proj.{part}": ("I32", [8, 8]) for part in ("qweight", "qzeros")}
    scale = build_scale_model(evidence_of(config, packed), tmp_path / "model")
    assert scale.plain == scale.folder
    assert any("awq" in note for note in scale.notes)
    assert "quantization_config" not in (scale.folder / "config.json").read_text(encoding="utf-8")


INT4 = {"num_bits": 4, "strategy": "group", "symmetric": True, "type": "int", "group_size": 32}


@pytest.mark.parametrize(
    "other", [{"num_bits": 8}, {"strategy": "channel"}, {"symmetric": False}, {"actorder": "group"}]
)
def test_other_schemes_of_compressed_tensors_are_not_taken_for_int4_groups(other: dict[str, object]) -> None:
    def layout(weights: dict[str, object]) -> object:
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        return read_layout(settings)

    assert layout(INT4) is not None
    assert layout({**INT4, **other}) is None
