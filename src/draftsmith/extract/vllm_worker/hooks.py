"""Hooked capture: the residual stream read at the decoder layers themselves, for models without an EAGLE-3 interface.

A hook binds a layer's arguments by the signature of that layer's own forward, so that no order is assumed; what the
parameters mean is told by their names, and a layer with a name that is not known here is refused before anything runs.

Relied on (vLLM 0.24 and 0.32): of the first model runner `input_batch.req_ids`, `query_start_loc`, `input_ids`; of the
second `execute_model_state.input_batch`, which it keeps until the step's tokens are sampled; of a text model
`aux_hidden_state_layers`, and that its own `forward` is what is called.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from draftsmith.extract.vllm_worker.options import sample_number

# Parameters of a decoder layer's forward that do not change what `hidden_states` and `residual` mean.
ASIDE = {
    "positions", "position_ids", "position_embeddings", "cache_position",
    "attention_mask", "attn_metadata", "past_key_values", "past_key_value", "use_cache", "output_attentions",
    "llama_4_scaling", "idx",
}  # fmt: skip
NOT_TEXT = ("vision", "visual", "audio", "speech", "mtp")


@dataclass(frozen=True)
class Convention:
    """How a decoder layer is called: with the stream in one piece, or as two addends."""

    signature: inspect.Signature
    has_residual: bool

    def stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """[tokens, Ht]: the residual stream that a layer is called with, in memory of its own."""
        given = self.signature.bind(*args, **kwargs).arguments
        hidden, residual = given["hidden_states"], given.get("residual")
        return hidden.clone() if residual is None else hidden + residual

    def after(self, output: Any) -> torch.Tensor:
        """[tokens, Ht]: the residual stream that a layer leaves, in memory of its own."""
        if self.has_residual:
            hidden, residual = output
            return hidden + residual
        return (output[0] if isinstance(output, tuple) else output).clone()


def read_convention(layer: nn.Module) -> Convention:
    """The convention of a layer, from the names of its forward's parameters.

    Raises:
        TypeError: a name is not known, or there are no `hidden_states`.
    """
    signature = inspect.signature(layer.forward)
    names = {name for name, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    unknown = sorted(names - ASIDE - {"hidden_states", "residual"})
    if unknown or "hidden_states" not in names:
        problem = f"takes {', '.join(unknown)}" if unknown else "takes no hidden_states"
        raise TypeError(
            f"the decoder layer {type(layer).__name__}{signature} {problem}, and what its residual stream is then is "
            "not known"
        )
    return Convention(signature, "residual" in names)


def find_decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The longest list of blocks that each hold attention or a state-space mixer, outside vision and audio towers."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.utils import PPMissingLayer

    def is_block(module: nn.Module) -> bool:
        return isinstance(module, PPMissingLayer) or any(isinstance(m, AttentionLayerBase) for m in module.modules())

    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and not any(part in name for part in NOT_TEXT)
        and all(is_block(block) for block in module)
    ]
    if not found:
        raise TypeError(f"no list of decoder layers in {type(model).__name__}")
    return max(found, key=len)


def complete_states(model: nn.Module, layer_ids: tuple[int, ...]) -> None:
    """Have a model hand out the state after its last layer too, which DeepSeek-V2's family does not in vLLM 0.24.

    Only where it hands out one state fewer than it was asked for; from its first forward on, a model that hands out all
    is left alone, as is one that is compiled, is divided into stages, or has layers of a convention that is not known.
    The forward is replaced and not hooked: vLLM calls it past PyTorch's hooks.
    """
    from vllm.model_executor.models.utils import PPMissingLayer

    text = next((part for part in model.modules() if layer_ids[-1] in _handed_out(part)), None)
    if text is None or not getattr(text, "do_not_compile", True):
        return
    try:
        layers = find_decoder_layers(model)
        if any(isinstance(layer, PPMissingLayer) for layer in layers):
            return
        convention = read_convention(layers[-1])
    except TypeError:
        return
    forward, after = text.forward, list[torch.Tensor]()
    hook = layers[-1].register_forward_hook(lambda layer, args, output: after.append(convention.after(output)))

    def completed(*args: Any, **kwargs: Any) -> Any:
        after.clear()
        output = forward(*args, **kwargs)
        hidden, states = output if isinstance(output, tuple) else (output, ())
        if len(states) == len(layer_ids) - 1:
            return hidden, [*states, *after]
        if len(states) == len(layer_ids):
            hook.remove()
            text.forward = forward
        return output

    text.forward = completed


def _handed_out(part: nn.Module) -> tuple[int, ...]:
    ids = getattr(part, "aux_hidden_state_layers", ())
    return tuple(ids) if isinstance(ids, tuple | list) else ()


class LayerHooks:
    """Keeps the states of one forward at those of the layers asked for that are on this rank.

    Attributes:
        layer_ids: the ids that are here; with pipeline parallelism, each stage has its own.
    """

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...], hidden_size: int) -> None:
        from vllm.model_executor.models.utils import PPMissingLayer

        layers = find_decoder_layers(model)
        if layer_ids[-1] != len(layers):
            raise ValueError(f"{type(model).__name__} has {len(layers)} decoder layers, and N is {layer_ids[-1]}")
        self.hidden_size = hidden_size
        self.states: dict[int, torch.Tensor] = {}
        places = {id: layers[min(id, len(layers) - 1)] for id in layer_ids}
        self.layer_ids = tuple(id for id, layer in places.items() if not isinstance(layer, PPMissingLayer))
        for id in self.layer_ids:
            convention = read_convention(places[id])
            if id < len(layers):
                places[id].register_forward_pre_hook(partial(self._before, id, convention), with_kwargs=True)
            else:
                places[id].register_forward_hook(partial(self._after, id, convention))

    def _before(self, id: int, convention: Convention, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._keep(id, convention.stream(args, kwargs))

    def _after(self, id: int, convention: Convention, layer: nn.Module, args: Any, output: Any) -> None:
        self._keep(id, convention.after(output))

    def _keep(self, id: int, state: torch.Tensor) -> None:
        state = state.squeeze(0) if state.ndim == 3 else state  # transformers' own layers have a batch axis of 1
        if state.ndim != 2 or state.shape[1] != self.hidden_size:
            raise ValueError(f"the stream at layer id {id} is {list(state.shape)}, not [tokens, {self.hidden_size}]")
        self.states[id] = state

    def take(self, tokens: int) -> torch.Tensor:
        """[tokens, L, Ht] of the forward just done, padding left out.

        Raises:
            RuntimeError: a layer was not called, or with fewer tokens.
        """
        lacking = [id for id in self.layer_ids if id not in self.states or len(self.states[id]) < tokens]
        if lacking:
            raise RuntimeError(f"of {tokens} tokens not all were seen at layer ids {lacking}")
        stacked = torch.stack([self.states[id][:tokens] for id in self.layer_ids], dim=1)
        self.states.clear()
        return stacked


@dataclass(frozen=True)
class Ran:
    """The batch that a model runner has just run."""

    spans: dict[str, tuple[int, int]]  # request → its first token in the batch and the one after its last
    input_ids: torch.Tensor  # [tokens or more], in memory that the engine writes again

    @classmethod
    def by(cls, runner: Any, scheduled: dict[str, int]) -> Ran:
        """By vLLM's first model runner or its second.

        Raises:
            RuntimeError: the runner and the scheduler do not agree.
        """
        second = getattr(getattr(runner, "execute_model_state", None), "input_batch", None)
        if second is not None:
            ids, starts, input_ids = second.req_ids, second.query_start_loc_np, second.input_ids
        else:
            ids, starts, input_ids = runner.input_batch.req_ids, runner.query_start_loc.np, runner.input_ids.gpu
        offsets = starts[: len(ids) + 1].tolist()
        spans = {id: (start, stop) for id, start, stop in zip(ids, offsets, offsets[1:], strict=False)}
        lengths = {id: stop - start for id, (start, stop) in spans.items()}
        if lengths != scheduled:
            raise RuntimeError(f"the batch holds {lengths} tokens by request, and {scheduled} were scheduled")
        return cls(spans, input_ids)


@dataclass
class Prompt:
    """A prompt of which not all tokens were seen yet."""

    number: int
    tokens: int
    computed_tokens: int = 0
    input_ids: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)


Captured = tuple[int, torch.Tensor, torch.Tensor]  # sample number, input ids [T], states [T, L, Ht]


class Joiner:
    """Divides each forward's tokens among the requests, and joins the chunks of a prompt."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}

    def follow(self, scheduler_output: Any) -> dict[str, int]:
        """Note the requests that come and go. Returns the tokens of each that were computed before this step."""
        for id in scheduler_output.finished_req_ids:
            self._prompts.pop(id, None)
        for request in scheduler_output.scheduled_new_reqs:
            if (number := sample_number(request)) is not None:
                self._prompts[request.req_id] = Prompt(number, len(request.prompt_token_ids))
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed | {
            request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs
        }

    def add(self, computed: dict[str, int], ran: Ran, states: torch.Tensor) -> list[Captured]:
        """Take the tokens of a step, and return the prompts that end with it.

        Args:
            computed: what `follow` returned for this step.
            states: [tokens, L, Ht].

        Raises:
            RuntimeError: a request goes on elsewhere than where it was left.
        """
        ended = []
        for id, (start, stop) in ran.spans.items():
            prompt = self._prompts.get(id)
            if prompt is None:
                continue
            if computed[id] == 0:  # new, or preempted and begun again
                prompt.computed_tokens, prompt.input_ids, prompt.states = 0, [], []
            if computed[id] != prompt.computed_tokens:
                raise RuntimeError(
                    f"sample number {prompt.number} goes on at token {computed[id]}, and {prompt.computed_tokens} were "
                    "captured: the engine took some from its prefix cache, or a chunk was lost"
                )
            prompt.input_ids.append(ran.input_ids[start:stop].clone())
            prompt.states.append(states[start:stop])
            prompt.computed_tokens += stop - start
            if prompt.computed_tokens >= prompt.tokens:
                del self._prompts[id]
                whole = _joined(prompt.input_ids), _joined(prompt.states)
                ended.append((prompt.number, whole[0][: prompt.tokens], whole[1][: prompt.tokens]))
        return ended


def _joined(chunks: list[torch.Tensor]) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
