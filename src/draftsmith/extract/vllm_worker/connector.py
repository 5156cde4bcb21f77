"""Native capture: vLLM's `extract_hidden_states` method keeps the states in a KV cache; this connector writes them out.

The scheduler's side follows each request's cache blocks and marks those whose prompt ends in this step; the worker's
side writes them in `wait_for_save`, which runs after the states of the step were cached and before the step's output
leaves the worker. So no request is finished whose states were not taken, and no block is used again before that.

Relied on (vLLM 0.24 and 0.32): `SchedulerOutput.scheduled_new_reqs`, `.scheduled_cached_reqs`, `.num_scheduled_tokens`;
the cache-only layer `cache_only_layers.N` among the KV caches; `save_kv_layer` called once it has cached a step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from draftsmith.extract.vllm_worker.options import read_options, sample_number
from draftsmith.extract.vllm_worker.spool import Ended, SpoolWriter

CACHE_LAYER = "cache_only_layers"


@dataclass
class Followed:
    """A request whose prompt is not computed to its end yet."""

    number: int
    input_ids: list[int]
    block_ids: list[int]


@dataclass
class EndedPrompts(KVConnectorMetadata):  # type: ignore[misc]
    """Requests whose prompt ends in this step."""

    requests: list[Followed] = field(default_factory=list)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One object in the scheduler, and one in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._options = read_options(vllm_config)
        self._followed: dict[str, Followed] = {}
        self._max_model_len = vllm_config.model_config.max_model_len
        self._group = _cache_group(kv_cache_config) if role == KVConnectorRole.SCHEDULER else 0
        self.writer: SpoolWriter | None = None
        self._cache: torch.Tensor | None = None  # [blocks, block_size, L, Ht]
        self._cached_tokens = 0  # in this step

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed over after a step, so a preempted request needs no special care."""
        return False

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> EndedPrompts:
        ended = EndedPrompts()
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduler_output.finished_req_ids:
            self._followed.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            if (number := sample_number(request)) is None:
                continue
            self._followed[request.req_id] = Followed(
                number, list(request.prompt_token_ids), list(request.block_ids[self._group])
            )
            self._advance(request.req_id, request.num_computed_tokens + scheduled[request.req_id], ended)
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in self._followed:
                continue
            followed, new_blocks = self._followed[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                followed.block_ids = []
            if new_blocks is not None:
                followed.block_ids += new_blocks[self._group]
            self._advance(request_id, cached.num_computed_tokens[index] + scheduled[request_id], ended)
        return ended

    def _advance(self, request_id: str, computed_tokens: int, ended: EndedPrompts) -> None:
        """Note that so many tokens of a request will have been computed when this step is done."""
        followed = self._followed[request_id]
        if computed_tokens < len(followed.input_ids):
            return
        if computed_tokens + 1 > self._max_model_len:  # gpu_model_runner.py, _input_fits_in_drafter
            raise ValueError(
                f"sample number {followed.number} has {computed_tokens} tokens and the engine takes "
                f"{self._max_model_len}: within one token of that it skips caching the states of the whole batch"
            )
        ended.requests.append(self._followed.pop(request_id))

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = [name for name in kv_caches if CACHE_LAYER in name]
        if names and get_tensor_model_parallel_rank() == 0:  # pipeline stages but the last have none
            self._cache = _blocks_first(kv_caches[names[0]], len(self._options.layer_ids))
            self.writer = SpoolWriter(self._options.spool, self._options.layer_ids, self._options.codec)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if CACHE_LAYER in layer_name:
            self._cached_tokens = len(attn_metadata.slot_mapping)

    def wait_for_save(self) -> None:
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        if self._cache is None or self.writer is None:
            return
        ended = self._get_connector_metadata().requests
        if not ended:
            return
        if not cached_tokens:
            raise RuntimeError("the engine ended a prompt in a step in which it cached no hidden states")
        blocks, sequences = self._blocks(ended)
        self.writer.put(sequences, gather_blocks(self._cache, blocks))

    def _blocks(self, ended: list[Followed]) -> tuple[list[int], list[Ended]]:
        """The cache blocks that the prompts of a step are in, and where each begins in them, back to back."""
        assert self._cache is not None
        blocks: list[int] = []
        sequences, block_size = [], self._cache.shape[1]
        for request in ended:
            tokens = len(request.input_ids)
            if len(request.block_ids) * block_size < tokens:
                raise RuntimeError(
                    f"sample number {request.number} has {tokens} tokens and {len(request.block_ids)} cache blocks of "
                    f"{block_size} tokens"
                )
            input_ids = torch.frombuffer(array("i", request.input_ids), dtype=torch.int32)
            sequences.append(Ended(request.number, input_ids, len(blocks) * block_size))
            blocks += request.block_ids[: -(-tokens // block_size)]
        return blocks, sequences

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def gather_blocks(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """[len(blocks) · block_size, L, Ht], a copy. The device is not waited for: the next step is prepared meanwhile.

    Args:
        cache: [blocks, block_size, L, Ht].
    """
    index = torch.tensor(blocks, pin_memory=cache.is_cuda).to(cache.device, non_blocking=True)
    return cache[index].flatten(0, 1).contiguous()


def _cache_group(kv_cache_config: Any) -> int:
    """Index of the KV-cache group that holds the states: its block ids are the ones to follow."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if any(CACHE_LAYER in name for name in group.layer_names):
            return index
    raise RuntimeError(f"no KV-cache group holds the layer {CACHE_LAYER}")


def _blocks_first(cache: torch.Tensor, layers: int) -> torch.Tensor:
    """[blocks, block_size, L, Ht] of a cache that may have its second and third axes the other way round."""
    if cache.ndim == 4 and (cache.shape[1] == layers) != (cache.shape[2] == layers):
        return cache if cache.shape[2] == layers else cache.transpose(1, 2)
    raise RuntimeError(
        f"the cache of hidden states has shape {list(cache.shape)}, in which {layers} layers are not told"
    )
