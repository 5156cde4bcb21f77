"""Tokenizers with the templates of real model families, in short form, and what the tests of this stage build."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.prepare.render import Chat
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Prepare
from draftsmith.records import Conversation, TargetFacts
from tests.conftest import SENTENCES

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: past reasoning is taken out, the last answer gets a think block, and the prompt too where thinking is off.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n{{ m['reasoning_content'] or '' }}\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# DeepSeek-R1: the prompt opens the reasoning, and no answer is ever rendered with it.
OPENED_THINKING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}"
    "{% else %}<assistant>{{ m['content'].split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
# Llama 3: begins with BOS, trims, and writes nothing after the end of a turn.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# gpt-oss: markers in pieces, reasoning in a channel of its own, another end for the last answer.
HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if '<|channel|>' in m['content'] %}{{ raise_exception('content has channel tags') }}{% endif %}"
    "{% if m['thinking'] and loop.last %}{{ '<|start|>' + 'assistant' }}"
    "<|channel|>analysis<|message|>{{ m['thinking'] }}<|end|>{% endif %}"
    "{{ '<|start|>' + 'assistant' }}<|channel|>final<|message|>{{ m['content'] }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}{{ '<|start|>' + m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Gemma: the turn's end is not the tokenizer's end of sequence; roles must alternate.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Hermes and Qwen: tools in the system turn, calls and results in tags.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UPPER = CHATML.replace("m['content'] }}", "m['content'] | trim | upper }}")
SHOUTED = "{{ raise_exception('no chats today') }}"

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<start_of_turn>"),
    *("<end_of_turn>", "<eos>"),
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are no special tokens


@cache
def _backend(merges_line_breaks: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*SENTENCES, *["\n\n"] * (9 * merges_line_breaks)], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def tokenizer_of(template: str, eos: str = "<|im_end|>", merges_line_breaks: bool = False) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(merges_line_breaks),
        bos_token="<|begin_of_text|>",
        eos_token=eos,
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_of(template: str, eos: str = "<|im_end|>", **settings: Any) -> Chat:
    """A chat with this template, for a target about which nothing else is known."""
    return Chat(tokenizer_of(template, eos=eos), bare_facts(), Prepare(**settings))


def bare_facts() -> TargetFacts:
    fields = {name: None for name in TargetFacts.__dataclass_fields__}
    tuples = {"eos_token_ids": (), "missing": (), "derived": ()}
    return TargetFacts(**{**fields, "path": "nowhere", **tuples})


def conversation(*turns: tuple[str, str] | dict[str, Any], name: str = "test/0", **more: Any) -> Conversation:
    """Turns as (role, content), or as whole messages."""
    messages = [{"role": turn[0], "content": turn[1]} if isinstance(turn, tuple) else turn for turn in turns]
    return Conversation(id=name, messages=messages, domain="test", **more)


def facts_of(folder: Path) -> TargetFacts:
    return read_facts(str(folder))


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def share_gpt(*values: str, first: str = "human") -> list[dict[str, str]]:
    """A ShareGPT conversation whose turns alternate."""
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return [{"from": roles[i % 2], "value": value} for i, value in enumerate(values)]
