"""`draftsmith store …`. Imports no torch until it is asked for something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="store",
    help="Look at, check, mend and copy stores of hidden states.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="RUN/extract/store", exists=True, file_okay=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else")]


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({k: v for k, v in report.items() if k != "summary"}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(report["summary"]))


@app.command("info")
def _info(
    folder: Folder,
    codecs: Annotated[bool, typer.Option("--codecs", help="Try every codec on the first sequences")] = False,
    as_json: Json = False,
) -> None:
    """What is in a store, and what its states are of."""
    from draftsmith.store.info import compare_codecs, info

    report = info(folder)
    if codecs:
        tried = compare_codecs(folder)
        report = {**report, **tried, "summary": [*report["summary"], *tried["summary"]]}
    _print(report, as_json)


@app.command("verify")
def _verify(folder: Folder, as_json: Json = False) -> None:
    """Check every byte; name damaged shards and the samples to extract again."""
    from draftsmith.store.check import verify

    report = verify(folder)
    _print(report, as_json)
    raise typer.Exit(0 if report["sound"] else 1)


@app.command("repair")
def _repair(folder: Folder, as_json: Json = False) -> None:
    """Drop what is damaged, so that `draftsmith extract RECIPE` makes just that anew."""
    from draftsmith.store.check import repair

    _print(repair(folder), as_json)


@app.command("merge")
def _merge(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER…", help="Stores of one target", exists=True, file_okay=False)
    ],
    into: Annotated[Path, typer.Option(help="Folder to make; its shards are linked where that is possible")],
    as_json: Json = False,
) -> None:
    """Make one store of several."""
    from draftsmith.store.copies import merge

    _print(merge(folders, into), as_json)


@app.command("convert")
def _convert(
    folder: Folder,
    into: Annotated[Path, typer.Option(help="Folder of the store to write")],
    codec: Annotated[str, typer.Option(help="bf16, fp32, int8, fp8 or lossless")],
    as_json: Json = False,
) -> None:
    """Write a store in another codec."""
    from draftsmith.signals import graceful_stop
    from draftsmith.store.copies import convert

    with graceful_stop():
        report = convert(folder, into, codec)
    _print(report, as_json)


@app.command("copy")
def _copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Folder, or address such as s3://bucket/folder")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The other of the two")],
    as_json: Json = False,
) -> None:
    """Copy a store to object storage, or from there. What is there already is not copied again."""
    from draftsmith.errors import RequestError
    from draftsmith.store.objects import download, upload

    if ("://" in source) == ("://" in target):
        raise RequestError(
            "one of FROM and TO is a folder, and the other an address",
            where="store copy",
            hint="copy to a folder first"
            if "://" in source
            else "`store merge FOLDER --into OTHER` copies between folders",
        )
    if "://" not in source and not Path(source).is_dir():
        raise RequestError("there is no such folder", where=source, hint="RUN/extract/store is the store of a run")
    _print(download(source, Path(target)) if "://" in source else upload(Path(source), target), as_json)
