"""Other renderings of the recorded prompts: another template, another BOS, the thinking switch the other way.

A draft follows the target's states, and those depend on every token before. The recorded first prompt of a text is
taken apart into its messages and rendered otherwise; the target reads it with the recorded answer behind, and the draft
is replayed there. A draft that was trained on prompts rendered so accepts more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from draftsmith.draft.model import Draft
from draftsmith.evaluate.diagnose import Counts, Trial, accepted_in, compared
from draftsmith.evaluate.offline import replay
from draftsmith.evaluate.speculate import TargetReader
from draftsmith.progress import progress

SWITCHES = ("enable_thinking", "thinking")  # of Qwen and many others; of DeepSeek and Kimi
FORMATS = {  # Jinja drops a template's last newline
    "ChatML": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}",
    "Llama 3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}",
    "Vicuna": "{{ bos_token }}{% for m in messages %}{{ 'USER: ' if m['role'] == 'user' else '' }}{{ m['content'] }} "
    "{% endfor %}ASSISTANT:",
    "no": "{{ messages[-1]['content'] }}{{ '\n' }}",
}
_TRAIN_OR_SERVE = "the draft was trained on prompts rendered so: train it on the run's corpus, or "


@dataclass(frozen=True)
class FirstTurn:
    """The first prompt of a text, and the answer to it."""

    conversation_id: str
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Rendering:
    name: str
    remedy: str
    prompt: Callable[[list[int]], list[int] | None]  # of a recorded prompt; None where it is no other


class Prompts:
    """Recorded prompts of one question, with or without a system message, and their renderings.

    Args:
        template: that the corpus was rendered with; None for the tokenizer's own.
        kwargs: what it was given.
    """

    def __init__(self, tokenizer: Any, template: str | None, kwargs: dict[str, Any]) -> None:
        self.tokenizer, self.template, self.kwargs = tokenizer, template, kwargs
        self.frames = {roles: self._frame(roles) for roles in (("user",), ("system", "user"))}

    def render(self, messages: list[dict[str, str]], template: str | None, kwargs: dict[str, Any]) -> str | None:
        """None where the template refuses or fails."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False, **kwargs
            )
        except Exception:  # noqa: BLE001 - a template is a program, and fails in any way that programs do
            return None

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def otherwise(self, template: str | None, kwargs: dict[str, Any], prompt: list[int]) -> list[int] | None:
        """The ids of a prompt's messages in another rendering."""
        messages = self.messages(prompt)
        text = self.render(messages, template, kwargs) if messages else None
        return self.ids(text) if text else None

    def messages(self, prompt: list[int]) -> list[dict[str, str]] | None:
        """What the prompt was rendered from; None where rendering it does not give the prompt again."""
        text = self.tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for roles, frame in self.frames.items():
            if frame and (found := frame.fullmatch(text)):
                messages = [
                    {"role": role, "content": content} for role, content in zip(roles, found.groups(), strict=True)
                ]
                again = self.render(messages, self.template, self.kwargs)
                if again is not None and self.ids(again) == prompt:
                    return messages
        return None

    def _frame(self, roles: tuple[str, ...]) -> re.Pattern[str] | None:
        """What the template writes around the contents of messages of these roles."""
        marks = [f"[content {i}]" for i in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        rest = self.render(messages, self.template, self.kwargs) or ""
        around = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            around.append(before)
        return re.compile("(.*?)".join(map(re.escape, [*around, rest])), re.DOTALL)


def renderings(prompts: Prompts) -> Iterator[Rendering]:
    """Every other rendering that there may be; `Rendering.prompt` is None where one is not."""
    bos = prompts.tokenizer.bos_token_id
    if bos is not None:
        serve = "see that the engine's prompts begin so"
        yield Rendering("BOS twice", _TRAIN_OR_SERVE + serve, lambda ids: [bos, *ids] if ids[0] == bos else None)
        yield Rendering("no BOS", _TRAIN_OR_SERVE + serve, lambda ids: ids[1:] if ids[0] == bos else None)
        yield Rendering("a BOS in front", _TRAIN_OR_SERVE + serve, lambda ids: [bos, *ids] if ids[0] != bos else None)
    for key in SWITCHES:
        for value in (True, False):
            serve = f"serve with {key}={value} in chat_template_kwargs, as in prepare.chat_template_kwargs"
            changed = partial(prompts.otherwise, prompts.template, {**prompts.kwargs, key: value})
            yield Rendering(f"{key}={value}", _TRAIN_OR_SERVE + serve, changed)
    serve = "serve with that template, as in prepare.chat_template"
    own = {} if prompts.template is None else {"the tokenizer's own": None}
    for name, template in {**own, **FORMATS}.items():
        changed = partial(prompts.otherwise, template, prompts.kwargs)
        yield Rendering(f"{name} chat template", _TRAIN_OR_SERVE + serve, changed)


def try_renderings(
    draft: Draft, target: TargetReader, turns: Sequence[FirstTurn], others: Iterable[Rendering], steps: int
) -> list[Trial]:
    """What the draft accepts on the same answers behind other prompts; renderings that change none are left out.

    Args:
        target: gives the states that the draft reads.
        steps: K.
    """
    tried: list[tuple[Rendering, dict[int, list[int]]]] = []
    for rendering in others:
        found = {i: rendering.prompt(turn.prompt) for i, turn in enumerate(turns)}
        prompts = {i: ids for i, ids in found.items() if ids and ids != turns[i].prompt}
        if prompts and all(prompts != before for _, before in tried):
            tried.append((rendering, prompts))
    if not tried:
        return []
    trials = []
    with progress("render", len(turns) + sum(len(prompts) for _, prompts in tried), "prompts") as bar:

        def counts(prompts: dict[int, list[int]]) -> Counts:
            found = []
            for i, ids in prompts.items():
                found.append(count(draft, target, ids, turns[i].answer, steps))
                bar.advance(1)
            return np.array(found, dtype=np.float64)

        recorded = counts({i: turn.prompt for i, turn in enumerate(turns)})
        for rendering, prompts in tried:
            owners = [turns[i].conversation_id for i in prompts]
            before, after = recorded[list(prompts)], counts(prompts)
            trials.append(compared(rendering.name, rendering.remedy, before, after, owners))
    return trials


@torch.inference_mode()
def count(draft: Draft, target: TargetReader, prompt: list[int], answer: list[int], steps: int) -> tuple[int, int]:
    """Drafted tokens accepted over the slots of an answer behind a prompt, and the slots."""
    logits, aux = target.read(prompt + answer, keep=len(answer) + 1, cached=False)
    ids = torch.tensor(prompt + answer, device=logits.device)
    mask = torch.arange(len(ids), device=ids.device) >= len(prompt)
    top1 = torch.cat([torch.full_like(ids[: len(prompt) - 1], -1), logits.argmax(-1)])
    return accepted_in(replay(draft, ids, mask, aux, top1, steps))
