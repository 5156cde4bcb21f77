"""Checkpoints are written beside training, and are complete or absent."""

from __future__ import annotations

import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from draftsmith.errors import CheckpointError
from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import (
    CheckpointWriter,
    checkpoints_in,
    draft_tensors,
    load_checkpoint,
    optimizer_tensors,
    write_checkpoint,
)
from tests.train.builders import build_store, features_of, make_trainer


@pytest.fixture(scope="module")
def store(tiny_target, tmp_path_factory):
    samples = features_of(tiny_target, [12, 30, 7, 21, 16])
    return build_store(tmp_path_factory.mktemp("store") / "store", tiny_target, samples)


@pytest.fixture
def trainer(tmp_path, tiny_target, store):
    trainer = make_trainer(tmp_path, tiny_target, store, max_steps=1)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoints")
    return trainer


def weights(trainer):
    return {name: tensor.clone() for name, tensor in draft_tensors(trainer.learner)}


def test_what_is_written_is_as_it_was_when_the_checkpoint_was_asked_for(tmp_path, trainer):
    before, go_on = weights(trainer), threading.Event()
    with CheckpointWriter(tmp_path, keep=1, writes=True) as writer:
        writer.thread.submit(go_on.wait)
        writer.save(1, trainer.learner)
        trainer.train_step(next(trainer._work(0)), 0).figures()
        assert not checkpoints_in(tmp_path)
        go_on.set()
    assert load_checkpoint(tmp_path / "step-00000001", trainer.learner, trainer.head) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_a_write_that_fails_is_raised_at_the_next_step_and_leaves_the_checkpoint_before(tmp_path, tiny_target, store):
    trainer = make_trainer(tmp_path, tiny_target, store, checkpoint_every_steps=1, keep_checkpoints=1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000002.partial").write_text("no folder can have this name")
    with pytest.raises(CheckpointError, match="checkpoint of step 2 could not be written"):
        trainer.train()
    (left,) = checkpoints_in(tmp_path / "checkpoints")
    assert load_checkpoint(left, trainer.learner, trainer.head) == 1


def test_killed_at_any_call_the_checkpoint_before_or_the_new_one_is_complete(tmp_path, trainer):
    draft, optimizer = weights(trainer), dict(optimizer_tensors(trainer.learner))
    config, folder = trainer.draft.config, tmp_path / "checkpoints"
    write_checkpoint(folder, {"step": 1, "updates": 1}, config, draft, optimizer, keep=1)
    for calls_before_the_kill in range(100):
        child = os.fork()
        if child == 0:
            _die_after(calls_before_the_kill)
            write_checkpoint(folder, {"step": 2, "updates": 2}, config, draft, optimizer, keep=1)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        newest = checkpoints_in(folder)[-1]
        assert load_checkpoint(newest, trainer.learner, trainer.head) == int(newest.name[-8:])
        if not killed:
            break
        shutil.rmtree(folder / "step-00000002", ignore_errors=True)
        if not checkpoints_in(folder):
            write_checkpoint(folder, {"step": 1, "updates": 1}, config, draft, optimizer, keep=1)
    assert calls_before_the_kill > 8
    assert [path.name for path in checkpoints_in(folder)] == ["step-00000002"]


def _die_after(calls: int) -> None:
    """Have this process die at one of its calls to the file system."""
    left = [calls]
    for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
        real = getattr(os, name)

        def call(*arguments, real=real, **options):
            if not left[0]:
                os._exit(9)
            left[0] -= 1
            return real(*arguments, **options)

        setattr(os, name, call)


def test_a_failure_in_validation_leaves_the_steps_before_it(tmp_path, tiny_target, store, monkeypatch):
    trainer = make_trainer(tmp_path, tiny_target, store, checkpoint_every_steps=2, validate_every_steps=2)
    monkeypatch.setattr(trainer, "validate", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert load_checkpoint(tmp_path / "checkpoints/step-00000002", trainer.learner, trainer.head) == 2


class SlowestThread:
    """Does a job when it is waited for, and no sooner."""

    def submit(self, job, *arguments):
        return SimpleNamespace(done=lambda: False, result=lambda: job(*arguments))

    def shutdown(self, wait):
        pass


@pytest.mark.parametrize(("settings", "saved"), [({"validate_every_steps": 2}, 2), ({"max_steps": 3}, 3)])
def test_what_ends_the_process_in_validation_loses_no_step(tmp_path, tiny_target, store, settings, saved, monkeypatch):
    """The checkpoint is whole before validation begins, although the thread that writes it never gets to before."""
    monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", lambda **_: SlowestThread())
    trainer = make_trainer(tmp_path, tiny_target, store, **{"checkpoint_every_steps": 2, **settings})
    there = []

    def validate():
        there.append(load_checkpoint(checkpoints_in(tmp_path / "checkpoints")[-1], trainer.learner, trainer.head))
        raise ZeroDivisionError

    trainer.validate = validate
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert there == [saved]


def test_checkpoints_count_optimizer_steps_however_many_passes_each_takes(tmp_path, tiny_target, store):
    settings = {"max_steps": 4, "checkpoint_every_steps": 2, "keep_checkpoints": 9}
    trainer = make_trainer(tmp_path, tiny_target, store, **settings, micro_batch_tokens=20)
    assert len(next(trainer._work(0)).passes) > 1
    trainer.train()
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("first", [1, 3, 8])
def test_a_resumed_run_reads_the_samples_that_were_left(tmp_path, tiny_target, store, first):
    trainer = make_trainer(tmp_path, tiny_target, store, batch_tokens=30, max_steps=14)
    whole, resumed = trainer._work(0), trainer._work(first)
    for _ in range(first):
        next(whole)
    for _ in range(6):
        assert next(whole).sample_ids == next(resumed).sample_ids


def test_the_moving_average_is_what_is_left_and_survives_a_resume(tmp_path, tiny_target, store):
    settings = {"ema_decay": 0.5, "learning_rate": 1e-2, "checkpoint_every_steps": 3}
    whole = make_trainer(tmp_path / "whole", tiny_target, store, **settings)
    expected, step = weights(whole), whole.train_step

    def step_and_average(work, number):
        launched = step(work, number)
        decay = min(0.5, (2 + number) / (11 + number))
        for name in whole.learner.averages:
            expected[name].lerp_(dict(whole.draft.named_parameters())[name].detach(), 1 - decay)
        return launched

    whole.train_step = step_and_average
    whole.train()
    left = dict(draft_tensors(whole.learner, averaged=True))
    for name, tensor in expected.items():
        torch.testing.assert_close(left[name], tensor)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step-00000006")
    cut = make_trainer(tmp_path / "cut", tiny_target, store, **settings)
    cut.train()
    for name, tensor in draft_tensors(cut.learner, averaged=True):
        assert torch.equal(tensor, left[name])
