"""What serving was measured to do: figures with their intervals, identical texts, and the forecast beside them.

Intervals are Student's over the repeats, at 95 %: of the same prompts, so they hold the machine's noise alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.errors import CheckFailed, RequestError
from draftsmith.evaluate.forecast import Forecast, StepCosts, acceptance_lengths, best, forecast, stops_paying
from draftsmith.evaluate.step_costs import divide
from draftsmith.recipe import Recipe

# Of Student's t, two-sided, for 1, 2 … degrees of freedom (any table).
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# Two computations of a log-probability differ by so much at most, as seen of targets in bfloat16; a larger gap between
# the two tokens is not rounding.
TIE_NATS = 0.5
STEPS = "steps"

Measurements = dict[tuple[str, int], dict[str, Any]]


def make_served(
    recipe: Recipe, alone: Measurements, drafted: dict[int, Measurements], offline: dict[str, Any]
) -> dict[str, Any]:
    """Figures of every K, set and concurrency; step costs; the forecast, and how far off it is.

    Args:
        alone: measurements without the draft, by prompt set and concurrency; step times under STEPS.
        drafted: the same with the draft, by K.
        offline: the report of `evaluate`'s other figures.
    """
    costs = divide(
        {size: found["seconds"] for (name, size), found in alone.items() if name == STEPS},
        {
            (k, size): found["seconds"]
            for k, results in drafted.items()
            for (name, size), found in results.items()
            if name == STEPS
        },
    )
    of = offline_set(offline, recipe.evaluate.served.temperature)
    within, rates = rates_within(of, recipe.evaluate.served.max_tokens)
    expected = forecast(lengths_by_k(of, within, rates), costs, recipe.evaluate.served.concurrency)
    sets = [
        _figures(k, name, concurrency, alone[name, concurrency], found, expected, costs)
        for k, results in drafted.items()
        for (name, concurrency), found in results.items()
        if name != STEPS
    ]
    known = measured_or_foretold(expected, sets)
    return {
        "prompt_sets": sets,
        "step_costs": {
            "target_seconds": {str(n): seconds for n, seconds in costs.target_seconds.items()},
            "draft_seconds": {str(n): seconds for n, seconds in costs.draft_seconds.items()},
            "round_seconds": costs.round_seconds,
            "measured_rounds": [
                {"num_speculative_tokens": k, "concurrency": c, "seconds": seconds}
                for (k, c), seconds in costs.measured_rounds.items()
            ],
        },
        "forecast": {
            "acceptance_of": of["name"],
            "within_tokens": within,
            "temperature": of.get("temperature", 0.0),
            "served_temperature": recipe.evaluate.served.temperature,
            "per_position": rates,
            "all": [dataclasses.asdict(one) for one in expected],
            "best": {str(c): one and dataclasses.asdict(one) for c, one in best(known).items()},
            "stops_paying": stops_paying(known),
        },
    }


def refuse_more_than_evaluated(recipe: Recipe) -> None:
    """Raises RequestError if a K is to be served for which acceptance is not measured, nor a forecast made."""
    evaluated = recipe.evaluate.num_speculative_tokens
    most = max(recipe.evaluate.served.num_speculative_tokens, default=0)
    if most > evaluated:
        raise RequestError(
            f"{most} draft tokens are to be served, and acceptance is measured with {evaluated}: there would be no "
            "forecast to compare with",
            where="evaluate.served.num_speculative_tokens",
            hint=f"evaluate.num_speculative_tokens={most}; where `evaluate` was done with {evaluated}, "
            f"`draftsmith evaluate RECIPE evaluate.num_speculative_tokens={most} --redo` deletes all that it measured, "
            "serving too, and measures again",
        )


def measured_or_foretold(expected: list[Forecast], sets: list[dict[str, Any]]) -> list[Forecast]:
    """Every K and concurrency as it was measured, on the mean over prompt sets, or else as forecast."""
    known = {(one.concurrency, one.num_speculative_tokens): one for one in expected}
    measured: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for found in sets:
        measured.setdefault((found["concurrency"], found["num_speculative_tokens"]), []).append(found)
    for (concurrency, k), of in measured.items():
        known[concurrency, k] = Forecast(
            k,
            concurrency,
            acceptance_length=mean([one["mean_acceptance_length"] for one in of]),
            tokens_per_second=mean([one["tokens_per_second"]["with_draft"] for one in of]),
            speedup=geometric_mean([one["speedup"] for one in of]),
            measured=True,
        )
    return [known[at] for at in sorted(known)]


def offline_set(offline: dict[str, Any], temperature: float) -> dict[str, Any]:
    """The trained draft's acceptance that a forecast is made of: of real decoding, else of recorded states.

    At that temperature, of a draft that proposes its likeliest tokens, as engines' do unless told; where that was not
    measured, greedy.
    """
    sets = [found for found in offline["prompt_sets"] if found["draft"] == "trained"]
    sampled = [
        found
        for found in sets
        if found.get("temperature") == temperature and found.get("draft_sample_method") == "greedy"
    ]
    for candidates, methods in (
        (sampled, ("sampled", "expected", "expected recorded")),
        (sets, ("decoded", "recorded")),
    ):
        for method in methods:
            for found in candidates:
                if found["method"] == method:
                    return found
    raise ValueError("the report has no figures of the trained draft")


def rates_within(of: dict[str, Any], max_tokens: int) -> tuple[int | None, list[float]]:
    """Joint rates in as much of an answer as serving writes, or little more; and how much that is, None for all."""
    fitting = [int(tokens) for tokens in of.get("within_tokens", {}) if int(tokens) >= max_tokens]
    if not fitting:
        return None, of["per_position"]
    return min(fitting), of["within_tokens"][str(min(fitting))]["per_position"]


def lengths_by_k(of: dict[str, Any], within: int | None, rates: list[float]) -> list[float]:
    """L_0, L_1 …: each as it was found with that very K, else from the joint rates of the largest.

    Args:
        within: tokens of an answer that are looked at; None for all.
        rates: joint, of the largest K.
    """
    lengths = acceptance_lengths(rates)
    for k, one in of.get("by_num_speculative_tokens", {}).items():  # an earlier version wrote none of greedy texts
        found = one if within is None else one.get("within_tokens", {}).get(str(within))
        if found:
            lengths[int(k)] = found["mean_acceptance_length"]
    return lengths


def _figures(
    k: int,
    name: str,
    concurrency: int,
    alone: dict[str, Any],
    drafted: dict[str, Any],
    expected: list[Forecast],
    costs: StepCosts,
) -> dict[str, Any]:
    plain, ours = alone["repeats"], drafted["repeats"]
    rates = [sum(r["accepted_per_position"][i] for r in ours) / sum(r["drafts"] for r in ours) for i in range(k)]
    lengths = [1 + r["accepted_tokens"] / r["drafts"] for r in ours]
    speedups = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(plain, ours, strict=True)]
    speedup = geometric_mean(speedups)
    return {
        "name": f"{name}, {concurrency} at once, K = {k}",
        "method": "served",
        "draft": "trained",
        "prompt_set": name,
        "concurrency": concurrency,
        "num_speculative_tokens": k,
        "mean_acceptance_length": 1 + sum(rates),
        "confidence_95": interval_95(lengths),
        "confidence_95_over": "repeats",
        "per_position": rates,
        "prompts": len(drafted["texts"]),
        "tokens": sum(r["tokens"] for r in ours),
        "tokens_per_second": _both(plain, ours, "tokens_per_second"),
        "speedup": speedup,
        "speedup_95": _interval_of_ratios(speedups),
        "latency_seconds": {
            which: {at: _both(plain, ours, which, at) for at in ("p50", "p99")}
            for which in ("first_token_seconds", "inter_token_seconds", "seconds_per_token")
        },
        "identical": _identical(drafted),
        "forecast": _compared(k, concurrency, speedup, rates, expected, costs),
    }


def _both(plain: list[Any], ours: list[Any], name: str, percentile: str | None = None) -> dict[str, Any]:
    """A figure of every repeat, or one of its percentiles: its mean without the draft and with it, and intervals."""
    found: dict[str, Any] = {}
    for engine, repeats in (("without_draft", plain), ("with_draft", ours)):
        values = [repeat[name] for repeat in repeats if repeat[name] is not None]
        values = [value[percentile] for value in values] if percentile else values
        found |= {engine: mean(values) if values else None, f"{engine}_95": interval_95(values)}
    return found


def _compared(
    k: int, concurrency: int, speedup: float, rates: list[float], expected: list[Forecast], costs: StepCosts
) -> dict[str, Any] | None:
    """The forecast beside the measured speed-up. At the acceptance of serving, what is left is the costs' error."""
    of = [one for one in expected if (one.num_speculative_tokens, one.concurrency) == (k, concurrency)]
    if not of:
        return None  # acceptance was not estimated for so many draft tokens
    again = forecast(acceptance_lengths(rates), costs, [concurrency])[k - 1]
    return {
        "speedup": of[0].speedup,
        "relative_error": of[0].speedup / speedup - 1,
        "speedup_at_served_acceptance": again.speedup,
        "relative_error_at_served_acceptance": again.speedup / speedup - 1,
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(mean([math.log(ratio) for ratio in ratios]))


def interval_95(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean; None of fewer than two."""
    if len(values) < 2:
        return None
    centre = mean(values)
    variance = sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    half = T_95[len(values) - 2] * math.sqrt(variance / len(values))
    return centre - half, centre + half


def _interval_of_ratios(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Of their geometric mean, by their logarithms: never below zero."""
    found = interval_95([math.log(ratio) for ratio in ratios])
    return found and (math.exp(found[0]), math.exp(found[1]))


def differences(
    prompts: Sequence[list[int]],
    alone: Sequence[list[int]],
    drafted: Sequence[list[int]],
    likeliest: Callable[[list[int]], dict[int, float]],
) -> list[dict[str, Any]]:
    """Where each text first leaves the other's, and how likely the target finds either token there.

    Args:
        likeliest: log-probabilities of the target's likeliest tokens after a text.
    """
    found = []
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, drafted, alone, strict=True)):
        index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if index is None:
            continue
        said = likeliest(prompt + theirs[:index])
        chances = [said.get(token) for token in (theirs[index], ours[index])]
        gap = abs(chances[0] - chances[1]) if chances[0] is not None and chances[1] is not None else None
        found.append(
            {
                "prompt": number,
                "index": index,
                "without_draft": theirs[index],
                "with_draft": ours[index],
                "gap_nats": gap,  # null: one of the two is not among the likeliest at all
                "tie": gap is not None and gap <= TIE_NATS,
            }
        )
    return found


def _identical(drafted: dict[str, Any]) -> dict[str, Any] | None:
    found = drafted.get("differences")
    if found is None:
        return None
    return {
        "prompts": len(drafted["texts"]),
        "identical": len(drafted["texts"]) - len(found),
        "ties": [one for one in found if one["tie"]],
        "faults": [one for one in found if not one["tie"]],
    }


def refuse_other_texts(served: dict[str, Any]) -> None:
    """Raises CheckFailed if the engine says something else with the draft, and rounding does not explain it."""
    for found in served["prompt_sets"]:
        faults = (found["identical"] or {}).get("faults") or []
        if faults:
            first = faults[0]
            gap = "not among its likeliest" if first["gap_nats"] is None else f"{first['gap_nats']:.3g} nats apart"
            raise CheckFailed(
                f"{len(faults)} of {found['prompts']} texts are not what the engine writes without the draft "
                f"({found['name']}); text {first['prompt']} first, at token {first['index']}: {first['with_draft']} in "
                f"place of {first['without_draft']}, for the target {gap}",
                where="evaluate.served",
                hint="speculative decoding must not change the output; please report it with the target's config.json",
            )


def summary_lines(served: dict[str, Any]) -> list[str]:
    notes = [f"note: {served['busy_note']}"] if served.get("busy_note") else []
    return [f"{'':<9} {line}" for found in served["prompt_sets"] for line in _lines(found)] + [
        f"{'':<9} {line}" for line in _forecast_lines(served["forecast"]) + notes
    ]


def _lines(found: dict[str, Any]) -> list[str]:
    rate, gaps = found["tokens_per_second"], found["latency_seconds"]["inter_token_seconds"]["p50"]
    spread = (
        "" if found["speedup_95"] is None else " (95 % over repeats: {:.2f} to {:.2f})".format(*found["speedup_95"])
    )
    line = (
        f"served {found['name']}: {rate['with_draft']:,.1f} tokens/s against {rate['without_draft']:,.1f}, speed-up "
        f"{found['speedup']:.2f}{spread}; acceptance length {found['mean_acceptance_length']:.2f}"
    )
    if gaps["with_draft"] is not None and gaps["without_draft"] is not None:
        line += f"; a chunk every {1000 * gaps['with_draft']:.1f} ms against {1000 * gaps['without_draft']:.1f}"
    if (foretold := found["forecast"]) is not None:
        line += f"; forecast {foretold['speedup']:.2f}, {foretold['relative_error']:+.1%}"
    if (same := found["identical"]) is None:
        return [line]
    ties = f", {len(same['ties'])} leave it at a near-tie" if same["ties"] else ""
    faults = f", {len(same['faults'])} AT NO TIE" if same["faults"] else ""
    return [line, f"  {same['identical']} of {same['prompts']} texts are the same without the draft{ties}{faults}"]


def _forecast_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["temperature"] != found["served_temperature"]:
        lines.append(
            f"forecast: made of greedy acceptance ({found['acceptance_of']}), and served at temperature "
            f"{found['served_temperature']:g}, where less is accepted; evaluate.temperature="
            f"{found['served_temperature']:g} measures that"
        )
    if found["within_tokens"] is not None:
        lines.append(f"forecast: of acceptance within the first {found['within_tokens']} tokens of an answer")
    lines += [
        f"{concurrency} at once: "
        + (
            "no K is faster than the target alone"
            if one is None
            else f"best K = {one['num_speculative_tokens']}, {one['speedup']:.2f} times as fast, "
            + ("as measured" if one["measured"] else "by the forecast")
        )
        for concurrency, one in found["best"].items()
    ]
    if found["stops_paying"] is not None:
        lines.append(f"speculation stops paying at {found['stops_paying']} at once")
    return lines
