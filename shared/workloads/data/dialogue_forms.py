"""Forms of dialogues in common use: recognised by their keys, and converted to turns of a chat
template.

`messages` of OpenAI (parts, tool calls, `weight`), `conversations` of ShareGPT, lists in `prompt`
and `completion` of TRL, and pairs: `prompt` and `completion` or `response`, `question` and
`answer` or `response`, `instruction` (with `input` or `context`) and `output` or `response`,
`query` and `response`, `problem` and `solution`, `inputs` and `targets`, `input` and `output`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shared.decoding import MALFORMED, decode
from shared.errors import InvalidRunFile
from shared.settings import check_values
from shared.text import escaped
from shared.workloads.data.chat_template import DialogueTurn, Role

_OPENAI, _SHAREGPT, TRL = "OpenAI's form", "ShareGPT's form", "TRL's form"
_LISTS = {"messages": _OPENAI, "conversations": _SHAREGPT, "conversation": _SHAREGPT}
_PAIRS = {
    ("prompt", "completion"): "prompts and completions",
    ("prompt", "response"): "prompts and responses",
    ("question", "answer"): "questions and answers",
    ("instruction", "output"): "Alpaca's form",
    ("instruction", "response"): "instructions and responses",
    ("question", "response"): "questions and responses",
    ("query", "response"): "queries and responses",
    ("problem", "solution"): "problems and solutions",
    ("inputs", "targets"): "inputs and targets",
    ("input", "output"): "inputs and outputs",
}
_IN_AND_OUT = ("input", "output")
_ASKED = frozenset(key for pair in _PAIRS for key in pair)
_PREFERENCE = {"chosen", "rejected"}
_VERDICT = "label"  # key that says whether an answer is good, in data for KTO
_BESIDE = ("input", "context")  # texts that accompany an instruction
_ALSO = ("system", "system_prompt", "tools", "history", _VERDICT, *_BESIDE, *_PREFERENCE)
FIELDS = frozenset({*_LISTS, *_ASKED, *_ALSO})
_ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("tool", "function", "function_response", "observation", "ipython"), "tool"),
}
_BOTH: tuple[Role, Role] = ("user", "assistant")
_CALL = "function_call"  # an answer whose text is a call
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_LEARNT = ("weight", "train")  # keys that say whether an answer is learnt
_TURN = frozenset({*("role", "from", "content", "value", "name"), *_LEARNT, *_THOUGHTS})
_TURN |= {"tool_calls", "tool_call_id", _CALL}
_TEXTS = ("text", "input_text", "output_text")  # types of parts that are text


class Dialogue(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of a dialogue, the tools that they may call, and their form."""

    messages: tuple[DialogueTurn, ...]
    tools: tuple[object, ...] = ()
    form: str
    unread: tuple[str, ...] = ()  # keys that are ignored


def is_dialogue(keys: Iterable[str]) -> bool:
    """Return True if a record with these keys is a dialogue, or a choice between two answers."""
    names = set(keys)
    return bool(_pair(names)) or not names.isdisjoint(_LISTS) or names >= _PREFERENCE


def _pair(names: Collection[str]) -> tuple[str, str] | None:
    """Return the keys of question and answer; None if the record has no pair, or only "input" and
    "output" next to a "text".
    """
    pairs = [pair for pair in _PAIRS if set(names) >= set(pair)]
    return None if pairs[:1] == [_IN_AND_OUT] and "text" in names else next(iter(pairs), None)


def read_dialogue(record: Mapping[str, object]) -> Dialogue:
    """Convert a record. Raises InvalidRunFile, with the record's keys if its form is unknown."""
    row = {key: value for key, value in record.items() if value not in (None, "")}
    unread = {key for key in row if key not in FIELDS or key == _VERDICT}
    if row.keys() >= _PREFERENCE:
        raise InvalidRunFile(
            "it is a pair of answers to choose between (chosen, rejected): this training learns"
            " from one answer"
        )
    if str(row.get(_VERDICT)).lower() == "false":
        raise InvalidRunFile(
            "its label is false: it is an answer to avoid, and only good answers are learnt"
        )
    messages, form = _turns(row, unread)
    system = row["system"] = row.get("system") or row.get("system_prompt")
    if system and messages and messages[0].role != "system":
        messages = [DialogueTurn("system", _text(row, "system")), *messages]
    elif system and messages and messages[0].content != system:
        unread.add("system")
    tools = tuple(_read_list(row, "tools")) if row.get("tools") else ()
    for tool in (*tools, *(call for turn in messages for call in turn.tool_calls)):
        check_values({"a tool": tool}, "")
    return Dialogue(
        messages=tuple(messages),
        tools=tools,
        form=form,
        unread=tuple(sorted(unread)),
    )


def read_turns(turns: Sequence[object], unread: set[str]) -> list[DialogueTurn]:
    """Convert the turns of a prompt; keys that are ignored are added to `unread`. Raises
    InvalidRunFile.
    """
    return [_turn(turn, unread) for turn in turns]


def _turns(row: Mapping[str, object], unread: set[str]) -> tuple[list[DialogueTurn], str]:
    for key, form in _LISTS.items():
        if key in row:
            turns = _read_list(row, key)
            messages = [_turn(turn, unread) for turn in turns]
            named = any("from" in turn for turn in turns if isinstance(turn, Mapping))
            return messages, form if named == (form == _SHAREGPT) else _OPENAI
    pair = _pair(row)
    if pair is None:
        keys = ", ".join(f'"{escaped(key, 40)}"' for key in sorted(row)[:8]) or "none"
        raise InvalidRunFile(
            f"it is not a dialogue of a known form: its keys are {keys}, and what is looked for is"
            ' "messages", "conversations", or a pair such as "prompt" and "completion",'
            ' "instruction" and "output", "question" and "answer"'
        )
    (question_key, answer), form = pair, _PAIRS[pair]
    beside = _BESIDE if question_key == "instruction" else ()
    unread |= {key for key in row if key in _ASKED.union(_BESIDE).difference(pair, beside)}
    row = {
        key: _parse_json(field) if str(field)[:3] == '[{"' else field for key, field in row.items()
    }
    if isinstance(row[answer], list) or isinstance(row[question_key], list):
        before = [_turn(turn, unread) for turn in _turns_of(row, question_key, "user")]
        before = [msgspec.structs.replace(turn, learnt=False) for turn in before]
        return [*before, *(_turn(t, unread) for t in _turns_of(row, answer, "assistant"))], TRL
    question_parts = [_text(row, key) for key in (question_key, *beside) if key in row]
    past = [
        DialogueTurn(role, _text({"history": text}, "history"))
        for pair in (_read_list(row, "history") if "history" in row else ())
        for role, text in zip(_BOTH, _read_list({"history": pair}, "history"), strict=False)
    ]
    return [
        *past,
        DialogueTurn("user", "\n\n".join(question_parts)),
        DialogueTurn("assistant", _text(row, answer)),
    ], form


def _turns_of(row: Mapping[str, object], key: str, role: str) -> list[object]:
    """Return turns, from a list or a single text."""
    content = row[key]
    return (
        [{"role": role, "content": content}] if isinstance(content, str) else _read_list(row, key)
    )


def _turn(raw: object, unread: set[str]) -> DialogueTurn:
    if not isinstance(raw, Mapping):
        raise InvalidRunFile("one of its turns is not a table with a role and a content")
    unread |= {key for key in raw if key not in _TURN}
    name = str(raw.get("from") or raw.get("role") or "")
    role = _ROLES.get(name.lower())
    if role is None:
        raise InvalidRunFile(f'one of its turns has the role "{escaped(name, 40)}"')
    value = raw.get("value")
    content = _content(raw.get("content") if value is None else value)
    calls = [_call(call) for call in _read_list(raw, "tool_calls")] if raw.get("tool_calls") else []
    if name == _CALL:
        calls, content = [_call(content)], ""
    elif raw.get(_CALL):
        calls.append(_call(raw[_CALL]))
    thought = next((str(raw[key]) for key in _THOUGHTS if raw.get(key)), None)
    if not content and not calls and thought is None:
        raise InvalidRunFile("one of its turns has no content")
    for key in _LEARNT:
        if raw.get(key) not in (None, 0, 1):
            text = escaped(repr(raw[key]), 20)
            raise InvalidRunFile(f"a turn has the {key} {text}: 0 and 1 are known here")
    names = {key: str(raw[key]) for key in ("name", "tool_call_id") if raw.get(key)}
    return DialogueTurn(
        role,
        content,
        tool_calls=tuple(calls),
        reasoning_content=thought,
        learnt=all(raw.get(key) != 0 for key in _LEARNT),
        **names,
    )


def _content(content: object) -> str:
    """Return the text of a turn, joined from its parts. Raises InvalidRunFile."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRunFile("the content of one of its turns is not text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise InvalidRunFile(
                f'one of its turns has a part of the type "{escaped(kind, 40)}"; text is learnt'
            )
    return "".join(part["text"] for part in content)


def _call(raw: Any) -> dict[str, Any]:
    """Return a call in the form of templates, its arguments as a table. Raises InvalidRunFile."""
    raw = _parse_json(raw)
    inside = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(inside, Mapping) or not isinstance(inside.get("name"), str):
        raise InvalidRunFile("one of its tool calls names no function")
    function = {"name": inside["name"], "arguments": _parse_json(inside.get("arguments") or {})}
    more = {"id": raw["id"]} if isinstance(raw.get("id"), str) else {}
    return {"type": "function", "function": function, **more}


def _parse_json(value: object) -> object:
    """Return the value of a text of JSON; return any other value unchanged."""
    if isinstance(value, str):
        try:
            return decode(value)
        except MALFORMED:
            pass
    return value


def _read_list(row: Mapping[str, object], key: str) -> list[object]:
    """Return the list in a record's field, a text of JSON in tables of texts. Raises
    InvalidRunFile.
    """
    entries = _parse_json(row[key])
    if not isinstance(entries, list):
        raise InvalidRunFile(f'its "{key}" is not a list')
    return entries


def _text(row: Mapping[str, object], key: str) -> str:
    text = row[key]
    if not isinstance(text, str):
        raise InvalidRunFile(f'its "{key}" is no text')
    return text
