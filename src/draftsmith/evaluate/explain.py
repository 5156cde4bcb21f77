"""The diagnosis of a draft on a run's held-out texts, with states from the target itself at the draft's layer ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.draft.engine_draft import is_for_engines, load_engine_draft
from draftsmith.draft.files import load_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import RequestError
from draftsmith.evaluate.diagnose import Recorded, Trial, accepted_in, cause, compared, conversations_needed, diagnose
from draftsmith.evaluate.held_out import HeldOut, first_prompt, open_held_out, open_target
from draftsmith.evaluate.offline import replay, target_top1
from draftsmith.evaluate.renderings import FirstTurn, Prompts, count, renderings, try_renderings
from draftsmith.evaluate.rounds import share
from draftsmith.evaluate.speculate import TargetReader, greedy_decode
from draftsmith.progress import progress
from draftsmith.recipe import Recipe
from draftsmith.records import Features
from draftsmith.rundir import RunPaths
from draftsmith.target import decoder_layers, load_tokenizer

TEXTS = 40
ANSWER_TOKENS = 128  # of a first answer, where texts have to be read again
OWN_SHARE = 0.9  # of recorded tokens that are the target's top-1, below which it is asked for answers of its own
OFF_POLICY = "trained on answers that are not the target's own"


def explain(recipe: Recipe, paths: RunPaths, folder: Path | None) -> dict[str, Any]:
    """Diagnose the draft in a folder, or the trained one. Returns the report.

    Raises:
        CheckpointError: the draft is damaged, or does not fit the target.
        DataError: nothing was held out.
        RequestError: the folder holds no draft, or the template that the prompts were rendered with is not there any
            more.
    """
    if folder is not None and not (folder / "config.json").is_file():
        raise RequestError("holds no draft: it has no config.json", where=str(folder))
    held_out = open_held_out(recipe, paths)
    folder = folder or paths.checkpoints / "final"
    draft, mismatches = _load(folder, held_out)
    target = open_target(held_out, _ids_to_read(held_out, draft))
    texts = list(_texts(held_out, draft, target))
    reader = TargetReader(target.model, decoder_layers(target.model, held_out.facts), draft.config.aux_layer_ids)
    turns = _first_turns(held_out)
    trials = diagnose(draft, held_out.facts, texts, held_out.steps) + _on_stored_states(held_out, draft, texts)
    rendered = try_renderings(draft, reader, turns, renderings(_prompts(held_out)), held_out.steps)
    own_share = _own_share(texts)
    own = _on_own_answers(held_out, draft, reader, turns) if own_share < OWN_SHARE else None
    named = cause(trials + rendered, own)
    conversations, needed = len({text.conversation_id for text in texts}), conversations_needed(trials + rendered, own)
    found, remedy = named.name if named else next(iter(mismatches), None), named.remedy if named else None
    report = {
        "draft": str(folder),
        "texts": len(texts),
        "num_speculative_tokens": held_out.steps,
        "conversations": conversations,
        "cause": found,
        "remedy": remedy,
        "verdict": _verdict(found, remedy, conversations, needed),
        "mismatches": mismatches,
        "trials": [dataclasses.asdict(trial) for trial in trials],
        "renderings": [dataclasses.asdict(trial) for trial in rendered],
        "own_answers": dataclasses.asdict(own) if own else None,
        "notes": _notes(draft, texts, own_share),
    }
    return {**report, "summary": _summary(report, trials, rendered, own)}


def _load(folder: Path, held_out: HeldOut) -> tuple[Draft, list[str]]:
    """The draft of a checkpoint, or as an engine reads it, and what is known to contradict itself or the target."""
    if is_for_engines(folder):
        draft, mismatches = load_engine_draft(folder, held_out.facts, held_out.head)
    else:
        draft, mismatches = load_draft(folder, held_out.head), []
    return draft.to(held_out.dtype).eval(), mismatches


def _shifts(held_out: HeldOut, draft: Draft) -> list[int]:
    ids, last_id = draft.config.aux_layer_ids, held_out.facts.num_hidden_layers or 0
    return [shift for shift in (-1, 0, 1) if ids[0] + shift >= 1 and ids[-1] + shift <= last_id]


def _ids_to_read(held_out: HeldOut, draft: Draft) -> tuple[int, ...]:
    """The draft's layer ids, and those one lower and one higher."""
    return tuple(sorted({id + shift for id in draft.config.aux_layer_ids for shift in _shifts(held_out, draft)}))


def _texts(held_out: HeldOut, draft: Draft, target: TargetReader) -> Iterator[Recorded]:
    """Held-out texts with the target's states at the draft's layer ids, and at those one lower and one higher."""
    every, ids = _ids_to_read(held_out, draft), draft.config.aux_layer_ids
    chosen = _chosen(held_out)
    with progress("read", len(chosen), "texts") as bar:
        for id, sample in chosen:
            input_ids, mask, last = (x.to(held_out.device) for x in (sample.input_ids, sample.loss_mask, sample.last))
            with torch.inference_mode():
                _, states = target.read(input_ids.tolist(), keep=1, cached=False)  # [T, len(every), Ht]
            yield Recorded(
                held_out.conversations[id],
                input_ids,
                mask,
                target_top1(held_out.head, last, mask),
                {at: states[:, [every.index(id + at) for id in ids]] for at in _shifts(held_out, draft)},
            )
            bar.advance(1)


def _chosen(held_out: HeldOut) -> list[tuple[str, Features]]:
    return [(id, held_out.store[held_out.indexes[id]]) for id in list(held_out.indexes)[:TEXTS]]


def _on_stored_states(held_out: HeldOut, draft: Draft, texts: list[Recorded]) -> list[Trial]:
    """What the draft accepts on the store's states, against those that the target computes here."""
    made = held_out.store.manifest
    if made.aux_layer_ids != draft.config.aux_layer_ids:
        return []
    before: list[tuple[int, int]] = []
    after: list[tuple[int, int]] = []
    for (_, sample), text in zip(_chosen(held_out), texts, strict=True):
        for counts, aux in ((before, text.aux[0]), (after, sample.aux.to(held_out.device))):
            counts.append(accepted_in(replay(draft, text.input_ids, text.loss_mask, aux, text.top1, held_out.steps)))
    owners = [text.conversation_id for text in texts]
    remedy = "what it was trained on is not what the target computes: see how extract compared them, and extract anew"
    name = f"states as {made.engine} {made.engine_version} recorded them"
    return [compared(name, remedy, np.array(before, float), np.array(after, float), owners)]


def _first_turns(held_out: HeldOut) -> list[FirstTurn]:
    """The first prompt of each text that has one, and the beginning of its answer."""
    turns = []
    for id, sample in _chosen(held_out):
        prompt = first_prompt(sample)
        rest = sample.loss_mask[len(prompt) :].tolist()
        answer_tokens = min(ANSWER_TOKENS, rest.index(False) if False in rest else len(rest))
        if prompt and answer_tokens:
            answer = sample.input_ids[len(prompt) : len(prompt) + answer_tokens].tolist()
            turns.append(FirstTurn(held_out.conversations[id], prompt, answer))
    return turns


def _prompts(held_out: HeldOut) -> Prompts:
    """As `prepare` rendered them. Raises RequestError if its template is no longer there."""
    recipe = held_out.recipe
    file = recipe.prepare.chat_template
    try:
        template = Path(file).read_text(encoding="utf-8") if file else None
    except OSError as error:
        raise RequestError(f"cannot be read: {error}", where=f"prepare.chat_template {file}") from error
    return Prompts(load_tokenizer(held_out.facts, recipe.target), template, recipe.prepare.chat_template_kwargs)


def _on_own_answers(held_out: HeldOut, draft: Draft, target: TargetReader, turns: list[FirstTurn]) -> Trial:
    """What the draft accepts on answers that the target writes to the same prompts, against the recorded ones."""
    before, after = [], []
    with progress("answer", len(turns), "prompts") as bar:
        for turn in turns:
            answer = greedy_decode(target, turn.prompt, len(turn.answer), held_out.facts.eos_token_ids)
            before.append(count(draft, target, turn.prompt, turn.answer, held_out.steps))
            after.append(count(draft, target, turn.prompt, answer, held_out.steps))
            bar.advance(1)
    owners = [turn.conversation_id for turn in turns]
    remedy = "let the target write the answers (prepare.regenerate), and train on them"
    return compared(OFF_POLICY, remedy, np.array(before, float), np.array(after, float), owners)


def _verdict(found: str | None, remedy: str | None, conversations: int, needed: int) -> str:
    """What was found, or why nothing was, in one sentence for the terminal and the page."""
    if found:
        return f"found: {found}; {remedy}" if remedy else f"found: {found}"
    if conversations < needed:
        return (
            f"too few conversations to name a cause: {conversations} held out, and {needed} are needed to tell what "
            "helps from chance; hold out more (prepare.validation_fraction, or more conversations in prepare.sources)"
        )
    return "nothing that was tried accepts more, beyond chance"


def _own_share(texts: list[Recorded]) -> float:
    """Share of the recorded answers' tokens that are the target's own top-1."""
    own = sum(int((text.top1[:-1] == text.input_ids[1:])[text.loss_mask[1:]].sum()) for text in texts)
    return share(own, sum(int(text.loss_mask[1:].sum()) for text in texts))


def _notes(draft: Draft, texts: list[Recorded], own_share: float) -> list[str]:
    """What no reading of the draft can mend."""
    notes = []
    if own_share < OWN_SHARE:
        notes.append(
            f"only {own_share:.0%} of the recorded answers' tokens are the target's own top-1: a draft that was "
            "trained on such text learns what the target does not say; let the target write the answers "
            "(prepare.regenerate)"
        )
    if draft.draft_ids is not None:
        known = torch.cat([text.top1[:-1][text.loss_mask[1:]] for text in texts])
        sayable = share(int(torch.isin(known, draft.draft_ids).sum()), len(known))
        if sayable < 0.95:
            notes.append(
                f"the draft's vocabulary holds {sayable:.0%} of what the target says; the rest is never accepted: "
                "raise prepare.draft_vocab_size, or choose it from more text"
            )
    return notes


def _summary(report: dict[str, Any], trials: list[Trial], rendered: list[Trial], own: Trial | None) -> list[str]:
    lines = [f"why       {report['draft']}, {report['texts']} texts, K = {report['num_speculative_tokens']}"]
    lines += [f"          mismatch: {mismatch}" for mismatch in report["mismatches"]]
    shown = trials + rendered
    if own:
        shown.append(dataclasses.replace(own, name="answers that the target writes itself"))
    width = max(len(trial.name) for trial in shown)
    for trial in shown:
        lines.append(f"          {trial.name:<{width}}  {trial.accepted:.3f} of K accepted, {trial.lift:+.3f}")
    if not rendered:
        lines.append("          note: no prompt could be taken apart and rendered otherwise")
    lines += [f"          note: {note}" for note in report["notes"]]
    return [*lines, f"          {report['verdict']}"]
