"""Tool calls in answers, in the form in which a chat template writes them: JSON objects with the
name of a function and its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, Self

import msgspec

from shared.errors import InvalidRunFile
from shared.workloads.data.chat_template import ChatTemplate, DialogueTurn, Endless

_NAMES, _ARGUMENTS = ("mark5b1f9e", "mark7c2a0d"), {"key": "mark9d3e4b"}
_QUESTION = DialogueTurn("user", "a question")
_JSON = json.JSONDecoder()


class ToolCall(NamedTuple):
    """Call of a function, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCallForm(msgspec.Struct, frozen=True, kw_only=True):
    """Texts that a template writes around the name and the arguments of a call.

    An answer is `before`, the objects with `between` two of them, and `after`; an object is
    `opening`, the name, `middle`, the arguments, and a brace. `mark` is the part of `before` that
    an answer's text shows, without special tokens.
    """

    before: str
    opening: str
    middle: str
    between: str | None  # None for a template that writes one call a turn
    after: str
    name_key: str
    arguments_key: str
    mark: str = ""

    @classmethod
    def of(cls, template: ChatTemplate, end: str) -> Self | None:
        """Return a template's form, without the text `end` that ends an answer; None for a template
        that writes no calls, or writes them otherwise than as objects.
        """
        single, several = (
            _answer_with_calls(template, _NAMES[:1]),
            _answer_with_calls(template, _NAMES),
        )
        call = _find_call(single, _NAMES[0])
        if call is None:
            return None
        second = _find_call(several, _NAMES[1])
        return cls(
            before=single[: call.start],
            opening=single[call.start : call.name],
            middle=single[call.name + len(_NAMES[0]) : call.arguments],
            between=None if second is None else several[call.stop : second.start],
            after=single.removesuffix(end)[call.stop :],
            name_key=call.keys[0],
            arguments_key=call.keys[1],
        )

    def read(self, text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
        """Return the calls in a text; () if an object is malformed or calls a function that is not
        in `names`.
        """
        calls: list[ToolCall] = []
        place = text.find("{")
        while place >= 0:
            try:
                value, end = _JSON.raw_decode(text, place)
            except (ValueError, RecursionError):
                return ()
            name, arguments = value.get(self.name_key), value.get(self.arguments_key)
            if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
                return ()
            calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
            place = text.find("{", end)
        return tuple(calls)


class _Object(NamedTuple):
    """Places in a text of a call's object, its name, its arguments and its end; its two keys."""

    start: int
    name: int
    arguments: int
    stop: int
    keys: tuple[str, str]


def _answer_with_calls(template: ChatTemplate, names: tuple[str, ...]) -> str:
    """Return an answer that calls these functions; "" if the template refuses it."""
    calls: list[dict[str, Any]] = [
        {
            "id": f"call0000{place}",
            "type": "function",
            "function": {"name": name, "arguments": _ARGUMENTS},
        }
        for place, name in enumerate(names)
    ]
    try:
        return template.answer([_QUESTION, DialogueTurn("assistant", "", tool_calls=tuple(calls))])
    except Endless:
        raise
    except InvalidRunFile:
        return ""


def _find_call(text: str, name: str) -> _Object | None:
    """Return the object that calls the function `name`; None if no object calls it."""
    for start, value, stop in _objects(text):
        keys = {field: key for key, field in value.items() if isinstance(field, str)}
        tables = [key for key, field in value.items() if field == _ARGUMENTS]
        if name in keys and tables:
            place = text.find(name, start)
            return _Object(start, place, text.find("{", place), stop, (keys[name], tables[0]))
    return None


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Yield the JSON objects of a text with their places."""
    start = text.find("{")
    while start >= 0:
        try:
            value, stop = _JSON.raw_decode(text, start)
            yield start, value, stop
        except ValueError:
            stop = start + 1
        start = text.find("{", stop)
