"""What vLLM's own code makes of the exported configuration, without starting an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.draft.config import DraftConfig
from draftsmith.export.formats import NORM_FLAGS
from tests.draft.builders import HIDDEN
from tests.export.builders import PLAIN, K, export_sglang, export_vllm, make_draft, make_facts
from tests.export.test_formats import FORMS, LLAMA3

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}]
SCALINGS += [{**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, {**YARN, "attention_factor": 1.3}]


def read_by_vllm(folder: Path):
    """The draft's configuration as vLLM's draft model sees it."""
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    config = get_config(folder, trust_remote_code=False)
    if isinstance(config, SpeculatorsConfig):
        return config
    return EAGLEConfig(config, method="eagle3", model_type="eagle")  # as in vLLM's config/speculative.py


def assert_means_the_same(seen, config: DraftConfig) -> None:
    for name in (*NORM_FLAGS, "target_hidden_size", "hidden_size", "vocab_size", "draft_vocab_size", "head_dim"):
        assert getattr(seen, name) == getattr(config, name), name
    assert seen.eagle_aux_hidden_state_layer_ids == list(config.aux_layer_ids)
    assert seen.num_aux_hidden_states == len(config.aux_layer_ids)
    assert seen.rope_parameters == config.rope_parameters()
    assert seen.tie_word_embeddings is False
    assert seen.architectures[0] in ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")


@pytest.mark.parametrize("form", FORMS)
def test_every_norm_flag_reaches_vllms_model(tmp_path, tiny_target, form):
    draft, facts = make_draft(**form), make_facts(tiny_target)
    assert_means_the_same(read_by_vllm(export_vllm(tmp_path / "vllm", draft, facts)), draft.config)
    if not form["norm_before_residual"]:
        assert_means_the_same(read_by_vllm(export_sglang(tmp_path / "flat", draft, facts)), draft.config)


@pytest.mark.parametrize(
    "shape", [{"aux_layer_ids": (1, 2, 4, 5)}, {"target_hidden_size": 2 * HIDDEN}, {"draft_vocab_size": 23}]
)
def test_every_width_reaches_vllms_model(tmp_path, tiny_target, shape):
    draft, facts = make_draft(**{**PLAIN, **shape}), make_facts(tiny_target)
    for export in (export_vllm, export_sglang):
        assert_means_the_same(read_by_vllm(export(tmp_path / export.__name__, draft, facts)), draft.config)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_vllm_rotates_as_the_draft_was_trained(tmp_path, tiny_target, scaling):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    draft = make_draft(**PLAIN, rope_scaling=scaling, rope_theta=5e5, head_dim=16)
    for export in (export_vllm, export_sglang):
        seen = read_by_vllm(export(tmp_path / export.__name__, draft, make_facts(tiny_target)))
        with set_current_vllm_config(VllmConfig()):
            rope = get_rope(
                16, max_position=64, is_neox_style=True, rope_parameters=seen.rope_parameters, dtype=torch.float32
            )
        cos, sin = (part[:, :8] for part in draft.rotation(torch.arange(64), torch.float32))
        torch.testing.assert_close(rope.cos_sin_cache[:64].float(), torch.cat([cos, sin], dim=-1))


def test_vllm_given_the_folder_alone_finds_the_target_and_the_number_of_tokens(tmp_path, tiny_target):
    from vllm.transformers_utils.config import maybe_override_with_speculators

    folder = export_vllm(tmp_path / "mtp-dflash", make_draft(), make_facts(tiny_target))
    model, tokenizer, speculative = maybe_override_with_speculators(str(folder), None, False)
    assert model == tokenizer == "someone/some-model"
    assert speculative == {"method": "eagle3", "num_speculative_tokens": K, "model": str(folder)}
