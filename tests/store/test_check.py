import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.errors import StoreError
from draftsmith.store.check import refuse_shortened, repair, verify
from draftsmith.store.commands import app
from draftsmith.store.shards import Store
from draftsmith.store.writer import StoreWriter
from tests.store.random_store import manifest, some_features, write_store


def flip_bit(file: Path, place: int = 0) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    file.write_bytes(damaged)


def test_a_sound_store_is_said_to_be_sound(tmp_path: Path) -> None:
    report = verify(write_store(tmp_path / "store", some_features()))
    assert report["sound"]
    assert (report["samples"], report["shards"], report["extract_again"]) == (7, 4, [])


def test_damaged_shards_are_named_with_their_samples(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    flip_bit(folder / "shard-00001.safetensors", -1)
    (folder / "shard-00003.safetensors").unlink()
    report = verify(folder)
    assert not report["sound"]
    assert list(report["damaged"]) == ["shard-00001.safetensors", "shard-00003.safetensors"]
    assert report["extract_again"] == ["sample-2", "sample-3", "sample-6"]
    assert report["samples"] == 4


def test_lines_removed_from_the_end_show_in_shards_that_no_line_names(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-2]))
    assert verify(folder)["unlisted"] == ["shard-00002.safetensors", "shard-00003.safetensors"]


def test_a_shard_that_a_writer_is_about_to_enter_is_no_damage(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", manifest(), 1) as writer:
        writer.add(some_features(2))
        writer.flush()
        (tmp_path / "store" / "shard-00001.safetensors").write_bytes(b"")
        assert verify(tmp_path / "store")["sound"]


@pytest.mark.parametrize("damage", ["shard", "line", "lines removed"])
def test_after_repair_just_what_was_damaged_is_to_be_added_again(tmp_path: Path, damage: str) -> None:
    samples = some_features()
    folder = write_store(tmp_path / "extract" / "store", samples)
    stage = tmp_path / "extract" / "stage.json"
    stage.write_text(json.dumps({"status": "done", "fingerprint": {"settings": {}}, "report": {}}))
    ledger = folder / "ledger.jsonl"
    if damage == "shard":
        flip_bit(folder / "shard-00001.safetensors")
    elif damage == "line":
        flip_bit(ledger, len(ledger.read_bytes().splitlines(keepends=True)[0]) + 30)
    else:
        first, _, *others = ledger.read_bytes().splitlines(keepends=True)
        ledger.write_bytes(b"".join([first, *others]))
    report = repair(folder)
    assert not report["sound"]
    assert report["extract_again"] == (["sample-2", "sample-3"] if damage == "shard" else [])
    assert json.loads(stage.read_text()) == {"status": "running", "fingerprint": {"settings": {}}}
    assert verify(folder)["sound"]
    with StoreWriter.open(folder, manifest(), 1) as writer:
        assert samples[2].id not in writer.committed
        assert len(writer.committed) == 5
        writer.add(samples[2:4])
    assert sorted(Store.open(folder).sample_ids) == [sample.id for sample in samples]


def test_repair_leaves_a_sound_store_and_its_stage_as_they_are(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "extract" / "store", some_features())
    (tmp_path / "extract" / "stage.json").write_text('{"status": "done"}')
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    assert repair(folder)["sound"]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before
    assert (tmp_path / "extract" / "stage.json").read_text() == '{"status": "done"}'


def test_a_store_with_fewer_samples_than_its_stage_left_is_refused_until_repair_lets_that_go_on(tmp_path: Path) -> None:
    folder, stage = write_store(tmp_path / "extract" / "store", some_features()), tmp_path / "extract" / "stage.json"
    samples = len(Store.open(folder))
    stage.write_text(json.dumps({"status": "done", "report": {"samples": samples}}))
    refuse_shortened(folder, samples)
    assert verify(folder)["sound"]
    stage.write_text(json.dumps({"status": "done", "report": {"samples": samples + 2}}))
    with pytest.raises(StoreError, match=f"has {samples} samples of the {samples + 2}") as caught:
        refuse_shortened(folder, samples)
    assert "store repair" in (caught.value.hint or "")
    assert not verify(folder)["sound"]
    repair(folder)
    assert json.loads(stage.read_text()) == {"status": "running"}
    refuse_shortened(folder, samples)


def test_a_store_that_is_being_written_is_not_repaired(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", manifest(), 1), pytest.raises(StoreError, match="is being written"):
        repair(tmp_path / "store")


def test_the_command_says_no_with_exit_code_1_and_what_to_do(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0
    flip_bit(folder / "shard-00002.safetensors", 50)
    result = CliRunner().invoke(app, ["verify", str(folder)])
    assert result.exit_code == 1
    for said in ("shard-00002.safetensors", "sample-4", f"store repair {folder}", "draftsmith extract RECIPE"):
        assert said in result.stdout
    report = json.loads(CliRunner().invoke(app, ["verify", str(folder), "--json"]).stdout)
    assert report["extract_again"] == ["sample-4", "sample-5"]
    assert CliRunner().invoke(app, ["repair", str(folder)]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0
