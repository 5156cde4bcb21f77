from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.errors import DataError, MissingExtraError
from draftsmith.train.loop import Unread
from draftsmith.train.metrics import MetricsLog, read_metrics
from draftsmith.train.speed import Speed, matrix_flops
from tests.train.builders import DRAFT_IDS, build_store, features_of, make_trainer, work_on


@pytest.fixture(scope="module")
def samples(tiny_target):
    return features_of(tiny_target, [12, 30, 7, 21, 16])


@pytest.fixture(scope="module")
def store(tiny_target, samples, tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("store") / "store", tiny_target, samples)


def addmm_flops(total, left, right, out_shape=None, **options):
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("draft_ids", [DRAFT_IDS, None], ids=["some", "all"])
@pytest.mark.parametrize("loss", ["soft_cross_entropy", "lk"])
@pytest.mark.parametrize("every", [1, 2])  # step 1 is logged, or not
def test_operations_are_those_of_the_matrix_products_that_torch_counts(
    tmp_path, tiny_target, store, samples, every, loss, draft_ids
):
    """All but those of attention, which the counter does not know on CPUs."""
    settings = {"mask_out_of_vocab": False, "loss": loss, "log_every_steps": every}
    trainer = make_trainer(tmp_path, tiny_target, store, draft_ids=draft_ids, **settings)
    work = work_on(trainer, samples)
    aten = torch.ops.aten
    with FlopCounterMode(display=False, custom_mapping={aten.addmm_: addmm_flops}) as counter:
        launched = trainer.train_step(work, 0)
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for kind, n in counted.items() if kind in (aten.mm, aten.addmm, aten.addmm_))
    trainer._read(Unread(launched, work))
    attention = matrix_flops(trainer.draft.config, 3, 0, sum(length**2 for length in work.lengths), 0, False)
    assert trainer.speed.flops - attention == pytest.approx(products, rel=0.002)


def test_attention_adds_three_and_a_half_forward_passes_over_half_a_square(tmp_path, tiny_target, store):
    config = make_trainer(tmp_path, tiny_target, store).draft.config
    without, with_it = (matrix_flops(config, 3, 100, squares, 0, False) for squares in (0, 100**2))
    width = config.num_attention_heads * config.head_dim
    assert with_it - without == 3 * 3.5 * 4 * 100**2 / 2 * width


def test_figures_of_a_run_have_speed_and_waiting_and_no_utilisation_of_a_cpu(tmp_path, tiny_target, store):
    make_trainer(tmp_path, tiny_target, store).train()
    for line in read_metrics(tmp_path):
        if line["split"] == "train":
            assert line["tokens_per_second"] > 0
            assert 0 <= line["data_wait_share"] <= 1
            assert line["gradient_norm"] > 0
            assert line["acceptance_length"] >= 1
            assert line["model_flop_utilisation"] is None


def test_utilisation_is_of_all_devices_together():
    speed = Speed(peak=1e12, devices=4)
    for _ in range(2):
        speed.add(tokens=10, flops=3e12)
    assert speed.figures(seconds=2.0) == {
        "tokens_per_second": 10.0,
        "model_flop_utilisation": 0.75,
        "data_wait_share": 0.0,
    }
    assert speed.take()["tokens_per_second"] > 0
    assert speed.take()["tokens_per_second"] == 0


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_the_remedy(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'draftsmith\[{package}\]'"):
        MetricsLog(tmp_path, 0, [package])


def test_tensorboard_gets_every_figure_that_there_is(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, 0, ["tensorboard"]) as log:
        log.add("train", 1, {"loss": 2.5, "model_flop_utilisation": None})
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert shown.Tags()["scalars"] == ["train/loss"]
    assert read_metrics(tmp_path)[0]["model_flop_utilisation"] is None


def wandb_records(raw: bytes) -> Iterator[Any]:
    """Of an offline run: 7 bytes, then for each record a checksum, its length and its kind; less than 32 kB."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert len(raw) < 1 << 15
    at = 7
    while at < len(raw):
        length = int.from_bytes(raw[at + 4 : at + 6], "little")
        record = Record()
        record.ParseFromString(raw[at + 7 : at + 7 + length])
        yield record
        at += 7 + length


def test_weights_and_biases_gets_every_figure_in_one_run_that_a_resume_goes_on_with(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    for first in (0, 2):
        with MetricsLog(tmp_path, first, ["wandb"], name="a run", settings={"learning_rate": 0.5}) as log:
            for step in (first + 1, first + 2):
                log.add("train", step, {"loss": 1.0 / step, "model_flop_utilisation": None})
            log.add("validation", first + 2, {"loss": 7.0})
        (tmp_path / "wandb").rename(tmp_path / f"wandb-{first}")  # two of one second would be in one folder
    found: dict[str, dict[int, dict[str, str]]] = {}
    for file in sorted(tmp_path.glob("wandb-*/offline-run-*/*.wandb")):
        for record in wandb_records(file.read_bytes()):
            if record.HasField("run"):
                id, settings = record.run.run_id, {item.key: item.value_json for item in record.run.config.update}
                assert (record.run.project, settings["learning_rate"]) == ("draftsmith", "0.5")
            if record.HasField("history"):
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                found.setdefault(id, {})[record.history.step.num] = items
    assert len(found) == 1, "one id: W&B joins them when they are sent"
    (steps,) = found.values()
    assert {step: float(items["train/loss"]) for step, items in steps.items()} == {n: 1.0 / n for n in range(1, 5)}
    assert {step for step, items in steps.items() if "validation/loss" in items} == {2, 4}
    assert not any("model_flop" in name for items in steps.values() for name in items)
    assert capfd.readouterr().out == "", "stdout is for data"


@pytest.mark.parametrize("first", [0, 2])
def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path, first):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, end, loss in ((0, 4, 1.0), (first, 5, 2.0)):
        with MetricsLog(tmp_path, start, ["tensorboard"]) as log:
            for step in range(start + 1, end + 1):
                log.add("train", step, {"loss": loss})
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    expected = [(step, 1.0 if step <= first else 2.0) for step in range(1, 6)]
    assert [(event.step, event.value) for event in shown] == expected
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected


def test_samples_that_teach_nothing_are_refused_before_training(tmp_path, tiny_target, samples):
    silent = [dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) for sample in samples]
    store = build_store(tmp_path / "store", tiny_target, silent)
    with pytest.raises(DataError, match="none of 4 samples"):
        make_trainer(tmp_path, tiny_target, store)
