"""What serving, and its measurement, ask of an engine; engine_vllm.py and engine_sglang.py are the two answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from draftsmith.recipe import Recipe
from draftsmith.records import TargetFacts


@dataclass(frozen=True)
class EngineCounters:
    """What an engine has counted."""

    drafts: int = 0  # rounds
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # as many as draft tokens in a round
    decode_seconds: float = 0.0  # from the first token to the last, of all requests

    def since(self, before: EngineCounters) -> EngineCounters:
        """What was counted after `before`."""
        earlier = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return EngineCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, earlier, strict=True)),
            self.decode_seconds - before.decode_seconds,
        )


@dataclass(frozen=True)
class Sampling:
    """Exactly `max_tokens` are written, past the end of an answer too."""

    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Reply:
    """What came for one prompt. Times are seconds on one clock for all."""

    token_ids: list[int]
    sent: float
    arrivals: list[tuple[float, int]]  # of each chunk: when, and how many tokens
    last_event: dict[str, Any]  # as the engine sent it

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def decode_seconds(self) -> float:
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def gaps_seconds(self) -> list[float]:
        """Between a chunk and the next."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first chunk, on the mean."""
        tokens = sum(tokens for _, tokens in self.arrivals[1:])
        return self.decode_seconds / tokens if tokens else None


class Engine(Protocol):
    """A module of that form. What talks to a server raises EngineError where there is no good answer."""

    NAME: str  # in recipes and of the export's folder
    TITLE: str
    DISTRIBUTIONS: tuple[str, ...]  # that bring it
    INSTALL: str
    HOLDS_NORM_BEFORE_RESIDUAL: bool  # a draft with it
    PORT: int  # where it listens, if it is not told
    STREAM_PATH: str  # where `stream_request` is posted to

    def command(
        self,
        recipe: Recipe,
        facts: TargetFacts | None,
        draft: Path | None,
        num_speculative_tokens: int,
        **engine_args: Any,
    ) -> list[str]:
        """What a person types to serve.

        Args:
            facts: None where the target was not probed.
            draft: its folder; None: the target alone.
            engine_args: as `serve.engine_args`, which they replace.
        """

    def version_at(self, url: str) -> str:
        """Of the engine that runs there."""

    def command_notes(self, command: Sequence[str]) -> list[str]:
        """What a person should know of a command with a draft."""

    def own_command(self, command: Sequence[str]) -> list[str]:
        """The same by this interpreter: the engine that is installed beside us."""

    def measuring_args(self, sequences: int) -> dict[str, Any]:
        """`engine_args` under which so many sequences run at once and no prompt is answered from a cache."""

    def stream_request(self, model: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]: ...

    def new_token_ids(self, event: dict[str, Any], seen: int, url: str) -> list[int]:
        """What an event of the stream adds to `seen` tokens."""

    def counting(self, url: str) -> Callable[[Sequence[Reply]], EngineCounters]:
        """Called before requests; with their replies, what it returns says what was counted of them."""

    def likeliest(self, url: str, model: str, ids: list[int]) -> dict[int, float]:
        """The target's likeliest next tokens after a text, with their log-probabilities."""

    def complete(
        self, url: str, model: str, text: str, max_tokens: int, api_key: str | None = None
    ) -> tuple[str, EngineCounters]:
        """How a text goes on, at temperature 0, and what was counted meanwhile."""
