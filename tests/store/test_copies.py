import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.errors import RequestError, StoreError
from draftsmith.store.codec import CODECS
from draftsmith.store.commands import app
from draftsmith.store.copies import convert, merge
from draftsmith.store.info import ACCEPTANCE_PERCENT
from draftsmith.store.shards import Store
from tests.store.random_store import HIDDEN_SIZE, assert_same, features, in_bf16, some_features, write_store

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_merged_stores_have_every_sample_of_each_and_share_its_shards(tmp_path: Path) -> None:
    samples = some_features(9)
    parts = [write_store(tmp_path / str(first), samples[first : first + 3]) for first in (0, 3, 6)]
    report = merge(parts, tmp_path / "whole")
    assert (report["samples"], report["shards"]) == (9, 6)
    for ours, theirs in zip(Store.open(tmp_path / "whole"), samples, strict=True):
        assert_same(ours, theirs)
    for part in parts:
        assert len(list(Store.open(part))) == 3
    assert (tmp_path / "whole" / "shard-00000.safetensors").samefile(parts[0] / "shard-00000.safetensors")
    write_store(tmp_path / "whole", [features(20, 4)])
    assert len(list(Store.open(tmp_path / "whole"))) == 10


def test_stores_of_different_targets_are_not_merged(tmp_path: Path) -> None:
    parts = [write_store(tmp_path / "a", some_features(2)), write_store(tmp_path / "b", [], weights_sha256="w1")]
    with pytest.raises(StoreError, match='weights_sha256 is "w1"'):
        merge(parts, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_sample_is_not_merged_twice(tmp_path: Path) -> None:
    parts = [write_store(tmp_path / name, some_features(2)) for name in "ab"]
    with pytest.raises(StoreError, match=r"sample-0, as .*a does"):
        merge(parts, tmp_path / "whole")


def test_a_folder_with_something_in_it_is_not_merged_into(tmp_path: Path) -> None:
    part = write_store(tmp_path / "part", some_features(2))
    other = write_store(tmp_path / "other", [])
    with pytest.raises(RequestError):
        merge([part], other)


def test_a_merge_that_broke_off_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    parts = [write_store(tmp_path / name, some_features(6)[first:][:3]) for name, first in (("a", 0), ("b", 3))]
    shard = parts[1] / "shard-00000.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(StoreError):
        merge(parts, tmp_path / "whole")
    shard.write_bytes(whole)
    assert merge(parts, tmp_path / "whole")["samples"] == 6


def test_a_store_is_not_converted_into_one_of_another_codec(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features(3))
    convert(folder, tmp_path / "other", "int8")
    with pytest.raises(StoreError, match=r"codec is .int8., and .fp8. is needed") as refused:
        convert(folder, tmp_path / "other", "fp8")
    assert refused.value.hint == "name a folder that is not there yet"


def test_a_store_is_not_converted_into_itself(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features(2), codec="bf16")
    with pytest.raises(RequestError) as caught:
        convert(folder, tmp_path / "no" / ".." / "store", "bf16")
    assert caught.value.hint == "name another folder"


def test_a_codec_that_cannot_hold_the_states_is_refused_with_those_that_can(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features(2), codec="fp32", dtype="float32")
    with pytest.raises(RequestError) as caught:
        convert(folder, tmp_path / "other", "lossless")
    assert caught.value.where == "--codec"
    assert set((caught.value.hint or "").removeprefix("choose ").split(", ")) == CODECS.keys() - {"lossless"}
    assert not (tmp_path / "other").exists()


def test_a_converted_store_has_the_same_samples_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "bf16", some_features(), codec="bf16")
    convert(folder, tmp_path / "fp32", "fp32")
    report = convert(folder, tmp_path / "fp32", "fp32")
    assert report["size_ratio"] > 1.2
    converted = Store.open(tmp_path / "fp32")
    assert converted.manifest.codec == "fp32"
    for ours, theirs in zip(converted, Store.open(folder), strict=True):
        assert (ours.id, ours.split, ours.domain) == (theirs.id, theirs.split, theirs.domain)
        assert ours.aux.equal(theirs.aux.float())
        assert ours.last.equal(theirs.last.float())


def test_what_codecs_do_to_drafts_is_said_as_it_was_measured() -> None:
    measured = json.loads((BENCHMARKS / "results" / "codec_acceptance.json").read_text())["differences"]
    by_seed = {name: of["slots_acceptance_length"]["percent_by_seed"] for name, of in measured.items()}
    assert {name: list(percent) for name, percent in ACCEPTANCE_PERCENT.items()} == by_seed


def test_an_unknown_codec_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="bf16"):
        convert(write_store(tmp_path / "store", []), tmp_path / "other", "mp3")


def test_the_commands_print_one_json_document(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    runs = [
        ["info", str(folder)],
        ["merge", str(folder), "--into", str(tmp_path / "merged")],
        ["convert", str(folder), "--into", str(tmp_path / "bf16"), "--codec", "bf16"],
    ]
    for arguments in runs:
        result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert json.loads(result.stdout)["samples"] == 7


def test_info_names_shards_that_the_ledger_lost(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    assert "not in the ledger" not in CliRunner().invoke(app, ["info", str(folder)]).stdout
    (folder / "ledger.jsonl").write_bytes((folder / "ledger.jsonl").read_bytes()[:100])
    said = CliRunner().invoke(app, ["info", str(folder)]).stdout
    assert "not in the ledger: shard-00000.safetensors" in said
    assert "store verify" in said


def test_info_reads_no_shard(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    for shard in folder.glob("shard-*"):
        shard.unlink()
    assert "7 samples" in CliRunner().invoke(app, ["info", str(folder)]).stdout


def test_info_tries_the_codecs_that_can_hold_the_states(tmp_path: Path) -> None:
    samples = [in_bf16(features(number, 40)) for number in range(3)]
    folder = write_store(tmp_path / "bf16", samples, codec="bf16", dtype="bfloat16")
    tried = json.loads(CliRunner().invoke(app, ["info", str(folder), "--codecs", "--json"]).stdout)["codecs"]
    assert set(tried) == set(CODECS)
    assert tried["bf16"]["largest_relative_error"] == tried["lossless"]["largest_relative_error"] == 0
    assert 0 < tried["fp8"]["largest_relative_error"] < 0.06
    assert tried["fp8"]["bytes_per_raw_bf16_byte"] == pytest.approx((HIDDEN_SIZE + 2) / (2 * HIDDEN_SIZE))
    as_fp32 = write_store(tmp_path / "fp32", some_features())
    assert "lossless" not in CliRunner().invoke(app, ["info", str(as_fp32), "--codecs"]).stdout
    empty = write_store(tmp_path / "empty", [])
    assert CliRunner().invoke(app, ["info", str(empty), "--codecs"], catch_exceptions=False).exit_code == 0
