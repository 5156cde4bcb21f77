"""Shards are written by threads; what that must not change."""

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftsmith.errors import StoreError
from draftsmith.records import EncodedFeatures
from draftsmith.store import shard_file
from draftsmith.store.codec import CODECS
from draftsmith.store.ledger import read_ledger
from draftsmith.store.shard_file import file_digest, taught, write_shard
from draftsmith.store.shards import Store
from draftsmith.store.threads import THREADS
from draftsmith.store.writer import StoreWriter
from tests.store.limits import largest_file
from tests.store.random_store import HIDDEN_SIZE, features, manifest, some_features, write_store


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from(["bf16", "fp32", "fp8", "int8"]),
    st.integers(1, 2000),
)
def test_a_shard_is_what_safetensors_itself_would_write(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], codec: str, piece_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    samples = [features(number, tokens) for number, tokens in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "PIECE_BYTES", piece_bytes)
        entry = write_shard(folder / "ours", samples, codec, threading.Event())
    tensors = {
        "input_ids": torch.cat([sample.input_ids for sample in samples]).int(),
        "loss_mask": torch.cat([sample.loss_mask for sample in samples]).to(torch.uint8),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    kept = [taught(sample.loss_mask) for sample in samples]
    tensors["last_offsets"] = torch.tensor([0, *(int(rows.sum()) for rows in kept)]).cumsum(0)
    lasts = [sample.last[rows] for sample, rows in zip(samples, kept, strict=True)]
    for name, states in (("aux", [sample.aux for sample in samples]), ("last", lasts)):
        encoded = CODECS[codec].encode(torch.cat(states))
        tensors |= {f"{name}.{part}" if part else name: values for part, values in encoded.items()}
    save_file(tensors, folder / "theirs")
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert (entry.bytes, entry.digest) == ((folder / "theirs").stat().st_size, file_digest(folder / "theirs"))


def test_states_that_are_views_of_a_larger_tensor_are_stored_right(tmp_path: Path) -> None:
    whole = torch.randn(5, 4, HIDDEN_SIZE)
    sample = features(0, 5, aux=whole[:, :-1], last=whole[:, -1])
    store = Store.open(write_store(tmp_path / "store", [sample]))
    assert torch.equal(store[0].aux, whole[:, :-1])
    assert torch.equal(store[0].last, whole[:, -1] * taught(sample.loss_mask)[:, None])


def test_the_ledger_has_the_shards_in_their_order_though_a_later_one_is_written_sooner(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", manifest(), 1) as writer:
        for number, tokens in enumerate([200_000, 1, 1]):
            writer.add([features(number, tokens)])
    entries = read_ledger(tmp_path / "store").entries
    assert [entry.shard for entry in entries] == [f"shard-0000{number}.safetensors" for number in range(3)]


def test_the_caller_goes_on_while_a_shard_is_being_written(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", manifest(), 1) as writer:
        aside = tmp_path / "store" / f".shard-00000.safetensors.{os.getpid()}.partial"
        os.mkfifo(aside)  # a thread that opens it to write waits for a reader, and then until all but 64 KiB is read
        assert writer.add([features(0, 2000)]) is False
        assert writer.committed == {}
        with open(aside, "rb") as pipe:
            aside.unlink()
            aside.write_bytes(b"a pipe cannot be synced")
            pipe.read()
        writer.flush()
        assert list(writer.committed) == ["sample-0"]


def test_no_more_shards_are_in_memory_than_there_are_threads(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", manifest(), 1) as writer:
        for number in range(4 * THREADS):
            writer.add([features(number, 2000)])
            assert len(writer._under_way) <= THREADS


def test_add_says_when_more_is_committed_and_flush_commits_all(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", manifest(), 1) as writer:
        before, counts = 0, []
        for sample in some_features():
            said = writer.add([sample])
            assert said == (len(writer.committed) > before)
            before = len(writer.committed)
            counts.append(before)
        assert counts == sorted(counts)
        writer.flush()
        assert list(writer.committed) == [sample.id for sample in some_features()]
        assert Store.open(tmp_path / "store").sample_ids == list(writer.committed)


def test_what_a_thread_failed_at_is_raised_and_no_later_shard_is_entered(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with (
        pytest.raises(StoreError, match=r"shard-00001.*too large.*1 samples in its ledger are safe"),
        StoreWriter.open(folder, manifest(), 1) as writer,
        largest_file(20_000),
    ):
        for number, tokens in enumerate([5, 2000, 5]):
            writer.add([features(number, tokens)])
        for _ in range(2):
            with pytest.raises(StoreError, match="shard-00001"):
                writer.flush()
    assert Store.open(folder).sample_ids == ["sample-0"]
    write_store(folder, [features(number, 5) for number in (1, 2)])
    assert Store.open(folder).sample_ids == ["sample-0", "sample-1", "sample-2"]


def test_full_shards_are_kept_when_the_work_fails(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with pytest.raises(ZeroDivisionError), StoreWriter.open(folder, manifest(), 2000) as writer:
        for number, tokens in enumerate([100_000, 100, 1]):
            writer.add([features(number, tokens)])
        raise ZeroDivisionError
    assert Store.open(folder).sample_ids == ["sample-0", "sample-1"]


def test_shards_under_way_are_given_up_when_someone_insists(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    write_store(folder, [features(9, 5)])
    with pytest.raises(KeyboardInterrupt), StoreWriter.open(folder, manifest(), 1) as writer:
        aside = folder / f".shard-00001.safetensors.{os.getpid()}.partial"
        os.mkfifo(tmp_path / "pipe")
        os.link(tmp_path / "pipe", aside)  # holds the thread that opens it, until it is read

        def let_go() -> None:
            writer._abandon.wait(20)
            aside.unlink()
            aside.write_bytes(b"")
            pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # waits for nobody
            os.set_blocking(pipe, True)
            with open(pipe, "rb") as stream:
                stream.read()

        threading.Thread(target=let_go).start()
        writer.add([features(0, 2000)])
        raise KeyboardInterrupt
    assert Store.open(folder).sample_ids == ["sample-9"]
    assert not list(folder.glob(".*.partial"))
    with StoreWriter.open(folder, manifest(), 1) as writer:
        assert list(writer.committed) == ["sample-9"]


def test_other_threads_compute_on_as_many_cores_as_before(tmp_path: Path) -> None:
    torch.set_num_threads(torch.get_num_threads())
    cores, found = torch.get_num_threads(), []
    store = Store.open(write_store(tmp_path / "store", some_features()))
    assert len(store.read_into([0], store[0].aux.clone(), store[0].last.clone())) == 2
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [cores] == [torch.get_num_threads()]
    assert set(store._readers.map(lambda _: torch.get_num_threads(), range(20))) == {1}


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_samples_that_come_encoded_are_written_as_if_they_were_encoded_here(tmp_path: Path, codec: str) -> None:
    samples, encode = some_features(), CODECS[codec].encode
    encoded = [EncodedFeatures(**{**vars(one), "aux": encode(one.aux), "last": encode(one.last)}) for one in samples]
    for name, found in (("here", samples), ("there", encoded)):
        with StoreWriter.open(tmp_path / name, manifest(codec=codec), 1) as writer:
            writer.add(found)
    shard = "shard-00000.safetensors"
    assert (tmp_path / "here" / shard).read_bytes() == (tmp_path / "there" / shard).read_bytes()
    with (
        pytest.raises(StoreError, match=r"`aux` of shape"),
        StoreWriter.open(tmp_path / "misfit", manifest(codec=codec, hidden_size=16), 1) as writer,
    ):
        writer.add(encoded)
