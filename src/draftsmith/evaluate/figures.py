"""What `evaluate` says: figures for machines, lines for people. Every rate is printed with its K."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.errors import CheckFailed
from draftsmith.evaluate.expected import Taken, expect
from draftsmith.evaluate.held_out import HeldOut
from draftsmith.evaluate.lossless import chance_of
from draftsmith.evaluate.offline import Replay, slot_rates
from draftsmith.evaluate.rounds import Rounds, bootstrap_95, difference, round_starts, share, summarise
from draftsmith.evaluate.sampled import sampled_by_the_target

Results = dict[str, dict[str, Any]]  # by sample id

PROPOSING = {"greedy": "proposing its likeliest tokens", "probabilistic": "sampling its tokens"}
EARLY_TOKENS, TOLD_FROM = 64, 0.1
LITTLE = 0.3  # of the rounds with the first draft token accepted: below it something may not fit
LEAST_CHANCE = 1e-6  # of sampled texts; below it they are not the target's own


def make_report(
    held_out: HeldOut, recorded: Results, decoded: Results, sampled: Results, at_temperature: Results
) -> dict[str, Any]:
    """The stage's report, without the lines for people.

    `prompt_sets` lists one set of figures per way of measuring and draft: `decoded`, by real speculative decoding;
    `replayed`, the hops of `offline.replay` on the decoded texts; `recorded`, the same on the held-out samples.
    At `evaluate.temperature`: `sampled`, by real decoding; `expected`, the rounds of `expected.expect` on the sampled
    texts; `expected recorded`, the same on the held-out samples, where these are the target's own at that temperature.
    """
    own = sum(result["own_tokens"] for result in recorded.values())
    own_top1 = sum(result["own_tokens_top1"] for result in recorded.values())
    sets = [_decoded(held_out, "decoded", decoded)] if decoded else []
    sets += [_decoded(held_out, "sampled", sampled) | _how_sampled(held_out)] if sampled else []
    sets += _expected(held_out, "expected", sampled)
    for draft in held_out.drafts:
        sets += [_replayed(held_out, "replayed", draft, decoded)] if decoded else []
        sets.append(_replayed(held_out, "recorded", draft, recorded))
        sets[-1]["at_temperature"] = _overlap(held_out, draft, at_temperature) if at_temperature else None
    if sampled_by_the_target(held_out.recipe):
        sets += _expected(held_out, "expected recorded", at_temperature)
    return {
        "num_speculative_tokens": held_out.steps,
        "target_dtype": str(held_out.dtype).removeprefix("torch."),
        "store_dtype": held_out.store.manifest.dtype,
        "prompts_wanted": held_out.recipe.evaluate.prompts,
        "prompt_sets": sets,
        "recorded_tokens_are_top1": share(own_top1, own),
        "lossless": _lossless(decoded) if decoded else None,
        "lossless_sampled": _lossless_sampled(held_out, sampled) if sampled else None,
        "replay_equals_decoding": _agreement(decoded) if decoded else None,
        "sampled_against_expected": _against_expected(held_out, sampled) if sampled else None,
    }


def refuse_unfaithful(report: dict[str, Any]) -> None:
    """Raises CheckFailed if a text differs from the target's greedy one by more than rounding, or sampled ones are not
    spread as the target's own."""
    faults = report["lossless"]["faults"] if report["lossless"] else []
    hint = "speculative decoding must not change the output; please report this with the target's config.json"
    if faults:
        first = faults[0]
        raise CheckFailed(
            f"{len({fault['id'] for fault in faults})} of {report['lossless']['prompts']} texts are not what the "
            f"target writes alone; sample {first['id']} first, at token {first['index']} of its answer, where the "
            f"target prefers {first['likeliest']} to {first['token']} by a logit gap of {first['gap']:.4g}",
            where="evaluate",
            hint=hint,
        )
    found = report["lossless_sampled"]
    if found and found["chance"] < LEAST_CHANCE:
        raise CheckFailed(
            f"the {found['tokens']:,} tokens sampled at temperature {found['temperature']:g} are not spread as the "
            f"target's own would be: by chance, no more than once in {1 / max(found['chance'], 1e-300):.3g} runs",
            where="evaluate",
            hint=hint,
        )


def summary_lines(report: dict[str, Any]) -> list[str]:
    steps = report["num_speculative_tokens"]
    by_name = {found["name"]: found for found in report["prompt_sets"]}
    lines = [
        _line(by_name[name], text, steps)
        for name, text in (
            ("decoded trained", "trained draft, decoded"),
            ("sampled trained", f"trained draft, sampled at temperature {_temperature(report)}"),
            ("replayed untrained", "untrained draft, same texts"),
            ("recorded trained", "trained draft, recorded states"),
            ("recorded untrained", "untrained draft, recorded states"),
        )
        if name in by_name
    ]
    greedy = by_name.get("decoded trained", by_name["recorded trained"])
    if len(greedy.get("by_num_speculative_tokens", {})) > 1:  # an earlier version wrote none
        lines.append(f"trained draft, {greedy['method']}: acceptance length {_by_k_text(greedy)}")
    lines += [_expected_line(found) for found in report["prompt_sets"] if found["method"].startswith("expected")]
    if by_name["recorded trained"]["at_temperature"]:
        lines.append(_overlap_line(by_name["recorded trained"]))
    if report["lossless"]:
        found = report["lossless"]
        ties = f"; {len(found['ties'])} tokens at a tie within rounding" if found["ties"] else ""
        lines.append(
            f"lossless: {found['identical']} of {found['prompts']} texts are the target's own greedy text{ties}"
        )
        if sampled := report["lossless_sampled"]:
            lines.append(
                f"lossless at temperature {_temperature(report)}: {sampled['tokens']:,} tokens are spread as the "
                f"target's own samples, p = {sampled['chance']:.2g}"
            )
            lines += _against_lines(report["sampled_against_expected"])
        same = report["replay_equals_decoding"]
        lines.append(
            f"replay from states makes the same rounds as decoding on {same['equal']} of {same['prompts']} texts"
        )
        if found["prompts"] < report["prompts_wanted"]:
            lines.append(f"note: {report['prompts_wanted']} prompts were wanted; no more were held out that fit")
    if greedy["per_position"][0] < LITTLE:
        lines.append(
            f"note: the first draft token is accepted in only {greedy['per_position'][0]:.1%} of rounds; "
            "`draftsmith evaluate RECIPE --why` tries what may not fit"
        )
    if report["recorded_tokens_are_top1"] < 0.9:
        lines.append(
            f"note: only {report['recorded_tokens_are_top1']:.0%} of the recorded answer tokens are the target's own "
            "top-1: sampled, or another's words; the figures from recorded states are then of a text that greedy "
            "serving would not write"
        )
    if report["target_dtype"] != report["store_dtype"]:
        lines.append(
            f"note: measured on the target in {report['target_dtype']}; the draft was trained on states computed in "
            f"{report['store_dtype']}"
        )
    return [f"{'evaluate' if i == 0 else '':<9} {line}" for i, line in enumerate(lines)]


def _line(found: dict[str, Any], text: str, steps: int) -> str:
    low, high = found["confidence_95"]
    rates = " ".join(f"{rate:.3f}" for rate in found["per_position"])
    return (
        f"{text}: acceptance length {found['mean_acceptance_length']:.2f} (95 %: {low:.2f} to {high:.2f}) with K = "
        f"{steps}, by position {rates}; {found['prompts']} texts, {found['tokens']:,} tokens{_early(found)}"
    )


def _early(found: dict[str, Any]) -> str:
    """What is accepted where answers begin, if that is not what is accepted on the whole."""
    early = found.get("within_tokens", {}).get(str(EARLY_TOKENS))  # an earlier version wrote none
    if early is None or abs(early["mean_acceptance_length"] / found["mean_acceptance_length"] - 1) < TOLD_FROM:
        return ""
    return f"; {early['mean_acceptance_length']:.2f} within the first {EARLY_TOKENS} tokens of an answer"


def _expected_line(found: dict[str, Any]) -> str:
    texts = "the recorded texts" if found["method"] == "expected recorded" else "the sampled texts"
    return (
        f"{found['draft']} draft {PROPOSING[found['draft_sample_method']]}, expected of {texts} at temperature "
        f"{found['temperature']:g}: acceptance length {_by_k_text(found)}"
    )


def _by_k_text(found: dict[str, Any]) -> str:
    lengths = [
        "{:.2f} ({:.2f} to {:.2f}) with K = {}".format(of["mean_acceptance_length"], *of["confidence_95"], k)
        for k, of in found["by_num_speculative_tokens"].items()
    ]
    return ", ".join(lengths)


def _against_lines(found: dict[str, Any]) -> list[str]:
    if found["difference"] is None:
        return []
    bounds = " (95 %: {:+.3f} to {:+.3f})".format(*found["confidence_95"]) if found["confidence_95"] else ""
    return [f"sampled acceptance length less what is expected of the same texts: {found['difference']:+.3f}{bounds}"]


def _overlap_line(found: dict[str, Any]) -> str:
    of = found["at_temperature"]
    rates = " ".join(f"{rate:.3f}" for rate in of["unconditional_per_position"])
    return (
        f"trained draft {PROPOSING[of['draft_sample_method']]}, recorded states at temperature {of['temperature']:g}: "
        f"after the recorded words alone, by position {rates} of its tokens would be taken with K = "
        f"{found['num_speculative_tokens']}"
    )


def _temperature(report: dict[str, Any]) -> str:
    return f"{report['lossless_sampled']['temperature']:g}" if report["lossless_sampled"] else "0"


def _decoded(held_out: HeldOut, method: str, decoded: Results) -> dict[str, Any]:
    def read(id: str) -> Rounds:
        result = decoded[id]
        starts = round_starts(len(result["prompt_ids"]) - 1, result["accepted"])
        return Rounds(*_origin(held_out, id), starts, result["accepted"], tokens=len(result["answer_ids"]))

    texts = [read(id) for id in decoded]
    by_k: dict[str, Any] = {}
    if method == "decoded":  # greedy: with fewer draft tokens the texts are the same, and what is accepted follows
        by_k = _by_k(held_out, {**_replayed_texts(held_out, "trained", decoded), held_out.steps: texts})
    return _summarise(held_out, method, "trained", texts) | by_k


def _how_sampled(held_out: HeldOut) -> dict[str, Any]:
    settings = held_out.recipe.evaluate
    return {"temperature": settings.temperature, "draft_sample_method": settings.draft_sample_method}


def _expected(held_out: HeldOut, method: str, results: Results) -> list[dict[str, Any]]:
    """Expected on texts that the target sampled: a set for each draft and way of proposing that the texts were read
    with, each with the acceptance length of every K."""
    steps = held_out.steps

    def one(name: str) -> dict[str, Any]:
        draft, sample_method = name.split()
        by_k = {k: _expected_texts(held_out, name, results, k) for k in range(1, steps + 1)}
        found = _summarise(held_out, method, draft, by_k[steps]) | _how_sampled(held_out)
        if sample_method != found["draft_sample_method"]:
            found |= {"name": f"{found['name']}, {PROPOSING[sample_method]}", "draft_sample_method": sample_method}
        return found | _by_k(held_out, by_k)

    return [one(name) for name in next(iter(results.values()))["taken"]] if results else []


def _expected_texts(held_out: HeldOut, name: str, results: Results, steps: int) -> list[Rounds]:
    return [
        expect(*_origin(held_out, id), Taken(**result["taken"][name]), steps, tokens=result["own_tokens"])
        for id, result in results.items()
    ]


def _overlap(held_out: HeldOut, draft: str, results: Results) -> dict[str, Any]:
    """How often each draft token would be taken after the recorded words: `expected` says what rate this is."""
    how, steps = _how_sampled(held_out), range(held_out.steps)
    sums: dict[str, list[float]] = {}
    for id, result in results.items():
        row = [result["slots"], *result["overlap"][f"{draft} {how['draft_sample_method']}"]]
        before = sums.get(held_out.conversations[id], [0.0] * len(row))
        sums[held_out.conversations[id]] = [a + b for a, b in zip(before, row, strict=True)]
    rows = [row for row in sums.values() if row[0]]
    slots, *taken = (sum(column) for column in zip(*rows, strict=True)) if rows else [0.0] * (1 + held_out.steps)

    def interval_95(k: int) -> tuple[float, float]:
        pairs = [(row[1 + k], row[0]) for row in rows]
        return bootstrap_95(pairs, lambda t, n: t / n, held_out.recipe.seed) if len(pairs) > 1 else (0.0, 1.0)

    return how | {
        "slots": int(slots),
        "unconditional_per_position": [share(taken[k], slots) for k in steps],
        "unconditional_95": [interval_95(k) for k in steps],
    }


def _against_expected(held_out: HeldOut, sampled: Results) -> dict[str, Any]:
    """How far decoding's own coins took its acceptance length from the expected one, over the slots that have both."""
    name = f"trained {held_out.recipe.evaluate.draft_sample_method}"
    expected = _expected_texts(held_out, name, sampled, held_out.steps)
    measured = []
    for id, result in sampled.items():
        starts = round_starts(len(result["prompt_ids"]) - 1, result["accepted"])
        last = max(result["taken"][name]["slots"], default=-1)
        accepted = [a for start, a in zip(starts, result["accepted"], strict=True) if start <= last]
        measured.append(Rounds(*_origin(held_out, id), starts[: len(accepted)], accepted, len(result["answer_ids"])))
    return {"prompts": len(sampled), **difference(measured, expected, held_out.recipe.seed)}


def _replayed(held_out: HeldOut, method: str, draft: str, results: Results) -> dict[str, Any]:
    texts = _replayed_texts(held_out, draft, results)
    rates = slot_rates([Replay(**result["replays"][draft]) for result in results.values()], held_out.steps)
    found = _summarise(held_out, method, draft, texts[held_out.steps]) | {"all_slots": rates}
    return found | _by_k(held_out, texts)


def _replayed_texts(held_out: HeldOut, draft: str, results: Results) -> dict[int, list[Rounds]]:
    """The rounds of every text, for each K up to the recipe's; of that alone where an earlier version replayed one."""
    steps = held_out.steps
    replays = {id: Replay(**result["replays"][draft]) for id, result in results.items()}
    texts = {}
    for k in range(1, steps + 1):
        hops = {id: rounds for id, found in replays.items() if (rounds := found.rounds(k, steps)) is not None}
        if len(hops) == len(replays):
            texts[k] = [
                Rounds(*_origin(held_out, id), of.starts, of.accepted, tokens=sum(of.accepted) + len(of.accepted))
                for id, of in hops.items()
            ]
    return texts


def _by_k(held_out: HeldOut, texts: dict[int, list[Rounds]]) -> dict[str, Any]:
    """The acceptance length that is to be expected with each K, by domain and by length of the answer too."""
    kept = ("mean_acceptance_length", "confidence_95", "by_domain", "within_tokens")
    found = {str(k): summarise("", of, k, held_out.recipe.seed).to_json() for k, of in texts.items()}
    return {"by_num_speculative_tokens": {k: {name: one[name] for name in kept} for k, one in found.items()}}


def _origin(held_out: HeldOut, id: str) -> tuple[str, str]:
    """Conversation and domain."""
    return held_out.conversations[id], held_out.store.domains[held_out.indexes[id]]


def _summarise(held_out: HeldOut, method: str, draft: str, texts: list[Rounds]) -> dict[str, Any]:
    found = summarise(f"{method} {draft}", texts, held_out.steps, held_out.recipe.seed)
    return {"name": found.name, "method": method, "draft": draft} | found.to_json()


def _lossless(decoded: Results) -> dict[str, Any]:
    found = [{"id": id, **deviation} for id, result in decoded.items() for deviation in result["deviations"]]
    return {
        "prompts": len(decoded),
        "identical": sum(not result["deviations"] for result in decoded.values()),
        "ties": [deviation for deviation in found if deviation["tie"]],
        "faults": [deviation for deviation in found if not deviation["tie"]],
    }


def _lossless_sampled(held_out: HeldOut, sampled: Results) -> dict[str, Any]:
    places = torch.tensor([place for result in sampled.values() for place in result["places"]])
    return {
        "temperature": held_out.recipe.evaluate.temperature,
        "draft_sample_method": held_out.recipe.evaluate.draft_sample_method,
        "prompts": len(sampled),
        "tokens": len(places),
        "chance": chance_of(places),
    }


def _agreement(decoded: Results) -> dict[str, int]:
    """On how many texts the unroll that training uses makes the rounds that decoding made."""
    equal = 0
    for result in decoded.values():
        again = result["replays"]["trained"]["accepted"]
        equal += again == result["accepted"][: len(again)]
    return {"prompts": len(decoded), "equal": equal}
