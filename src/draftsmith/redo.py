"""What a stage left before `--redo`: set aside until it is done anew, and put back where nothing comes of that.

A kill at any point loses nothing. Renames are whole; a folder is deleted record first, and one without its record is
rubbish; what a kill left is settled at the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from draftsmith.errors import RequestError, StaleError
from draftsmith.rundir import ALSO_READ, INPUTS, RunPaths, append_event, sole_process, sync_folder, write_json

ALWAYS = ("serve", "report")  # a command line and a page cost nothing to make again


def came_of_it(paths: RunPaths, stage: str) -> bool:
    """Whether a stage left more than its record. An empty file is nothing; an empty folder may be a disk's."""
    found = (file for file in paths.stage(stage).iterdir() if file != paths.stage_file(stage))
    return any(not file.is_file() or file.stat().st_size for file in found)


def refuse_unrecorded(paths: RunPaths, stage: str) -> None:
    """Raises StaleError where a stage left something, and there is no record of what it is of."""
    if found := _unrecorded(paths, stage):
        raise StaleError(
            f"{found} is there, and no {paths.stage_file(stage)} that says of which settings and inputs it is",
            where=stage,
            hint=f"restore that record from a copy; or `draftsmith {stage} RECIPE --redo` deletes all that is in "
            f"{paths.stage(stage)} and does it again",
        )


def _unrecorded(paths: RunPaths, stage: str) -> Path | None:
    """One file, if any. A store says itself what it is of, and may be brought here; `evaluate --why` has no record."""
    if stage in ALWAYS or paths.stage_file(stage).exists():
        return None
    files = (Path(folder, name) for folder, _, names in os.walk(paths.stage(stage)) for name in names)
    return next((file for file in files if paths.store not in file.parents and file.name != "why.json"), None)


def set_aside(paths: RunPaths, stage: str) -> None:
    """Make room for the stage to be done anew. Of two `--redo`, the results before the first are kept.

    Raises:
        RequestError: another process reads what the stage left; or some of it is on a disk of its own, where a new
            folder would not be.
    """
    folder, record = paths.stage(stage), paths.stage_file(stage)
    if stage in ALWAYS or not (record.exists() or _unrecorded(paths, stage)):
        return
    for place in (folder, *folder.iterdir()):
        if place.is_symlink() or place.is_mount():
            raise RequestError(
                f"{place} is a link or a disk of its own, which --redo leaves alone",
                where=stage,
                hint=f"delete what is in it, and {record}; then give the command without --redo",
            )
    with _without_readers(paths, stage):
        if _aside(paths, stage).exists():
            _put_back(paths, stage)
        if not record.exists():
            write_json(record, {})  # what is set aside without one is rubbish
        append_event(paths, stage, "redo")
        os.rename(folder, _aside(paths, stage))
        sync_folder(paths.root)


@contextlib.contextmanager
def kept_until_done(paths: RunPaths, stage: str) -> Iterator[None]:
    """Delete what was set aside once the block ends well; where it fails and nothing came of it, put it back."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may be what failed; the next start settles it
            settle(paths, stage)
        raise
    delete_aside(paths, stage)


def settle(paths: RunPaths, stage: str) -> None:
    """Put back what was set aside if nothing came of the stage since, or say where it is. Nothing may run meanwhile."""
    aside = _aside(paths, stage)
    if not aside.exists():
        return
    if not (aside / "stage.json").exists() or _is_done(paths, stage):
        delete_aside(paths, stage)  # a kill came before its end
    elif not _worth_keeping(paths, stage):
        _put_back(paths, stage)
        print(f"{stage}: nothing came of --redo; the results before it are back in place", file=sys.stderr)
    else:
        print(
            f"{stage}: the results before --redo are in {aside} until it is done anew; to have them back: "
            f"rm -r {paths.stage(stage)} && mv {aside} {paths.stage(stage)}",
            file=sys.stderr,
        )


def _is_done(paths: RunPaths, stage: str) -> bool:
    try:
        return json.loads(paths.stage_file(stage).read_text(encoding="utf-8"))["status"] == "done"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _worth_keeping(paths: RunPaths, stage: str) -> bool:
    """Whether there is something that the stage, half done, would go on from."""
    if not paths.stage_file(stage).exists() or stage == "extract":
        return False  # `extract` deletes the old store, for want of room, before it has a shard of the new
    if stage == "train":
        return (paths.checkpoints / "final").exists() or any(paths.checkpoints.glob("step-*"))
    return came_of_it(paths, stage)


def delete_aside(paths: RunPaths, stage: str) -> None:
    """Delete what was set aside, if anything was."""
    _delete(_aside(paths, stage))


def bytes_aside(paths: RunPaths, stage: str) -> int:
    """What deleting it would make room for."""
    files = (Path(folder, name) for folder, _, names in os.walk(_aside(paths, stage)) for name in names)
    return sum(file.lstat().st_size for file in files)


def _aside(paths: RunPaths, stage: str) -> Path:
    return paths.root / f".{stage}.before-redo"


def _put_back(paths: RunPaths, stage: str) -> None:
    _delete(paths.stage(stage))
    os.rename(_aside(paths, stage), paths.stage(stage))
    sync_folder(paths.root)
    append_event(paths, stage, "restored")


def _delete(folder: Path) -> None:
    if folder.exists():
        (folder / "stage.json").unlink(missing_ok=True)
        sync_folder(folder)
        shutil.rmtree(folder)


@contextlib.contextmanager
def _without_readers(paths: RunPaths, stage: str) -> Iterator[None]:
    """Hold off the stages that read what this one left. Those that begin later find it half done."""
    with contextlib.ExitStack() as held:
        for reader in INPUTS.keys() - set(ALWAYS):
            if stage not in (*INPUTS[reader], *ALSO_READ.get(reader, ())):
                continue
            try:
                held.enter_context(sole_process(paths, reader))
            except RequestError as error:
                raise RequestError(
                    f"--redo would delete what `{reader}` reads, and {error.what}", where=stage, hint=error.hint
                ) from error
        yield
