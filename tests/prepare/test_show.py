from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftsmith import recipe as recipes
from draftsmith.cli import app, main
from draftsmith.prepare import run
from draftsmith.prepare.show import marked, show_samples
from draftsmith.recipe import Recipe
from draftsmith.records import Sample
from draftsmith.rundir import RunPaths, write_json
from draftsmith.target import load_tokenizer
from tests.prepare.chats import facts_of, share_gpt, write_lines


@pytest.fixture
def recipe(tiny_target: Path, tmp_path: Path) -> Recipe:
    data = write_lines(tmp_path / "talk.jsonl", {"conversations": share_gpt("How [b]?", "Thus [/b].")})
    prepare = {"sources": [{"path": str(data)}], "regenerate": {"using": "none"}, "validation_fraction": 0}
    made = recipes.parse(
        {"name": "t", "run_dir": str(tmp_path / "run"), "target": {"model": str(tiny_target)}, "prepare": prepare}
    )
    write_json(RunPaths(made.folder).facts, facts_of(tiny_target).to_json())
    return made


def test_off_a_terminal_supervised_tokens_stand_between_brackets(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    show_samples(recipe, 3)  # of the sources, for nothing is prepared yet
    out = capsys.readouterr().out
    assert "<|im_start|>user\nHow [b]?<|im_end|>\n<|im_start|>assistant\n⟦Thus [/b].<|im_end|>⟧" in out
    assert "talk/0/0 (train)" in out
    run(recipe, RunPaths(recipe.folder))
    show_samples(recipe, 3)
    assert capsys.readouterr().out == out


def test_on_a_terminal_supervised_tokens_are_coloured(recipe: Recipe) -> None:
    tokenizer = load_tokenizer(facts_of(Path(recipe.target.model)), recipe.target)
    text = marked(Sample("s", "c", "d", "train", [2, 1, 2], [0, 1, 1]), tokenizer, in_colour=True)
    assert text.plain == "<|im_end|><|im_start|><|im_end|>"
    assert [(span.start, span.end, span.style) for span in text.spans] == [(0, 10, "dim"), (10, 32, "bold green")]


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_on_a_terminal_without_colours_supervised_tokens_stand_between_brackets(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: dict[str, str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", **setting}.items():  # FORCE_COLOR: as on a terminal
        monkeypatch.setenv(name, value)
    show_samples(recipe, 1)
    out = capsys.readouterr().out
    assert ("⟦Thus [/b].<|im_end|>⟧" in out, "\x1b[" in out) == ((True, False) if setting else (False, True))


def test_the_command_prints_samples(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
    app(["prepare", str(file), "--show", "1"], standalone_mode=False)
    assert "⟦Thus [/b].<|im_end|>⟧" in capsys.readouterr().out


def test_a_number_of_samples_below_0_is_a_wrong_request(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
    monkeypatch.setattr("sys.argv", ["draftsmith", "prepare", str(file), "--show", "-1"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "Invalid value for '--show'" in capsys.readouterr().err
