"""What each of two ranks does in the tests of training on several: every scenario in one process group.

A rank leaves `NAME.rank0.safetensors` (its weights) or an error's text for the tests to look at.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from draftsmith.errors import DraftsmithError, StoreError
from draftsmith.signals import graceful_stop
from draftsmith.store.shards import Store
from draftsmith.train import ranks
from draftsmith.train.checkpoint import draft_tensors
from tests.train.builders import make_trainer

LOSSES = ("soft_cross_entropy", "lk_hybrid")
# Settings of runs that one process must repeat; `alone` says with what else.
RUNS = {
    "whole": {"checkpoint_every_steps": 3},
    "sharded": {"shard": True, "checkpoint_every_steps": 3},
    "uneven": {"batch_tokens": 16, "max_steps": 12},
    "uneven_sharded": {"batch_tokens": 16, "shard": True},
    "passes": {"micro_batch_tokens": 20},
    "passes_sharded": {"micro_batch_tokens": 20, "shard": True, "ema_decay": 0.9},
    "plain": {"kernels": "plain"},
    "noise": {"feature_noise": 0.3, "mask_out_of_vocab": False},
    "lk": {"loss": "lk_hybrid"},
}


def work(rank: int, count: int, folder: Path, target: Path, store_folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(count)}  # as on machines of one GPU each
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    world = World(rank, folder, target, Store.open(store_folder))
    for name, settings in RUNS.items():
        world.train(name, **settings)
    for scenario in (same_bits_again, mixed, waiting, broken_on_one, terminated, unreadable, gone):
        scenario(world)
    dist.destroy_process_group()


@dataclasses.dataclass
class World:
    rank: int
    folder: Path
    target: Path
    store: Store

    def trainer(self, name: str, **settings: object):
        return make_trainer(self.folder / name, self.target, self.store, **settings)

    def train(self, name: str, **settings: object) -> None:
        trainer = self.trainer(name, **settings)
        trainer.train()
        self.leave(name, trainer)

    def leave(self, name: str, trainer) -> None:
        weights = {key: tensor.contiguous() for key, tensor in draft_tensors(trainer.learner, averaged=True)}
        save_file(weights, self.folder / f"{name}.rank{self.rank}.safetensors")

    def fail(self, name: str, work) -> None:
        try:
            work()
        except DraftsmithError as error:
            text = f"{type(error).__name__} {error}"
            (self.folder / f"{name}.rank{self.rank}.txt").write_text(text)


def same_bits_again(world: World) -> None:
    """Go on from the middle of a run, on the same number of ranks; and from the middle of an undivided one, divided."""
    for name, again, settings in (
        ("whole", "again", "whole"),
        ("sharded", "sharded_again", "sharded"),
        ("whole", "divided", "sharded"),
    ):
        if world.rank == 0:
            shutil.copytree(world.folder / name, world.folder / again)
            shutil.rmtree(world.folder / again / "checkpoints/step-00000006")
        dist.barrier()
        world.train(again, **RUNS[settings])


def mixed(world: World) -> None:
    """Go on from two steps that one process did."""
    world.train("mixed", checkpoint_every_steps=2)


def waiting(world: World) -> None:
    """The second rank waited a thousand hours for the data of the first step."""
    trainer = world.trainer("waiting", max_steps=2)
    step = trainer.train_step

    def step_after_waiting(batch, number):
        trainer.speed.waited += 3.6e6 * world.rank * (number == 0)
        return step(batch, number)

    trainer.train_step = step_after_waiting
    trainer.train()


def broken_on_one(world: World) -> None:
    trainer = world.trainer("broken")
    world.leave("before", trainer)
    batch = next(trainer._work(0))
    if world.rank == 1:
        (prepared,) = batch.passes
        states = dataclasses.replace(prepared.batch, aux=torch.full_like(prepared.batch.aux, torch.nan))
        batch = dataclasses.replace(batch, passes=[dataclasses.replace(prepared, batch=states)])
    world.fail("broken", lambda: trainer.train_step(batch, 0).figures())
    world.leave("broken", trainer)
    (world.folder / f"broken.samples{world.rank}.txt").write_text("\n".join(batch.sample_ids[world.rank]))


def terminated(world: World) -> None:
    """SIGTERM reaches the second rank alone, in its third step."""
    trainer = world.trainer("terminated", checkpoint_every_steps=100)
    step = trainer.train_step

    def step_with_signal(batch, number):
        if number == 2 and world.rank == 1:
            for _ in range(2):  # a scheduler's, and the same once more from torchrun
                os.kill(os.getpid(), signal.SIGTERM)
        return step(batch, number)

    trainer.train_step = step_with_signal
    with graceful_stop():
        world.fail("terminated", trainer.train)


def unreadable(world: World) -> None:
    """The second rank cannot read what the second step needs."""
    trainer = world.trainer("unreadable", batch_tokens=40)
    flat, calls = trainer._flat, []

    def flat_or_error(rows, memory, number):
        calls.append(rows)
        if world.rank == 1 and len(calls) == 2:
            raise StoreError("shard 7 is damaged")
        return flat(rows, memory, number)

    trainer._flat = flat_or_error
    world.fail("unreadable", trainer.train)


def gone(world: World) -> None:
    """The second rank dies before the second step. Nothing can come after this."""
    trainer, sharded = world.trainer("gone"), world.trainer("gone_gather", shard=True)
    (prepared,) = next(sharded._work(0)).passes
    following, calls = trainer._next, []

    def next_or_die(*arguments):
        calls.append(arguments)
        if world.rank == 1 and len(calls) == 2:
            os._exit(0)
        return following(*arguments)

    trainer._next = next_or_die
    world.fail("gone", trainer.train)
    world.fail("gone_broadcast", lambda: trainer.ranks.heard_from_first("hello"))
    world.fail("gone_copy", lambda: trainer.ranks.copy_first([torch.ones(1)]))
    world.fail("gone_gather", ranks._together()(lambda: sharded.learner.loss(prepared)))  # as in `run_on_ranks`
