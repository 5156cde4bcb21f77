"""`draftsmith store repair` and `draftsmith extract`, on a run as the pipeline leaves it."""

import json
from pathlib import Path

from draftsmith.pipeline import read_state, run_stage
from draftsmith.recipe import parse
from draftsmith.rundir import RunPaths
from draftsmith.store.check import repair, verify
from draftsmith.store.shards import Store
from tests.conftest import SENTENCES
from tests.store.random_store import assert_same


def test_after_repair_extract_makes_just_what_was_damaged_and_training_waits_for_it(
    tmp_path: Path, tiny_target: Path
) -> None:
    chats = [
        {"messages": [{"role": "user", "content": SENTENCES[n % 4]}, {"role": "assistant", "content": f"{n} " * 120}]}
        for n in range(24)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    recipe = parse(
        {
            "name": "t",
            "run_dir": str(tmp_path / "run"),
            "target": {"model": str(tiny_target)},
            "prepare": {"sources": [{"path": str(tmp_path / "chats.jsonl")}], "regenerate": {"using": "none"}},
            "extract": {"codec": "fp32", "batch_tokens": 500, "shard_mib": 1},
        }
    )
    for stage in ("probe", "prepare", "extract"):
        run_stage(stage, recipe)
    paths = RunPaths(tmp_path / "run")
    before = {found.id: found for found in Store.open(paths.store)}
    shards = sorted(paths.store.glob("shard-*"))
    assert len(shards) > 2
    kept = {path.name: path.stat().st_mtime_ns for path in shards if path != shards[1]}
    with open(shards[1], "r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    again = verify(paths.store)["extract_again"]
    assert repair(paths.store)["extract_again"] == again
    assert read_state(paths, "extract")["status"] == "running"  # type: ignore[index]
    run_stage("extract", recipe)
    store = Store.open(paths.store)
    assert {entry.shard: (paths.store / entry.shard).stat().st_mtime_ns for entry in store.entries[:-1]} == kept
    assert sorted(store.entries[-1].sample_ids) == sorted(again)
    assert sorted(store.sample_ids) == sorted(before)
    for found in store:
        assert_same(found, before[found.id])
