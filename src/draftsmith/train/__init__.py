"""Store → draft checkpoints."""

from __future__ import annotations

import sys
from typing import Any

from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths

LEAST_BALANCE = 0.8  # below it, the report says so
SLOW = "the fast kernels of a GPU are for bfloat16: with train.autocast=none it takes the slow, plain computation"


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Train a draft on the store and leave it in checkpoints/final. Under torchrun, all ranks call this."""
    from functools import partial

    from draftsmith.draft.files import save_draft, write_draft
    from draftsmith.rundir import append_event
    from draftsmith.store.check import refuse_shortened
    from draftsmith.store.manifest import identity
    from draftsmith.store.shards import Store
    from draftsmith.target import load_head, pick_dtype, read_facts_of_run
    from draftsmith.train.checkpoint import draft_tensors
    from draftsmith.train.initial import first_draft
    from draftsmith.train.loop import Trainer
    from draftsmith.train.ranks import Ranks, device_of_rank
    from draftsmith.train.step import lacks_kernels

    ranks, device = Ranks.joined(), device_of_rank(recipe.train.device)
    with ranks.all_or_none():
        facts = read_facts_of_run(paths)
        # The head begins with the final norm, so states that it was applied to would be normed twice.
        expected = {**identity(facts), "final_norm_applied": False}
        store = Store.open(paths.require(paths.store, "extract"), expect=expected)
        refuse_shortened(paths.store, len(store))
        head = load_head(facts, device, pick_dtype("auto", facts, device))
        draft, notes = first_draft(recipe, paths, facts, head, store.manifest.aux_layer_ids)
        if ranks.is_first:
            slow = recipe.train.kernels == "auto" and lacks_kernels(recipe.train, device)
            for note in [*notes, SLOW] if slow else notes:
                print(f"train: {note}", file=sys.stderr)
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
    return _report(trainer, validation, notes)


def _report(trainer: Any, validation: dict[str, float], notes: list[str]) -> dict[str, Any]:
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
        "initial": notes,
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
