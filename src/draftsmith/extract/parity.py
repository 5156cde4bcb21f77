"""Whether an engine's states are the reference's: each layer of a few real sequences, token by token.

The reference also has the layers next to those asked for, and the last state after the final norm, so that a state
that is not what it should be is named by what it is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import CaptureError, DraftsmithError, TargetError
from draftsmith.extract.from_transformers import CHECKED_TOKENS, TOLERANCE, Reference, head_errors, refuse_wrong_head
from draftsmith.extract.work import Captured
from draftsmith.recipe import Target
from draftsmith.records import EncodedFeatures, Features, Sample, TargetFacts
from draftsmith.store.codec import CODECS
from draftsmith.store.shard_file import taught
from draftsmith.target import DTYPES, TargetHead, final_norm, load_head, load_target, take_long_factors

SEQUENCES, TOKENS = 16, 4096  # that are compared at most; one sequence at the least
AFTER_NORM = "the last state after the final norm"
OUTLIER = 6.0  # times the tolerance: what a single token may differ by
EXPERT_QUANTILE = 0.95  # of tokens: those in which a near-tie between experts falls the other way differ by more
NOISE = 2.0  # times what rounding does to the reference itself: an engine rounds at other places
EMPTY = 0.1  # of the size of the reference's state: a smaller one was not captured
ELSEWISE = (
    "what the engine captures is not the target's residual stream there; extract.capture=hooked or native takes the "
    "other way, extract.engine=transformers needs none"
)
_SPARE = 1.25  # of the weights' size: room for activations
_BITS = ("num_bits", "bits", "w_bit")  # of a quantised weight, as configurations call them
# What a model's own code raises where it does not work here: the comparison is then left out, and the run goes on.
_FAILURES = (
    DraftsmithError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError,
    OSError, MemoryError,
)  # fmt: skip


Place = int | str
States = dict[str, dict[Place, torch.Tensor]]


@dataclass(frozen=True)
class Expected:
    """What the reference has for some samples.

    Attributes:
        states: by sample id and place, [T, Ht]; a place is a layer id, or `AFTER_NORM`.
        rounding: by place, how far rounding takes them; empty where that was not asked.
    """

    states: States
    rounding: dict[Place, dict[str, float]] = field(default_factory=dict)

    def of(self, ids: Sequence[str]) -> Expected | str:
        """Without the samples that are not among these; or why there is nothing to compare."""
        states = {id: states for id, states in self.states.items() if id in set(ids)}
        return replace(self, states=states) if states else "each sample that the reference ran was set aside"


def first_samples(samples: Iterable[Sample], step_tokens: int) -> list[Sample]:
    """As many of the samples as are compared, and the one that the engine has to cut, as its first step is full.

    Args:
        step_tokens: of the engine.
    """
    chosen: list[Sample] = []
    read, beginning = 0, True
    for sample in samples:
        tokens = len(sample.input_ids)
        beginning = beginning and len(chosen) < SEQUENCES and (not chosen or read + tokens <= TOKENS)
        if beginning or read < step_tokens < read + tokens:
            chosen.append(sample)
        read += tokens
        if read >= step_tokens and not beginning:
            break
    return chosen


def expect(
    facts: TargetFacts, target: Target, layer_ids: Sequence[int], device: torch.device, dtype: torch.dtype,
    samples: Sequence[Sample], rope_factors: str | None = None,
) -> Expected | str:  # fmt: skip
    """The reference's states, through transformers; or why there are none.

    Of a mixture of experts, also what rounding does to them: a token whose experts are nearly tied goes to others, and
    those after it, which attend to it, are not what they were. They are compared with what they are in float32, or, if
    that is what they are, with what they are for embeddings that are off by the tolerance.

    Raises:
        CaptureError: its own logits do not follow from its last state by the head that training reads.
    """
    if problem := _lacks_room(facts, device, dtype):
        return problem
    last = layer_ids[-1]
    places = (*sorted({near for id in layer_ids for near in (id - 1, id, id + 1) if 1 <= near < last}), last)
    found = _try_reference(facts, target, places, device, dtype, samples, rope_factors)
    if isinstance(found, str):
        return found
    states, of_head = found
    if of_head is not None:
        refuse_wrong_head(of_head, TOLERANCE[dtype])
    if not facts.num_experts or facts.quantization or _lacks_room(facts, device, torch.float32):
        return Expected(states)
    noise = TOLERANCE[dtype] if dtype == torch.float32 else 0.0
    found = _try_reference(facts, target, places, device, torch.float32, samples, rope_factors, noise)
    if isinstance(found, str):  # it is an allowance, and not needed
        return Expected(states)
    rounding: dict[Place, dict[str, float]] = {}
    for place in places:
        rounding[place] = _figures(_errors(states, found[0], place), experts=True)
        if noise:
            del rounding[place]["median"]  # which is the embeddings' own
    return Expected(states, rounding)


def _try_reference(
    facts: TargetFacts, target: Target, layer_ids: Sequence[int], device: torch.device, dtype: torch.dtype,
    samples: Sequence[Sample], rope_factors: str | None, noise: float = 0.0,
) -> tuple[States, dict[str, float] | None] | str:  # fmt: skip
    """`_reference_states`, or why there are none; whichever, its memory is free again."""
    try:
        return _reference_states(facts, target, layer_ids, device, dtype, samples, rope_factors, noise)
    except _FAILURES as error:
        reason = error.what if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {error}"
        return f"transformers cannot run the target: {reason}"
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine takes a share of the whole device


def _reference_states(
    facts: TargetFacts, target: Target, layer_ids: Sequence[int], device: torch.device, dtype: torch.dtype,
    samples: Sequence[Sample], rope_factors: str | None, noise: float,
) -> tuple[States, dict[str, float] | None]:  # fmt: skip
    """The states, and the errors of the head that training reads; None where the weight files have no such head."""
    model = load_target(facts, target, device, dtype)
    if noise:
        chance = torch.Generator().manual_seed(0)

        def disturb(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
            return embedded * (1 + noise * torch.randn(embedded.shape, generator=chance).to(embedded))

        model.get_input_embeddings().register_forward_hook(disturb)
    if rope_factors == "long":
        take_long_factors(model)
    reference = Reference(model, facts, layer_ids[:-1])
    norm = final_norm(model, facts)
    of_head = _head_errors(reference, facts, device, dtype, samples[0].input_ids[:CHECKED_TOKENS])
    states: States = {}
    for sample in samples:
        found = reference.states([sample.input_ids])[0]
        by_place: dict[Place, torch.Tensor] = dict(zip(layer_ids, found.unbind(dim=1), strict=True))
        with torch.inference_mode():
            by_place[AFTER_NORM] = norm(found[:, -1].to(device)).cpu()
        states[sample.id] = by_place
    return states, of_head


def _head_errors(
    reference: Reference, facts: TargetFacts, device: torch.device, dtype: torch.dtype, input_ids: list[int]
) -> dict[str, float] | None:
    """The engine's next tokens tell which logit is the largest; how large it is, only the reference's logits tell."""
    try:
        head = load_head(facts, device, dtype)
    except TargetError:  # `measure` says so
        return None
    return head_errors(head, *reference.last_and_logits(input_ids))


def compare(
    captured: Sequence[Features], expected: Expected, layer_ids: Sequence[int], dtype: torch.dtype, experts: bool,
    codec: str | None = None, stored: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Relative error of each layer, ‖ours − theirs‖ / ‖theirs‖ by token.

    Args:
        captured: the samples that there are states of; each of `expected` among them.
        layer_ids: canonical, ascending, N among them.
        dtype: of the computation, which says what rounding explains.
        experts: the target is a mixture of experts.
        codec: which they were encoded with, and rounds more.
        stored: they come from a store, which keeps the last states that the loss needs, and no others.

    Raises:
        CaptureError: a sample is not there, or a state is not the reference's; names the layer and what it is instead.
    """
    by_id = {features.id: features for features in captured}
    if absent := [id for id in expected.states if id not in by_id]:
        raise CaptureError(f"{len(absent)} samples were not captured: {', '.join(absent)}", where="parity")
    tolerance, by_layer = TOLERANCE[dtype] + ((CODECS[codec].error or 0.0) if codec else 0.0), {}
    for column, id in enumerate(layer_ids):
        partial = stored and column == len(layer_ids) - 1
        rows = {name: taught(by_id[name].loss_mask) if partial else slice(None) for name in expected.states}
        ours = torch.cat([_columns(by_id[name])[rows[name], column] for name in expected.states])
        theirs = {
            place: torch.cat([of[place][rows[name]] for name, of in expected.states.items()])
            for place in next(iter(expected.states.values()))
        }
        errors = {place: _relative_error(ours, states) for place, states in theirs.items()}
        figures, rounding = _figures(errors[id], experts), expected.rounding.get(id, {})
        explained = max(tolerance, _allowed(rounding.get("median", 0.0)))
        outlier = max(OUTLIER * tolerance, _allowed(rounding.get("outlier", 0.0)))
        nearest = min(errors, key=lambda place: float(errors[place].median()))
        if nearest != id or figures["median"] > explained or figures["outlier"] > outlier:
            raise _differs(id, figures, explained, outlier, nearest, float(errors[nearest].median()))
        if empty := int((_norms(ours) < EMPTY * _norms(theirs[id])).sum()):
            raise CaptureError(
                f"of {len(ours)} tokens {empty} have next to no state", where=f"parity, layer id {id}", hint=ELSEWISE
            )
        by_layer[str(id)] = figures | {"explained": explained, "outlier_explained": outlier}
    return {"sequences": len(expected.states), "tokens": len(ours), "tolerance": tolerance, "by_layer": by_layer}


def measure(
    captured: Sequence[Captured], expected: Expected | str, facts: TargetFacts, layer_ids: Sequence[int],
    dtype: torch.dtype, codec: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the manifest says of an engine's states: against the reference, and against the engine's own next tokens.

    Args:
        dtype, codec: as for `compare`.
        expected: of `expect`, for samples that are all among those captured.

    Raises:
        CaptureError: they are not what they should be.
    """
    features = [_decoded(one.features, codec) for one in captured]
    if isinstance(expected, str):
        report: dict[str, Any] = {"against": None, "reason": expected}
    else:
        figures = compare(features, expected, layer_ids, dtype, bool(facts.num_experts), codec)
        report = {"against": "transformers", **figures}
    try:
        head = load_head(facts, torch.device("cpu"), torch.float32)
    except TargetError as error:
        return {**report, "next_tokens": 0, "next_tokens_reason": error.what}
    lasts = torch.stack([one.last[-1] for one in features]).float()
    agreement = next_token_agreement(head, lasts, [one.next_token for one in captured])
    refuse_other_tokens(agreement, len(captured))
    return {**report, "next_tokens": len(captured), **agreement}


def next_token_agreement(head: TargetHead, lasts: torch.Tensor, next_tokens: Sequence[int]) -> dict[str, float]:
    """How often the head's first choice is the token that the engine chose, with the final norm once and not at all.

    Args:
        lasts: [n, Ht], canonical id N at the last token of n prompts.
        next_tokens: that the engine wrote after them, greedily.
    """
    chosen = torch.tensor(next_tokens)

    def share(logits: torch.Tensor) -> float:
        return float((logits.argmax(dim=-1).cpu() == chosen).float().mean())

    return {
        "next_token_agreement": share(head.logits(lasts)),
        "next_token_agreement_without_norm": share(head.project(lasts)),
    }


def refuse_other_tokens(agreement: dict[str, float], prompts: int) -> None:
    """Raises CaptureError where the captured last state is not what the engine's own tokens follow from."""
    with_norm, without = agreement["next_token_agreement"], agreement["next_token_agreement_without_norm"]
    if prompts < 8 or (with_norm >= 0.5 and with_norm >= without):
        return
    raise CaptureError(
        f"of {prompts} tokens that the engine chose, {with_norm:.0%} are the first choice of the target's head for the "
        f"captured last state, and {without:.0%} without the final norm",
        where="parity",
        hint="the state of layer id N is not the one before the final norm; please report this architecture",
    )


def _decoded(features: Features | EncodedFeatures, codec: str | None) -> Features:
    if isinstance(features, Features):
        return features
    assert codec is not None
    decode = CODECS[codec].decode
    return Features(**{**vars(features), "aux": decode(features.aux), "last": decode(features.last)})


def _columns(features: Features) -> torch.Tensor:
    """[T, L, Ht]"""
    return torch.cat([features.aux, features.last[:, None]], dim=1)


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """[S, Ht], [S, Ht] → [S]"""
    if ours.shape != theirs.shape:
        raise CaptureError(
            f"{list(ours.shape)} states were captured, where {list(theirs.shape)} are due", where="parity"
        )
    return _norms(ours.float() - theirs.float()) / _norms(theirs).clamp_min(1e-30)


def _norms(states: torch.Tensor) -> torch.Tensor:
    return states.float().norm(dim=-1)


def _allowed(rounding: float) -> float:
    """Of an engine, where rounding does so much to the reference; never one that is nothing of it, and so 1 off."""
    return min(NOISE * rounding, (1 + rounding) / 2)


def _errors(ours: States, theirs: States, place: Place) -> torch.Tensor:
    return _relative_error(*(torch.cat([of[place] for of in states.values()]) for states in (ours, theirs)))


def _figures(errors: torch.Tensor, experts: bool) -> dict[str, float]:
    outlier = errors.quantile(EXPERT_QUANTILE) if experts else errors.max()
    return {"median": float(errors.median()), "outlier": float(outlier), "max": float(errors.max())}


def _differs(
    id: int, figures: dict[str, float], explained: float, outlier: float, nearest: Place, error: float
) -> CaptureError:
    problem = (
        f"the engine's state differs from the reference's by {figures['median']:.1e} in the median of tokens and "
        f"{figures['outlier']:.1e} in the worst of them, where rounding explains {explained:.0e} and {outlier:.0e}"
    )
    if nearest != id:
        name = nearest if isinstance(nearest, str) else f"layer id {nearest}"
        problem += f"; it is nearer to {name}, with {error:.1e}"
    return CaptureError(problem, where=f"parity, layer id {id}", hint=ELSEWISE)


def _lacks_room(facts: TargetFacts, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the reference does not fit, as far as the weight files tell: the host's memory holds it before a device's."""
    if facts.weight_bytes is None:
        return "the size of the weights is not known"
    needed = facts.weight_bytes * dtype.itemsize / _stored_bytes(facts, dtype) * _SPARE
    free = {"memory": _available_bytes()}
    if device.type == "cuda":
        free["the device's memory"] = torch.cuda.mem_get_info(device)[0]
    for place, free_bytes in free.items():
        if needed > free_bytes:
            return (
                f"the reference needs {needed / 2**30:,.1f} GiB of {place}, and {free_bytes / 2**30:,.1f} GiB are free"
            )
    return None


def _stored_bytes(facts: TargetFacts, dtype: torch.dtype) -> float:
    """Bytes of a weight in the files, at the least: transformers dequantises where it has no kernels."""
    if facts.quantization is None:
        return DTYPES.get(facts.dtype or "", dtype).itemsize
    named = f"{facts.quantization.get('quant_method')} {facts.quantization.get('quant_algo')}"
    return min(_bits(facts.quantization), default=8 if "8" in named else 4) / 8


def _bits(settings: dict[str, Any]) -> list[int]:
    """What the settings of a quantisation say of bits, however deep."""
    own = [settings[name] for name in _BITS if isinstance(settings.get(name), int)]
    return own + [bits for part in settings.values() if isinstance(part, dict) for bits in _bits(part)]


def _available_bytes() -> int:
    """Memory that a process may take without others being swapped out."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
