from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from draftsmith import progress, recipe, signals
from draftsmith.draft.loss import teacher_of
from draftsmith.errors import CheckFailed, CheckpointError, DataError, Interrupted
from draftsmith.store.shards import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.train import speed
from draftsmith.train.batches import flat_batch, padded
from draftsmith.train.checkpoint import CheckpointWriter, checkpoints_in, load_checkpoint
from draftsmith.train.metrics import read_metrics
from draftsmith.train.step import lacks_kernels
from tests.train.builders import build_store, features_of, make_trainer, work_on

LENGTHS = [12, 30, 7, 21, 16, 3, 40, 9, 25, 18, 1, 33]


@pytest.fixture(scope="module")
def samples(tiny_target):
    return features_of(tiny_target, LENGTHS)


@pytest.fixture(scope="module")
def store(tiny_target, samples, tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("store") / "store", tiny_target, samples)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}


def results_of(trainer, samples):
    return trainer.learner.loss(trainer.learner.prepare(flat_batch(samples)))[1]


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_what_a_step_works_on_stays_while_the_next_is_read(tmp_path, tiny_target, store):
    trainer = make_trainer(tmp_path, tiny_target, store, batch_tokens=30, micro_batch_tokens=20, max_steps=12)
    passes = []
    for work in trainer._work(0):
        passes.append(len(work.passes))
        for batch in (prepared.batch for prepared in work.passes if prepared.batch.sample_ids):
            exact = flat_batch([store[store.sample_ids.index(id)] for id in batch.sample_ids])
            assert all(torch.equal(a, b) for a, b in zip(batch.tensors(), exact.tensors(), strict=True))
    assert len(passes) == 12
    assert max(passes) > 1


def test_a_run_cut_in_the_middle_goes_on_to_the_same_bits(tmp_path, tiny_target, store):
    whole = make_trainer(tmp_path / "whole", tiny_target, store, checkpoint_every_steps=3)
    whole.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000006")
    cut = make_trainer(tmp_path / "cut", tiny_target, store, checkpoint_every_steps=3)
    cut.train()
    assert_same_bits(weights(whole), weights(cut))
    unbroken, resumed = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "cut")
    for name in ("step", "split", "loss", "learning_rate", "acceptance_length"):
        assert [line.get(name) for line in unbroken] == [line.get(name) for line in resumed], name


def test_a_store_captured_in_another_order_and_in_more_pieces_trains_the_same_draft(
    tmp_path, tiny_target, store, samples
):
    manifest = store.manifest
    for sample in samples[::-1]:  # as if extraction had been stopped after each
        with StoreWriter.open(tmp_path / "store", manifest, shard_bytes=50_000) as writer:
            writer.add([sample])
    other = Store.open(tmp_path / "store")
    assert len(set(other.shards)) > len(set(store.shards))
    trainers = [make_trainer(tmp_path / str(number), tiny_target, at) for number, at in enumerate((store, other))]
    for trainer in trainers:
        trainer.train()
    assert_same_bits(*map(weights, trainers))


def validations(folder):
    figures = ("step", "loss", "acceptance_length")
    return [[line[name] for name in figures] for line in read_metrics(folder) if line["split"] == "validation"]


def test_a_run_cut_in_a_validation_leaves_the_figures_of_one_that_was_not_and_so_does_a_finished_one(
    tmp_path, tiny_target, store, monkeypatch
):
    settings = {"checkpoint_every_steps": 2, "validate_every_steps": 2}
    whole, cut, again = (make_trainer(tmp_path / name, tiny_target, store, **settings) for name in ("a", "b", "b"))
    whole.train()
    expected = validations(tmp_path / "a")
    assert [step for step, *_ in expected] == [2, 4, 6]

    def die():
        raise KeyboardInterrupt

    monkeypatch.setattr(cut, "validate", die)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    assert validations(tmp_path / "b") == []
    again.train()
    assert validations(tmp_path / "b") == expected
    make_trainer(tmp_path / "a", tiny_target, store, **settings).train()
    assert validations(tmp_path / "a") == expected


def test_a_stop_request_leaves_a_checkpoint_that_training_resumes_from(tmp_path, tiny_target, store, monkeypatch):
    trainer = make_trainer(tmp_path, tiny_target, store)
    step = trainer.train_step

    def stop_in_step_two(batch, number):
        monkeypatch.setattr(signals, "_requested", number == 1)
        return step(batch, number)

    monkeypatch.setattr(trainer, "train_step", stop_in_step_two)
    with pytest.raises(Interrupted, match="nothing is lost") as stopped:
        trainer.train()
    assert f"after step 2 of {trainer.total_steps}, whose checkpoint is on disk" in str(stopped.value)
    assert "the same command" in str(stopped.value)
    monkeypatch.setattr(signals, "_requested", False)
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step-00000002"]
    resumed, whole = (make_trainer(folder, tiny_target, store) for folder in (tmp_path, tmp_path / "whole"))
    resumed.train()
    whole.train()
    assert_same_bits(weights(resumed), weights(whole))


def test_a_stop_before_the_first_step_promises_no_checkpoint(tmp_path, tiny_target, store, monkeypatch):
    monkeypatch.setattr(signals, "_requested", True)
    with pytest.raises(Interrupted, match="before the first step; nothing is lost"):
        make_trainer(tmp_path, tiny_target, store).train()
    assert checkpoints_in(tmp_path / "checkpoints") == []


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    def spent(self, seconds, work):
        """`work`, which takes so long."""

        def timed(*arguments):
            self.now += seconds
            return work(*arguments)

        return timed


def test_speed_and_waiting_are_of_training_and_not_of_validations_and_checkpoints(
    tmp_path, tiny_target, store, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    settings = {"validate_every_steps": 2, "checkpoint_every_steps": 3, "log_every_steps": 6}
    trainer = make_trainer(tmp_path, tiny_target, store, **settings)
    batches = [*trainer._work(0)]
    clock.now = 500.0
    monkeypatch.setattr(trainer, "train_step", clock.spent(3, trainer.train_step))
    monkeypatch.setattr(trainer, "validate", clock.spent(1000, trainer.validate))
    monkeypatch.setattr(
        CheckpointWriter, "save", lambda *given, save=CheckpointWriter.save: clock.spent(70, save)(*given)
    )
    monkeypatch.setattr(trainer, "_work", lambda first: map(clock.spent(1, lambda batch: batch), batches))
    trainer.train()
    (line,) = (line for line in read_metrics(tmp_path) if line["split"] == "train")
    assert line["data_wait_share"] == 6 / 24
    assert line["steps_per_second"] == 6 / 24
    assert line["tokens_per_second"] == sum(batch.tokens for batch in batches) / 24


def test_training_lowers_the_loss_and_raises_what_would_be_accepted(tmp_path, tiny_target, store):
    trainer = make_trainer(tmp_path, tiny_target, store, max_steps=150, learning_rate=1e-2)
    trainer.train()
    trained = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert trained[-1]["acceptance_length"] > trained[0]["acceptance_length"] + 0.4


def test_the_targets_tensors_and_the_drafts_embedding_do_not_move(tmp_path, tiny_target, store):
    trainer = make_trainer(tmp_path, tiny_target, store, learning_rate=0.1)
    head = {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}
    embedding = trainer.draft.embed_tokens.weight.clone()
    trainer.train()
    assert_same_bits(head, dict(trainer.head.state_dict()))
    assert torch.equal(embedding, trainer.draft.embed_tokens.weight)
    assert not torch.equal(trainer.draft.lm_head.weight, trainer.head.lm_head[trainer.draft.draft_ids])


def test_a_batch_that_nobody_answered_in_changes_nothing(tmp_path, tiny_target, store, samples):
    trainer = make_trainer(tmp_path, tiny_target, store)
    silent = [dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) for sample in samples[:3]]
    before = weights(trainer)
    launched = trainer.train_step(work_on(trainer, silent), 0)
    assert launched.figures()["loss"] == 0
    assert_same_bits(before, weights(trainer))


def test_a_batch_that_nobody_answered_in_is_no_update_before_and_after_a_resume(tmp_path, tiny_target, store, samples):
    silent = [dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) for sample in samples[:3]]
    unbroken, resumed = (make_trainer(tmp_path / name, tiny_target, store, weight_decay=0.1) for name in "ab")
    unbroken.train_step(work_on(unbroken, samples[:3]), 0)
    before = weights(unbroken)
    unbroken.train_step(work_on(unbroken, silent), 1)
    assert_same_bits(before, weights(unbroken))
    with CheckpointWriter(tmp_path / "checkpoints", 1, writes=True) as saver:
        saver.save(2, unbroken.learner)
    assert load_checkpoint(tmp_path / "checkpoints/step-00000002", resumed.learner, resumed.head) == 2
    for trainer in (unbroken, resumed):
        trainer.train_step(work_on(trainer, samples[3:6]), 2)
    assert_same_bits(weights(unbroken), weights(resumed))


def test_a_gradient_that_is_not_finite_stops_where_the_loss_is(tmp_path, tiny_target, store, samples):
    trainer = make_trainer(tmp_path, tiny_target, store)
    trainer.draft.fc.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    before = weights(trainer)
    with pytest.raises(CheckFailed, match=r"loss \d.* gradient norm inf, on samples s1, s3"):
        trainer.train_step(work_on(trainer, [samples[1], samples[3]]), 0).figures()
    assert_same_bits(before, weights(trainer))


def test_a_loss_that_is_not_finite_stops_and_names_the_samples(tmp_path, tiny_target, store, samples):
    trainer = make_trainer(tmp_path, tiny_target, store)
    broken = dataclasses.replace(samples[3], aux=torch.full_like(samples[3].aux, torch.nan))
    before = weights(trainer)
    with pytest.raises(CheckFailed, match="s1, s3"):
        trainer.train_step(work_on(trainer, [samples[1], broken]), 0).figures()
    assert_same_bits(before, weights(trainer))


def test_the_gradient_is_that_of_the_mean_over_slots_whatever_shares_the_batch(tmp_path, tiny_target, store, samples):
    """Two documents in one batch weigh by their counted slots, as if their losses were summed and divided once."""
    trainer = make_trainer(tmp_path, tiny_target, store)
    both, *apart = (results_of(trainer, chosen) for chosen in ([samples[1], samples[3]], [samples[1]], [samples[3]]))
    for k, step in enumerate(both):
        assert step.counted == sum(part[k].counted for part in apart)
        assert step.loss_count == sum(part[k].loss_count for part in apart)
        torch.testing.assert_close(step.loss_sum, sum(part[k].loss_sum for part in apart))


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_the_steps_weighted_losses_add_up_to_the_whole(tmp_path, tiny_target, store, samples, kernels):
    trainer = make_trainer(tmp_path, tiny_target, store, kernels=kernels, step_decay=0.7)
    loss, results = trainer.learner.loss(trainer.learner.prepare(flat_batch(samples)))
    parts = [0.7**k * step.loss_sum.item() / int(step.loss_count) for k, step in enumerate(results)]
    assert sum(parts) == pytest.approx(loss.item(), rel=1e-5)
    for step in results:
        assert int(step.accepted) <= int(step.correct) <= int(step.counted)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_padding_a_batch_to_one_shape_changes_nothing(tmp_path, tiny_target, store, samples, kernels):
    trainer = make_trainer(tmp_path, tiny_target, store, kernels=kernels)
    batch, outcomes = flat_batch(samples[:5]), []
    for given in (batch, padded(batch, 128)):
        prepared = trainer.learner.prepare(given)
        if given is not batch:
            one_shape = {"slots": prepared.slots.of_one_shape(), "documents": prepared.documents.of_one_shape(20)}
            prepared = dataclasses.replace(prepared, **one_shape)
        loss, results = trainer.learner.loss(prepared)
        trainer.draft.zero_grad()
        loss.backward()
        outcomes.append((results, {n: p.grad for n, p in trainer.draft.named_parameters() if p.requires_grad}))
    (alone, gradients), (filled, same_gradients) = outcomes
    for step, other in zip(alone, filled, strict=True):
        for name in ("loss_sum", "loss_count", "correct", "accepted", "counted"):
            torch.testing.assert_close(*(torch.as_tensor(getattr(x, name)).float() for x in (step, other)))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same_gradients[name], rtol=1e-4, atol=1e-6)


def test_in_bfloat16_the_fast_kernels_leave_a_draft_like_that_of_the_plain_computation(tmp_path, tiny_target, store):
    settings = {"autocast": "bfloat16", "max_steps": 40, "learning_rate": 1e-2}
    fast, plain, exact = (
        make_trainer(tmp_path / name, tiny_target, store, **{**settings, **other}).train()["loss"]
        for name, other in (("fast", {}), ("plain", {"kernels": "plain"}), ("exact", {"autocast": "none"}))
    )
    assert fast == pytest.approx(plain, rel=0.02)
    assert fast == pytest.approx(exact, rel=0.02)


def test_the_fast_kernels_train_as_the_plain_computation_does(tmp_path, tiny_target, store):
    fast, plain = (
        make_trainer(tmp_path / kernels, tiny_target, store, kernels=kernels) for kernels in ("auto", "plain")
    )
    found, expected = fast.train(), plain.train()
    assert found == pytest.approx(expected, rel=1e-3)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(fast)[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("autocast", "device", "lacks"),
    [("auto", "cuda", False), ("bfloat16", "cuda", False), ("none", "cuda", True), ("none", "cpu", False)],
)
def test_a_gpu_lacks_fast_kernels_without_bfloat16(autocast, device, lacks):
    assert lacks_kernels(recipe.Train(autocast=autocast), torch.device(device)) is lacks


def test_the_teacher_in_chunks_is_the_teacher_at_once(tmp_path, tiny_target, store, samples):
    trainer = make_trainer(tmp_path, tiny_target, store)
    last = samples[6].last
    whole, chunked = (teacher_of(trainer.draft, trainer.head, last, size) for size in (1000, 7))
    torch.testing.assert_close(whole.probs, chunked.probs)
    assert torch.equal(whole.top1, chunked.top1)


def test_a_token_that_the_draft_cannot_say_is_never_accepted_and_not_trained_on(tmp_path, tiny_target, store, samples):
    trainer = make_trainer(tmp_path, tiny_target, store)
    (masked, *_), (unmasked, *_) = (
        results_of(make_trainer(tmp_path, tiny_target, store, mask_out_of_vocab=mask), samples)
        for mask in (True, False)
    )
    sayable = teacher_of(trainer.draft, trainer.head, flat_batch(samples).last).top1 % 2 == 0
    assert masked.counted == unmasked.counted == unmasked.loss_count
    assert 0 < masked.loss_count < unmasked.loss_count
    assert int(masked.correct) <= int(sayable.sum())


def test_noise_is_in_what_is_trained_on_and_not_in_what_is_validated_on(tmp_path, tiny_target, store):
    noisy, plain = (make_trainer(tmp_path, tiny_target, store, feature_noise=share) for share in (0.3, 0.0))
    for with_noise, without in zip(noisy._work(0), plain._work(0), strict=True):
        states, exact = (work.passes[0].batch.aux for work in (with_noise, without))
        added = (states - exact).abs() / exact.square().mean(-1, keepdim=True).sqrt()
        assert 0.29 < added.max() <= 0.3 + 1e-5
    assert noisy.validate() == plain.validate()


@pytest.mark.parametrize("settings", [{}, {"log_every_steps": 100, "checkpoint_every_steps": 20}])
def test_what_is_on_record_counts_a_token_that_the_draft_cannot_say_as_refused(tmp_path, tiny_target, store, settings):
    """Also where the target's whole vocabulary is asked for nothing else."""
    chosen = {"mask_out_of_vocab": False, "max_steps": 21, "learning_rate": 1e-2, **settings}
    events = []
    trainer = make_trainer(tmp_path, tiny_target, store, **chosen)
    trainer.record = lambda event, **details: events.append(details)
    step, expected = trainer.train_step, []

    def step_after_asking(work, number):
        with torch.no_grad():
            counts = [[trainer.learner.loss(p, exact=exact)[1][0] for p in work.passes] for exact in (True, False)]
        expected.append([float(sum(r.correct for r in of) / sum(r.counted for r in of)) for of in counts])
        return step(work, number)

    trainer.train_step = step_after_asking
    trainer.train()
    recorded = events or [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    of_steps = [expected[line["step"] - 1] for line in recorded]
    assert [line["accuracy_0"] for line in recorded] == pytest.approx([exact for exact, _ in of_steps])
    assert any(exact != lenient for exact, lenient in of_steps)


def test_it_is_the_averaged_weights_that_are_validated(tmp_path, tiny_target, store):
    trainer = make_trainer(tmp_path, tiny_target, store, ema_decay=0.9, learning_rate=1e-2)
    figures = trainer.train()
    learner = trainer.learner
    for name, held in learner.weights.held.items():
        held.data.copy_(learner.averages[name])
    assert trainer.validate() == figures


def test_no_sample_to_train_on_is_refused(tmp_path, tiny_target, store):
    with pytest.raises(DataError, match="no sample to train on"):
        dataclasses.replace(make_trainer(tmp_path, tiny_target, store), train_indexes=[])


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_a_flipped_bit(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize("damage", [cut_short, with_a_flipped_bit])
@pytest.mark.parametrize("file", ["optimizer.safetensors", "state.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, tiny_target, store, file, damage):
    trainer = make_trainer(tmp_path, tiny_target, store, max_steps=1)
    trainer.train()
    (checkpoint,) = checkpoints_in(tmp_path / "checkpoints")
    (checkpoint / file).write_bytes(damage((checkpoint / file).read_bytes()))
    with pytest.raises(CheckpointError, match="step-00000001"):
        load_checkpoint(checkpoint, trainer.learner, trainer.head)


def test_only_so_many_checkpoints_are_kept(tmp_path, tiny_target, store):
    make_trainer(tmp_path, tiny_target, store, checkpoint_every_steps=1, keep_checkpoints=2).train()
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step-00000005", "step-00000006"]
