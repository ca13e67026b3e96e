"""Calls of functions are read in the form in which a model's own template writes them."""

from __future__ import annotations

import json

import pytest

from shared.workloads.data.chat_template import DialogueTurn
from shared.workloads.data.tool_calls import ToolCall, ToolCallForm
from tests.support.workloads.tool_templates import END, EVERY, HERMES, LLAMA, MISTRAL, XML

ARGUMENTS = {"city": "Ulm {now}", "days": [1, 2], "more": {"a": None}}
NAMES = ("weather", "time")


def form_of(name: str) -> ToolCallForm:
    form = ToolCallForm.of(EVERY[name], END)
    assert form is not None
    return form


def written(name: str, count: int) -> str:
    calls = tuple(
        {"id": f"abc12345{n}", "type": "function"}
        | {"function": {"name": NAMES[n], "arguments": ARGUMENTS}}
        for n in range(count)
    )
    turns = [DialogueTurn("user", "?"), DialogueTurn("assistant", "", tool_calls=calls)]
    return EVERY[name].answer(turns).removesuffix(END)


@pytest.mark.parametrize(("name", "count"), [("hermes", 2), ("llama", 1), ("mistral", 2)])
def test_calls_are_read_as_the_template_writes_them(name: str, count: int) -> None:
    calls = form_of(name).read(written(name, count), NAMES)
    assert [call.name for call in calls] == list(NAMES[:count])
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS] * count


@pytest.mark.parametrize("name", EVERY)
def test_the_parts_of_a_form_make_an_answer_that_is_read_again(name: str) -> None:
    form = form_of(name)
    calls = [f'{form.opening}{each}{form.middle}{{"n": 1}}}}' for each in NAMES]
    count = 1 if form.between is None else 2
    text = form.before + (form.between or "").join(calls[:count]) + form.after
    assert form.read(text, NAMES) == tuple(ToolCall(each, '{"n": 1}') for each in NAMES[:count])


def test_forms_differ_as_their_templates_do() -> None:
    hermes, llama, mistral = (ToolCallForm.of(t, END) for t in (HERMES, LLAMA, MISTRAL))
    assert hermes is not None
    assert (hermes.before, hermes.after) == ("<tool_call>\n", "\n</tool_call>")
    assert hermes.between == "\n</tool_call>\n<tool_call>\n"
    assert llama is not None
    assert (llama.before, llama.between, llama.arguments_key) == ("", None, "parameters")
    assert mistral is not None
    assert (mistral.before, mistral.between, mistral.after) == ("[TOOL_CALLS] [", ", ", "]")
    assert ToolCallForm.of(XML, END) is None


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '<tool_call>\n{"name": "rm", "arguments": {}}',
        '<tool_call>\n{"name": "time", "arguments": "x"}',
        '<tool_call>\n{"name": "time"}',
        '<tool_call>\n{"name": ["time"], "arguments": {}}',
        '<tool_call>\n{"name": "time", "arguments": {}',
        '{"name": "time", "arguments": {}} and {a brace',
        '{"a":' * 5000,
    ],
)
def test_what_is_no_call_of_a_given_function_is_none(text: str) -> None:
    assert form_of("hermes").read(text, frozenset(NAMES)) == ()
