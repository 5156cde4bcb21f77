import json
import mmap
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftsmith.errors import StoreError
from draftsmith.probe.facts import read_facts
from draftsmith.store import shards
from draftsmith.store.codec import CODECS
from draftsmith.store.ledger import read_ledger, write_ledger
from draftsmith.store.manifest import FORMAT, identity
from draftsmith.store.shard_file import file_digest, taught
from draftsmith.store.shards import Store
from draftsmith.store.sizes import predict_bytes
from draftsmith.store.writer import StoreWriter
from tests.store.random_store import (
    AUX_LAYERS,
    HIDDEN_SIZE,
    assert_same,
    features,
    in_bf16,
    manifest,
    some_features,
    write_store,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    samples = some_features()
    store = Store.open(write_store(tmp_path / "store", samples))
    assert len(store) == len(samples)
    assert store.sample_ids == [sample.id for sample in samples]
    assert store.lengths == [len(sample.input_ids) for sample in samples]
    for ours, theirs in zip(store, samples, strict=True):
        assert_same(ours, theirs)


def test_a_store_opened_again_goes_on_where_it_stopped(tmp_path: Path) -> None:
    samples = some_features()
    write_store(tmp_path / "whole", samples)
    write_store(tmp_path / "store", samples[:4])
    write_store(tmp_path / "store", samples[4:])
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


def test_lengths_and_ids_are_known_without_the_shards(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    for shard in folder.glob("shard-*"):
        shard.unlink()
    assert Store.open(folder).lengths == [len(sample.input_ids) for sample in some_features()]


def test_the_order_does_not_depend_on_the_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = some_features()
    folder = write_store(tmp_path / "store", samples)
    names = Store.open(folder).sample_ids
    listdir, scandir = os.listdir, os.scandir
    monkeypatch.setattr(os, "listdir", lambda path=".": list(reversed(listdir(path))))
    monkeypatch.setattr(os, "scandir", lambda path=".": iter(reversed(list(scandir(path)))))
    assert Store.open(folder).sample_ids == names == [sample.id for sample in samples]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4000))
def test_sequences_come_back_whatever_the_shard_size(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    samples = [features(number, tokens) for number, tokens in enumerate(lengths)]
    with StoreWriter.open(folder, manifest(), shard_bytes) as writer:
        for sample in samples:
            writer.add([sample])
    store = Store.open(folder)
    assert store.lengths == lengths
    for index in reversed(range(len(samples))):
        assert_same(store[index], samples[index])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=4), st.sampled_from(sorted(CODECS)))
def test_last_states_are_kept_before_each_token_of_the_targets_own_and_are_zeros_elsewhere(
    tmp_path_factory, masks: list[list[bool]], codec: str
) -> None:
    samples = []
    for number, mask in enumerate(masks):
        whole = in_bf16(features(number, len(mask), last=torch.randn(len(mask), HIDDEN_SIZE) + 5))
        samples.append(replace(whole, loss_mask=torch.tensor(mask, dtype=torch.bool)))
    folder = write_store(tmp_path_factory.mktemp("store") / "store", samples, codec=codec, dtype="bfloat16")
    store = Store.open(folder)
    kept = [sum(mask[1:]) for mask in masks]
    assert [len(store._shard(number).last.parts[""]) for number in range(len(store.entries))] == [
        sum(kept[first : first + 2]) for first in range(0, len(kept), 2)
    ]
    aux, last = memory_for(store, list(range(len(samples))))
    store.read_into(range(len(samples)), aux, last)
    for one, again, found in zip(samples, last.split(store.lengths), store, strict=True):
        assert torch.equal(again, found.last.float())
        for place, (state, read) in enumerate(zip(one.last, found.last, strict=True)):
            own_next = place + 1 < len(one.loss_mask) and bool(one.loss_mask[place + 1])
            assert torch.allclose(read.float(), state.float(), rtol=0.1, atol=0.1) if own_next else not read.any()


def test_predicted_bytes_are_within_one_percent_of_the_disks(tmp_path: Path) -> None:
    samples = [features(number, tokens=400) for number in range(50)]
    lengths = [(400, int(taught(one.loss_mask).sum())) for one in samples]
    for codec in ("bf16", "fp32"):
        with StoreWriter.open(tmp_path / codec, manifest(codec=codec), shard_bytes=1 << 20) as writer:
            writer.add(samples)
        predicted = predict_bytes(lengths, aux_layers=AUX_LAYERS, hidden_size=HIDDEN_SIZE, codec=codec)
        on_disk = sum(path.stat().st_size for path in (tmp_path / codec).glob("shard-*"))
        assert predicted == pytest.approx(on_disk, rel=0.01)


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8", "int8", "lossless"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_fetched_and_read_at_once_is_what_is_read_one_by_one(
    tmp_path: Path, codec: str, dtype: torch.dtype
) -> None:
    samples = [in_bf16(sample) for sample in [*some_features(), features(7, 0)]]
    folder = write_store(tmp_path / "store", samples, codec=codec, dtype="bfloat16")
    one_by_one = list(Store.open(folder))
    store, order = Store.open(folder), [3, 7, 5, 3, 0, 6]
    store.prefetch(order)
    store.prefetch([])
    aux, last = memory_for(store, order, dtype)
    input_ids, loss_mask = store.read_into(order, aux, last)
    exact = [one_by_one[index] for index in order]
    assert torch.equal(aux, torch.cat([one.aux for one in exact]).to(dtype))
    assert torch.equal(last, torch.cat([one.last for one in exact]).to(dtype))
    assert torch.equal(input_ids, torch.cat([one.input_ids for one in exact]))
    assert torch.equal(loss_mask, torch.cat([one.loss_mask for one in exact]))
    assert one_by_one[3].aux.dtype == store.dtype


def memory_for(store: Store, order: list[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = sum(store.lengths[index] for index in order)
    aux = torch.full((tokens, AUX_LAYERS, HIDDEN_SIZE), torch.nan, dtype=dtype)
    return aux, torch.full((tokens, HIDDEN_SIZE), torch.nan, dtype=dtype)


def test_what_is_brought_into_memory_is_the_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = Store.open(write_store(tmp_path / "store", [features(0, 5), features(1, 300), features(2, 4)])), []
    monkeypatch.setattr(shards, "_madvise", lambda begin, length, advice: asked.append((begin, begin + length, advice)))
    store._bring_into_memory([1])
    shard = store._shard(0)
    for tensor in (store[1].aux, shard.last.parts[""][slice(*shard.last_span(1))]):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        found = [advice for first, last, advice in asked if begin - mmap.PAGESIZE < first <= begin and last == end]
        assert found == [mmap.MADV_WILLNEED, shards.MADV_POPULATE_READ]
    assert all(first % mmap.PAGESIZE == 0 for first, _, _ in asked)


def test_a_damaged_shard_is_an_error_when_it_is_read_not_when_it_is_fetched(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    (folder / "shard-00001.safetensors").write_bytes(b"damaged")
    store = Store.open(folder)
    store.prefetch(range(len(store)))
    store.read_into([0, 1], *memory_for(store, [0, 1]))
    with pytest.raises(StoreError, match="shard-00001"):
        store.read_into([0, 2], *memory_for(store, [0, 2]))


# ---- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 100, -10])
def test_a_shard_cut_short_is_refused_by_readers_and_extracted_again(tmp_path: Path, keep: int) -> None:
    samples = some_features()
    folder = write_store(tmp_path / "store", samples)
    shard = folder / "shard-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:keep])
    with pytest.raises(StoreError, match=r"shard-00001.*bytes"):
        Store.open(folder)[2]
    with StoreWriter.open(folder, manifest(), 1) as writer:
        assert writer.lost == ["shard-00001.safetensors"]
        assert set(writer.committed) == {sample.id for sample in samples} - {"sample-2", "sample-3"}
        writer.add(samples[2:4])
    store = Store.open(folder)
    assert sorted(store.sample_ids) == sorted(sample.id for sample in samples)
    for found in store:
        assert_same(found, samples[int(found.id.removeprefix("sample-"))])


def test_a_shard_that_is_gone_is_refused_by_readers_and_extracted_again(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    (folder / "shard-00000.safetensors").unlink()
    with pytest.raises(StoreError, match="shard-00000"):
        Store.open(folder)[0]
    with StoreWriter.open(folder, manifest(), 1) as writer:
        assert writer.lost == ["shard-00000.safetensors"]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    files = [path for path in sorted(folder.iterdir()) if path.name != ".lock"]
    chance = random.Random(0)
    for number in range(150):
        file = files[number % len(files)]
        whole = file.read_bytes()
        place = chance.randrange(len(whole) * 8)
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(StoreError, match=file.name):
            list(Store.open(folder))
        file.write_bytes(whole)
    list(Store.open(folder))


def test_every_flipped_bit_of_the_ledgers_last_line_is_noticed(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features(2))
    ledger = folder / "ledger.jsonl"
    whole = ledger.read_bytes()
    bits = range(len(whole) * 8)
    for place in [*random.Random(0).sample(bits, 300), *bits[-16:]]:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        ledger.write_bytes(damaged)
        with pytest.raises(StoreError, match="line 1 is damaged"):
            read_ledger(folder)


def test_a_torn_ledger_line_does_not_exist_and_is_cut_off(tmp_path: Path) -> None:
    samples = some_features(4)
    folder = write_store(tmp_path / "store", samples)
    ledger = folder / "ledger.jsonl"
    whole = ledger.read_bytes()
    first_line = whole.index(b"\n") + 1
    for cut in (first_line + 1, len(whole) - 20, len(whole) - 1):
        ledger.write_bytes(whole[:cut])
        assert Store.open(folder).sample_ids == ["sample-0", "sample-1"]
    with StoreWriter.open(folder, manifest(), 1) as writer:
        assert ledger.read_bytes() == whole[:first_line]
        assert not (folder / "shard-00001.safetensors").exists()
        writer.add(samples[2:])
    assert ledger.read_bytes() == whole


def test_leftovers_of_a_crash_are_swept_up_and_other_files_are_not(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features(2))
    before = contents(folder)
    for name in (".shard-00001.safetensors.99.partial", "shard-00001.safetensors", ".manifest.json.99.partial"):
        (folder / name).write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    assert len(Store.open(folder)) == 2
    with StoreWriter.open(folder, manifest(), 1):
        pass
    assert contents(folder) == before | {"notes.txt": b"mine"}


@pytest.mark.parametrize("name", ["ledger.jsonl", "manifest.json"])
def test_shards_without_ledger_or_manifest_are_neither_read_nor_deleted(tmp_path: Path, name: str) -> None:
    folder = write_store(tmp_path / "store", some_features())
    (folder / name).unlink()
    with pytest.raises(StoreError, match=name):
        Store.open(folder)
    with pytest.raises(StoreError), StoreWriter.open(folder, manifest(), 1):
        pass
    assert len(list(folder.glob("shard-*"))) == 4


def test_a_shard_of_another_axis_order_is_refused_though_its_checksum_fits(tmp_path: Path) -> None:
    # Three tokens and three layers: only the names of the axes tell them apart from a shard written right.
    folder = write_store(tmp_path / "store", [features(0, tokens=5)])
    assert swap_tensor(folder, "aux", lambda tensors: tensors["aux"].transpose(0, 1)) == [AUX_LAYERS, 5, HIDDEN_SIZE]
    with pytest.raises(StoreError, match=r"`aux` of shape \[3, 5, 8\], where \[5, 3, 8\] is due"):
        Store.open(folder)[0]


def test_a_shard_of_other_lengths_than_the_ledgers_is_refused(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", [features(0, tokens=5), features(1, tokens=7)])
    swap_tensor(folder, "offsets", lambda tensors: tensors["offsets"].new_tensor([0, 6, 12]))
    with pytest.raises(StoreError, match="other lengths than the ledger"):
        Store.open(folder)[0]


def swap_tensor(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> list[int]:
    """Replace a tensor of the only shard, and enter the new checksum in the ledger as its writer would."""
    (entry,) = read_ledger(folder).entries
    path = folder / entry.shard
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    tensors[name] = change(tensors).contiguous()
    save_file(tensors, path)
    write_ledger(folder, [replace(entry, bytes=path.stat().st_size, digest=file_digest(path))])
    return list(tensors[name].shape)


# ---- identity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("aux_layer_ids", (1, 4, 5)),
        ("revision", "v2"),
        ("weights_sha256", "w1"),
        ("tokenizer_sha256", "t1"),
        ("template_sha256", None),
        ("quantization", {"quant_method": "fp8"}),
        ("dtype", "bfloat16"),
        ("codec", "bf16"),
        ("engine_version", "6"),
    ],
)
def test_a_store_of_something_else_is_refused_naming_the_field(tmp_path: Path, field: str, other: object) -> None:
    folder = write_store(tmp_path / "store", some_features(2))
    before = contents(folder)
    with pytest.raises(StoreError, match=f"{field} is .* is needed"):
        Store.open(folder, expect={field: other})
    with (
        pytest.raises(StoreError, match=f"{field} is .* is needed"),
        StoreWriter.open(folder, manifest(**{field: other}), 1),
    ):
        pass
    assert contents(folder) == before


def test_notes_may_differ_between_the_runs_that_fill_a_store(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features(2))
    with StoreWriter.open(folder, manifest(draftsmith_version="1", model="elsewhere"), 1) as writer:
        writer.record_parity({"head_error": 1e-7})
    assert Store.open(folder).manifest.parity == {"head_error": 1e-7}


def test_what_was_measured_of_earlier_samples_stays_in_the_manifest(tmp_path: Path) -> None:
    first, other = {"head_error": 1e-7}, {"head_error": 2e-7}
    folder = write_store(tmp_path / "store", some_features(2))
    for parity in (first, first, other, first, other):
        with StoreWriter.open(folder, manifest(), 1) as writer:
            writer.record_parity(parity)
    assert Store.open(folder).manifest.parity == {**first, "later": {"1": other}}


def test_a_consumer_can_expect_the_target_that_the_probe_read(tmp_path: Path, tiny_target: Path) -> None:
    facts = read_facts(str(tiny_target))
    folder = write_store(tmp_path / "store", [], **identity(facts))
    Store.open(folder, expect=identity(facts))
    with pytest.raises(StoreError, match="tokenizer_sha256"):
        Store.open(folder, expect=identity(facts) | {"tokenizer_sha256": "another"})


def test_a_manifest_of_a_later_format_is_refused_by_its_number(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", [], format=FORMAT + 1)
    with pytest.raises(StoreError, match=f"is of format {FORMAT + 1}"):
        Store.open(folder)


# ---- writing ----------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    samples = some_features(4)
    with StoreWriter.open(tmp_path / "store", manifest(), 1) as writer:
        writer.add(samples[:2])
        (tmp_path / "store" / ".shard-00001.safetensors.1.partial").write_bytes(b"being written")
        with (
            pytest.raises(StoreError, match=f"process {os.getpid()}"),
            StoreWriter.open(tmp_path / "store", manifest(), 1),
        ):
            pass
        assert (tmp_path / "store" / ".shard-00001.safetensors.1.partial").exists()
        writer.add(samples[2:])
    assert len(Store.open(tmp_path / "store")) == 4


def test_a_sample_is_taken_once(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", manifest(), 1 << 20) as writer:
        writer.add([features(0, 5)])
        with pytest.raises(StoreError, match="sample-0: is in the store already"):
            writer.add([features(0, 5)])
        writer.flush()
        with pytest.raises(StoreError, match="sample-0: is in the store already"):
            writer.add([features(0, 5)])


@pytest.mark.parametrize("name", ["loss_mask", "aux", "last"])
def test_a_sample_of_fewer_rows_than_tokens_is_refused_by_name(tmp_path: Path, name: str) -> None:
    short = getattr(features(0, 5), name)[:4]
    with (
        StoreWriter.open(tmp_path / "store", manifest(), 1) as writer,
        pytest.raises(StoreError, match=rf"sample-0: has `{name}`"),
    ):
        writer.add([features(0, 5, **{name: short})])
    assert len(Store.open(tmp_path / "store")) == 0


def test_a_reader_sees_only_whole_shards_while_a_writer_is_at_work(tmp_path: Path) -> None:
    samples = some_features(6)
    with StoreWriter.open(tmp_path / "store", manifest(), 1) as writer:
        for count in (2, 4, 6):
            writer.add(samples[count - 2 : count])
            writer.flush()
            assert len(list(Store.open(tmp_path / "store"))) == count


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(StoreError, match="a file is in the way"),
        StoreWriter.open(tmp_path / "file" / "store", manifest(), 1),
    ):
        pass


def test_the_ledger_is_json_by_the_line(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features(4))
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["entry"]["sample_ids"] for line in lines] == [["sample-0", "sample-1"], ["sample-2", "sample-3"]]
