"""Why a draft accepts little: every other way to read it is tried on recorded states, and the one that helps is named.

A draft that was trained well and is read otherwise than it was trained accepts little, and nothing else shows it:
shapes fit, training figures are good. All readings are measured at the same slots: their differences are paired.
What chance explains is told by exchanging, in whole conversations, what was accepted before and after: exact however
few they are, where a bootstrap over few of them finds causes that are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2
from typing import Any

import numpy as np
import torch

from draftsmith.draft.model import Draft
from draftsmith.evaluate.offline import Replay, replay
from draftsmith.records import TargetFacts

Counts = Any  # float64 [texts, 2]: drafted tokens accepted, summed over the slots of each text, and its slots

EXACT = 14  # conversations, up to which every exchange is tried; of more, as many exchanges are drawn
CHANCE = 0.05  # that a whole diagnosis names a cause where there is none
DEFAULT_ROPE_THETA = 10000.0  # what engines take where a draft's configuration says nothing


@dataclass(frozen=True)
class Recorded:
    """A text that the target wrote, with its states."""

    conversation_id: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool
    top1: torch.Tensor  # [T] int64, the target's likeliest token after each; -1 where it is not known
    aux: dict[int, torch.Tensor]  # [T, A, Ht], of the draft's layer ids at 0, of ids so many higher at others


@dataclass(frozen=True)
class Reading:
    """One way to read a draft."""

    name: str
    remedy: str
    draft: Callable[[], Draft]
    shift: int = 0  # of the layer ids
    backwards: bool = False  # auxiliary states in descending order


@dataclass(frozen=True)
class Trial:
    """What is accepted after a change: drafted tokens of K, on the mean over slots; how much more than before it."""

    name: str
    remedy: str
    accepted: float
    lift: float
    by_chance: float  # how often chance alone moves it as far or farther that way; not corrected for other trials


def diagnose(draft: Draft, facts: TargetFacts, texts: Sequence[Recorded], steps: int) -> list[Trial]:
    """Try every reading; the first trial is the draft as it is.

    Args:
        texts: of `conversations_needed` or more, else no cause can be found.
        steps: K.
    """
    readings = list(_readings(draft, facts, texts))
    counts = [_count(reading, texts, steps) for reading in readings]  # each [texts, 2]
    owners = [text.conversation_id for text in texts]
    return [
        compared(reading.name, reading.remedy, counts[0], found, owners)
        for reading, found in zip(readings, counts, strict=True)
    ]


def compared(name: str, remedy: str, before: Counts, after: Counts, owners: Sequence[str]) -> Trial:
    """What is accepted after a change, and how much more than before it.

    Args:
        owners: the conversation of each text.
    """
    owner = np.unique(owners, return_inverse=True)[1]
    accepted, lift = _rate(after.sum(0)), _rate(after.sum(0)) - _rate(before.sum(0))
    return Trial(name, remedy, float(accepted), float(lift), _by_chance(before, after, owner))


def cause(trials: Sequence[Trial], own: Trial | None = None) -> Trial | None:
    """Of the trials that lift acceptance by more than chance explains, the one that lifts it most.

    Args:
        trials: everything that one diagnosis tried; one correction is over all of it.
        own: on answers that the target writes itself. The draft that accepts less there knows the recorded words alone.
    """
    limit = CHANCE / _comparisons(trials, own)
    lifted = [trial for trial in trials if trial.lift > 0 and trial.by_chance <= limit]
    if lifted:
        return max(lifted, key=lambda trial: trial.lift)
    return own if own and own.lift < 0 and own.by_chance <= limit else None


def conversations_needed(trials: Sequence[Trial], own: Trial | None = None) -> int:
    """With fewer, even a change that helps in every conversation may be chance: one exchange of 2 to the so many."""
    return ceil(log2(_comparisons(trials, own) / CHANCE))


def _comparisons(trials: Sequence[Trial], own: Trial | None) -> int:
    """The draft as it is has no remedy, and is compared with nothing."""
    return max(1, sum(bool(trial.remedy) for trial in trials) + (own is not None))


def _readings(draft: Draft, facts: TargetFacts, texts: Sequence[Recorded]) -> Iterator[Reading]:
    config = draft.config
    yield Reading("as it is", "", lambda: draft)
    for shift in (-1, 1):
        if all(shift in text.aux for text in texts):
            ids = ", ".join(str(id + shift) for id in config.aux_layer_ids)
            yield Reading(
                f"layer ids one {'higher' if shift > 0 else 'lower'}",
                f"it was trained on canonical layer ids {ids}; engines and trainers count from 0 or from 1",
                lambda: draft,
                shift=shift,
            )
    yield Reading(
        "auxiliary states in descending order", "turn the blocks of fc.weight's columns round", lambda: draft, 0, True
    )
    if draft.has_vocab_map and int(draft.d2t.max()) < config.vocab_size:
        yield Reading("d2t holds target ids", "write offsets: d2t[i] - i", lambda: _with_offsets(draft))
    for name, changes in _other_configs(draft, facts).items():
        said = ", ".join(f"{key} to {value}" for key, value in changes.items())
        yield Reading(name, f"set {said} in its configuration", partial(_variant, draft, changes))


def _other_configs(draft: Draft, facts: TargetFacts) -> dict[str, dict[str, Any]]:
    config = draft.config
    found: dict[str, dict[str, Any]] = {}
    for flag in ("norm_before_residual", "norm_output"):
        found[f"{flag} the other way"] = {flag: not getattr(config, flag)}
    if config.norm_before_fc or config.fc_norm:
        found["no norm before fc"] = {"norm_before_fc": False, "fc_norm": False}
    else:
        found["a norm over all states before fc"] = {"norm_before_fc": True}
        found["a norm over each state before fc"] = {"fc_norm": True}
    own = {"rope_theta": facts.rope_theta, "rope_scaling": facts.rope_scaling}
    if facts.rope_theta is not None and own != {"rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling}:
        found["the target's RoPE"] = own
    if DEFAULT_ROPE_THETA not in (config.rope_theta, facts.rope_theta):
        found["the default RoPE"] = {"rope_theta": DEFAULT_ROPE_THETA, "rope_scaling": None}
    return found


def _variant(draft: Draft, changes: dict[str, Any]) -> Draft:
    """The same weights under another configuration; a norm that it does not have has weights of one."""
    other = Draft(replace(draft.config, **changes)).to(draft.fc.weight.device, draft.fc.weight.dtype)
    other.load_state_dict(draft.state_dict(), strict=False, assign=True)
    return other.eval()


def _with_offsets(draft: Draft) -> Draft:
    other = _variant(draft, {})
    other.d2t = draft.d2t - torch.arange(len(draft.d2t), device=draft.d2t.device)
    return other


def _count(reading: Reading, texts: Sequence[Recorded], steps: int) -> Counts:
    draft = reading.draft()
    counts = []
    for text in texts:
        aux = text.aux[reading.shift].flip(-2) if reading.backwards else text.aux[reading.shift]
        counts.append(accepted_in(replay(draft, text.input_ids, text.loss_mask, aux, text.top1, steps)))
    return np.array(counts, dtype=np.float64)


def accepted_in(found: Replay) -> tuple[int, int]:
    """Drafted tokens accepted, summed over the slots of a text, and its slots."""
    return sum(found.joint), found.slots


def _by_chance(before: Counts, after: Counts, owner: Any) -> float:
    """One-sided sign-flip test of the lift, the way that it went: before and after exchanged in whole conversations."""
    before, after = _by_owner(before, owner), _by_owner(after, owner)
    conversations = len(before)
    if conversations <= EXACT:
        flips = np.arange(2**conversations)[:, None] >> np.arange(conversations) & 1
    else:
        flips = np.random.default_rng(0).integers(2, size=(2**EXACT, conversations))
        flips[0] = 0  # what was found is one of its exchanges: the chance is never none
    moved = flips @ (after - before)  # [flips, 2]
    lifts = _rate(after.sum(0) - moved) - _rate(before.sum(0) + moved)  # [flips]
    lifts = lifts if lifts[0] > 0 else -lifts
    return float((lifts >= lifts[0] - 1e-9).mean())


def _by_owner(counts: Counts, owner: Any) -> Counts:
    """[texts, 2] → [conversations, 2]"""
    return np.stack([np.bincount(owner, weights=column) for column in counts.T], axis=-1)


def _rate(counts: Any) -> Any:
    """Accepted tokens a slot: [..., 2] → [...]"""
    return counts[..., 0] / np.maximum(counts[..., 1], 1)
