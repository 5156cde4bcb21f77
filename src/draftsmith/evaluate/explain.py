"""The diagnosis of a draft on a run's held-out texts, with states from the target itself at the draft's layer ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from draftsmith.draft.files import load_draft
from draftsmith.draft.model import Draft
from draftsmith.evaluate.diagnose import Recorded, Trial, cause, diagnose
from draftsmith.evaluate.held_out import HeldOut, open_held_out
from draftsmith.evaluate.offline import target_top1
from draftsmith.evaluate.rounds import share
from draftsmith.evaluate.speculate import GreedyTarget
from draftsmith.progress import progress
from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths
from draftsmith.target import decoder_layers, load_target

TEXTS = 40


def explain(recipe: Recipe, paths: RunPaths, folder: Path | None) -> dict[str, Any]:
    """Diagnose the draft in a folder, or the trained one. Returns the report.

    Raises:
        CheckpointError: the draft is damaged, or does not fit the target.
        DataError: nothing was held out.
    """
    held_out = open_held_out(recipe, paths)
    folder = folder or paths.checkpoints / "final"
    draft = load_draft(folder, held_out.head).to(held_out.dtype).eval()
    texts = list(_texts(held_out, draft))
    trials = diagnose(draft, held_out.facts, texts, held_out.steps)
    named = cause(trials)
    report = {
        "draft": str(folder),
        "texts": len(texts),
        "num_speculative_tokens": held_out.steps,
        "cause": named.name if named else None,
        "trials": [dataclasses.asdict(trial) for trial in trials],
        "notes": _notes(draft, texts),
    }
    return {**report, "summary": _summary(report, trials, named)}


def _texts(held_out: HeldOut, draft: Draft) -> Iterator[Recorded]:
    """Held-out texts with the target's states at the draft's layer ids, and at those one lower and one higher."""
    ids, last_id = draft.config.aux_layer_ids, held_out.facts.num_hidden_layers or 0
    shifts = [shift for shift in (-1, 0, 1) if ids[0] + shift >= 1 and ids[-1] + shift <= last_id]
    every = sorted({id + shift for id in ids for shift in shifts})
    model = load_target(held_out.facts, held_out.recipe.target, held_out.device, held_out.dtype)
    target = GreedyTarget(model, decoder_layers(model, held_out.facts), tuple(every))
    chosen = list(held_out.indexes)[:TEXTS]
    with progress("read", len(chosen), "texts") as bar:
        for id in chosen:
            sample = held_out.store[held_out.indexes[id]]
            input_ids, mask, last = (x.to(held_out.device) for x in (sample.input_ids, sample.loss_mask, sample.last))
            with torch.inference_mode():
                _, states = target.read(input_ids.tolist(), keep=1, cached=False)  # [T, len(every), Ht]
            yield Recorded(
                held_out.conversations[id],
                input_ids,
                mask,
                target_top1(held_out.head, last, mask),
                {shift: states[:, [every.index(id + shift) for id in ids]] for shift in shifts},
            )
            bar.advance(1)


def _notes(draft: Draft, texts: list[Recorded]) -> list[str]:
    """What no reading of the draft can mend."""
    known = torch.cat([text.top1[:-1][text.loss_mask[1:]] for text in texts])
    written = torch.cat([text.input_ids[1:][text.loss_mask[1:]] for text in texts])
    notes = []
    own = share(int((known == written).sum()), len(known))
    if own < 0.9:
        notes.append(
            f"only {own:.0%} of the recorded answers' tokens are the target's own top-1: a draft that was trained on "
            "such text learns what the target does not say; let the target write the answers (prepare.regenerate)"
        )
    if draft.draft_ids is not None:
        sayable = share(int(torch.isin(known, draft.draft_ids).sum()), len(known))
        if sayable < 0.95:
            notes.append(
                f"the draft's vocabulary holds {sayable:.0%} of what the target says; the rest is never accepted: "
                "raise prepare.draft_vocab_size, or choose it from more text"
            )
    return notes


def _summary(report: dict[str, Any], trials: list[Trial], named: Trial | None) -> list[str]:
    width = max(len(trial.name) for trial in trials)
    lines = [f"why       {report['draft']}, {report['texts']} texts, K = {report['num_speculative_tokens']}"]
    for trial in trials:
        lines.append(f"          {trial.name:<{width}}  {trial.accepted:.3f} of K accepted, {trial.lift:+.3f}")
    lines += [f"          note: {note}" for note in report["notes"]]
    if named is None:
        return [*lines, "          no other reading of the draft accepts more, beyond chance"]
    return [*lines, f"          found: {named.name}; {named.remedy}"]
