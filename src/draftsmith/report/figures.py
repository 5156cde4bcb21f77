"""The headline figures of a run, each taken from one place of its files, and the difference of two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.pipeline import differences
from draftsmith.report.record import SHOWN, RunRecord

PREFERRED = {"trained": ("decoded", "replayed", "recorded"), "untrained": ("replayed", "recorded")}


@dataclass(frozen=True)
class Figure:
    """A number of the run, and how people read it."""

    name: str
    label: str
    unit: str  # a key of `say`
    value: float
    interval: tuple[float, float] | None = None  # 95 %
    over: str | None = None  # what the interval is over, where that is not conversations


def figures(run: RunRecord) -> list[Figure]:
    """What is known of the run, in the order of the pipeline; what is not known is not there."""
    prepared, trained = run.stages["prepare"].report, run.stages["train"].report
    extracted, exported = run.stages["extract"].report, run.stages["export"].report
    found = [
        ("rows_read", "rows read", "count", dig(prepared, "rows", "read")),
        ("conversations", "conversations kept", "count", dig(prepared, "conversations")),
        ("tokens", "tokens", "count", dig(prepared, "tokens")),
        ("supervised_share", "share of tokens trained on", "share", dig(prepared, "supervised_share")),
        (
            "vocabulary_coverage",
            "held-out tokens that the draft vocabulary holds",
            "share",
            dig(prepared, "draft_vocab", "coverage_validation"),
        ),
        ("store_bytes", "hidden states on disk", "bytes", dig(extracted, "bytes")),
        ("extract_rate", "capture, tokens a second", "rate", dig(extracted, "tokens_per_second")),
        ("engine_restarts", "engines that died in the capture", "count", dig(extracted, "engine_restarts") or None),
        ("steps", "training steps", "count", dig(trained, "steps")),
        ("loss", "held-out loss", "loss", dig(trained, "validation", "loss")),
        *(
            (f"accuracy_{k}", f"held-out accuracy, step {k + 1}", "share", accuracy)
            for k, accuracy in enumerate(per_step(dig(trained, "validation") or {}, "accuracy"))
        ),
    ]
    plain = [Figure(name, label, unit, value) for name, label, unit, value in found if is_number(value)]
    sizes = [size for one in (dig(exported, "formats") or {}).values() if is_number(size := dig(one, "bytes"))]
    times = [stage.seconds for stage in run.stages.values() if stage.seconds is not None]
    return [
        *plain,
        *_acceptance(run),
        *_speed(run),
        *([Figure("draft_bytes", "exported draft", "bytes", max(sizes))] if sizes else []),
        *([Figure("seconds", "time on record", "seconds", sum(times))] if times else []),
    ]


def _acceptance(run: RunRecord) -> list[Figure]:
    found = []
    for draft in PREFERRED:
        chosen = prompt_set(run, draft)
        length = dig(chosen, "mean_acceptance_length")
        if is_number(length):
            label = f"acceptance length, {draft} draft, K\u00a0=\u00a0{chosen.get('num_speculative_tokens')}"
            found.append(Figure(f"acceptance_{draft}", label, "length", length, interval(chosen)))
    rates = dig(prompt_set(run, "trained"), "per_position") or []
    found += [Figure(f"accepted_{k}", f"draft token {k + 1} accepted", "share", rate) for k, rate in enumerate(rates)]
    lossless = run.acceptance.get("lossless")
    if is_number(prompts := dig(lossless, "prompts")) and prompts:
        share = dig(lossless, "identical") / prompts
        found.append(Figure("identical_share", "texts identical to the target's own", "share", share))
    return found


def _speed(run: RunRecord) -> list[Figure]:
    found = []
    for of in run.served.get("prompt_sets") or []:
        if is_number(speedup := dig(of, "speedup")):
            bounds = interval({"confidence_95": of.get("speedup_95")})
            found.append(
                Figure(f"speedup {of.get('name')}", f"speed-up, {of.get('name')}", "length", speedup, bounds, "repeats")
            )
    for concurrency, best in (dig(run.served, "forecast", "best") or {}).items():
        if is_number(k := dig(best, "num_speculative_tokens")):
            how = "as measured" if best.get("measured") else "by the forecast"
            found.append(Figure(f"best_k {concurrency}", f"best K at {concurrency} at once, {how}", "count", k))
    return found


def prompt_set(run: RunRecord, draft: str) -> dict[str, Any]:
    """The figures to show first for a draft: of real decoding, else of the same texts replayed, else of the store."""
    sets = run.acceptance.get("prompt_sets") or []
    for method in PREFERRED[draft]:
        for found in sets:
            if dig(found, "draft") == draft and dig(found, "method") == method:
                return found
    return {}


def interval(found: dict[str, Any]) -> tuple[float, float] | None:
    bounds = found.get("confidence_95")
    return (bounds[0], bounds[1]) if isinstance(bounds, list) and len(bounds) == 2 else None


def per_step(figures: dict[str, Any], name: str) -> list[float]:
    """`name_0`, `name_1` … as far as there are."""
    rates: list[float] = []
    while is_number(figures.get(f"{name}_{len(rates)}")):
        rates.append(figures[f"{name}_{len(rates)}"])
    return rates


@dataclass(frozen=True)
class Compared:
    """A figure of two runs."""

    label: str
    unit: str
    this: Figure | None
    other: Figure | None

    @property
    def difference(self) -> float | None:
        return None if self.this is None or self.other is None else self.this.value - self.other.value


def compare(this: RunRecord, other: RunRecord) -> dict[str, Compared]:
    """Every figure that either run has, by name."""
    ours, theirs = ({one.name: one for one in figures(run)} for run in (this, other))
    names = [*ours, *(name for name in theirs if name not in ours)]
    found = {}
    for name in names:
        of = ours.get(name) or theirs[name]
        found[name] = Compared(of.label, of.unit, ours.get(name), theirs.get(name))
    return found


def names_apart(this: RunRecord, other: RunRecord) -> tuple[str, str]:
    """What to call two runs: their folders' names, with as many of the folders above as it takes to tell them apart."""
    ours, theirs = this.root.resolve().parts, other.root.resolve().parts
    taken = next((n for n in range(1, len(ours)) if ours[-n:] != theirs[-n:]), len(ours))
    return str(Path(*ours[-taken:])), str(Path(*theirs[-taken:]))


def settings_that_differ(this: RunRecord, other: RunRecord) -> list[str]:
    """`name: other → this` for each setting on record that is not the same, of stages that both runs have begun."""
    found: dict[str, None] = {}
    for stage in SHOWN:
        ours, theirs = this.stages[stage].settings, other.stages[stage].settings
        if ours and theirs:
            found |= dict.fromkeys(differences(_numbered(theirs), _numbered(ours)))
    return list(found)


def _numbered(value: Any) -> Any:
    """Lists as objects from 0, so that a difference inside them has a name."""
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    return {name: _numbered(item) for name, item in value.items()} if isinstance(value, dict) else value


def dig(data: Any, *names: str) -> Any:
    """A value inside nested objects; None where the way to it ends."""
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def say(value: float, unit: str, signed: bool = False) -> str:
    """A number with its unit, as people read it; `signed` for a difference."""
    text = _unsigned(abs(value), unit, signed)
    if not set(text) & set("123456789"):  # what rounds to nothing has no sign
        return text
    return ("−" if value < 0 else "+" if signed else "") + text


def _unsigned(value: float, unit: str, difference: bool) -> str:
    if unit == "seconds":
        return _time(value)
    if unit == "bytes":
        return _size(value)
    if unit == "milliseconds":
        return f"{1000 * value:,.1f}"
    if unit == "percent":
        return f"{100 * value:.1f} %"
    if unit == "share":
        return f"{100 * value:.1f} {'points' if difference else '%'}"
    return {"count": f"{value:,.0f}", "rate": f"{value:,.1f}", "length": f"{value:.2f}", "loss": f"{value:.3f}"}[unit]


def _time(seconds: float) -> str:
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _size(size: float) -> str:
    for unit, of in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size:.0f} B"
