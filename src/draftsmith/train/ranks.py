"""Many processes that train one draft, started by torchrun on one machine or several.

Each does its share of every batch, and gradients are summed once, after the backward pass. They are few and large (one
per weight matrix), and the written-out backward pass has them at its very end, so hooks in the middle of it would have
nothing to overlap with, and a captured step could not hold them (docs/decisions/0013).

What the hosts agree on goes over gloo, beside the devices' work: whether to stop, and whether someone failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from draftsmith import launch
from draftsmith.errors import CheckFailed, DraftsmithError, Interrupted, RankFailed, RequestError
from draftsmith.target import pick_device

T = TypeVar("T")
N = TypeVar("N", int, float)
GO, STOP, FAILED = 0, 1, 2  # FAILED + rank names who did
LONGEST_WAIT = timedelta(minutes=30)  # for a rank that reads, validates or writes while the others wait


@dataclass(frozen=True)
class Ranks:
    """This process among `count`. One alone has no process group, and none of this costs it anything."""

    rank: int = 0
    count: int = 1

    @classmethod
    def joined(cls) -> Ranks:
        """Those of the process group, if there is one."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.count > 1:
            with _together():
                dist.all_reduce(tensor)
        return tensor

    def sum_each(self, tensors: Iterable[torch.Tensor]) -> None:
        """`sum` of several, at once."""
        if self.count > 1:
            with _together():
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of the first rank."""
        if self.count > 1:
            with _together():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def largest(self, number: N) -> N:
        """The largest of the ranks' numbers, all of one type; between the hosts alone."""
        if self.count == 1:
            return number
        said = torch.tensor(number, dtype=torch.float64)
        with _together():
            dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return type(number)(said.item())

    def agree(self, word: int) -> int:
        """Say GO, STOP or FAILED + rank; returns the gravest that any rank said.

        Raises:
            RankFailed: another one failed, or is gone.
        """
        if self.count == 1:
            return word
        heard = self.largest(word)
        if heard >= FAILED and heard != word:
            raise RankFailed(f"rank {heard - FAILED} failed, and its own message says why", where="train")
        return heard

    def heard_from_first(self, value: T) -> T:
        """The first rank's value."""
        if self.count == 1:
            return value
        said = [value]
        with _together():
            dist.broadcast_object_list(said, src=0)
        return said[0]

    def wait_for_all(self) -> None:
        """Return once every rank is here."""
        self.agree(GO)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Go on after the block once every rank is through it. Nothing in it may wait for another rank.

        Raises:
            RankFailed: another one failed in it.
        """
        try:
            yield
        except DraftsmithError:
            with suppress(RankFailed):  # each says what it found itself: it may be another thing on another machine
                self.agree(FAILED + self.rank)
            raise
        self.wait_for_all()


@contextmanager
def _together() -> Iterator[None]:
    """Translate what gloo says when another rank is not there any more."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("by peer", "Timed out", "Broken pipe")):
            raise
        raise RankFailed(
            "another rank is gone without a word",
            where="train",
            hint="look for its message above, and in the system's log whether it was killed for memory",
        ) from error


def device_of_rank(wanted: str) -> torch.device:
    """The device that this process trains on: each process of a machine has a GPU of its own.

    Raises:
        RequestError: the machine has fewer GPUs than processes, or one GPU is named for several processes.
    """
    device = pick_device(wanted)
    if device.type != "cuda" or launch.world_size() == 1:
        return device
    index, there = launch.local_rank(), torch.cuda.device_count()
    if ":" in wanted or index >= there:
        raise RequestError(
            f"rank {launch.rank()} cannot have {wanted if ':' in wanted else f'GPU {index}'}",
            where="train",
            hint=f"leave train.device at auto, and start no more processes here than there are GPUs, which is {there}",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def run_on_ranks(device: str, lead: Callable[[Callable[[], Any]], T], work: Callable[[], Any]) -> T | None:
    """Do `work` on all ranks. The first does it within `lead`, which keeps the records and may find it done already.

    Args:
        device: `train.device`.
        lead: given a way to start `work` on all ranks, which it calls at most once.

    Returns:
        What `lead` returned, on the first rank; None on the others.
    """
    work = _together()(work)  # in which FSDP2 has collectives of its own
    own = device_of_rank(device)
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=LONGEST_WAIT, device_id=own if own.type == "cuda" else None)
    try:
        ranks = Ranks.joined()
        if ranks.is_first:
            return _lead(ranks, lead, work)
        if ranks.heard_from_first(False):
            work()
        return None
    except (Interrupted, CheckFailed, RankFailed) as error:
        if launch.rank() == 0:
            raise
        raise SystemExit(error.exit_code) from error  # all ranks found the same, and the first says so
    finally:
        dist.destroy_process_group()


def _lead(ranks: Ranks, lead: Callable[[Callable[[], Any]], T], work: Callable[[], Any]) -> T:
    called = False

    def start() -> Any:
        nonlocal called
        called = True
        ranks.heard_from_first(True)
        return work()

    try:
        return lead(start)
    finally:
        if not called:
            ranks.heard_from_first(False)
