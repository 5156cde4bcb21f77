"""Training-time test: the draft runs K steps on its own outputs, at every slot of a sequence at once.

Slot j at step k, in a document x₀ … x_{T-1} (facts and serving agree on this pairing):

    reads      embedding of x_{j+1+k}, beside  fuse(aux_j) at k = 0, its own output of step k-1 later
    position   j + k
    predicts   x_{j+2+k};  the teacher is the target's distribution after x_{j+1+k}, from last_{j+1+k}
    counts     when x_{j+1} … x_{j+2+k} all lie in the document and are all the target's own words

    k = 0, j = 2:   x₀ x₁ x₂ [x₃]→x₄        x₃ came from the target itself; x₄ is the first token drafted
    k = 1, j = 2:   x₀ x₁ x₂  x₃ [x₄]→x₅    the first draft was accepted
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from draftsmith.draft.attention import Spans, UnrollAttention
from draftsmith.draft.model import Draft


def unroll(
    draft: Draft, input_ids: torch.Tensor, aux: torch.Tensor, position: torch.Tensor, spans: Spans, steps: int
) -> Iterator[torch.Tensor]:
    """Run `steps` steps of the draft on a flat batch of documents.

    Args:
        input_ids: [S] int64.
        aux: [S, A, Ht], the target's auxiliary states, ids ascending.
        position: [S] int64, from 0 in each document.
        spans: where each document begins and ends.

    Yields:
        For each step k, what `lm_head` reads at every slot: [S, H]. Slots that do not count hold nothing of meaning.
    """
    attend = UnrollAttention(spans)
    hidden = draft.fuse(aux)
    for k in range(steps):
        hidden, normed = draft.step(shift(input_ids, 1 + k), hidden, position + k, attend)
        yield normed


def counted_slots(loss_mask: torch.Tensor, document: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """For each step, the slots whose draft serving would really ask for: [S] bool.

    Args:
        loss_mask: [S] bool, True where the target wrote the token itself.
        document: [S] int64, number of the document of each token.
    """

    def own(offset: int) -> torch.Tensor:
        same = torch.zeros_like(loss_mask)
        if offset < len(document):
            same[: len(document) - offset] = document[offset:] == document[: len(document) - offset]
        return shift(loss_mask, offset) & same

    counted = own(1)
    for k in range(steps):
        counted = counted & own(2 + k)
        yield counted


def shift(x: torch.Tensor, amount: int) -> torch.Tensor:
    """x[i + amount] at i, zeros where that is past the end: [S, …] → [S, …]."""
    shifted = torch.zeros_like(x)
    if amount < len(x):
        shifted[: len(x) - amount] = x[amount:]
    return shifted
