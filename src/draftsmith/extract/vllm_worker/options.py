"""What the driver tells the code in the engine's processes, through vLLM's `additional_config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KEY = "draftsmith"


@dataclass(frozen=True)
class Options:
    spool: Path
    failures: Path
    layer_ids: tuple[int, ...]  # canonical, ascending: the auxiliary ids and N
    hooked: bool = False
    codec: str | None = None  # which the workers encode states with

    def to_additional_config(self) -> dict[str, Any]:
        return {KEY: asdict(self) | {"spool": str(self.spool), "failures": str(self.failures)}}


def read_options(vllm_config: Any) -> Options:
    values = vllm_config.additional_config[KEY]
    return Options(
        spool=Path(values["spool"]),
        failures=Path(values["failures"]),
        layer_ids=tuple(values["layer_ids"]),
        hooked=values["hooked"],
        codec=values["codec"],
    )


def sampling_extra_args(number: int) -> dict[str, Any]:
    """Carries a sample's number with its request: vLLM changes request ids inside."""
    return {KEY: number}


def sample_number(new_request: Any) -> int | None:
    """What a request of `SchedulerOutput.scheduled_new_reqs` carries; None of those that an engine warms up with."""
    return (new_request.sampling_params.extra_args or {}).get(KEY)
