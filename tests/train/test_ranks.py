"""Training on several ranks: what they compute together is what one process computes."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from draftsmith import launch
from draftsmith.engine_server import free_port
from draftsmith.errors import RankFailed
from draftsmith.train.checkpoint import checkpoints_in, draft_tensors
from draftsmith.train.metrics import read_metrics
from draftsmith.train.ranks import run_on_ranks
from tests.train.builders import build_store, features_of, make_trainer
from tests.train.rank_worker import RUNS, work

LENGTHS = [12, 30, 7, 21, 16, 3, 40, 9, 25, 18, 1, 33]


@pytest.fixture(scope="module")
def store(tiny_target, tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("store") / "store", tiny_target, features_of(tiny_target, LENGTHS))


@pytest.fixture(scope="module")
def together(tmp_path_factory, tiny_target, store):
    """A folder in which two ranks went through all scenarios of `rank_worker`."""
    folder = tmp_path_factory.mktemp("ranks")
    make_trainer(folder / "mixed", tiny_target, store, checkpoint_every_steps=2).train()
    for later in checkpoints_in(folder / "mixed" / "checkpoints")[1:]:
        shutil.rmtree(later)
    arguments = (2, folder, tiny_target, store.folder)
    torch.multiprocessing.spawn(work, args=arguments, nprocs=2)
    return folder


def left_by(folder, name, rank=0):
    return load_file(folder / f"{name}.rank{rank}.safetensors")


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one_process_does(tmp_path, tiny_target, store, together, name):
    settings = {**RUNS[name], "micro_batch_tokens": None}
    alone = make_trainer(tmp_path, tiny_target, store, **settings)
    alone.train()
    for rank in range(2):
        assert_close(left_by(together, name, rank), dict(draft_tensors(alone.learner, averaged=True)))
    ours, theirs = read_metrics(tmp_path), read_metrics(together / name)
    assert [(line["split"], line["step"]) for line in theirs] == [(line["split"], line["step"]) for line in ours]
    for figure in ("loss", "gradient_norm", "acceptance_length", "slots", "tokens", "learning_rate"):
        expected, found = ([line[figure] for line in lines if figure in line] for lines in (ours, theirs))
        assert found == pytest.approx(expected, rel=1e-4), figure


@pytest.mark.parametrize(("run", "resumed"), [("whole", "again"), ("sharded", "sharded_again")])
def test_both_ranks_leave_the_same_bits_and_a_resumed_pair_too(together, run, resumed):
    first, second, again = left_by(together, run), left_by(together, run, 1), left_by(together, resumed)
    for name in first:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], again[name])


def test_a_run_goes_on_divided_from_a_checkpoint_of_one_that_was_not(together):
    assert_close(left_by(together, "divided"), left_by(together, "whole"))


def test_one_rank_then_two_then_one_train_as_one_does(tmp_path, tiny_target, store, together):
    folder = tmp_path / "mixed"
    shutil.copytree(together / "mixed", folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    last, whole = (make_trainer(at, tiny_target, store, checkpoint_every_steps=2) for at in (folder, tmp_path / "one"))
    last.train()
    whole.train()
    assert_close(dict(draft_tensors(last.learner)), dict(draft_tensors(whole.learner)))
    of_mixed, of_whole = read_metrics(folder), read_metrics(tmp_path / "one")
    assert [line["step"] for line in of_mixed] == [line["step"] for line in of_whole]
    assert [line["loss"] for line in of_mixed] == pytest.approx([line["loss"] for line in of_whole], rel=1e-4)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_names_its_samples(together):
    names = (together / "broken.samples1.txt").read_text().splitlines()
    for rank in range(2):
        text = (together / f"broken.rank{rank}.txt").read_text()
        assert text.startswith("CheckFailed")
        assert "on samples " + ", ".join(names) + "\n" in text
        before, after = left_by(together, "before", rank), left_by(together, "broken", rank)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(together):
    for rank in range(2):
        assert (together / f"terminated.rank{rank}.txt").read_text().startswith("Interrupted train: stopped on request")
    assert [path.name for path in checkpoints_in(together / "terminated/checkpoints")] == ["step-00000003"]


def test_a_rank_that_cannot_read_its_samples_lets_the_others_know(together):
    assert (together / "unreadable.rank0.txt").read_text().startswith("RankFailed train: rank 1 failed")
    assert (together / "unreadable.rank1.txt").read_text().startswith("StoreError shard 7 is damaged")


def test_a_rank_that_dies_does_not_leave_the_others_waiting(together):
    for name in ("gone", "gone_broadcast", "gone_copy", "gone_gather"):
        assert (together / f"{name}.rank0.txt").read_text().startswith("RankFailed train: another rank is gone"), name


def test_what_gloo_says_of_a_rank_that_is_gone_is_understood_wherever_it_says_it(monkeypatch):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **place}.items():
        monkeypatch.setenv(name, value)

    def work():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")

    with pytest.raises(RankFailed, match="another rank is gone"):
        run_on_ranks("cpu", lambda start: start(), work)


def test_the_first_rank_alone_writes(together):
    steps = [line["step"] for line in read_metrics(together / "uneven") if line["split"] == "train"]
    assert steps == list(range(1, 13))


def test_the_share_of_waiting_is_that_of_the_rank_that_waited_longest(together):
    first, second = (line["data_wait_share"] for line in read_metrics(together / "waiting") if line["split"] == "train")
    assert second <= 1 < first


def test_data_are_divided_by_rank_and_devices_by_local_rank(monkeypatch):
    for name, value in {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (launch.rank(), launch.local_rank(), launch.world_size()) == (4, 0, 8)
    monkeypatch.delenv("LOCAL_RANK")  # something else than torchrun set the others
    assert (launch.rank(), launch.world_size()) == (0, 1)
