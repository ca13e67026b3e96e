"""Calls of functions in chats: which are allowed, and how an answer's text becomes calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.inference.answers import TextPrompt
from coordinator.inference.inference_engine import AnswerPiece, InvalidField
from coordinator.v1.replies import ReplyForm, chat_text_prompt
from coordinator.v1.tool_answers import CallReader
from shared.protocol.inference import ChatRequest
from shared.workloads.data.tool_calls import ToolCallForm
from tests.support.workloads.tool_templates import END, EVERY

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "?"}]


def request(**more: Any) -> ChatRequest:
    return msgspec.convert(
        {"model": "m", "messages": MESSAGES, "tools": TOOLS, **more}, ChatRequest
    )


def answered(text: str, form: str = "hermes", **more: Any) -> tuple[Any, list[Any]]:
    """Return the message of an answer, and the deltas of the same answer as a stream."""
    ask = request(**more)
    wish = TextPrompt(kind="chat", prompts=("",), max_tokens=9, seed=0)
    calls = ToolCallForm.of(EVERY[form], END)
    assert calls is not None
    calls = msgspec.structs.replace(calls, mark=calls.before.removeprefix("[TOOL_CALLS]"))
    whole = ReplyForm("a", "m", 0, wish, [CallReader(calls, ask)])
    stream = ReplyForm("a", "m", 0, wish, [CallReader(calls, ask)])
    pieces = [AnswerPiece(text=letter) for letter in text] + [AnswerPiece(finish="stop")]
    chunks: list[Any] = []
    for piece in pieces:
        whole.add(0, piece)
        chunks += stream.chunks(0, piece)
    reply: Any = whole.whole(1, 0)
    return reply["choices"][0], [chunk["choices"][0] for chunk in chunks]


def functions(calls: list[Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("before", ["", "I look. "])
def test_a_call_is_no_text_whole_and_streamed(before: str) -> None:
    whole, parts = answered(before + CALL)
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == (before or None)
    assert functions(whole["message"]["tool_calls"]) == [("time", '{"zone": "CET"}')]
    assert "".join(part["delta"].get("content", "") for part in parts) == before
    (streamed,) = [part["delta"]["tool_calls"] for part in parts if "tool_calls" in part["delta"]]
    assert functions(streamed) == functions(whole["message"]["tool_calls"])
    assert streamed[0]["index"] == 0


def test_several_calls_have_ids_of_their_own_and_one_may_be_asked_for() -> None:
    text = f"{CALL}\n{CALL.replace('time', 'weather', 1)}"
    calls = answered(text)[0]["message"]["tool_calls"]
    assert [name for name, _ in functions(calls)] == ["time", "weather"]
    assert calls[0]["id"] != calls[1]["id"]
    assert len(answered(text, parallel_tool_calls=False)[0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("form", ["llama", "mistral"])
def test_a_form_without_a_mark_is_looked_for_at_the_beginning(form: str) -> None:
    key = "parameters" if form == "llama" else "arguments"
    call = f'{{"name": "time", "{key}": {{}}}}'
    call = call if form == "llama" else f" [{call}]"
    assert functions(answered(call, form)[0]["message"]["tool_calls"]) == [("time", "{}")]
    whole, parts = answered("It is " + call, form)
    assert "tool_calls" not in whole["message"]
    assert "".join(part["delta"].get("content", "") for part in parts) == "It is " + call


@pytest.mark.parametrize(
    "text", ["no call", CALL.replace("time", "rm"), "<tool_call>\n{", "a < b <tool", "{}", "[1]"]
)
@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
def test_what_is_no_call_stays_text(text: str, form: str) -> None:
    whole, parts = answered(text, form)
    assert (whole["finish_reason"], whole["message"]["content"]) == ("stop", text)
    assert "".join(part["delta"].get("content", "") for part in parts) == text


def test_a_choice_says_which_functions_must_be_called() -> None:
    named = {"type": "function", "function": {"name": "time"}}
    rules = [
        chat_text_prompt(request(tool_choice=choice), 0, None).rule
        for choice in ("none", "auto", "required", named)
    ]
    assert rules[:2] == [None, None]
    assert rules[2] is not None
    assert (list(rules[2].functions), rules[2].must_call) == (["weather", "time"], True)
    assert rules[3] is not None
    assert (list(rules[3].functions), rules[3].several) == (["time"], False)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_a_wrong_wish_names_its_field(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as error:
        chat_text_prompt(request(**more), 0, None)
    assert error.value.param == param
