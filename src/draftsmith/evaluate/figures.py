"""What `evaluate` says: figures for machines, lines for people. Every rate is printed with its K."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.errors import CheckFailed
from draftsmith.evaluate.held_out import HeldOut
from draftsmith.evaluate.lossless import chance_of
from draftsmith.evaluate.offline import Replay, slot_rates
from draftsmith.evaluate.rounds import Rounds, round_starts, share, summarise

Results = dict[str, dict[str, Any]]  # by sample id

LEAST_CHANCE = 1e-6  # of sampled texts; below it they are not the target's own


def make_report(held_out: HeldOut, recorded: Results, decoded: Results, sampled: Results) -> dict[str, Any]:
    """The stage's report, without the lines for people.

    `prompt_sets` lists one set of figures per way of measuring and draft: `decoded`, by real speculative decoding;
    `sampled`, the same at `evaluate.temperature`; `replayed`, the hops of `offline.replay` on the decoded texts;
    `recorded`, the same on the held-out samples.
    """
    own = sum(result["own_tokens"] for result in recorded.values())
    own_top1 = sum(result["own_tokens_top1"] for result in recorded.values())
    sets = [_decoded(held_out, "decoded", decoded)] if decoded else []
    sets += [_decoded(held_out, "sampled", sampled)] if sampled else []
    for draft in held_out.drafts:
        sets += [_replayed(held_out, "replayed", draft, decoded)] if decoded else []
        sets.append(_replayed(held_out, "recorded", draft, recorded))
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
        same = report["replay_equals_decoding"]
        lines.append(
            f"replay from states makes the same rounds as decoding on {same['equal']} of {same['prompts']} texts"
        )
        if found["prompts"] < report["prompts_wanted"]:
            lines.append(f"note: {report['prompts_wanted']} prompts were wanted; no more were held out that fit")
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
        f"{steps}, by position {rates}; {found['prompts']} texts, {found['tokens']:,} tokens"
    )


def _temperature(report: dict[str, Any]) -> str:
    return f"{report['lossless_sampled']['temperature']:g}" if report["lossless_sampled"] else "0"


def _decoded(held_out: HeldOut, method: str, decoded: Results) -> dict[str, Any]:
    def read(id: str) -> Rounds:
        result = decoded[id]
        starts = round_starts(len(result["prompt_ids"]) - 1, result["accepted"])
        return Rounds(*_origin(held_out, id), starts, result["accepted"], tokens=len(result["answer_ids"]))

    return _summarise(held_out, method, "trained", [read(id) for id in decoded])


def _replayed(held_out: HeldOut, method: str, draft: str, results: Results) -> dict[str, Any]:
    replays = {id: Replay(**result["replays"][draft]) for id, result in results.items()}
    texts = [
        Rounds(*_origin(held_out, id), found.starts, found.accepted, tokens=sum(found.accepted) + len(found.accepted))
        for id, found in replays.items()
    ]
    rates = slot_rates(list(replays.values()), held_out.steps)
    return _summarise(held_out, method, draft, texts) | {"all_slots": rates}


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
