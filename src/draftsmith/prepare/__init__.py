"""Conversations in, corpus and draft vocabulary out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from draftsmith.errors import DataError, RecipeError, TargetError
from draftsmith.recipe import Recipe
from draftsmith.records import Sample, TargetFacts
from draftsmith.rundir import RunPaths, hash_json

if TYPE_CHECKING:
    from draftsmith.prepare.render import Chat
    from draftsmith.prepare.sources import Tally


def run(recipe: Recipe, paths: RunPaths) -> dict[str, Any]:
    """Read the sources, let the target answer, and write `corpus.parquet` and `draft_vocab.json`.

    Raises:
        RequestError: no source is named, or no draft can have the shape or vocabulary that the recipe asks for.
        DataError: a source is damaged, or no conversation can be used; the reasons are counted.
        TargetError: its tokenizer or chat template is not usable.
        EngineError: the server that answers does not.
    """
    from draftsmith.corpus import write_corpus
    from draftsmith.draft.config import draft_config
    from draftsmith.prepare.figures import Figures, caveats, summary
    from draftsmith.prepare.render import Chat
    from draftsmith.prepare.samples import outcomes_of_given
    from draftsmith.prepare.sources import Tally, read_conversations
    from draftsmith.prepare.vocab import always_kept, check_size, write_draft_vocab
    from draftsmith.progress import progress
    from draftsmith.target import load_tokenizer, read_facts_of_run

    settings = recipe.prepare
    regenerating = settings.regenerate.using != "none"
    if not settings.sources:
        raise RecipeError("names no conversations", where="prepare.sources", hint="sources: [{path: FILE}]")
    facts = read_facts_of_run(paths)
    if facts.vocab_size is None:
        raise TargetError("the size of its vocabulary is not known", where=facts.path)
    chat = Chat(load_tokenizer(facts, recipe.target), facts, settings)
    always = always_kept(chat, facts.vocab_size)
    check_size(settings.draft_vocab_size, facts.vocab_size, always)
    if recipe.train.draft.initial is None:  # what `train` would die of, before the target writes for hours
        draft_config(facts, recipe.train.draft, settings.draft_vocab_size, facts.aux_layer_ids or ())

    tally = Tally()  # read once for the figures and for damage, before anything that takes long
    for _ in read_conversations(settings.sources, tally, answers_needed=not regenerating):
        pass
    if not tally.kept:
        raise _nothing_left(tally)
    conversations = read_conversations(settings.sources, Tally(), answers_needed=not regenerating)
    figures = Figures(facts.vocab_size, tally)
    if regenerating:
        from draftsmith.prepare.regenerate import answer_all, outcomes_of_answers

        answered = answer_all(conversations, tally.kept, chat, facts, recipe, paths)
        conversations = read_conversations(settings.sources, Tally(), answers_needed=False)
        outcomes = outcomes_of_answers(conversations, chat, recipe, paths)
    else:
        answered = {"written_by": "data", "regenerated_share": 0.0}
        outcomes = outcomes_of_given(conversations, chat, facts, recipe)
    with progress("prepare", tally.kept, "conversations") as bar:
        samples = _at_least_one(figures.count(outcomes, bar), tally)
        write_corpus(paths.corpus, samples, _metadata(recipe, facts, chat))
    vocab = write_draft_vocab(
        paths.draft_vocab,
        figures.counts,
        settings.draft_vocab_size,
        always,
        facts.tokenizer_sha256,
    )
    report = {**figures.to_json(), "answers": answered, "draft_vocab": vocab}
    report["caveats"] = caveats(report) + ([bos] if (bos := chat.bos_caveat()) else [])
    return {**report, "summary": summary(report)}


def _metadata(recipe: Recipe, facts: TargetFacts, chat: Chat) -> dict[str, Any]:
    """What a later stage may want to know of how the corpus was made."""
    return {
        "tokenizer_sha256": facts.tokenizer_sha256,
        "template_sha256": hash_json(chat.template_text),
        "settings": recipe.prepare.identity(),
        "seed": recipe.seed,
    }


def _at_least_one(samples: Iterable[Sample], tally: Tally) -> Iterator[Sample]:
    """The samples; raises DataError, before the corpus has its name, if there are none."""
    empty = True
    for sample in samples:
        empty = False
        yield sample
    if empty:
        raise _nothing_left(tally)


def _nothing_left(tally: Tally) -> DataError:
    reasons = "; ".join(
        f"{number} × {reason} (such as {tally.examples[reason][0]})" for reason, number in tally.dropped.most_common()
    )
    return DataError(
        f"none of {tally.read} rows gives a sample: {reasons or 'the sources are empty'}",
        where="prepare",
        hint="each row needs `messages` (role, content) or `conversations` (from, value) with a user's turn and an "
        "answer; where the template is the cause, let the target write the answers (prepare.regenerate), pass what it "
        "needs in prepare.chat_template_kwargs, or give another in prepare.chat_template",
    )
