"""Store → draft checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths

if TYPE_CHECKING:
    from draftsmith.draft.model import Draft
    from draftsmith.records import TargetFacts
    from draftsmith.target import TargetHead

LEAST_BALANCE = 0.8  # below it, the report says so


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Train a draft on the store and leave it in checkpoints/final. Under torchrun, all ranks call this."""
    from functools import partial

    from draftsmith.draft.files import save_draft, write_draft
    from draftsmith.rundir import append_event
    from draftsmith.store.manifest import identity
    from draftsmith.store.shards import Store
    from draftsmith.target import load_head, pick_dtype, read_facts_of_run
    from draftsmith.train.checkpoint import draft_tensors
    from draftsmith.train.loop import Trainer
    from draftsmith.train.ranks import Ranks, device_of_rank

    ranks, device = Ranks.joined(), device_of_rank(recipe.train.device)
    facts = read_facts_of_run(paths)
    # The head begins with the final norm, so states that it was applied to would be normed twice.
    expected = {**identity(facts), "final_norm_applied": False}
    store = Store.open(paths.require(paths.store, "extract"), expect=expected)
    head = load_head(facts, device, pick_dtype("auto", facts, device))
    draft = _first_draft(recipe, paths, facts, head, store.manifest.aux_layer_ids)
    if ranks.is_first:
        save_draft(paths.checkpoints / "initial", draft)
    trainer = Trainer(
        settings=recipe.train,
        seed=recipe.seed,
        draft=draft,
        head=head,
        store=store,
        train_indexes=[i for i, split in enumerate(store.splits) if split == "train"],
        validation_indexes=[i for i, split in enumerate(store.splits) if split == "validation"],
        folder=paths.stage("train"),
        device=device,
        ranks=ranks,
        name=recipe.name,
    )
    if ranks.is_first:
        trainer.record = partial(append_event, paths, "train")
    validation = trainer.train()
    whole = draft_tensors(trainer.learner, averaged=True)
    trained = {name: tensor.cpu() for name, tensor in whole if ranks.is_first}
    if ranks.is_first:
        write_draft(paths.checkpoints / "final", draft.config, trained)
    return _report(trainer, validation)


def _first_draft(
    recipe: Recipe, paths: RunPaths, facts: TargetFacts, head: TargetHead, aux_layer_ids: tuple[int, ...]
) -> Draft:
    """The draft before training: float32 masters, from the target's head or from a draft that was trained before."""
    from pathlib import Path

    from draftsmith.draft.config import draft_config
    from draftsmith.draft.files import load_draft
    from draftsmith.draft.model import Draft
    from draftsmith.errors import RequestError
    from draftsmith.vocab_map import read_draft_vocab

    ids = read_draft_vocab(paths.require(paths.draft_vocab, "prepare"))
    config = draft_config(facts, recipe.train.draft, None if ids is None else len(ids), aux_layer_ids)
    if recipe.train.draft.initial is None:
        draft = Draft(config)
        draft.initialise(head, ids, recipe.seed)
        return draft.to(head.embedding.device)
    draft = load_draft(Path(recipe.train.draft.initial), head).float()
    there = draft.draft_ids
    if draft.config != config or (there is not None and there.tolist() != ids):
        raise RequestError(
            "has another shape or vocabulary than this run's draft",
            where=recipe.train.draft.initial,
            hint="use the run's own draft_vocab.json and train.draft settings for both",
        )
    return draft


def _report(trainer: Any, validation: dict[str, float]) -> dict[str, Any]:
    parameters = dict(trainer.draft.named_parameters())
    trained = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
    steps = trainer.total_steps
    report = {
        "steps": steps,
        "ranks": trainer.ranks.count,
        "balance": round(trainer.balance(), 3),
        "train_tokens": sum(trainer.lengths),
        "trained_parameters": sum(trained.values()),
        "trained": sorted(trained),
        "frozen": sorted(parameters.keys() - trained.keys()),
        "validation": validation,
    }
    lines = [
        f"train     {steps:,} steps over {report['train_tokens']:,} tokens, {report['trained_parameters']:,} weights"
    ]
    if report["balance"] < LEAST_BALANCE:
        lines.append(
            f"          the {report['ranks']} ranks had work for {report['balance']:.0%} of their time: "
            "too few samples fit a batch; raise train.batch_tokens"
        )
    if validation:
        accuracy = " ".join(f"{validation[f'accuracy_{k}']:.3f}" for k in range(trainer.settings.unroll_steps))
        lines.append(
            f"          held out: loss {validation['loss']:.3f}, accuracy by step {accuracy}, "
            f"expected acceptance length {validation['acceptance_length']:.2f}"
        )
    return report | {"summary": lines}
