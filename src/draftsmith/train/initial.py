"""The draft that training begins with: from the target's head, or one that was trained before."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from draftsmith import recipe
from draftsmith.draft.config import draft_config
from draftsmith.draft.engine_draft import is_for_engines, load_engine_draft
from draftsmith.draft.files import load_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckpointError, RequestError
from draftsmith.records import TargetFacts
from draftsmith.rundir import RunPaths
from draftsmith.target import TargetHead
from draftsmith.vocab_map import check_mapping, ids_from_offsets, mask, read_draft_vocab


def first_draft(
    run: recipe.Recipe, paths: RunPaths, facts: TargetFacts, head: TargetHead, aux_layer_ids: tuple[int, ...]
) -> tuple[Draft, list[str]]:
    """The draft before training, in float32 and on the head's device, and what a person should know of it.

    An earlier draft keeps its shape and its vocabulary; where the recipe asks for another shape, it is refused.

    Raises:
        RequestError: the earlier draft has another shape than the recipe asks for.
        CheckpointError: the earlier draft is damaged, made for another target, or has an embedding of its own.
        DataError: its vocabulary map is none.
    """
    settings = run.train.draft
    if settings.initial is None:
        ids = read_draft_vocab(paths.require(paths.draft_vocab, "prepare"))
        draft = Draft(draft_config(facts, settings, None if ids is None else len(ids), aux_layer_ids))
        draft.initialise(head, ids, run.seed)
        return draft.to(head.embedding.device), []
    folder = Path(settings.initial)
    draft, notes = _published(folder, facts, head) if is_for_engines(folder) else (load_draft(folder, head), [])
    _refuse_other_shape(draft, settings, aux_layer_ids)
    vocabulary = f"keeps its own vocabulary of {draft.config.draft_vocab_size:,} tokens, whatever `prepare` chose"
    return draft.float(), [f"{folder}: {note}" for note in (vocabulary, *notes)]


def _published(folder: Path, facts: TargetFacts, head: TargetHead) -> tuple[Draft, list[str]]:
    """A draft as engines take it, made one to train: its embedding is the target's, frozen, and the rest is trained."""
    draft, notes = load_engine_draft(folder, facts, head, to_train=True)
    own, target = draft.embed_tokens.weight, head.embedding.detach()
    if own.shape != target.shape or not torch.equal(own, target.to(own.dtype)):
        raise CheckpointError(
            "has an embedding that is not the target's",
            where=str(folder),
            hint="training keeps the target's embedding, which this draft never saw: train a new draft",
        )
    draft.requires_grad_(True)
    draft.embed_tokens.weight = nn.Parameter(target, requires_grad=False)
    if draft.has_vocab_map:  # engines read d2t alone
        d2t, size = draft.d2t.tolist(), draft.config.vocab_size
        marked = mask(ids_from_offsets(d2t), size)
        check_mapping(d2t, marked, size, draft.config.draft_vocab_size)
        draft.t2d.copy_(torch.tensor(marked))
    return draft, notes


def _refuse_other_shape(draft: Draft, settings: recipe.Draft, aux_layer_ids: tuple[int, ...]) -> None:
    wanted = {f"train.draft.{name}": value for name, value in settings.identity().items() if name != "initial"}
    wanted["extract.aux_layer_ids"] = list(aux_layer_ids)
    there = draft.config.to_json()
    differing = [
        f"{name}={json.dumps(there[name.rpartition('.')[2]])}"
        for name, value in wanted.items()
        if value is not None and json.dumps(value) != json.dumps(there[name.rpartition(".")[2]])
    ]
    if differing:
        raise RequestError(
            f"has another shape than this run's draft: {', '.join(differing)}",
            where=f"train.draft.initial={settings.initial}",
            hint="give these settings, or another draft",
        )
