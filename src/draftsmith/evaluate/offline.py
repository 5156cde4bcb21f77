"""Acceptance from recorded states, without running the target.

On a text that the target wrote greedily, what a round would accept at any slot follows from the text: drafts are right
as long as they equal it. The rounds that serving would really make are the slots reached from the first by hops of
`accepted + 1`:

    slot      s   s+1  s+2  s+3  s+4  s+5  s+6
    accepts   1    0    3    1    2    0    1        K = 3
    rounds    ●─────────●───────────────────●        3 rounds: 1, 3, 1

The mean over these rounds is the estimate. With fewer draft tokens K' < K a slot accepts min(accepted, K'), and rounds
begin elsewhere: hops of so much + 1 over the same slots. The mean over all slots is printed beside it: it weighs every
slot alike, while serving passes over the slots inside an accepted run. A slot takes part when all K drafts have a
recorded answer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from draftsmith.draft.model import Draft
from draftsmith.draft.unroll import counted_slots, shift, unroll
from draftsmith.evaluate.rounds import conditional, share
from draftsmith.target import TargetHead

HEAD_ROWS = 1024  # logits of so many tokens at once: [1024, Vt]


@dataclass(frozen=True)
class Hops:
    """The rounds of one text, in order."""

    starts: list[int]  # slots that they begin at
    accepted: list[int]  # drafts accepted in each


@dataclass(frozen=True)
class Replay:
    """What a draft would have done on one text."""

    starts: list[int]  # slots of the rounds
    accepted: list[int]  # drafts accepted in each round
    slots: int  # slots whose K drafts all have a recorded answer
    correct: list[int]  # slots whose draft k is right, by k
    joint: list[int]  # slots whose drafts 0 … k are all right, by k
    fewer: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # Hops of each K' < K; once there were none

    def rounds(self, k: int, steps: int) -> Hops | None:
        """The rounds with k of the K = `steps` draft tokens; None if an earlier version left only those of K."""
        if k == steps:
            return Hops(self.starts, self.accepted)
        return Hops(**self.fewer[str(k)]) if str(k) in self.fewer else None


@torch.inference_mode()
def replay(
    draft: Draft, input_ids: torch.Tensor, loss_mask: torch.Tensor, aux: torch.Tensor, top1: torch.Tensor, steps: int
) -> Replay:
    """Draft at every slot of a text, on its recorded tokens and states.

    Args:
        input_ids: [T] int64.
        loss_mask: [T] bool, where the target wrote the token itself.
        aux: [T, A, Ht].
        top1: [T] int64, the target's likeliest token after each; -1 where it is not known.
        steps: K.
    """
    length = len(input_ids)
    position = torch.arange(length, device=input_ids.device)
    states = unroll(draft, input_ids, aux.to(draft.fc.weight.dtype), position, [(0, length)], steps)
    *_, whole = counted_slots(loss_mask, torch.zeros_like(input_ids), steps)
    slots = whole.nonzero().squeeze(-1)
    drafted = [draft.to_target_ids(draft.lm_head(normed[slots]).argmax(-1)) for normed in states]
    correct = torch.stack([tokens == top1[slots + 1 + k] for k, tokens in enumerate(drafted)], dim=-1)
    joint = correct.cumprod(-1)
    *fewer, own = (_rounds(slots.tolist(), joint[:, :k].sum(-1).tolist()) for k in range(1, steps + 1))
    return Replay(
        starts=own.starts,
        accepted=own.accepted,
        slots=len(slots),
        correct=correct.sum(0).tolist(),
        joint=joint.sum(0).tolist(),
        fewer={str(k): asdict(found) for k, found in enumerate(fewer, start=1)},
    )


def _rounds(slots: list[int], accepted: list[int]) -> Hops:
    rounds = hops(slots, accepted)
    return Hops([slots[i] for i in rounds], [accepted[i] for i in rounds])


def hops(slots: list[int], accepted: list[int]) -> list[int]:
    """Indexes of the slots that serving begins a round at: the first of each run of slots, then on by accepted + 1."""
    rounds, due = [], -1
    for i, slot in enumerate(slots):
        begins_answer = i == 0 or slot != slots[i - 1] + 1
        if begins_answer or slot == due:
            rounds.append(i)
            due = slot + accepted[i] + 1
    return rounds


@torch.inference_mode()
def target_top1(head: TargetHead, last: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """The target's likeliest token after each token, where the next one is its own; -1 elsewhere: [T, Ht] → [T]."""
    top1 = torch.full_like(loss_mask, -1, dtype=torch.int64)
    rows = shift(loss_mask, 1).nonzero().squeeze(-1)
    for part in rows.split(HEAD_ROWS):
        top1[part] = head.logits(last[part].to(head.lm_head.dtype)).argmax(-1)
    return top1


def slot_rates(replays: list[Replay], steps: int) -> dict[str, Any]:
    """The mean over all slots: secondary to that over rounds."""
    slots = sum(replay.slots for replay in replays)
    joint = [share(sum(replay.joint[k] for replay in replays), slots) for k in range(steps)]
    return {
        "slots": slots,
        "mean_acceptance_length": 1 + sum(joint),
        "per_position": joint,
        "conditional_per_position": conditional(joint),
        "unconditional_per_position": [
            share(sum(replay.correct[k] for replay in replays), slots) for k in range(steps)
        ],
    }
