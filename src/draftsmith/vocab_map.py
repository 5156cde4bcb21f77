"""The draft vocabulary: which target tokens the draft can say, and the two tensors by which engines know it.

    ids   target ids in ascending order, one per draft id
    d2t   int64 [Vd], an offset: target id = draft id + d2t[draft id]
    t2d   bool [Vt], true where the draft can say the target's token

An ascending order is what makes `logits[..., t2d]` columns equal the draft's (facts of SpecForge, speculators and
vLLM's `llama_eagle3.py`, which all read d2t as an offset). No torch here: plain integers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from draftsmith.errors import DataError


def offsets(ids: Sequence[int]) -> list[int]:
    """d2t of a draft vocabulary: [3, 7, 9] → [3, 6, 7]."""
    return [target - draft for draft, target in enumerate(ids)]


def ids_from_offsets(d2t: Sequence[int]) -> list[int]:
    """Target ids of a d2t: [3, 6, 7] → [3, 7, 9]."""
    return [draft + offset for draft, offset in enumerate(d2t)]


def mask(ids: Sequence[int], target_vocab_size: int) -> list[bool]:
    """t2d of a draft vocabulary."""
    chosen = set(ids)
    return [target in chosen for target in range(target_vocab_size)]


def looks_absolute(d2t: Sequence[int], target_vocab_size: int) -> bool:
    """Whether a d2t holds target ids instead of offsets.

    Offsets of ascending ids never fall, and stay in range once the draft id is added. Ids climb by at least one at
    each step. A d2t that climbs so everywhere may still be offsets with a gap behind every id, but then only if all
    of them are in range; d2t = 0, 1, 2 … is taken for the identity written as ids.
    """
    climbs = len(d2t) > 1 and all(after > before for before, after in pairwise(d2t))
    if not climbs:
        return False
    is_counting = list(d2t) == list(range(len(d2t)))
    return is_counting or ids_from_offsets(d2t)[-1] >= target_vocab_size


def check_mapping(d2t: Sequence[int], t2d: Sequence[bool], target_vocab_size: int, draft_vocab_size: int) -> None:
    """Raise DataError unless d2t and t2d describe one ascending draft vocabulary within the target's."""
    problem = _problem(d2t, t2d, target_vocab_size, draft_vocab_size)
    if problem:
        absolute = looks_absolute(d2t, target_vocab_size) or list(d2t) == [i for i, used in enumerate(t2d) if used]
        raise DataError(
            problem,
            where="draft vocabulary",
            hint="d2t seems to hold target ids; engines expect offsets, target id - draft id" if absolute else None,
        )


def _problem(d2t: Sequence[int], t2d: Sequence[bool], target_vocab_size: int, draft_vocab_size: int) -> str | None:
    ids = ids_from_offsets(d2t)
    if len(ids) != draft_vocab_size:
        return f"d2t has {len(ids)} entries for a draft vocabulary of {draft_vocab_size}"
    if len(t2d) != target_vocab_size:
        return f"t2d has {len(t2d)} entries for a target vocabulary of {target_vocab_size}"
    outside = next((i for i, target in enumerate(ids) if not 0 <= target < target_vocab_size), None)
    if outside is not None:
        return f"draft id {outside} maps to target id {ids[outside]}, outside of 0 … {target_vocab_size - 1}"
    falling = next((i for i in range(1, len(ids)) if ids[i] <= ids[i - 1]), None)
    if falling is not None:
        return f"target ids do not ascend at draft id {falling}: {ids[falling - 1]}, {ids[falling]}"
    unmarked = next((target for target in ids if not t2d[target]), None)
    if unmarked is not None:
        return f"d2t reaches target id {unmarked}, which t2d does not mark"
    marked = sum(bool(value) for value in t2d)
    return None if marked == len(ids) else f"t2d marks {marked} tokens, d2t has {len(ids)}"


def read_draft_vocab(path: Path) -> list[int] | None:
    """Target ids of the draft vocabulary that `prepare` chose, ascending; None for the target's whole vocabulary.

    Raises:
        DataError: the file is damaged or its ids are no draft vocabulary.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        ids, size, target_size = data["token_ids"], data["draft_vocab_size"], data["target_vocab_size"]
        if any(type(number) is not int for number in (size, target_size, *(ids or ()))):
            raise ValueError("ids and sizes are whole numbers")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"is no draft vocabulary: {error!r}", where=str(path), hint="run `draftsmith prepare RECIPE --redo`"
        ) from error
    if ids is not None:
        check_mapping(offsets(ids), mask(ids, target_size), target_size, size)
    return ids
