import shutil
from pathlib import Path

import pytest
import torch

from draftsmith.store.manifest import read_manifest
from draftsmith.store.shards import Store
from draftsmith.store.writer import StoreWriter
from tests.store.golden import FORMAT_1, FORMAT_2, LENGTHS, golden_features
from tests.store.random_store import assert_same, features


@pytest.mark.parametrize("old", [FORMAT_1, FORMAT_2], ids=["1", "2"])
def test_a_store_of_an_old_format_is_read(old: Path) -> None:
    store = Store.open(old)
    assert len(store) == len(LENGTHS)
    for number, found in enumerate(store):
        assert_same(found, golden_features(number))


@pytest.mark.parametrize("old", [FORMAT_1, FORMAT_2], ids=["1", "2"])
def test_a_store_of_an_old_format_is_gone_on_with(tmp_path: Path, old: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(old, folder)
    with StoreWriter.open(folder, read_manifest(folder), 1) as writer:
        writer.add([features(3, 4, aux=features(3, 4).aux.bfloat16(), last=features(3, 4).last.bfloat16())])
    store = Store.open(folder)
    assert store.sample_ids == [f"sample-{number}" for number in range(4)]
    for number in range(3):
        assert_same(store[number], golden_features(number))
    assert store[3].aux.equal(features(3, 4).aux.bfloat16())
    assert store[3].last.equal(features(3, 4).last.bfloat16())
    aux, last = torch.empty(9, 3, 8, dtype=torch.bfloat16), torch.empty(9, 8, dtype=torch.bfloat16)
    store.read_into([0, 3], aux, last)
    assert last.equal(torch.cat([store[0].last, store[3].last]))
