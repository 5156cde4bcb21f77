"""What the corpus came to, counted while it is written."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from draftsmith.prepare.samples import Outcome
from draftsmith.prepare.sources import Tally
from draftsmith.prepare.vocab import TokenCounts
from draftsmith.progress import Progress
from draftsmith.records import Sample
from draftsmith.signals import check_stop


class Figures:
    """Counts of samples and tokens. `tally` goes on from what the sources counted: `kept` becomes what gave samples."""

    def __init__(self, target_vocab_size: int, tally: Tally) -> None:
        self.counts = TokenCounts(target_vocab_size)
        self.tally = tally
        self.lengths: list[int] = []
        self.cut_samples = self.short_rows = 0
        self.conversations: Counter[str] = Counter()  # by split
        self.by_domain: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.by_split: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, outcomes: Iterable[Outcome], bar: Progress) -> Iterator[Sample]:
        """The samples of the outcomes, counted as they pass."""
        for outcome in outcomes:
            check_stop("prepare")
            bar.advance(1)
            self.short_rows += outcome.short_rows
            self.cut_samples += outcome.cut_rows
            if outcome.reason is not None:
                self.tally.kept -= 1
                self.tally.drop(outcome.reason, outcome.conversation_id)
                continue
            self.conversations[outcome.samples[0].split] += 1
            for sample in outcome.samples:
                self._add(sample)
                yield sample

    def _add(self, sample: Sample) -> None:
        self.counts.add(sample)
        self.lengths.append(len(sample.input_ids))
        for group in (self.by_domain[sample.domain], self.by_split[sample.split]):
            group["samples"] += 1
            group["tokens"] += len(sample.input_ids)
            group["supervised_tokens"] += sum(sample.loss_mask)

    def to_json(self) -> dict[str, Any]:
        totals: Counter[str] = sum(self.by_split.values(), Counter())
        p50, p90 = (int(np.percentile(self.lengths, share)) for share in (50, 90))
        return {
            "rows": self.tally.to_json(),
            "conversations": self.conversations.total(),
            **totals,
            "supervised_share": round(totals["supervised_tokens"] / totals["tokens"], 4),
            "samples_cut": self.cut_samples,
            "samples_too_short": self.short_rows,
            "length_tokens": {"p50": p50, "p90": p90, "max": max(self.lengths)},
            "by_split": {
                split: {"conversations": self.conversations[split], **self.by_split[split]}
                for split in ("train", "validation")
            },
            "by_domain": {domain: dict(group) for domain, group in sorted(self.by_domain.items())},
        }


def caveats(report: dict[str, Any]) -> list[str]:
    """What a reader of the report should know before training on the corpus."""
    found = []
    answers, vocab = report["answers"], report["draft_vocab"]
    if answers["written_by"] == "data":
        found.append(
            "the answers are not the target's own: the draft learns what others would say, and the target will accept "
            "less of it; prepare.regenerate.using=transformers, or server, lets the target write them"
        )
    if answers.get("retokenised"):
        found.append(
            f"{answers['retokenised']:,} answers came as text without token ids and were tokenised anew, which may "
            "differ from what the target wrote"
        )
    if answers.get("cut_share", 0) > 0.2:
        found.append(
            f"{answers['cut_share']:.0%} of the answers were cut before their end; the draft sees few ends of turns; "
            "raise prepare.regenerate.max_new_tokens"
        )
    for split, share in (("validation", "raise"), ("train", "lower")):
        if not report["by_split"][split]["conversations"]:
            found.append(f"no conversation fell to {split}: {share} prepare.validation_fraction or add conversations")
    if vocab["coverage_train"] is not None and vocab["coverage_train"] < 0.95:
        found.append(
            f"the draft vocabulary holds only {vocab['coverage_train']:.1%} of the target's tokens: the rest is never "
            "accepted; raise prepare.draft_vocab_size"
        )
    return found


def summary(report: dict[str, Any]) -> list[str]:
    """The report in lines for people."""
    rows, lengths, vocab, answers = (report[key] for key in ("rows", "length_tokens", "draft_vocab", "answers"))
    lines = [
        f"prepare: {rows['read']:,} rows read, {report['conversations']:,} conversations kept, "
        f"{report['samples']:,} samples ({report['by_split']['validation'].get('samples', 0):,} for validation)",
        f"  {report['tokens']:,} tokens, {report['supervised_tokens']:,} supervised "
        f"({report['supervised_share']:.0%}); length p50 {lengths['p50']}, p90 {lengths['p90']}, max {lengths['max']}; "
        f"{report['samples_cut']:,} cut",
    ]
    lines += [
        f"  dropped {entry['rows']:,}: {reason} ({', '.join(entry['examples'])})"
        for reason, entry in rows["dropped"].items()
    ]
    if rows["same_question"]:
        lines.append(
            f"  {rows['same_question']:,} begin with the question of an earlier conversation, and share its split; "
            f"{rows['repeated']:,} repeat the whole of one"
        )
    if report["samples_too_short"]:
        lines.append(f"  left out {report['samples_too_short']:,} rows with too few supervised tokens")
    if answers["written_by"] == "target":
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in answers["finish_reasons"].items())
        lines.append(
            f"  {answers['answers']:,} answers by the target itself ({answers['tokens']:,} tokens, "
            f"{answers['tokens_per_second']:,} tokens/s), finished by: {reasons}"
        )
    if vocab["draft_vocab_size"] < vocab["target_vocab_size"]:
        shares = " and ".join(
            f"{vocab[f'coverage_{split}']:.2%} of {split}"
            for split in ("train", "validation")
            if vocab[f"coverage_{split}"] is not None
        )
        lines.append(
            f"  draft vocabulary {vocab['draft_vocab_size']:,} of {vocab['target_vocab_size']:,}: covers {shares} "
            f"({vocab['distinct_tokens']:,} distinct tokens seen, {vocab['filled']:,} entries never seen)"
        )
    return lines + [f"  note: {text}" for text in report["caveats"]]
