"""Samples on the terminal, token by token, with what the draft learns from set apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.prepare.render import Chat
from draftsmith.recipe import Recipe
from draftsmith.records import Sample
from draftsmith.rundir import RunPaths

_SUPERVISED, _CONTEXT = "bold green", "dim"


def show_samples(recipe: Recipe, count: int) -> None:
    """Print the first samples of the corpus, or, before `prepare` was run, of the sources with the answers they have.

    Supervised tokens are green on a terminal that shows colours, and stand between ⟦ and ⟧ elsewhere.

    Raises:
        DataError: the sources are damaged.
        MissingInputError: the target was not probed in this run.
    """
    from draftsmith.target import load_tokenizer, read_facts_of_run

    paths = RunPaths(recipe.folder)
    facts = read_facts_of_run(paths)
    chat = Chat(load_tokenizer(facts, recipe.target), facts, recipe.prepare)
    console = Console(soft_wrap=True, highlight=False)
    in_colour = console.color_system is not None and not console.no_color  # TERM=dumb, NO_COLOR
    for sample in islice(_samples(recipe, paths, chat), count):
        supervised = sum(sample.loss_mask)
        console.rule(f"{sample.id} ({sample.split}): {len(sample.input_ids)} tokens, {supervised} supervised")
        console.print(marked(sample, chat.tokenizer, in_colour=in_colour))


def _samples(recipe: Recipe, paths: RunPaths, chat: Chat) -> Iterator[Sample]:
    from draftsmith.corpus import read_corpus
    from draftsmith.prepare.samples import outcome_of_given
    from draftsmith.prepare.sources import Tally, read_conversations

    if paths.corpus.exists():
        yield from read_corpus(paths.corpus)
        return
    for conversation in read_conversations(recipe.prepare.sources, Tally(), answers_needed=True):
        yield from outcome_of_given(conversation, chat, recipe.prepare, recipe.seed).samples


def marked(sample: Sample, tokenizer: Any, *, in_colour: bool) -> Text:
    """A sample's text, special tokens spelled out, with its supervised tokens set apart."""
    text = Text()
    pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        words = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        if in_colour:
            text.append(words, style=_SUPERVISED if supervised else _CONTEXT)
        else:
            text.append(f"⟦{words}⟧" if supervised else words)
    return text
