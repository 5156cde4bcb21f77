from __future__ import annotations

from typing import Any

from draftsmith.prepare.answers import Answer
from draftsmith.prepare.dialogue import Request, dialogue, message_of
from draftsmith.prepare.render import Chat
from draftsmith.recipe import Prepare
from draftsmith.records import Conversation
from tests.prepare.chats import CHATML, HARMONY, THINKING, TOOLS, chat_of, conversation


def talk_through(
    chat: Chat, talk: Conversation, says: str = "Mine.", reason: str = "stop", known: int = 0, **settings: Any
) -> tuple[list[Request], str]:
    """All requests of a dialogue whose every answer is `says`, and why it ends. The first `known` are known before."""
    requests: list[Request] = []
    answers: list[Answer] = []
    before = [Answer(talk.id, i, [], [], "stop", {"role": "assistant", "content": says}) for i in range(known)]
    run = dialogue(talk, chat, Prepare(**settings), before)
    try:
        request = next(run)
        while True:
            requests.append(request)
            ids = [*chat.whole_ids(says), chat.end_of_turn]
            answers.append(Answer(talk.id, request.turn, request.prompt_ids, ids, reason, message_of(chat, ids)))
            request = run.send(answers[-1])
    except StopIteration as end:
        return requests, end.value


def said(request: Request) -> list[str]:
    return [message["content"] for message in request.messages]


def test_the_targets_own_answers_are_the_context_of_the_next() -> None:
    talk = conversation(("user", "1"), ("assistant", "theirs"), ("user", "2"), ("assistant", "theirs"))
    requests, end = talk_through(chat_of(CHATML), talk)
    assert [said(request) for request in requests] == [["1"], ["1", "Mine.", "2"]]
    assert end == "end of the conversation"


def test_the_prompt_is_what_the_template_makes_of_the_context() -> None:
    chat = chat_of(THINKING, chat_template_kwargs={"enable_thinking": False})
    (request,), _ = talk_through(chat, conversation(("user", "1")))
    expected = chat.tokenizer.apply_chat_template(
        [{"role": "user", "content": "1"}], add_generation_prompt=True, enable_thinking=False
    )["input_ids"]
    assert request.prompt_ids == expected


def test_a_users_last_turn_is_answered_though_the_data_have_no_answer() -> None:
    requests, _ = talk_through(chat_of(CHATML), conversation(("user", "1"), ("assistant", "a"), ("user", "2")))
    assert [said(request) for request in requests] == [["1"], ["1", "Mine.", "2"]]


def test_odd_orders_are_followed() -> None:
    chat = chat_of(CHATML)
    requests, _ = talk_through(
        chat, conversation(("assistant", "Hello"), ("user", "1"), ("user", "2"), ("assistant", "a"))
    )
    assert [said(request) for request in requests] == [["Hello", "1", "2"]]
    requests, _ = talk_through(
        chat, conversation(("user", "1"), ("assistant", "a"), ("assistant", "b"), ("system", "s"))
    )
    assert [said(request) for request in requests] == [["1"]]


def test_a_call_whose_result_follows_stays_in_the_context_and_is_asked_for_too() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    talk = conversation(
        ("user", "Add."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        ("tool", "2"),
        ("assistant", "Two."),
    )
    requests, _ = talk_through(chat_of(TOOLS), talk)
    assert [said(request) for request in requests] == [["Add."], ["Add.", "", "2"]]
    assert requests[1].messages[1]["tool_calls"] == [call]


def test_a_dialogue_ends_at_an_answer_that_was_cut_or_is_empty() -> None:
    talk = conversation(("user", "1"), ("assistant", "a"), ("user", "2"))
    for reason in ("length", "unknown", "content_filter"):
        assert talk_through(chat_of(CHATML), talk, reason=reason)[1] == "answer cut before its end"
    requests, end = talk_through(chat_of(CHATML), talk, says=" ")
    assert (len(requests), end) == (1, "answer without text")


def test_a_dialogue_ends_after_as_many_turns_as_asked_for() -> None:
    talk = conversation(("user", "1"), ("assistant", "a"), ("user", "2"))
    requests, end = talk_through(chat_of(CHATML), talk, regenerate={"max_turns": 1})
    assert (len(requests), end) == (1, "as many turns as asked for")


def test_answers_and_prompts_stay_within_the_greatest_length() -> None:
    talk = conversation(("user", "a b c d e f"))
    chat = chat_of(CHATML)
    (request,), _ = talk_through(chat, talk, max_length_tokens=30)
    assert request.max_tokens == 30 - len(request.prompt_ids)
    (request,), _ = talk_through(chat, talk, max_length_tokens=300, regenerate={"max_new_tokens": 7})
    assert request.max_tokens == 7
    requests, end = talk_through(chat, talk, max_length_tokens=len(request.prompt_ids) + 1)
    assert (requests, end) == ([], f"prompt leaves no room for an answer within {len(request.prompt_ids) + 1} tokens")


def test_known_answers_are_not_asked_for_again() -> None:
    talk = conversation(("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "a"), ("user", "3"))
    requests, _ = talk_through(chat_of(CHATML), talk)
    for known in range(4):
        rest, end = talk_through(chat_of(CHATML), talk, known=known)
        assert rest == requests[known:]
        assert end == "end of the conversation"


def test_an_answer_that_spells_a_special_token_ends_the_dialogue_with_that_reason() -> None:
    talk = conversation(("user", "1"), ("assistant", "a"), ("user", "2"))
    _, end = talk_through(chat_of(CHATML), talk, says="<|im_start|>")
    assert end == "text of a turn spells the special token <|im_start|>"


def test_reasoning_is_set_apart_from_the_answer() -> None:
    chat = chat_of(THINKING)
    for text in ("<think>\nHm.\n</think>\n\nSo.", "Hm.\n</think>\n\nSo."):
        message = message_of(chat, [*chat.whole_ids(text), chat.end_of_turn])
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "So.")
    message = message_of(chat, chat.whole_ids("<think>\n\n</think>\n\nSo."))
    assert message == {"role": "assistant", "content": "So."}
    assert message_of(chat, chat.whole_ids(" So.")) == {"role": "assistant", "content": " So."}


def test_harmony_channels_are_set_apart_so_that_the_template_takes_them_back() -> None:
    chat = chat_of(HARMONY, eos="<|return|>")
    says = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So."
    message = message_of(chat, [*chat.whole_ids(says), chat.end_of_turn])
    assert (message["thinking"], message["content"]) == ("Hm.", "So.")
    requests, end = talk_through(chat, conversation(("user", "1"), ("assistant", "a"), ("user", "2")), says=says)
    assert [said(request) for request in requests] == [["1"], ["1", "So.", "2"]]
    assert end == "end of the conversation"
