"""The whole pipeline on a tiny real target, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.corpus import corpus_lengths
from draftsmith.errors import CheckpointError, DataError, MissingInputError, StaleError
from draftsmith.pipeline import run_stage
from draftsmith.recipe import Recipe, load
from draftsmith.rundir import RunPaths, hash_file, hash_json, sole_process
from draftsmith.store.shards import Store
from draftsmith.vocab_map import read_draft_vocab

STAGES = ["probe", "prepare", "extract", "train", "evaluate", "export", "serve", "report"]
ALWAYS = ["serve", "report"]


def draftsmith(*arguments: object, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftsmith", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, **options)


def write_recipe(folder: Path, target: Path) -> Path:
    words = ["sort a list", "boil water", "jump over the dog", "freeze the fox", "use a tool"]
    rows = [{"messages": [{"role": "user", "content": f"How do I {words[i % 5]} {i} times?"}]} for i in range(24)]
    (folder / "conversations.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    settings = {
        "name": "tiny",
        "target": {"model": str(target), "dtype": "float32"},
        "prepare": {
            "sources": [{"path": "conversations.jsonl"}],
            "regenerate": {"max_new_tokens": 16},
            "draft_vocab_size": 200,
            "validation_fraction": 0.3,
        },
        "extract": {"codec": "fp32"},
        "train": {"unroll_steps": 2, "max_steps": 8, "batch_tokens": 128, "checkpoint_every_steps": 2},
        "evaluate": {"prompts": 3, "max_new_tokens": 12, "num_speculative_tokens": 2},
        "export": {"dtype": "float32"},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_target) -> Path:
    """A folder with a recipe that was run to the end."""
    folder = tmp_path_factory.mktemp("run")
    write_recipe(folder, tiny_target)
    done = draftsmith("run", "recipe.yaml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert [stage for stage in reports if stage in STAGES] == STAGES
    return folder


def events(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "runs/tiny/events.jsonl").read_text().splitlines()
    return [(line["stage"], line["event"]) for line in map(json.loads, lines)]


def test_a_finished_run_is_not_done_again(finished):
    before = (finished / "runs/tiny/train/checkpoints/final/model.safetensors").stat().st_mtime_ns
    again = draftsmith("run", "recipe.yaml", cwd=finished)
    assert again.returncode == 0, again.stderr
    assert (finished / "runs/tiny/train/checkpoints/final/model.safetensors").stat().st_mtime_ns == before
    again = [(stage, "skipped") for stage in STAGES if stage not in ALWAYS]
    again += [(stage, event) for stage in ALWAYS for event in ("started", "done")]
    assert events(finished)[-len(again) :] == again


def test_the_evaluation_says_what_the_contract_promises(finished):
    done = draftsmith("evaluate", "recipe.yaml", "--json", cwd=finished)
    report = json.loads(done.stdout)
    text = json.dumps(report)
    for name in ("mean_acceptance_length", "per_position", "prompts", "tokens", "confidence_95"):
        assert f'"{name}"' in text


@pytest.mark.parametrize(
    ("stage", "override", "says"),
    [
        ("train", "train.learning_rate=0.5", "train.learning_rate: 0.0001 → 0.5"),
        ("extract", "extract.codec=bf16", "extract.codec: fp32 → bf16"),
        ("prepare", "seed=3", "seed: 0 → 3"),
        ("evaluate", "evaluate.num_speculative_tokens=5", "evaluate.num_speculative_tokens: "),
    ],
)
def test_other_settings_are_refused_by_name_and_nothing_is_touched(finished, stage, override, says):
    files = {path: path.stat().st_mtime_ns for path in (finished / "runs/tiny" / stage).rglob("*") if path.is_file()}
    done = draftsmith(stage, "recipe.yaml", override, cwd=finished)
    assert done.returncode == 2
    assert says in done.stderr
    assert f"`draftsmith {stage} RECIPE --redo`, with the same settings, deletes" in done.stderr, "not of every stage"
    seconds = json.loads((finished / "runs/tiny" / stage / "stage.json").read_text())["report"]["seconds"]
    assert f"of which the last {seconds:,.0f} s of work" in done.stderr
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_extraction_says_before_it_starts_what_it_takes_of_disk_and_time(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    done = draftsmith("extract", "recipe.yaml", "--redo", cwd=copy)
    assert done.returncode == 0, done.stderr
    tokens = sum(corpus_lengths(copy / "runs/tiny/prepare/corpus.parquet").values())
    size, seconds = done.stderr.splitlines()[:2]
    assert size.startswith("extract: store size: ")
    assert f"{tokens / 1e6:.3g} million tokens" in size
    assert seconds.startswith("extract: extraction time: ")


def test_a_run_of_before_a_setting_was_is_done_as_with_its_default(finished, tmp_path):
    folder = tmp_path / "older"
    shutil.copytree(finished, folder, symlinks=True)
    paths, fingerprints = RunPaths(folder / "runs" / "tiny"), {}
    for stage in STAGES[:6]:
        state = json.loads(paths.stage_file(stage).read_text())
        recorded = state["fingerprint"]
        recorded["inputs"] = {name: hash_json(fingerprints[name]) for name in recorded["inputs"]}
        fingerprints[stage] = recorded
        del recorded["settings"]["target"]["revision"]
        for section, setting in (
            ("prepare", "max_length_tokens"),
            ("train", "feature_noise"),
            ("evaluate", "temperature"),
        ):
            recorded["settings"].get(section, {}).pop(setting, None)
        recorded["settings"].get("train", {}).get("draft", {}).pop("fc_norm", None)
        paths.stage_file(stage).write_text(json.dumps(state))
    done = draftsmith("run", "recipe.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    refused = draftsmith("train", "recipe.yaml", "train.feature_noise=0.1", cwd=folder)
    assert refused.returncode == 2
    assert "train.feature_noise: 0.0 → 0.1" in refused.stderr


def test_a_setting_of_an_earlier_stage_that_changed_is_refused_by_name(finished):
    done = draftsmith("export", "recipe.yaml", "train.learning_rate=0.5", cwd=finished)
    assert done.returncode == 2
    assert "needs `train`, which was done otherwise: train.learning_rate: 0.0001 → 0.5" in done.stderr


def test_a_draft_that_was_trained_anew_is_not_served_by_its_old_export(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    faster = "train.learning_rate=0.5"
    assert draftsmith("train", "recipe.yaml", faster, "seed=1", "--redo", cwd=copy).returncode == 0
    done = draftsmith("serve", "recipe.yaml", faster, cwd=copy)
    assert done.returncode == 2
    assert "needs `export`, which was done otherwise: `train` was done anew since" in done.stderr


@pytest.mark.parametrize(
    ("initial", "says"),
    [
        ("runs/nowhere", "there is no such folder"),
        ("runs", "there is no config.json"),
        ("{run}/train/checkpoints/final", "is what this very training wrote"),
    ],
)
def test_training_is_not_deleted_for_a_first_draft_that_cannot_be(finished, initial, says):
    run = finished / "runs" / "tiny"
    override = f"train.draft.initial={initial.format(run=run)}"
    refused = draftsmith("train", "recipe.yaml", override, "--redo", cwd=finished)
    assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
    assert (run / "train" / "checkpoints" / "final" / "model.safetensors").exists()


def test_an_evaluation_stays_done_where_serving_could_not_be_measured(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    state = tmp_path / "copy/runs/tiny/evaluate/stage.json"
    before = json.loads(state.read_text())
    nobody = "http://127.0.0.1:9"
    served = [f"evaluate.served.{name}={nobody}" for name in ("url", "baseline_url")]
    command = ["evaluate", "recipe.yaml", "evaluate.served.enabled=true", *served]
    done = draftsmith(*command, cwd=tmp_path / "copy")
    assert done.returncode == 1
    assert "ConnectError" in done.stderr
    assert json.loads(state.read_text()) == before
    told = draftsmith("report", "runs/tiny", cwd=tmp_path / "copy").stdout
    assert "7 of 7 stages done" in told
    assert "evaluate: done: " in told
    assert "ConnectError" in told
    assert draftsmith("evaluate", "recipe.yaml", cwd=tmp_path / "copy").returncode == 0


def test_figures_of_serving_that_were_refused_do_not_stop_the_next_run(finished, tmp_path):
    """They are on disk, for the report shows what differed, and not what was on record."""
    shutil.copytree(finished, tmp_path / "copy")
    folder = tmp_path / "copy/runs/tiny/evaluate"
    (folder / "served.json").write_text("{}")
    state = json.loads((folder / "stage.json").read_text())
    state["outputs"]["served.json"] = "of another"
    (folder / "stage.json").write_text(json.dumps(state))
    command = ["evaluate", "recipe.yaml"]
    assert "served.json: damaged" in draftsmith(*command, cwd=tmp_path / "copy").stderr
    state["outputs"]["served.json"] = hash_file(folder / "served.json")
    (folder / "stage.json").write_text(json.dumps(state))
    served = [f"evaluate.served.{name}=http://127.0.0.1:9" for name in ("url", "baseline_url")]
    assert draftsmith(*command, "evaluate.served.enabled=true", *served, cwd=tmp_path / "copy").returncode == 1
    (folder / "served.json").write_text('{"prompt_sets": []}')
    assert draftsmith(*command, cwd=tmp_path / "copy").returncode == 0


def test_redo_replaces_a_stage_whose_record_is_damaged(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    whole = '{"fingerprint": {"settings": {"seed": 0}, "inputs": {}}, "status": "done", "report": {}'
    for damage in (
        "{",
        "[]",
        '{"fingerprint": {"settings": {}, "inputs": {}}, "status": "done"}',
        whole + ', "outputs": null}',
    ):
        (copy / "runs/tiny/export/stage.json").write_text(damage)
        refused = draftsmith("export", "recipe.yaml", cwd=copy)
        assert refused.returncode == 2
        assert "`draftsmith export RECIPE --redo`" in refused.stderr
    assert draftsmith("export", "recipe.yaml", "--redo", cwd=copy).returncode == 0


def test_a_run_that_was_moved_is_not_said_to_be_where_it_was(finished, tmp_path):
    shutil.copytree(finished / "runs/tiny", tmp_path / "moved")
    for more in ([], ["--json"]):
        done = draftsmith("run", "recipe.yaml", f"run_dir={tmp_path / 'moved'}", *more, cwd=finished)
        assert done.returncode == 0, done.stderr
        assert "runs/tiny" not in done.stdout


@pytest.mark.parametrize(
    ("stage", "file", "refused"),
    [
        ("probe", "facts.json", "prepare"),
        ("prepare", "corpus.parquet", "extract"),
        ("prepare", "draft_vocab.json", "train"),
        ("train", "checkpoints/final/config.json", "export"),
        ("evaluate", "acceptance.json", "export"),
        ("evaluate", "acceptance.json", "evaluate"),
        ("export", "vllm/draftsmith.json", "serve"),
        ("export", "vllm/model.safetensors", "serve"),
    ],
)
def test_a_file_that_is_not_what_its_stage_wrote_is_refused_by_name(finished, stage, file, refused):
    path = finished / "runs/tiny" / stage / file
    written = path.read_bytes()
    path.write_bytes(written[:-2] + bytes([written[-2] ^ 1]) + written[-1:])
    try:
        done = draftsmith(refused, "recipe.yaml", cwd=finished)
    finally:
        path.write_bytes(written)
    assert done.returncode == 2
    assert f"{stage}/{file}: damaged, changed or removed since it was written" in done.stderr
    assert f"`draftsmith {stage} RECIPE --redo`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def copied(finished, tmp_path, monkeypatch) -> tuple[Recipe, RunPaths]:
    """The recipe of a finished run, and the run, to do with as one likes."""
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    loaded = load("recipe.yaml")
    return loaded, RunPaths(loaded.folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_other_users_can_read_what_the_umask_lets_them(copied):
    """Such as a server that runs as one of its own."""
    loaded, paths = copied
    before = os.umask(0o027)
    try:
        for stage in ("train", "export"):
            run_stage(stage, loaded, redo=True)
    finally:
        os.umask(before)
    files = [file for of in ("train/checkpoints", "export") for file in (paths.root / of).rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o640"}


def test_a_trained_draft_that_is_damaged_or_gone_is_made_anew_from_the_last_checkpoint(copied):
    loaded, paths = copied
    before = contents(paths.checkpoints)
    steps = {file: file.stat().st_mtime_ns for file in paths.checkpoints.glob("step-*/*")}
    weights = paths.checkpoints / "final/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(
        CheckpointError, match="delete this draft's folder: `draftsmith train RECIPE` then makes it anew"
    ):
        run_stage("export", loaded, redo=True)
    shutil.rmtree(weights.parent)
    with pytest.raises(StaleError, match="delete it: `draftsmith train RECIPE` then makes it anew from the last"):
        run_stage("evaluate", loaded)
    shutil.rmtree(paths.checkpoints / "initial")
    run_stage("train", loaded)
    assert contents(paths.checkpoints) == before
    assert steps == {file: file.stat().st_mtime_ns for file in steps}, "it was trained again"
    run_stage("export", loaded)


def test_a_draft_before_training_that_is_gone_with_all_checkpoints_is_not_trained_for(copied, capsys):
    loaded, paths = copied
    for folder in (paths.checkpoints / "initial", *paths.checkpoints.glob("step-*")):
        shutil.rmtree(folder)
    before = contents(paths.stage("train"))
    run_stage("train", loaded)
    assert contents(paths.stage("train")) == before
    assert "train: done already" in capsys.readouterr().err
    with pytest.raises(MissingInputError, match="with --redo if it says that it is done already"):
        run_stage("evaluate", loaded, redo=True)


def test_a_shard_that_is_gone_is_extracted_anew_and_a_store_that_is_gone_is_not(copied, capsys):
    loaded, paths = copied
    before = {found.id: found.aux.tolist() for found in Store.open(paths.store)}
    next(paths.store.glob("shard-*")).unlink()
    run_stage("extract", loaded)
    assert {found.id: found.aux.tolist() for found in Store.open(paths.store)} == before
    assert "done already" not in capsys.readouterr().err
    shutil.rmtree(paths.store)  # for room, once the draft is trained
    run_stage("extract", loaded)
    assert not paths.store.exists()
    assert "extract: done already" in capsys.readouterr().err


def test_facts_and_a_vocabulary_that_no_stage_wrote_are_refused_by_what_is_wrong(finished, tmp_path):
    paths = RunPaths(tmp_path / "copy")
    shutil.copytree(finished / "runs/tiny", paths.root)
    facts, vocab = json.loads(paths.facts.read_text()), json.loads(paths.draft_vocab.read_text())
    ids = vocab["token_ids"]
    for change, says in (({"hidden_size": "wide"}, "hidden_size: "), ({"eos_token_ids": 3}, "eos_token_ids: ")):
        paths.facts.write_text(json.dumps(facts | change))
        with pytest.raises(DataError, match=says):
            paths.read_facts()
    for text in ("{}", "[]", "[" * 5000, "{"):
        paths.facts.write_text(text)
        with pytest.raises(DataError, match="probe RECIPE --redo"):
            paths.read_facts()
    for change, says in (
        ({"token_ids": [ids[0], *ids[:-1]]}, "do not ascend"),
        ({"token_ids": ids[:-1]}, "199 entries"),
        ({"token_ids": [*ids[:-1], 10**9]}, "outside of"),
        ({"token_ids": [*ids[:-1], float(ids[-1])]}, "whole numbers"),
        ({"draft_vocab_size": None}, "whole numbers"),
    ):
        paths.draft_vocab.write_text(json.dumps(vocab | change))
        with pytest.raises(DataError, match=says):
            read_draft_vocab(paths.draft_vocab)


def test_a_stage_that_another_process_works_on_is_refused(finished):
    with sole_process(RunPaths(finished / "runs/tiny"), "train"):
        done = draftsmith("train", "recipe.yaml", "--redo", cwd=finished)
    assert done.returncode == 2
    assert f"process {os.getpid()} is at work on it" in done.stderr
    assert (finished / "runs/tiny/train/checkpoints/final").exists()


def test_what_the_disk_refuses_is_an_error_with_a_remedy(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    shutil.rmtree(copy / "runs/tiny/export")
    (copy / "runs/tiny/export").write_text("in the way")
    done = draftsmith("export", "recipe.yaml", cwd=copy)
    assert done.returncode == 1
    assert "the file system refuses" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_fails_nothing(finished):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "draftsmith", "report", "recipe.yaml"]
    assert subprocess.run(command, cwd=finished, env=ascii_only, capture_output=True, check=False).returncode == 0


def test_a_setting_that_cannot_change_the_result_may_change(finished):
    done = draftsmith("extract", "recipe.yaml", "extract.batch_tokens=64", cwd=finished)
    assert done.returncode == 0, done.stderr


def test_conversations_that_changed_are_noticed(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    with open(copy / "conversations.jsonl", "a") as file:
        file.write('{"messages": [{"role": "user", "content": "One more?"}]}\n')
    done = draftsmith("run", "recipe.yaml", cwd=copy)
    assert done.returncode == 2
    assert "files.conversations.jsonl" in done.stderr


def test_a_stage_whose_input_is_not_there_says_which(tmp_path, tiny_target):
    write_recipe(tmp_path, tiny_target)
    done = draftsmith("train", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "needs `probe`, which has not been done" in done.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('prompt_sets=["held_out","questions.jsonl"]', "questions.jsonl"),
        ("url=http://localhost:1", "both must be named"),
    ],
)
def test_what_serving_cannot_be_measured_with_is_said_before_anything_is_done(tmp_path, tiny_target, override, says):
    write_recipe(tmp_path, tiny_target)
    served = ["evaluate.served.enabled=true", f"evaluate.served.{override}"]
    done = draftsmith("run", "recipe.yaml", *served, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("killed_after", ["prepare", "extract", "train"])
def test_a_run_that_was_killed_ends_as_an_unbroken_one(finished, tmp_path, tiny_target, killed_after):
    """SIGKILL as soon as a stage has begun; the draft that the second run trains has the same bits."""
    write_recipe(tmp_path, tiny_target)
    command = [sys.executable, "-m", "draftsmith", "run", "recipe.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    begun = tmp_path / f"runs/tiny/{killed_after}/stage.json"
    while not begun.exists() and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = draftsmith("run", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, other = (root / "runs/tiny/train/checkpoints/final/model.safetensors" for root in (finished, tmp_path))
    assert one.read_bytes() == other.read_bytes()


def test_a_stage_of_which_nothing_came_takes_other_settings(tmp_path, tiny_target):
    write_recipe(tmp_path, tiny_target)
    assert draftsmith("probe", "recipe.yaml", cwd=tmp_path).returncode == 0
    wrong = draftsmith("prepare", "recipe.yaml", "prepare.sources.0.path=nowhere.jsonl", cwd=tmp_path)
    assert (wrong.returncode, "there is no such file" in wrong.stderr) == (2, True)
    mended = draftsmith("prepare", "recipe.yaml", cwd=tmp_path)
    assert mended.returncode == 0, mended.stderr
    events = [json.loads(line) for line in (tmp_path / "runs/tiny/events.jsonl").read_text().splitlines()]
    happened = [event["event"] for event in events if event["stage"] == "prepare"]
    assert happened == ["started", "failed", "started", "done"]


def test_empty_files_are_nothing_and_a_finished_stage_says_so(tmp_path, tiny_target):
    write_recipe(tmp_path, tiny_target)
    assert draftsmith("probe", "recipe.yaml", cwd=tmp_path).returncode == 0
    wrong = draftsmith("prepare", "recipe.yaml", "prepare.chat_template_kwargs={tokenize: false}", cwd=tmp_path)
    assert wrong.returncode != 0
    mended = draftsmith("prepare", "recipe.yaml", cwd=tmp_path)
    assert mended.returncode == 0, mended.stderr
    assert "done already" not in mended.stderr
    assert "prepare: done already" in draftsmith("prepare", "recipe.yaml", cwd=tmp_path).stderr


def test_a_damaged_record_of_what_is_made_every_time_stands_in_nobodys_way(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    record = copy / "runs/tiny/report/stage.json"
    record.write_text("{")
    done = draftsmith("run", "recipe.yaml", cwd=copy)
    assert done.returncode == 0, done.stderr
    assert json.loads(record.read_text())["status"] == "done"


@pytest.mark.parametrize(("fraction", "split"), [(0, "validation"), (0.99999, "train")])
def test_a_run_of_which_nothing_could_be_measured_or_trained_ends_before_it_costs_anything(
    tmp_path, tiny_target, fraction, split
):
    write_recipe(tmp_path, tiny_target)
    done = draftsmith("run", "recipe.yaml", f"prepare.validation_fraction={fraction}", cwd=tmp_path)
    assert done.returncode == 1
    assert f"no conversation fell to {split}" in done.stderr
    assert not (tmp_path / "runs/tiny/extract/store").exists()


def test_a_first_draft_that_is_not_there_is_refused_before_anything_is_done(tmp_path, tiny_target):
    write_recipe(tmp_path, tiny_target)
    done = draftsmith("run", "recipe.yaml", "train.draft.initial=absent", cwd=tmp_path)
    assert done.returncode == 2
    assert "train.draft.initial=absent: there is no such folder" in done.stderr
    assert not (tmp_path / "runs").exists()
