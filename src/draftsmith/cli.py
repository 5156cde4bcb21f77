"""Command line: argv → recipe → one stage's run(). Imports no torch, and has no logic of its own.

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 the work failed or a check says no, 2 the request is wrong.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith import __version__, launch
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.store.commands import app as store_app

app = typer.Typer(
    name="draftsmith",
    help="Trains EAGLE-3 draft models for any large language model, and proves each step before it costs GPU hours.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(store_app)

INTERRUPTED = 130  # what typer makes of KeyboardInterrupt
Model = Annotated[str, typer.Argument(metavar="MODEL|RECIPE", help="Folder, hub id, HOST:/path, or a recipe file")]
Revision = Annotated[str | None, typer.Option(help="Hub revision")]
Ssh = Annotated[str | None, typer.Option(help="user@host that holds MODEL; nothing is installed there")]
RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file that describes the run")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.field=value …]", help="Settings that replace the recipe's")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else")]
Redo = Annotated[bool, typer.Option("--redo", help="Do it again, in place of the results there are")]


def main() -> None:
    """Entry point of the `draftsmith` command."""
    _mend_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's word is Ctrl-C's
    try:
        code = app(standalone_mode=False) or 0  # where it does not stand alone, typer.Exit becomes a return value
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()  # what refuses it is told here, not by the interpreter as it ends
        sys.exit(code)
    except DraftsmithError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print(
            "error: stopped at once; what is on disk stays, and the same command, without --redo, goes on with it",
            file=sys.stderr,
        )
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the outermost frame: nothing carries on after it
        if hasattr(error, "format_message"):  # click's: the arguments do not fit
            if error.format_message().startswith("Usage:"):  # nothing was asked, and it is the help
                print(error.format_message(), file=sys.stderr)
                sys.exit(2)
            print(f"error: {error.format_message()}\n  hint: see `draftsmith --help`", file=sys.stderr)
            sys.exit(2)
        if isinstance(error, OSError):
            _end_with(error)
        traceback.print_exc()
        print("error: this is a fault of draftsmith; please report it with the lines above", file=sys.stderr)
        sys.exit(1)


def _mend_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows less, and nothing fails


def _end_with(error: OSError) -> None:
    """Say what the file system refuses, and end; return where it is not that."""
    if error.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left is tried again at the end
        if error.errno == errno.EPIPE:  # the reader went away
            sys.exit(1)
        print(f"error: {error}\n  hint: make room where it runs and where its output goes", file=sys.stderr)
        sys.exit(1)
    if error.filename is not None:
        print(f"error: the file system refuses: {error}\n  hint: see that path, and the rights to it", file=sys.stderr)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    pass


def _print(report: dict[str, Any], as_json: bool) -> None:
    """A stage's report: whole as JSON, or its summary lines for people."""
    if as_json:
        print(json.dumps({k: v for k, v in report.items() if k != "summary"}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(report.get("summary", [])))


def _with_recipe(path: Path, overrides: list[str] | None, work: Callable[[Any], dict[str, Any]], as_json: bool) -> None:
    from draftsmith import recipe
    from draftsmith.signals import graceful_stop

    with graceful_stop():
        report = work(recipe.load(path, overrides or []))
    if launch.rank() == 0:
        _print(report, as_json)


def _stage(name: str, recipe: Path, overrides: list[str] | None, as_json: bool, redo: bool) -> None:
    from draftsmith.pipeline import run_stage

    _with_recipe(recipe, overrides, lambda loaded: run_stage(name, loaded, redo=redo), as_json)


@app.command()
def run(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False, redo: Redo = False) -> None:
    """Go through all stages: skip what is done, resume what is half done."""
    from draftsmith.pipeline import run_all

    def work(loaded: Any) -> dict[str, Any]:
        reports = run_all(loaded, redo=redo)
        return {**reports, "summary": [line for report in reports.values() for line in report.get("summary", [])]}

    _with_recipe(recipe, overrides, work, as_json)


@app.command()
def probe(
    model: Model,
    overrides: Overrides = None,
    as_json: Json = False,
    redo: Redo = False,
    revision: Revision = None,
    ssh: Ssh = None,
) -> None:
    """Read a target's configuration and weight index: facts, verdicts, budget. Loads no weights."""
    if model.endswith((".yaml", ".yml")):
        _stage("probe", Path(model), overrides, as_json, redo)
        return
    from draftsmith.probe import examine

    report = examine(model, revision=revision, ssh=ssh, overrides=overrides or [])
    _print(report, as_json)
    raise typer.Exit(1 if report["verdict"] == "fail" else 0)


@app.command()
def rehearse(
    model: Model,
    overrides: Overrides = None,
    as_json: Json = False,
    revision: Revision = None,
    ssh: Ssh = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where it is kept; the run's folder if not given")
    ] = None,
) -> None:
    """Prove capture, training, export and serving on a scale model of the target, in about a minute."""
    from draftsmith.rehearse import rehearse as rehearse_model

    report = rehearse_model(model, overrides=overrides or [], revision=revision, ssh=ssh, folder=folder)
    _print(report, as_json)
    raise typer.Exit(1 if report["verdict"] == "fail" else 0)


@app.command()
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: Json = False,
    redo: Redo = False,
    show: Annotated[int, typer.Option(min=0, help="Print so many samples with the loss mask in colour")] = 0,
) -> None:
    """Conversations → token ids, loss masks and draft vocabulary."""
    if show:
        from draftsmith import recipe as recipes
        from draftsmith.prepare.show import show_samples

        show_samples(recipes.load(recipe, overrides or []), show)
        return
    _stage("prepare", recipe, overrides, as_json, redo)


@app.command()
def extract(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False, redo: Redo = False) -> None:
    """Corpus + target → hidden states in the store."""
    _stage("extract", recipe, overrides, as_json, redo)


@app.command()
def train(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False, redo: Redo = False) -> None:
    """Store → draft checkpoints, by EAGLE-3 with training-time test."""
    _stage("train", recipe, overrides, as_json, redo)


@app.command()
def evaluate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: Json = False,
    redo: Redo = False,
    why: Annotated[bool, typer.Option("--why", help="Try other readings of a draft that accepts little")] = False,
    draft: Annotated[
        Path | None,
        typer.Option(help="With --why: another draft, checkpoint or exported", exists=True, file_okay=False),
    ] = None,
) -> None:
    """Acceptance length on held-out prompts, and proof that the output is unchanged."""
    if draft is not None and not why:
        raise RequestError("is for --why alone", where="--draft", hint="give both")
    if not why:
        _stage("evaluate", recipe, overrides, as_json, redo)
        return
    from draftsmith import recipe as recipes
    from draftsmith.evaluate import why as explain
    from draftsmith.rundir import RunPaths

    loaded = recipes.load(recipe, overrides or [])
    report = explain(loaded, RunPaths(loaded.folder), draft)
    _print(report, as_json)
    raise typer.Exit(1 if report["cause"] else 0)


@app.command()
def export(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False, redo: Redo = False) -> None:
    """Checkpoint → draft folders for vLLM and SGLang, read back and compared."""
    _stage("export", recipe, overrides, as_json, redo)


@app.command()
def serve(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE|DRAFT", help="YAML file that describes the run, or a draft's folder")
    ],
    overrides: Overrides = None,
    as_json: Json = False,
    redo: Redo = False,
    start: Annotated[bool, typer.Option("--run", help="Run it, see that it drafts, and serve until Ctrl-C")] = False,
) -> None:
    """Print the engine command that serves the target with its draft, or run it."""
    if recipe.is_dir():
        from draftsmith.serve.folder import serve_folder
        from draftsmith.serve.foreground import serve_in_foreground
        from draftsmith.signals import graceful_stop

        loaded, report = serve_folder(recipe, overrides or [])
        with graceful_stop():
            _print(serve_in_foreground(loaded, report) if start else report, as_json)
        return
    if not start:
        _stage("serve", recipe, overrides, as_json, redo)
        return
    from draftsmith.pipeline import run_stage
    from draftsmith.serve.foreground import serve_in_foreground

    _with_recipe(recipe, overrides, lambda loaded: serve_in_foreground(loaded, run_stage("serve", loaded)), as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN|RECIPE", help="Folder of a run, or its recipe")],
    overrides: Overrides = None,
    as_json: Json = False,
    against: Annotated[Path | None, typer.Option(help="Folder of another run, to compare with")] = None,
) -> None:
    """Write one HTML page on a run, finished or not, and print its figures."""
    from draftsmith import recipe as recipes
    from draftsmith.report import write_report

    if run.suffix in (".yaml", ".yml"):
        loaded = recipes.load(run, overrides or [])
        run, against = loaded.folder, against or loaded.report.against
    _print(write_report(run, against), as_json)


@app.command()
def recipe() -> None:
    """Print every setting with its default and meaning."""
    from draftsmith.recipe import describe

    print(describe())


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the model and the run are kept")] = Path("runs/demo"),
    as_json: Json = False,
) -> None:
    """Train, measure and export a draft for SmolLM2-135M on this machine, in minutes."""
    from draftsmith.demo import run_demo
    from draftsmith.signals import graceful_stop

    with graceful_stop():
        report = run_demo(folder)
    _print(report, as_json)
