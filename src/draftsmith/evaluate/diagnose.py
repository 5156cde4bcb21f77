"""Why a draft accepts little: every other way to read it is tried on recorded states, and the one that helps is named.

A draft that was trained well and is read otherwise than it was trained accepts little, and nothing else shows it:
shapes fit, training figures are good. All readings are measured at the same slots: their differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from draftsmith.draft.model import Draft
from draftsmith.evaluate.offline import replay
from draftsmith.records import TargetFacts

DRAWS = 2000
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
    """What a reading accepts: drafted tokens of K, on the mean over slots; and how much more than the draft as it is.

    The interval of the lift is so wide that by chance one trial in twenty runs has any of its intervals miss.
    """

    name: str
    remedy: str
    accepted: float
    lift: float
    interval: tuple[float, float] | None  # none where one conversation says nothing of the spread


def diagnose(draft: Draft, facts: TargetFacts, texts: Sequence[Recorded], steps: int) -> list[Trial]:
    """Try every reading; the first trial is the draft as it is.

    Args:
        texts: of several conversations, else there is no interval and no cause is found.
        steps: K.
    """
    readings = list(_readings(draft, facts, texts))
    counts = [_count(reading, texts, steps) for reading in readings]  # each [texts, 2]
    owner = np.unique([text.conversation_id for text in texts], return_inverse=True)[1]
    chance = 0.05 / max(1, len(readings) - 1)
    before, slots = counts[0].T
    return [
        Trial(
            reading.name,
            reading.remedy,
            accepted=float(accepted.sum() / slots.sum()),
            lift=float((accepted - before).sum() / slots.sum()),
            interval=_interval(accepted - before, slots, owner, chance),
        )
        for reading, (accepted, _) in zip(readings, (count.T for count in counts), strict=True)
    ]


def cause(trials: Sequence[Trial]) -> Trial | None:
    """The reading that accepts most, if chance does not explain that it accepts more than the draft as it is."""
    most = max(trials, key=lambda trial: trial.accepted)
    return most if most.interval and most.interval[0] > 0 else None


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


def _count(reading: Reading, texts: Sequence[Recorded], steps: int) -> Any:
    """Drafted tokens accepted, summed over the slots of each text, and its slots: float64 [texts, 2]."""
    draft = reading.draft()
    counts = []
    for text in texts:
        aux = text.aux[reading.shift].flip(-2) if reading.backwards else text.aux[reading.shift]
        found = replay(draft, text.input_ids, text.loss_mask, aux, text.top1, steps)
        counts.append((sum(found.joint), found.slots))
    return np.array(counts, dtype=np.float64)


def _interval(lifts: Any, slots: Any, owner: Any, chance: float) -> tuple[float, float] | None:
    """Percentile bootstrap over whole conversations of Σ lifts / Σ slots."""
    conversations = int(owner.max()) + 1
    if conversations < 2:
        return None
    by_lift, by_slots = (np.bincount(owner, weights=values) for values in (lifts, slots))
    draws = np.random.default_rng(0).integers(conversations, size=(DRAWS, conversations))
    rates = by_lift[draws].sum(1) / np.maximum(by_slots[draws].sum(1), 1)
    low, high = np.quantile(rates, [chance / 2, 1 - chance / 2])
    return float(low), float(high)
