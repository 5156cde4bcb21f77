"""The trained weights as a rank holds them: whole, or with `train.shard` its part of each (FSDP2).

The optimizer, its moments and the moving average know only what is held here, plain tensors either way. FSDP2 gathers
whole weights for a computation and leaves each rank its part of the summed gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from draftsmith.draft.model import Draft
from draftsmith.train.ranks import Ranks

T = TypeVar("T")


class Computation(nn.Module):
    """Whatever reads the draft's weights, as the one forward that FSDP2 gathers them for."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class TrainedWeights:
    """What of a draft is trained.

    Attributes:
        held: by name, in its order, parameters over this rank's memory; a part may have no elements.
    """

    def __init__(self, draft: Draft, ranks: Ranks, *, shard: bool) -> None:
        self.draft, self.ranks = draft, ranks
        ranks.copy_first(parameter.data for _, parameter in self._named())
        self.mesh: DeviceMesh | None = None
        self.computation = Computation(draft)
        if shard and ranks.count > 1:
            self.mesh = init_device_mesh(draft.fc.weight.device.type, (ranks.count,))
            frozen = {parameter for parameter in draft.parameters() if not parameter.requires_grad}
            sharded = fully_shard(self.computation, mesh=self.mesh, ignored_params=frozen)
            sharded.set_gradient_divide_factor(1.0)  # the loss is divided already, by counts of all ranks
            sharded.set_force_sum_reduction_for_comms(True)
        self.held = {name: _held(parameter) for name, parameter in self._named()}

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return sorted((name, p) for name, p in self.draft.named_parameters() if p.requires_grad)

    def compute(self, work: Callable[[], T]) -> T:
        """Do `work` with whole weights in the draft; they stay until the backward pass, or `release`."""
        return work() if self.mesh is None else self.computation(work)

    def release(self) -> None:
        """Give back the whole weights of a computation that no backward pass followed."""
        if isinstance(self.computation, FSDPModule):
            self.computation.reshard()

    def drop_gradients(self) -> None:
        for (_, parameter), held in zip(self._named(), self.held.values(), strict=True):
            parameter.grad = held.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """What the backward passes since `drop_gradients` left here."""
        return [parameter.grad for _, parameter in self._named() if parameter.grad is not None]

    def put_gradients(self, gradients: list[torch.Tensor]) -> None:
        for (_, parameter), gradient in zip(self._named(), gradients, strict=True):
            parameter.grad = gradient

    def sum_gradients(self) -> None:
        """Give each held weight its part of the gradient of all ranks. FSDP2 has summed already."""
        if self.mesh is None:
            vectors = [g for g in self.gradients() if g.ndim < 2]
            self.ranks.sum_each([g for g in self.gradients() if g.ndim > 1])
            if vectors and self.ranks.count > 1:  # in one go: they are small
                joined = self.ranks.sum(torch.cat(vectors))
                torch._foreach_copy_(vectors, list(joined.split([len(g) for g in vectors])))
            return
        for (_, parameter), held in zip(self._named(), self.held.values(), strict=True):
            held.grad = None if parameter.grad is None else _local(parameter.grad)

    def gradient_norm(self) -> torch.Tensor:
        """Norm of the gradients of all weights together."""
        norm = get_total_norm([p.grad for p in self.held.values() if p.grad is not None])
        return norm if self.mesh is None else self.ranks.sum(norm.square()).sqrt()

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A whole tensor from the parts that all ranks hold; every rank must call this, in the same order."""
        if self.mesh is None:
            return part
        like = dict(self._named())[name]
        assert isinstance(like, DTensor)
        gathered = DTensor.from_local(
            part, self.mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return gathered.full_tensor()

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a whole tensor."""
        if self.mesh is None:
            return whole
        like = dict(self._named())[name]
        assert isinstance(like, DTensor)
        return distribute_tensor(whole, self.mesh, like.placements, src_data_rank=None).to_local().clone()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or one over the memory of this rank's part of it."""
    return nn.Parameter(parameter.to_local()) if isinstance(parameter, DTensor) else parameter
