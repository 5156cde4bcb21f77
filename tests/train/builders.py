"""A store of a tiny target's real states, and a trainer on it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from draftsmith import recipe
from draftsmith.draft.config import draft_config
from draftsmith.draft.model import Draft
from draftsmith.probe.facts import read_facts
from draftsmith.records import Features
from draftsmith.store.manifest import Manifest, identity
from draftsmith.store.shards import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.target import load_head
from draftsmith.train.batches import flat_batch
from draftsmith.train.loop import Trainer, Work

AUX_LAYER_IDS, DRAFT_IDS = (2, 4, 5), list(range(0, 320, 2))


def features_of(target: Path, lengths: list[int], seed: int = 0) -> list[Features]:
    """Random prompts of a few tokens, the target's own greedy words after them, and its states for both."""
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, length in enumerate(lengths):
        prompt = torch.randint(3, 300, (min(3, length),), generator=generator)
        with torch.no_grad():
            ids = prompt[None]
            if length > len(prompt):
                new = length - len(prompt)
                ids = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            states.clear()
            hidden = model(ids, output_hidden_states=True).hidden_states
        mask = torch.ones(length, dtype=torch.bool)
        mask[: len(prompt)] = False
        aux = torch.stack([hidden[a][0] for a in AUX_LAYER_IDS], dim=1)
        split = "validation" if number % 5 == 4 else "train"
        samples.append(Features(f"s{number}", "tiny", split, ids[0], mask, aux, states[-1]))
    return samples


def build_store(folder: Path, target: Path, samples: list[Features]) -> Store:
    manifest = Manifest(
        model=str(target),
        **identity(read_facts(str(target))),
        template_sha256=None,
        aux_layer_ids=AUX_LAYER_IDS,
        dtype="float32",
        codec="fp32",
        engine="transformers",
        engine_version="test",
        draftsmith_version="test",
    )
    with StoreWriter.open(folder, manifest, shard_bytes=50_000) as writer:
        for sample in samples:
            writer.add([sample])
    return Store.open(folder)


def make_trainer(
    folder: Path, target: Path, store: Store, draft_ids: list[int] | None = DRAFT_IDS, **settings: object
) -> Trainer:
    facts = read_facts(str(target))
    head = load_head(facts, torch.device("cpu"), torch.float32)
    draft_vocab = facts.vocab_size if draft_ids is None else len(draft_ids)
    draft = Draft(draft_config(facts, recipe.Draft(), draft_vocab, AUX_LAYER_IDS))
    draft.initialise(head, draft_ids, seed=0)
    chosen = {"unroll_steps": 3, "batch_tokens": 64, "max_steps": 6, "log_every_steps": 1, "trackers": []}
    return Trainer(
        settings=recipe.Train(**{**chosen, **settings}),
        seed=0,
        draft=draft,
        head=head,
        store=store,
        train_indexes=[i for i, split in enumerate(store.splits) if split == "train"],
        validation_indexes=[i for i, split in enumerate(store.splits) if split == "validation"],
        folder=folder,
        device=torch.device("cpu"),
    )


def work_on(trainer: Trainer, samples: list[Features]) -> Work:
    """The samples as one batch of a step."""
    ids = tuple(sample.id for sample in samples)
    return Work([trainer.learner.prepare(flat_batch(samples))], (ids,), [len(sample.input_ids) for sample in samples])
