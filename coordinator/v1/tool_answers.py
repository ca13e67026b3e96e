"""Calls of functions in chats: permission in a request, form in an answer."""

from __future__ import annotations

import secrets
from typing import Any

from coordinator.inference.inference_engine import AnswerRule, ChatPrompt, InvalidField
from shared.decoding import MALFORMED, decode
from shared.protocol.inference import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Tool,
    ToolCalled,
    ToolNamed,
)
from shared.workloads.data.chat_template import DialogueTurn, Role
from shared.workloads.data.tool_calls import ToolCall, ToolCallForm
from shared.workloads.generation.text_stream import StopStrings

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_CHARS = 9  # Mistral's chat templates accept only ids of this length
_MARK_CHARS = 3  # a shorter mark counts only at the beginning of an answer


def chat_prompt(ask: ChatRequest) -> ChatPrompt:
    """Return a conversation for the model's chat template. Raises InvalidField."""
    return ChatPrompt(
        turns=tuple(_turn(message) for message in ask.messages),
        tools=()
        if ask.tool_choice == "none"
        else tuple(_template_function(tool) for tool in ask.tools),
        options=ask.chat_template_kwargs,
    )


def plain_turns(ask: ChatRequest) -> list[tuple[str, str]]:
    """Return the roles and texts of a conversation for a model without a chat template. Raises
    InvalidField for what such a model cannot read.
    """
    problem = "this model has no chat template, which alone writes"
    if ask.tools and ask.tool_choice != "none":
        raise InvalidField(f"{problem} functions", "tools")
    if any(turn.tool_calls or turn.role == "tool" for turn in ask.messages):
        raise InvalidField(f"{problem} calls and their results", "messages")
    if ask.chat_template_kwargs:
        raise InvalidField(f"{problem} with options", "chat_template_kwargs")
    return [(turn.role, turn.text) for turn in ask.messages]


def answer_rule(ask: ChatRequest) -> AnswerRule | None:
    """Return the form that the answer must have; None for a free answer. Raises InvalidField."""
    choice = ask.tool_choice
    functions = {tool.function.name: tool.function.parameters for tool in ask.tools}
    if isinstance(choice, ToolNamed):
        name = choice.function.name
        if name not in functions:
            raise InvalidField(
                f'tool_choice: there is no function "{name}" in tools', "tool_choice"
            )
        functions = {name: functions[name]}
    must_call = choice == "required" or isinstance(choice, ToolNamed)
    if must_call and not functions:
        raise InvalidField("tool_choice: required needs functions in tools", "tool_choice")
    schema = _schema(ask)
    if schema is None and not must_call:
        return None
    return AnswerRule(
        schema=schema,
        functions={} if choice == "none" else functions,
        must_call=must_call,
        several=ask.parallel_tool_calls is not False and not isinstance(choice, ToolNamed),
    )


def _schema(ask: ChatRequest) -> dict[str, Any] | None:
    form = ask.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise InvalidField("response_format: json_schema is missing", "response_format")
    return form.json_schema.schema


def _template_function(tool: Tool) -> dict[str, Any]:
    """Return a function in the form that templates read."""
    about = tool.function
    function = {
        "name": about.name,
        "description": about.description,
        "parameters": about.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _turn(message: ChatMessage) -> DialogueTurn:
    return DialogueTurn(
        _ROLES[message.role],
        message.text,
        name=message.name if message.role == "tool" else "",
        tool_calls=tuple(_call(call) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _call(call: ToolCalled) -> dict[str, Any]:
    try:
        arguments = decode(call.function.arguments.encode() or b"{}", dict[str, Any])
    except MALFORMED as error:
        sentence = "messages: the arguments of a call are not a JSON object"
        raise InvalidField(sentence, "messages") from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


class CallReader:
    """Reader of one answer, which holds text back where a call may begin."""

    def __init__(self, form: ToolCallForm, ask: ChatRequest) -> None:
        self._form = form
        self._functions = frozenset(tool.function.name for tool in ask.tools)
        self._several = ask.parallel_tool_calls is not False
        mark = form.mark.strip()
        self._mark = mark if len(mark) >= _MARK_CHARS else ""
        self._marks = StopStrings((self._mark,))
        self._beginning = mark or "{"
        self._whole, self._passed = "", 0

    def take(self, text: str) -> str:
        """Add a piece; return the text that is no call."""
        self._whole += text
        if self._marks.stopped:
            return ""
        if not self._mark:
            start = self._whole.lstrip()[: len(self._beginning)]
            if self._beginning.startswith(start):
                return ""
            passed = self._whole[self._passed :]
        else:
            passed = self._marks.take(text)
        self._passed += len(passed)
        return passed

    def end(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the rest of the text, or the calls that it makes."""
        rest = self._whole[self._passed :]
        calls = self._form.read(rest, self._functions)
        return ("" if calls else rest), calls if self._several else calls[:1]


def call_readers(
    form: ToolCallForm | None, ask: CompletionRequest | ChatRequest, count: int
) -> list[CallReader]:
    """Return a reader for each of `count` answers; [] if no function may be called."""
    if form is None or not isinstance(ask, ChatRequest):
        return []
    return [CallReader(form, ask) for _ in range(count)]


def openai_calls(calls: tuple[ToolCall, ...], *, streamed: bool) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form, each with an id."""
    return [
        {
            **({"index": index} if streamed else {}),
            "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_CHARS)),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]
