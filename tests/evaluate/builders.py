"""A tiny target with its own greedy answers, and a draft that knows them by heart, so that drafts get accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.corpus import write_corpus
from draftsmith.draft.config import draft_config
from draftsmith.draft.files import save_draft
from draftsmith.draft.loss import teacher_of, total_loss, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.evaluate.sampling import distribution
from draftsmith.evaluate.speculate import TargetReader, greedy_decode
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Draft as DraftSettings
from draftsmith.recipe import Recipe, parse
from draftsmith.records import Batch, Features, Sample, TargetFacts
from draftsmith.rundir import RunPaths, write_json
from draftsmith.store.manifest import Manifest, identity
from draftsmith.store.writer import StoreWriter
from draftsmith.target import TargetHead, decoder_layers, load_head
from tests.conftest import build_tiny_target

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, STEPS = 4, 9, 40, 3
CPU = torch.device("cpu")
WORDS, DRAFT_IDS, SMALL_PROMPT = 6, [1, 2, 4, 5], [2, 5, 2]


@dataclass
class Text:
    """A prompt with the target's answer, and the target's states of all of it from one uncached forward."""

    prompt: list[int]
    answer: list[int]
    aux: torch.Tensor  # [T, A, Ht]
    last: torch.Tensor  # [T, Ht]

    @property
    def input_ids(self) -> torch.Tensor:
        return torch.tensor(self.prompt + self.answer)

    @property
    def loss_mask(self) -> torch.Tensor:
        return torch.arange(len(self.input_ids)) >= len(self.prompt)


@dataclass
class World:
    facts: TargetFacts
    head: TargetHead
    target: TargetReader
    texts: list[Text]
    untrained: Draft
    trained: Draft


@dataclass
class Small:
    """A target of six words, so that the probability of every short text can be known, and an untrained draft."""

    target: TargetReader
    draft: Draft


def build_small(folder: Path) -> Small:
    build_tiny_target(folder, vocab_size=WORDS, num_hidden_layers=3, pad_token_id=None)
    facts = replace(read_facts(str(folder)), aux_layer_ids=(1, 2, 3))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    target = TargetReader(model, decoder_layers(model, facts), (1, 2, 3))
    return Small(target, make_draft(facts, load_head(facts, CPU, torch.float32), DRAFT_IDS))


@torch.inference_mode()
def exact_texts(target: TargetReader, tokens: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Every text of so many tokens after the prompt, with its probability."""
    found = {}
    for text in product(range(WORDS), repeat=tokens - 1):
        logits, _ = target.read([*SMALL_PROMPT, *text], keep=tokens, cached=False)
        *before, last = distribution(logits, temperature).double()
        chance = float(torch.stack([probs[token] for probs, token in zip(before, text, strict=True)]).prod())
        found |= {(*text, token): chance * float(last[token]) for token in range(WORDS)}
    assert abs(sum(found.values()) - 1) < 1e-6
    return found


def open_target(folder: Path, shift_aux: int = 0) -> tuple[TargetFacts, TargetReader, Any]:
    facts = replace(read_facts(str(folder)), eos_token_ids=())  # answers of one length, whatever they say
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    ids = tuple(id + shift_aux for id in facts.aux_layer_ids or ())
    return facts, TargetReader(model, decoder_layers(model, facts), ids), model


def make_prompts(seed: int = 0, prompts: int = PROMPTS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (prompts, PROMPT_TOKENS), generator=generator).tolist()


def build_world(
    folder: Path, training_steps: int = 120, prompts: int = PROMPTS, answer_tokens: int = ANSWER_TOKENS
) -> World:
    facts, target, _ = open_target(folder)
    head = load_head(facts, CPU, torch.float32)
    texts = []
    for prompt in make_prompts(prompts=prompts):
        answer = greedy_decode(target, prompt, answer_tokens, ())
        texts.append(read_text(facts, target, prompt, answer))
    untrained, trained = (make_draft(facts, head, seen_ids(texts)) for _ in range(2))
    learn_by_heart(trained, head, texts, training_steps)
    return World(facts, head, target, texts, untrained, trained)


def read_text(facts: TargetFacts, target: TargetReader, prompt: list[int], answer: list[int]) -> Text:
    """A text with the target's states."""
    states: list[torch.Tensor] = []
    last_layer = decoder_layers(target.model, facts)[-1]
    hook = last_layer.register_forward_hook(lambda layer, inputs, output: states.append(output[0]))
    with torch.no_grad():
        _, aux = target.read(prompt + answer, keep=1, cached=False)
    hook.remove()
    return Text(prompt, answer, aux, states[0])


def seen_ids(texts: list[Text]) -> list[int]:
    """A draft vocabulary smaller than the target's, that misses a few of the answers' tokens."""
    seen = sorted({token for text in texts for token in text.answer})
    return seen[: len(seen) * 9 // 10]


def make_draft(facts: TargetFacts, head: TargetHead, ids: list[int], **form: Any) -> Draft:
    draft = Draft(draft_config(facts, DraftSettings(**form), len(ids), facts.aux_layer_ids or ()))
    draft.initialise(head, ids, seed=0)
    return draft


def learn_by_heart(draft: Draft, head: TargetHead, texts: list[Text], steps: int) -> None:
    batch = as_batch(texts)
    teacher = teacher_of(draft, head, batch.last)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        results = unrolled_loss(draft, batch, teacher, STEPS)
        optimizer.zero_grad()
        total_loss(results, [result.loss_count for result in results], 0.8).backward()
        optimizer.step()


def as_batch(texts: list[Text]) -> Batch:
    lengths = torch.tensor([len(text.input_ids) for text in texts])
    return Batch(
        sample_ids=tuple(str(i) for i in range(len(texts))),
        input_ids=torch.cat([text.input_ids for text in texts]),
        loss_mask=torch.cat([text.loss_mask for text in texts]),
        document=torch.repeat_interleave(torch.arange(len(texts)), lengths),
        position=torch.cat([torch.arange(int(n)) for n in lengths]),
        aux=torch.cat([text.aux for text in texts]),
        last=torch.cat([text.last for text in texts]),
    )


def build_run(world: World, folder: Path, split: str = "validation", **manifest: Any) -> RunPaths:
    """A run's folder as the stages before `evaluate` leave it: a sample of each text, in two domains."""
    paths = RunPaths(folder)
    write_json(paths.facts, world.facts.to_json())
    features = [
        Features(str(i), f"domain{i % 2}", split, text.input_ids, text.loss_mask, text.aux, text.last)
        for i, text in enumerate(world.texts)
    ]
    samples = [
        Sample(f.id, f"conversation {f.id}", f.domain, split, f.input_ids.tolist(), f.loss_mask.int().tolist())
        for f in features
    ]
    write_corpus(paths.corpus, samples, {})
    fields: dict[str, Any] = {
        **identity(world.facts),
        "model": world.facts.path,
        "template_sha256": None,
        "aux_layer_ids": world.facts.aux_layer_ids,
        "dtype": "float32",
        "codec": "fp32",
        "engine": "transformers",
        "engine_version": "5",
        "draftsmith_version": "0",
    }
    with StoreWriter.open(paths.store, Manifest(**(fields | manifest)), shard_bytes=1 << 20) as writer:
        writer.add(features)
    save_draft(paths.checkpoints / "initial", world.untrained)
    save_draft(paths.checkpoints / "final", world.trained)
    return paths


def make_recipe(paths: RunPaths, **settings: Any) -> Recipe:
    evaluate = {"prompts": PROMPTS, "max_new_tokens": ANSWER_TOKENS, "device": "cpu"} | settings
    facts = json.loads(paths.facts.read_text())
    return parse({"name": "t", "run_dir": str(paths.root), "target": {"model": facts["path"]}, "evaluate": evaluate})
