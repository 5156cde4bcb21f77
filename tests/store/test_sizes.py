from pathlib import Path

import pytest
import torch

from draftsmith.extract.from_transformers import Reference
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Target
from draftsmith.records import Sample
from draftsmith.store.codec import CODECS
from draftsmith.store.shards import Store
from draftsmith.store.sizes import bytes_per_token, predict_bytes
from draftsmith.target import load_target
from tests.store.random_store import write_store


@pytest.mark.real_model
def test_the_bytes_of_a_real_targets_states_are_foretold_within_five_percent(tmp_path: Path, smollm2: Path) -> None:
    facts, target = read_facts(str(smollm2)), Target(model=str(smollm2), dtype="bfloat16")
    model = load_target(facts, target, torch.device("cpu"), torch.bfloat16)
    reference = Reference(model, facts, facts.aux_layer_ids or ())
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 40_000, (length,), generator=generator).tolist() for length in (60, 40)]
    samples = [Sample(f"{n}", f"{n}", "chat", "train", ids, [1] * len(ids)) for n, ids in enumerate(tokens)]
    found = [one for sample in samples for one in reference.features([sample])]
    lengths = [(len(ids), len(ids) - 1) for ids in tokens]  # the last has none after it
    for codec in CODECS:
        folder = tmp_path / codec
        write_store(folder, found, codec=codec, dtype="bfloat16", hidden_size=576, aux_layer_ids=facts.aux_layer_ids)
        written = sum(path.stat().st_size for path in folder.iterdir())
        foretold = predict_bytes(lengths, aux_layers=3, hidden_size=576, codec=codec)
        assert foretold == pytest.approx(written, rel=0.05), codec
        assert foretold == pytest.approx(100 * bytes_per_token(576, 3, codec, 0.98), rel=0.001)
        assert Store.open(folder).lengths == [60, 40]
