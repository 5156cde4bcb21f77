"""One tree of errors: each says what is wrong, where, and what to do about it.

Exit codes: 1, the work failed or a check says no; 2, the request itself is wrong.
"""

from __future__ import annotations


class DraftsmithError(Exception):
    """The work could not be done.

    Args:
        what: what is wrong, in one sentence.
        where: the stage, file, sample or layer that it concerns.
        hint: the remedy.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class RequestError(DraftsmithError):
    """The request is wrong: a path, an argument, a recipe. Nothing was started."""

    exit_code = 2


class RecipeError(RequestError):
    """The recipe does not say what it must, or says what it may not."""


class StaleError(RequestError):
    """A stage was done under other settings or inputs than those asked for now."""


class MissingInputError(RequestError):
    """A stage needs the result of an earlier one that is not there."""


class MissingExtraError(RequestError):
    """A package of an optional extra is needed and not installed, or has the wrong version."""


class TargetError(DraftsmithError):
    """The target model's folder, configuration or weights are not usable."""


class TargetNotFoundError(TargetError, RequestError):
    """There is no such model, or it may not be read."""


class DataError(DraftsmithError):
    """Conversations or a corpus that can't be read or trained on."""


class StoreError(DraftsmithError):
    """A hidden-state store is damaged, incomplete, or made for something else."""


class CheckpointError(DraftsmithError):
    """A training checkpoint or an exported draft is damaged or does not fit."""


class CaptureError(DraftsmithError):
    """Hidden states could not be captured, or differ from the reference."""


class EngineError(DraftsmithError):
    """The serving engine failed; carries the worker's own traceback in `detail`."""

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, detail: str | None = None
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.detail = detail

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n{self.detail.rstrip()}" if self.detail else text


class CheckFailed(DraftsmithError):
    """A check said no: the work was done and its result is not good enough to go on with."""


class RankFailed(DraftsmithError):
    """Another process of the same training failed, and says itself why."""


class Interrupted(DraftsmithError):
    """Stopped at a safe point because the user or the scheduler asked for it."""
