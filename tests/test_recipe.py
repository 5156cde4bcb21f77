from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith import recipe
from draftsmith.errors import RecipeError

MINIMAL = "name: x\ntarget:\n  model: m\n"
ROOT = Path(__file__).parents[1]


def write(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return file


def test_overrides_reach_nested_settings_lists_and_sections_that_the_file_leaves_out(tmp_path):
    file = write(tmp_path, MINIMAL + "prepare:\n  sources:\n    - path: a.json\n")
    loaded = recipe.load(
        file, ["train.draft.fc_norm=true", "train.draft.norm_before_fc=false", "prepare.sources.0.limit=5"]
    )
    assert loaded.train.draft.fc_norm is True
    assert loaded.prepare.sources[0].limit == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL + "trian: {}\n", "`trian` does not exist; did you mean `train`?"),
        (MINIMAL + "train:\n  learning_rat: 1\n", "did you mean `learning_rate`?"),
        (
            MINIMAL + "prepare:\n  sources:\n    - pth: x\n",
            "`prepare.sources.0.pth` does not exist; did you mean `path`?",
        ),
        (MINIMAL + "extract:\n  epochs: 3\n", "did you mean `train.epochs`?"),
        (MINIMAL + "train:\n  epochs: many\n", "`train.epochs`"),
        (MINIMAL + "train:\n  epochs: -1\n", "`train.epochs`"),
        ("name: x\n", "`target`"),
        ("name: a/b\ntarget:\n  model: m\n", "`name`"),
        ("- a\n- b\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("name: [x\n", "not valid YAML"),
        (MINIMAL + "train:\n  epochs: 2\n  betas: [0, 0]\n  epochs: 3\n", "line 7: `epochs` is there since line 5"),
        (MINIMAL + "train: {epochs: 2, epochs: 3}\n", "line 4: `epochs` is there since line 4"),
        (MINIMAL + "train: {}\nprepare: {}\ntrain: {}\n", "line 6: `train` is there since line 4"),
        (MINIMAL + "x: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_with_the_nearest_right_name(tmp_path, text, says):
    with pytest.raises(RecipeError) as caught:
        recipe.load(write(tmp_path, text))
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("override", ["train.epochs", "=3", "train.epochs.deep=3", "prepare.sources.7.limit=1"])
def test_an_override_that_does_not_fit_is_refused(tmp_path, override):
    file = write(tmp_path, MINIMAL + "train:\n  epochs: 2\nprepare:\n  sources: []\n")
    with pytest.raises(RecipeError):
        recipe.load(file, [override])


def test_a_recipe_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no such recipe"):
        recipe.load(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="is a folder"):
        recipe.load(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        recipe.load(binary)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("prepare.chat_template_kwargs={a: 2024-01-01}", "is no text, number"),
        ("prepare.chat_template_kwargs={a: [.nan]}", "not a finite number"),
        ("serve.engine_args={a: !!set {x}}", "is no text, number"),
        ("extract.engine_args={a: !!binary aGVsbG8=}", "is no text, number"),
        ("serve.engine_args={a: {[1]: 2}}", "not valid YAML"),
        ("serve.engine_args={a: {1.5: 2}}", "is no name"),
        ('run_dir="/tmp/a\\0b"', "no path or text"),
        ('run_dir="/tmp/\\ud800"', "no path or text"),
        ("prepare.sources.².path=x", "is not one of the"),
        ("prepare.sources." + "9" * 5000 + ".path=x", "is not one of the"),
        ("train.max_steps=true", "should be a number"),
        ("train.learning_rate=false", "should be a number"),
    ],
)
def test_what_yaml_can_say_and_a_run_cannot_hold_is_refused_by_name(tmp_path, override, says):
    file = write(tmp_path, MINIMAL + "prepare:\n  sources: [{path: a}]\n")
    with pytest.raises(RecipeError, match=says):
        recipe.load(file, [override])


def test_the_choices_of_a_setting_are_listed():
    line = next(line for line in recipe.describe().splitlines() if line.startswith("prepare.regenerate.using "))
    assert line.endswith("[none, server, transformers]")


def test_a_recipe_is_frozen(tmp_path):
    loaded = recipe.load(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        loaded.train.epochs = 3


def test_what_cannot_change_a_result_is_not_part_of_its_identity(tmp_path):
    file = write(tmp_path, MINIMAL)
    plain = recipe.load(file)
    free = recipe.load(file, ["train.device=cuda", "extract.batch_tokens=1", "prepare.regenerate.batch_size=2"])
    other = recipe.load(file, ["train.learning_rate=1"])
    for section in ("train", "extract", "prepare"):
        assert getattr(plain, section).identity() == getattr(free, section).identity()
    assert plain.train.identity() != other.train.identity()


def test_every_setting_is_described():
    undescribed = [name for name, info in recipe.every_setting().items() if not info.description]
    known = {"name", "run_dir", "seed"}
    assert [name for name in undescribed if name in known or name.count(".") == 0] == ["name", "seed"]
    assert "train.learning_rate" in recipe.describe()


@pytest.mark.parametrize(
    "file", sorted([*ROOT.glob("recipes/*.yaml"), *ROOT.glob("src/draftsmith/*.yaml")]), ids=lambda f: f.name
)
def test_every_recipe_that_we_ship_loads(file):
    recipe.load(file)


def test_the_page_of_settings_is_what_make_docs_would_write():
    assert (ROOT / "docs/settings.md").read_text() == recipe.settings_page()


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "probe.gpu_memory_gib=0",
        "probe.load_gib_per_second=0",
        "prepare.validation_fraction=1",
        "prepare.regenerate.timeout_seconds=0",
        "extract.aux_layer_ids=[-1, 2, 3]",
        "extract.gpu_memory_utilization=0",
        "extract.stall_seconds=-5",
        "train.betas=[5, 7]",
        "train.betas=[0.9, 1]",
        "train.unroll_steps=1000000",
        "train.learning_rate=3",
        "evaluate.temperature=1e-40",
        "evaluate.num_speculative_tokens=1000",
        "evaluate.served.num_speculative_tokens=[3, 1000]",
        "evaluate.served.start_seconds=0",
        "serve.port=70000",
        "serve.port=[" + "[" * 5000,
        "train={epochs: 1, epochs: 2}",
    ],
)
def test_a_number_that_no_run_can_have_is_refused(tmp_path, override):
    with pytest.raises(RecipeError) as caught:
        recipe.load(write(tmp_path, MINIMAL), [override])
    assert override.partition("=")[0] in str(caught.value)


def test_what_an_anchor_brings_may_be_overridden_once(tmp_path):
    text = "a: &a {epochs: 2, max_steps: 4}\nb: &b {<<: *a, epochs: 3}\nc: {<<: *b, epochs: 5}\n"
    assert recipe._read_yaml(text, "x")["c"] == {"epochs": 5, "max_steps": 4}


def test_a_range_leaves_a_free_setting_out_of_the_fingerprint(tmp_path):
    loaded = recipe.load(write(tmp_path, MINIMAL))
    free = {"gpu_memory_gib", "load_gib_per_second", "gpu_memory_utilization", "stall_seconds"}
    assert not free & (loaded.probe.identity() | loaded.extract.identity()).keys()
