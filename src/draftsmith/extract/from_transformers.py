"""The reference: the target's hidden states through transformers, and the proof that they are what they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from draftsmith.errors import CaptureError
from draftsmith.records import Features, Sample, TargetFacts
from draftsmith.target import TargetHead, decoder_layers, final_norm, text_model

# Largest relative error that rounding explains, by dtype of the computation.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_WINDOW = 1024  # samples that are sorted by length together
CHECKED_TOKENS, _CHECKED_SEQUENCES = 128, 4


class Reference:
    """A target in transformers, with hooks that keep its residual stream.

    Args:
        model: what `load_target` returns.
        facts: of the same target.
        aux_layer_ids: canonical, ascending, below N.

    Raises:
        TargetError: the model's decoder layers or final norm are not found.
    """

    def __init__(self, model: Any, facts: TargetFacts, aux_layer_ids: Sequence[int]) -> None:
        self.model, self.text, self.hidden_size = model, text_model(model, facts), facts.hidden_size
        layers = decoder_layers(model, facts)
        # Canonical id a is the input of 0-based layer a; id N, after the last layer, is the input of the final norm.
        places = {id: layers[id] for id in aux_layer_ids} | {len(layers): final_norm(model, facts)}
        self.layer_ids = tuple(places)
        self._kept: dict[int, torch.Tensor] = {}
        for id, module in places.items():
            module.register_forward_pre_hook(self._keep(id), with_kwargs=True)

    def _keep(self, id: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            self._kept[id] = state.clone()  # what comes after may write into it

        return hook

    @torch.inference_mode()
    def features(self, samples: Sequence[Sample]) -> list[Features]:
        """The states of samples read in one batch.

        Raises:
            CaptureError: a state is absent, of another shape, or not finite; or the device has not enough memory.
        """
        states = self.states([sample.input_ids for sample in samples])
        for sample, of_sample in zip(samples, states, strict=True):
            self._refuse_non_finite(sample, of_sample)
        return [
            Features(
                id=sample.id,
                domain=sample.domain,
                split=sample.split,
                input_ids=torch.tensor(sample.input_ids),
                loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool),
                aux=of_sample[:, :-1],
                last=of_sample[:, -1],
            )
            for sample, of_sample in zip(samples, states, strict=True)
        ]

    @torch.inference_mode()
    def states(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """States [T, A + 1, Ht] of each sequence, the last one id N, on the CPU.

        Sequences are padded on the right, without an attention mask: the target is causal, so that no token sees what
        comes after it.
        """
        longest = max(map(len, sequences))
        ids = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
        try:
            self._forward(self.text, ids, use_cache=False)
        except torch.OutOfMemoryError as error:
            raise CaptureError(
                f"the device has not enough memory for {len(sequences)} sequences of {longest} tokens",
                where="extract",
                hint="lower extract.batch_tokens; the same command, without --redo, then goes on from the last shard",
            ) from error
        kept = torch.stack([self._kept[id] for id in self.layer_ids], dim=2).cpu()  # [B, T, A + 1, Ht]
        return [rows[: len(sequence)] for rows, sequence in zip(kept, sequences, strict=True)]

    @torch.inference_mode()
    def last_and_logits(self, sequence: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """State id N [T, Ht] and the model's own logits [T, Vt], of one forward."""
        output = self._forward(self.model, torch.tensor([list(sequence)]))
        return self._kept[self.layer_ids[-1]][0], output.logits[0]

    def _forward(self, module: Any, ids: torch.Tensor, **settings: Any) -> Any:
        """Run a module on token ids [B, T], and see that every hook kept a state of each token."""
        self._kept.clear()
        output = module(input_ids=ids.to(self.model.device), **settings)
        for id in self.layer_ids:
            found = list(self._kept[id].shape) if id in self._kept else None
            if found != [*ids.shape, self.hidden_size]:
                raise CaptureError(
                    f"the state of layer id {id} "
                    + ("was not captured" if found is None else f"is {found}, not {[*ids.shape, self.hidden_size]}"),
                    where=type(module).__name__,
                )
        return output

    def _refuse_non_finite(self, sample: Sample, states: torch.Tensor) -> None:
        finite = states.isfinite().all(dim=-1)  # [T, A + 1]
        if not finite.all():
            token, place = (~finite).nonzero()[0].tolist()
            raise CaptureError(
                f"the state of layer id {self.layer_ids[place]} is not finite at token {token}",
                where=f"sample {sample.id}",
                hint="float16 overflows in many targets: set target.dtype=bfloat16",
            )


def batches(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Samples of like length together, the longest first.

    A batch has at most `batch_tokens` with padding, or one sample. It depends on nothing but the corpus: a run
    that resumes forms the same batches, and so computes the same bytes.
    """
    remaining = iter(samples)
    while window := list(islice(remaining, _WINDOW)):
        window.sort(key=lambda sample: -len(sample.input_ids))
        while window:
            size = max(1, batch_tokens // len(window[0].input_ids))
            yield window[:size]
            window = window[size:]


def measure_parity(reference: Reference, head: TargetHead, samples: Sequence[Sample]) -> dict[str, Any]:
    """Prove on a few sequences that the captured states are those that the target's own logits come from.

    `padding_error` is the relative error of states read in one padded batch against each sequence alone, in the median
    of tokens and at most; the others are those of `head_errors`.

    Raises:
        CaptureError: an error is more than rounding; names the figures.
    """
    sequences = [sample.input_ids[:CHECKED_TOKENS] for sample in samples[:_CHECKED_SEQUENCES]]
    alone = torch.cat([reference.states([sequence])[0] for sequence in sequences])
    batched = torch.cat(reference.states(sequences))
    by_token = ((batched - alone).float().norm(dim=-1) / alone.float().norm(dim=-1).clamp_min(1e-30)).amax(-1)
    lasts, logits = zip(*(reference.last_and_logits(sequence) for sequence in sequences), strict=True)
    tolerance = TOLERANCE[alone.dtype]
    errors = head_errors(head, torch.cat(lasts), torch.cat(logits))
    refuse_wrong_head(errors, tolerance)
    median, most = float(by_token.median()), float(by_token.max())
    if median > tolerance:
        raise CaptureError(
            f"a sequence's states depend on what it is batched with: relative error {median:.1e} in the median and "
            f"{most:.1e} at most, where rounding explains {tolerance:.0e}",
            where="extract",
            hint="is the target causal? Please report its architecture",
        )
    return {
        "against": "transformers",
        "sequences": len(sequences),
        "tokens": len(alone),
        "tolerance": tolerance,
        **errors,
        "padding_error_median": median,
        "padding_error_max": most,
    }


@torch.inference_mode()
def head_errors(head: TargetHead, last: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """Relative error of the logits that the head makes with the final norm applied once, not at all, and twice.

    Args:
        last: [T, Ht], said to be canonical id N.
        logits: [T, Vt], the target's own.
    """

    def error(ours: torch.Tensor) -> float:
        return float((ours.float() - logits.float()).norm() / logits.float().norm())

    normed = head.norm(last)
    return {
        "head_error": error(head.project(normed)),
        "head_error_without_norm": error(head.project(last)),
        "head_error_norm_twice": error(head.project(head.norm(normed))),
    }


def refuse_wrong_head(errors: dict[str, float], tolerance: float) -> None:
    """Raises CaptureError unless the final norm is due exactly once.

    Where the weights of a norm are all one, twice is as good as once; that it is due at all still shows.
    """
    if errors["head_error"] <= tolerance < errors["head_error_without_norm"]:
        return
    raise CaptureError(
        "the target's logits do not follow from its captured last state as they should: their relative error is "
        f"{errors['head_error']:.1e} with the final norm applied once, {errors['head_error_without_norm']:.1e} without "
        f"it and {errors['head_error_norm_twice']:.1e} with it twice, where rounding explains {tolerance:.0e}",
        where="extract",
        hint="the head or the final norm of this architecture is not what draftsmith takes it for; please report it",
    )
