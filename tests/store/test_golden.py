import shutil
from pathlib import Path

from draftsmith.store.manifest import read_manifest
from draftsmith.store.shards import Store
from draftsmith.store.writer import StoreWriter
from tests.store.golden import FORMAT_1, LENGTHS, golden_features
from tests.store.random_store import assert_same, features


def test_a_store_of_format_1_is_read(tmp_path: Path) -> None:
    store = Store.open(FORMAT_1)
    assert len(store) == len(LENGTHS)
    for number, found in enumerate(store):
        assert_same(found, golden_features(number))


def test_a_store_of_format_1_is_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(FORMAT_1, folder)
    with StoreWriter.open(folder, read_manifest(folder), 1) as writer:
        writer.add([features(3, 4, aux=features(3, 4).aux.bfloat16(), last=features(3, 4).last.bfloat16())])
    store = Store.open(folder)
    assert store.sample_ids == [f"sample-{number}" for number in range(4)]
    for number in range(3):
        assert_same(store[number], golden_features(number))
    assert store[3].aux.equal(features(3, 4).aux.bfloat16())
