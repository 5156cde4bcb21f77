"""The fast path on a GPU, where its kernels are other ones than on a CPU."""

from __future__ import annotations

import pytest
import torch

from draftsmith import recipe
from draftsmith.draft.model import Draft
from draftsmith.records import Batch
from draftsmith.target import FinalNorm, TargetHead
from draftsmith.train.checkpoint import CheckpointWriter, load_checkpoint
from draftsmith.train.step import Learner
from tests.draft.builders import make_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HIDDEN = 128


def make_world(lengths, dtype, device, vocab=1000, draft_vocab=304, **settings):
    """A learner in `dtype` and a batch, of the same numbers whatever the device."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    norm = FinalNorm(torch.ones(HIDDEN), None, 1e-5, "rms")
    head = TargetHead(random(vocab, HIDDEN), norm, random(vocab, HIDDEN) / 4).to(device, dtype)
    config = make_config(
        vocab_size=vocab, draft_vocab_size=draft_vocab, hidden_size=HIDDEN, target_hidden_size=HIDDEN,
        intermediate_size=320, num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
    )  # fmt: skip
    draft = Draft(config)
    draft.initialise(head.cpu().float(), list(range(0, 2 * draft_vocab, 2)), seed=0)
    total = sum(lengths)
    batch = Batch(
        sample_ids=tuple(str(i) for i in range(len(lengths))),
        input_ids=torch.randint(0, vocab, (total,), generator=generator),
        loss_mask=torch.rand(total, generator=generator) < 0.9,
        document=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        position=torch.cat([torch.arange(length) for length in lengths]),
        aux=random(total, 3, HIDDEN).bfloat16().to(dtype),
        last=random(total, HIDDEN).bfloat16().to(dtype),
    )
    draft.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    autocast = "bfloat16" if dtype == torch.bfloat16 else "none"
    chosen = recipe.Train(**{"unroll_steps": 4, "autocast": autocast, **settings})
    return Learner(draft, head.to(device, dtype), chosen, torch.device(device)), batch


def loss_and_gradients(learner, batch):
    loss, results = learner.loss(learner.prepare(batch))
    loss.backward()
    gradients = {n: p.grad.double().cpu() for n, p in learner.draft.named_parameters() if p.requires_grad}
    return {"loss": loss.detach().double().cpu()} | gradients, [int(result.loss_count) for result in results]


@pytest.mark.parametrize("loss", ["soft_cross_entropy", "forward_kl", "lk", "lk_hybrid"])
@pytest.mark.parametrize("lengths", [[200, 1, 57], [1, 1, 1, 1, 1, 1, 1], [1000]], ids=str)
def test_on_a_gpu_the_fast_path_is_as_near_to_float64_as_the_plain_one(loss, lengths):
    settings = {"loss": loss, "mask_out_of_vocab": False}
    truth, counts = loss_and_gradients(*make_world(lengths, torch.float64, "cpu", kernels="plain", **settings))
    plain, _ = loss_and_gradients(*make_world(lengths, torch.bfloat16, "cuda", kernels="plain", **settings))
    fast, found = loss_and_gradients(*make_world(lengths, torch.bfloat16, "cuda", **settings))
    assert found == counts
    for name, value in truth.items():
        of_plain, of_fast = ((x[name] - value).norm() / value.norm().clamp_min(1e-9) for x in (plain, fast))
        assert of_fast < 2 * of_plain + 0.01, (name, of_plain, of_fast)


def compiled_kernels():
    from triton.runtime import JITFunction

    from draftsmith.draft import kernels

    functions = [x for x in vars(kernels).values() if isinstance(x, JITFunction)]
    return sum(len(cache[0]) for function in functions for cache in function.device_caches.values())


def test_on_a_gpu_other_lengths_compile_nothing_anew():
    learner, batch = make_world([100, 60], torch.bfloat16, "cuda")
    learner.use_graphs = False  # a captured step launches no kernel of its own
    learner.step([learner.prepare(batch)], 1e-4).figures()
    before = compiled_kernels()
    assert before
    for lengths in ([33, 1, 91], [500], [1, 2, 3], [16] * 8, [77]):
        batch = make_world(lengths, torch.bfloat16, "cuda")[1]
        learner.step([learner.prepare(batch)], 1e-4).figures()
    assert compiled_kernels() == before


def test_a_captured_step_does_what_a_launched_one_does():
    lengths = ([100, 60], [33, 1, 90], [256], [1, 2, 3], [70, 70], [11] * 9)
    outcomes = []
    for use_graphs in (False, True):
        learner, _ = make_world([1], torch.bfloat16, "cuda", batch_tokens=256)
        learner.use_graphs = use_graphs
        figures = []
        for step, of_batch in enumerate(lengths):
            batch = make_world(of_batch, torch.bfloat16, "cuda")[1]
            figures.append(learner.step([learner.prepare(batch)], 1e-3 / (1 + step)).figures()["loss"])
        outcomes.append((figures, {n: p.detach().cpu() for n, p in learner.draft.named_parameters()}))
    assert learner.graphs[True] is not None
    (losses, weights), (same_losses, same_weights) = outcomes
    assert same_losses == pytest.approx(losses, rel=1e-2)
    for name, weight in weights.items():
        torch.testing.assert_close(same_weights[name], weight, rtol=0.05, atol=2e-3)


def test_on_a_gpu_a_resumed_run_goes_on_to_the_same_bits(tmp_path):
    (whole, batch), (resumed, _) = (make_world([100, 60], torch.bfloat16, "cuda") for _ in range(2))
    whole.use_graphs = resumed.use_graphs = False
    for _ in range(3):
        whole.step([whole.prepare(batch)], 1e-3)
    with CheckpointWriter(tmp_path, keep=1, writes=True) as writer:
        writer.save(3, whole)
    load_checkpoint(tmp_path / "step-00000003", resumed, resumed.head)
    for learner in (whole, resumed):
        learner.step([learner.prepare(batch)], 1e-3).figures()
    for one, other in zip(whole.draft.parameters(), resumed.draft.parameters(), strict=True):
        assert torch.equal(one, other)


def test_on_a_gpu_the_logits_in_memory_do_not_grow_with_the_batch():
    vocab, draft_vocab, short, long = 40_000, 20_000, 2000, 8000
    peaks = []
    for tokens in (short, long):
        learner, batch = make_world([tokens // 2] * 2, torch.bfloat16, "cuda", vocab=vocab, draft_vocab=draft_vocab)
        learner.step([learner.prepare(batch)], 1e-4)
        torch.cuda.reset_peak_memory_stats()
        learner.step([learner.prepare(batch)], 1e-4)
        peaks.append(torch.cuda.max_memory_allocated())
    logits_of_one_step = (long - short) * draft_vocab * 2
    assert peaks[1] - peaks[0] < logits_of_one_step
