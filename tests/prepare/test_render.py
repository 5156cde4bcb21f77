from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftsmith.errors import RequestError, TargetError
from draftsmith.prepare.render import Chat, Row, Turn, Unrenderable, given_turns, rows_of
from draftsmith.recipe import Prepare
from draftsmith.records import Conversation
from tests.prepare.chats import (
    CHATML,
    GEMMA,
    HARMONY,
    LLAMA3,
    OPENED_THINKING,
    SHOUTED,
    THINKING,
    TOOLS,
    UPPER,
    bare_facts,
    chat_of,
    conversation,
    tokenizer_of,
)

MAX = 4096
TWO_TURNS = conversation(("user", "How?"), ("assistant", "So."), ("user", "And then?"), ("assistant", "Thus."))


def rows(chat: Chat, talk: Conversation, max_length: int = MAX) -> list[Row]:
    return rows_of(given_turns(talk, chat, max_length), max_length)


def supervised(chat: Chat, row: Row) -> list[str]:
    """Text of each run of supervised tokens."""
    runs: list[list[int]] = []
    for i, token in enumerate(row.input_ids):
        if row.loss_mask[i]:
            if i == 0 or not row.loss_mask[i - 1]:
                runs.append([])
            runs[-1].append(token)
    return [chat.tokenizer.decode(run) for run in runs]


def template_ids(chat: Chat, talk: Conversation, **more: Any) -> list[int]:
    return chat.tokenizer.apply_chat_template(talk.messages, tools=talk.tools, **more)["input_ids"]


def test_mask_covers_answers_and_their_ends_and_nothing_that_the_template_writes() -> None:
    chat = chat_of(CHATML)
    (row,) = rows(chat, TWO_TURNS)
    assert supervised(chat, row) == ["So.<|im_end|>", "Thus.<|im_end|>"]
    assert sum(row.loss_mask) > 0  # though the template has no generation tags
    assert chat.tokenizer.decode(row.input_ids).endswith("Thus.<|im_end|>")  # and not the line break behind it


@pytest.mark.parametrize("template", [CHATML, THINKING, LLAMA3, HARMONY, GEMMA, TOOLS, UPPER])
def test_ids_are_those_of_the_models_own_template(template: str) -> None:
    chat = chat_of(template)
    for row, until in zip(rows(chat, TWO_TURNS)[::-1], (4, 2), strict=False):
        whole = template_ids(chat, conversation(*TWO_TURNS.messages[:until]))
        assert row.input_ids == whole[: len(row.input_ids)]
        assert len(whole) - len(row.input_ids) <= 1  # what the template writes after the last end of turn


SPELLINGS = [("{% ", " %}"), ("{%- ", " %}"), ("{% ", " -%}"), ("{%- ", " -%}")]


@pytest.mark.parametrize(("begin", "end"), SPELLINGS)
def test_generation_tags_in_any_spelling_change_no_mask(begin: str, end: str) -> None:
    body = "{{ m['content'] }}<|im_end|>"
    plain = CHATML.replace("\n", "{{ '\n' }}")  # which the tags' own white space rules leave alone
    tagged = plain.replace(body, f"{begin}generation{end}{body}{begin}endgeneration{end}")
    assert rows(chat_of(tagged), TWO_TURNS) == rows(chat_of(CHATML), TWO_TURNS)


def test_an_assistant_that_speaks_first_answers_nobody_and_is_not_supervised() -> None:
    chat = chat_of(CHATML)
    greeted = conversation(("assistant", "A"), ("user", "user message"), ("assistant", "B"))
    (row,) = rows(chat, greeted)
    assert supervised(chat, row) == ["B<|im_end|>"]
    assert rows(chat, conversation(("assistant", "A"), ("user", "user message"))) == []


def test_spaces_at_the_end_of_an_answer_do_not_move_its_end() -> None:
    chat = chat_of(CHATML)
    (row,) = rows(chat, conversation(("user", "Hi"), ("assistant", "Yes.   "), ("user", "Go on"), ("assistant", "No ")))
    assert supervised(chat, row) == ["Yes.   <|im_end|>", "No <|im_end|>"]


def test_a_row_cut_in_an_answer_keeps_the_mask_of_what_survives_and_no_end_of_turn() -> None:
    chat = chat_of(CHATML)
    talk = conversation(("user", "Hi"), ("assistant", "z " * 50))
    (whole,) = rows(chat, talk)
    start = whole.loss_mask.index(1)
    (cut,) = rows(chat, talk, max_length=20)
    assert cut == Row(whole.input_ids[:20], [0] * start + [1] * (20 - start), cut=True)
    assert chat.stop_ids.isdisjoint(cut.input_ids[start:])


def test_answers_that_begin_past_the_greatest_length_are_left_out() -> None:
    chat = chat_of(CHATML)
    (row,) = rows(chat, conversation(("user", "Hi"), ("assistant", "Yes"), ("user", "x " * 50), ("assistant", "z")), 24)
    assert supervised(chat, row) == ["Yes<|im_end|>"]


def test_thinking_switched_off_puts_the_empty_block_into_the_prompt() -> None:
    talk = conversation(("user", "How?"), ("assistant", "So."))
    off = chat_of(THINKING, chat_template_kwargs={"enable_thinking": False})
    (row,) = rows(off, talk)
    assert supervised(off, row) == ["So.<|im_end|>"]
    on = chat_of(THINKING)
    (row,) = rows(on, talk)
    assert supervised(on, row) == ["<think>\n\n</think>\n\nSo.<|im_end|>"]


def test_reasoning_is_in_the_row_of_its_own_turn_and_not_in_later_ones() -> None:
    chat = chat_of(THINKING)
    first, second = rows(
        chat,
        conversation(
            ("user", "How?"),
            {"role": "assistant", "content": "So.", "reasoning_content": "first thought"},
            ("user", "Then?"),
            {"role": "assistant", "content": "Thus.", "reasoning_content": "second thought"},
        ),
    )
    assert supervised(chat, first) == ["<think>\nfirst thought\n</think>\n\nSo.<|im_end|>"]
    assert supervised(chat, second) == ["<think>\nsecond thought\n</think>\n\nThus.<|im_end|>"]
    assert "first thought" not in chat.tokenizer.decode(second.input_ids)


def test_an_answer_rendered_otherwise_than_it_is_prompted_for_is_refused() -> None:
    with pytest.raises(Unrenderable, match="otherwise than it prompts"):
        rows(chat_of(OPENED_THINKING), TWO_TURNS)


def test_a_turn_may_end_with_another_token_than_the_sequence() -> None:
    chat = chat_of(GEMMA, eos="<eos>")
    header = "<start_of_turn>".replace("<", "< ")
    said = f"{header}model\nuser\nmodel\nHow?"  # the answer repeats what headers are made of
    (row,) = rows(chat, conversation(("user", "How?"), ("assistant", said), ("user", "How?"), ("assistant", "How?")))
    assert supervised(chat, row) == [f"{said}<end_of_turn>", "How?<end_of_turn>"]


def test_a_template_that_trims_and_shouts_is_followed_exactly() -> None:
    chat = chat_of(UPPER)
    (row,) = rows(chat, conversation(("user", " how "), ("assistant", " so \n")))
    assert supervised(chat, row) == ["SO<|im_end|>"]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_text_that_spells_the_templates_markers_is_refused(role: str) -> None:
    chat = chat_of(CHATML)
    turns = {"user": "How?", "assistant": "So."} | {role: "<|im_end|>\n<|im_start|>user\nhi"}
    with pytest.raises(Unrenderable, match=r"spells the special token <\|im_end\|>"):
        rows(chat, conversation(("user", turns["user"]), ("assistant", turns["assistant"])))


def test_markers_inside_the_arguments_of_a_call_are_refused_too() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": ["<|im_end|>"]}}}
    talk = conversation(("user", "How?"), {"role": "assistant", "content": "", "tool_calls": [call]})
    with pytest.raises(Unrenderable, match="spells the special token"):
        rows(chat_of(TOOLS), talk)


def test_both_channels_of_a_harmony_answer_are_supervised() -> None:
    chat = chat_of(HARMONY, eos="<|return|>")
    first, second = rows(
        chat,
        conversation(
            ("user", "How?"),
            {"role": "assistant", "content": "So.", "thinking": "Hm."},
            ("user", "Then?"),
            {"role": "assistant", "content": "Thus.", "thinking": "Well."},
        ),
    )
    both = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
    assert supervised(chat, first) == [both.format("Hm.", "So.")]
    assert supervised(chat, second) == [both.format("Well.", "Thus.")]  # the first answer is context, its end rewritten


def test_tools_calls_and_results_are_rendered() -> None:
    chat = chat_of(TOOLS)
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    (row,) = rows(
        chat,
        conversation(
            ("system", "Be brief."),
            ("user", "Add."),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            ("tool", "2"),
            ("assistant", "Two."),
            tools=tools,
        ),
    )
    text = chat.tokenizer.decode(row.input_ids)
    assert '"name": "add"' in text.partition("Be brief.")[0]
    assert "<|im_start|>tool\n2<|im_end|>" in text
    called, said = supervised(chat, row)
    assert called.startswith("<tool_call>")
    assert '"arguments": {"x": 1}' in called
    assert said == "Two.<|im_end|>"


FORGETS_REASONING = CHATML.replace("m['content'] }}", "m['content'].split('</think>')[-1] }}")
CALL = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        (CHATML, {"content": "", **CALL}, "template leaves out an answer's calls of tools"),
        (CHATML, {"content": "Let me see.", **CALL}, "template leaves out an answer's calls of tools"),
        (THINKING, {"content": "", "reasoning_content": "Hm.", **CALL}, "leaves out an answer's calls of tools"),
        (CHATML, {"content": "", "reasoning_content": "Hm."}, "template writes nothing of an answer but its end"),
        (FORGETS_REASONING, {"content": "<think>Hm.</think>"}, "template writes nothing of an answer but its end"),
    ],
)
def test_an_answer_of_which_the_template_writes_only_the_end_is_refused(
    template: str, answer: dict[str, Any], reason: str
) -> None:
    talk = conversation(("user", "Add."), {"role": "assistant", **answer}, ("user", "And?"), ("assistant", "That is."))
    with pytest.raises(Unrenderable, match=reason):
        rows(chat_of(template), talk)


def test_an_answer_that_is_reasoning_alone_is_supervised_where_the_template_writes_it() -> None:
    chat = chat_of(THINKING)
    answer = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    (row,) = rows(chat, conversation(("user", "Add."), answer))
    assert supervised(chat, row) == ["<think>\nHm.\n</think>\n\n<|im_end|>"]


@pytest.mark.parametrize("template", [LLAMA3, GEMMA])
def test_a_rendered_chat_begins_with_one_bos(template: str) -> None:
    chat = chat_of(template)
    (row,) = rows(chat, TWO_TURNS)
    bos = chat.tokenizer.bos_token_id
    assert row.input_ids[0] == bos
    assert row.input_ids.count(bos) == 1
    assert chat.bos_caveat() is None


def test_a_template_without_bos_and_one_with_two_are_pointed_out() -> None:
    from tokenizers.processors import TemplateProcessing

    assert "twice" in str(chat_of("{{ bos_token }}" + LLAMA3).bos_caveat())
    chat = chat_of(CHATML)
    assert chat.bos_caveat() is None  # the tokenizer puts none before plain text either
    backend = chat.tokenizer.backend_tokenizer
    bos = chat.tokenizer.bos_token
    backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, chat.tokenizer.bos_token_id)])
    assert "writes no beginning-of-sequence token" in str(chat.bos_caveat())


def test_an_answer_whose_first_token_would_merge_with_the_prompt_is_tokenised_on_its_own() -> None:
    chat = Chat(tokenizer_of(LLAMA3, eos="<|eot_id|>", merges_line_breaks=True), bare_facts(), Prepare())
    whole = template_ids(chat, conversation(*TWO_TURNS.messages[:2]))
    prompt = template_ids(chat, conversation(*TWO_TURNS.messages[:1]), add_generation_prompt=True)
    assert whole[: len(prompt)] != prompt  # the prompt's two line breaks are one token only where nothing follows
    first, second = rows(chat, TWO_TURNS)
    assert first.input_ids[: len(prompt)] == prompt
    assert supervised(chat, first) == ["So.<|eot_id|>"]
    assert supervised(chat, second) == ["Thus.<|eot_id|>"]
    assert second.input_ids[: len(whole)] == whole


def test_a_template_that_refuses_is_named_with_its_reason() -> None:
    with pytest.raises(Unrenderable, match="template refuses it: no chats today"):
        rows(chat_of(SHOUTED), TWO_TURNS)
    with pytest.raises(Unrenderable, match="template refuses it: roles must alternate"):
        rows(chat_of(GEMMA), conversation(("user", "How?"), ("user", "Well?"), ("assistant", "So.")))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ messages[9]['role'] }}", "no element 9"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_template_that_fails_is_told_in_one_sentence(fault: str, said: str) -> None:
    with pytest.raises(Unrenderable, match=f"template refuses it: .*{said}"):
        rows(chat_of(CHATML + fault), TWO_TURNS)


def test_a_tokenizer_without_a_template_is_refused_with_the_remedy() -> None:
    with pytest.raises(TargetError, match=r"prepare\.chat_template"):
        chat_of("")


def test_a_template_of_the_recipe_replaces_the_models_own(tmp_path: Any) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(UPPER)
    chat = chat_of(CHATML, chat_template=str(file))
    (row,) = rows(chat, conversation(("user", "how"), ("assistant", "so")))
    assert supervised(chat, row) == ["SO<|im_end|>"]
    with pytest.raises(RequestError, match=r"prepare\.chat_template"):
        chat_of(CHATML, chat_template=str(tmp_path / "absent.jinja"))


pieces = st.sampled_from(
    [
        "\n",
        "\n\n",
        " ",
        "a",
        "assistant",
        "é",
        "漢",
        "<",
        "think>",
        "<think>",
        "</think>",
        "The quick",
        "<|im_end|>",
        "1",
    ]
)
texts = st.lists(pieces, max_size=12).map("".join)


@given(parts=st.lists(texts, min_size=1, max_size=6))
@settings(deadline=None, max_examples=150)
def test_ids_made_from_the_last_special_token_on_equal_those_of_the_whole_text(parts: list[str]) -> None:
    chat = chat_of(CHATML)
    text = ""
    for part in parts:
        text += part
        assert chat.ids(text) == tokenizer_of(CHATML)(text, add_special_tokens=False)["input_ids"]


HEADER = 9
ids = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(answers=st.lists(ids, min_size=1, max_size=4), new=st.lists(ids, min_size=4, max_size=4), data=st.data())
@settings(deadline=None)
def test_rows_supervise_every_answer_once_behind_the_prompt_it_was_given_to(
    answers: list[list[int]], new: list[list[int]], data: st.DataObject
) -> None:
    turns: list[Turn] = []
    history: list[int] = []
    for answer, asked in zip(answers, new, strict=False):
        kept = data.draw(st.integers(0, len(history)))
        turns.append(Turn([*history[:kept], HEADER, *asked], answer))
        assume(turns[-1].prompt_ids != history)  # two answers with nothing between them would look like one below
        history = turns[-1].prompt_ids + answer
    made = rows_of(turns, MAX)
    spans = []
    for row in made:
        assert len(row.input_ids) == len(row.loss_mask)
        begins = [i for i, m in enumerate(row.loss_mask) if m and (i == 0 or not row.loss_mask[i - 1])]
        for begin in begins:
            length = ([*row.loss_mask[begin:], 0]).index(0)
            spans.append(Turn(row.input_ids[:begin], row.input_ids[begin : begin + length]))
    assert spans == turns
