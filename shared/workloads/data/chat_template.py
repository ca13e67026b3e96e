"""Chat template of a tokenizer: renders dialogues as text, with the answers marked.

A template is a small program of the library jinja2 that comes with a model chosen by the organiser.
It runs only where a dataset is built or its model is prompted, in a limited sandbox: on a
volunteer's machine only when its owner adds dialogues for a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import msgspec

from shared.errors import InvalidRunFile, why
from shared.files.text_file import json_object, read_text
from shared.text import escaped
from shared.workloads.base import DatasetManifest

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

    from shared.workloads.data.template_sandbox import Bounded

NO_TOKENIZER = (
    "dialogues need the tokenizer of the model that is to learn them, with its chat template beside"
    " it: --tokenizer MODEL/tokenizer.json"
)
TEMPLATE = "chat_template"  # asset of a dataset of dialogues
_FILE_MAX = 4 << 20  # bytes
_FRAME_MAX = 16 << 10  # characters
_FRAME = ("asked_before", "asked_after", "asked_end")  # fields in the manifest of a dataset
_QUESTION, _ANSWER, _MARK = "a question 5b1f9e", "an answer 5b1f9e", "mark5b1f9e"
_TEXT_MAX = 1 << 20  # characters
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


class Endless(InvalidRunFile):
    """Raised when a template does not end."""


Role = Literal["system", "user", "assistant", "tool"]


class DialogueTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a dialogue."""

    role: Role
    content: str
    name: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str = ""
    reasoning_content: str | None = None
    learnt: bool = True  # the answer is trained on

    def as_written(self) -> dict[str, Any]:
        """Return the turn in the form that a template reads."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        fields.pop("learnt", None)
        return fields


class DialoguePiece(msgspec.Struct, frozen=True):
    """Part of a rendered dialogue; `learnt` if it is an answer."""

    text: str
    learnt: bool


class ChatTemplate(msgspec.Struct, frozen=True, dict=True):
    """Source of a template, and the tokens that it may name."""

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def documents(
        self, messages: Sequence[DialogueTurn], tools: Sequence[Any] = ()
    ) -> list[list[DialoguePiece]]:
        """Return the dialogue as one document, or as a document for each learnt answer if the
        template renders earlier turns differently once later turns follow.

        Raises InvalidRunFile for a dialogue without a learnt answer, and for a dialogue that the
        template refuses.
        """
        answers = [at for at, message in enumerate(messages) if message.role == "assistant"]
        if not any(messages[at].learnt for at in answers):
            raise InvalidRunFile("it has no answer of the assistant to learn from")
        turns = [self._prompt_and_answer(messages[: at + 1], tools) for at in answers]
        marked = [(*turn, messages[at].learnt) for turn, at in zip(turns, answers, strict=True)]
        whole: list[DialoguePiece] = []
        done = ""
        for prompt, answer, learn in marked:
            if not prompt.startswith(done):
                return [
                    [DialoguePiece(a, False), DialoguePiece(b, True)]
                    for a, b, learn in marked
                    if learn
                ]
            whole += [DialoguePiece(prompt[len(done) :], False), DialoguePiece(answer, learn)]
            done = prompt + answer
        return [whole]

    def prompt_text(
        self,
        messages: Sequence[DialogueTurn],
        tools: Sequence[Any] = (),
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> str:
        """Return the text of a dialogue up to the beginning of its next answer; `options` are the
        template's own variables.

        Raises InvalidRunFile if the template refuses the dialogue.
        """
        return self._render(messages, tools, prompt=True, options=options)

    def answer(self, messages: Sequence[DialogueTurn]) -> str:
        """Return the last message in the form of an answer. Raises InvalidRunFile."""
        return self._prompt_and_answer(messages, ())[1]

    def frame(self) -> ChatFrame | None:
        """Return the text that the template writes around a question; None if that text is unclear
        or too long.

        Raises InvalidRunFile if the template does not end.
        """
        question = [DialogueTurn("user", _QUESTION)]
        try:
            text = self._render(question, prompt=True)
            text_with_answer = self._render(
                [*question, DialogueTurn("assistant", _ANSWER)], prompt=False
            )
        except Endless:
            raise
        except InvalidRunFile:  # the template refuses a dialogue that begins so
            return None
        before, mark, after = text.partition(_QUESTION)
        whole = (
            mark
            and _QUESTION not in after
            and len(text_with_answer) <= _FRAME_MAX
            and _ANSWER in text_with_answer
        )
        return ChatFrame(before, after, text_with_answer.rpartition(_ANSWER)[2]) if whole else None

    @cached_property
    def supported(self) -> frozenset[str]:
        """Return the parts of a dialogue that the template does not drop silently: each of
        "system", "tool", "tools" and "tool_calls" if it writes or refuses the part, and
        "reasoning_content" if it writes the part.
        """
        question = DialogueTurn("user", _QUESTION)
        function = {"name": _MARK, "description": _MARK, "parameters": {"type": "object"}}
        call = {"id": "call00001", "type": "function"}
        call["function"] = {"name": _MARK, "arguments": {"a": _MARK}}  # type: ignore[assignment]
        plain = call | {"function": {"name": "f", "arguments": {}}}
        thought = DialogueTurn("assistant", _ANSWER, reasoning_content=_MARK)
        result = DialogueTurn("tool", _MARK, name="f", tool_call_id="call00001")
        probes: dict[str, list[DialogueTurn]] = {
            "system": [DialogueTurn("system", _MARK), question],
            "tool": [question, DialogueTurn("assistant", "", tool_calls=(plain,)), result],
            "tools": [question],
            "tool_calls": [question, DialogueTurn("assistant", "", tool_calls=(call,))],
            "reasoning_content": [question, thought],
        }
        names = set()
        for name, messages in probes.items():
            tools = [{"type": "function", "function": function}] if name == "tools" else ()
            try:
                present = _MARK in self._render(messages, tools, prompt=False)
            except Endless:
                raise
            except InvalidRunFile:
                present = name != "reasoning_content"
            names |= {name} if present else set()
        return frozenset(names)

    def _prompt_and_answer(
        self, messages: Sequence[DialogueTurn], tools: Sequence[Any]
    ) -> tuple[str, str]:
        """Return the text before the last message, and the text of that message as an answer.
        Raises InvalidRunFile if the template leaves out the answer.
        """
        before = self._render(messages[:-1], tools, prompt=True)
        whole = self._render(messages, tools, prompt=False)
        pairs = enumerate(zip(before, whole, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(before))
        if same >= len(whole):
            raise InvalidRunFile("the template leaves out its answer")
        return whole[:same], whole[same:]  # the template may begin an answer's reasoning

    def _render(
        self,
        messages: Sequence[DialogueTurn],
        tools: Sequence[Any] = (),
        *,
        prompt: bool,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> str:
        import jinja2

        _check_length(sum(len(message.content) for message in messages))
        around, template = self._compiled
        around.begin(len(messages))
        variables = {
            "messages": [message.as_written() for message in messages],
            "add_generation_prompt": prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "tools": list(tools) or None,
        }
        if reserved := sorted(variables.keys() & options.keys()):
            raise InvalidRunFile(f"{reserved[0]} is no option of a chat template")
        try:
            text = template.render({**options, **variables})
        except (TimeoutError, RecursionError, MemoryError) as error:
            raise Endless("the chat template does not come to an end") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRunFile(f"the chat template refuses it: {escaped(error, 200)}") from error
        _check_length(len(text))
        return str(text)

    @cached_property
    def _compiled(self) -> tuple[Bounded, jinja2.Template]:
        import jinja2

        from shared.workloads.data.template_sandbox import Bounded

        around = Bounded(raise_exception=_refuse, strftime_now=_never_now)
        try:
            return around, around.template(self.source)
        except jinja2.TemplateError as error:
            raise InvalidRunFile(f"the chat template is broken: {escaped(error, 200)}") from error


class ChatFrame(msgspec.Struct, frozen=True):
    """Text that a template writes around one question, up to its answer, and after the answer. A
    dataset of dialogues contains it, so that a model trained on them gets the same prompts.
    """

    before: str
    after: str
    end: str = ""

    @classmethod
    def of(cls, manifest: DatasetManifest) -> Self | None:
        """Return the frame of a dataset; None for a dataset without dialogues."""
        fields = [manifest.meta.get(name) for name in _FRAME]
        return cls(*map(str, fields)) if all(isinstance(field, str) for field in fields) else None

    @property
    def meta(self) -> dict[str, str | int | float]:
        """Return the fields for the manifest of a dataset."""
        return dict(zip(_FRAME, (self.before, self.after, self.end), strict=True))

    def prompt_text(self, question: str) -> str:
        return f"{self.before}{question.strip()}{self.after}"


def answer_end(tokenizer: Tokenizer, template: ChatTemplate) -> str | None:
    """Return the special token with which a template ends an answer; None if it writes no special
    token there.
    """
    frame = template.frame()
    written = frame.end.lstrip() if frame is not None else ""
    special = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    return max((text for text in special if written.startswith(text)), key=len, default=None)


def _check_length(characters: int) -> None:
    if characters > _TEXT_MAX:
        raise InvalidRunFile(f"it has more than {_TEXT_MAX:,} characters")


def template_beside(tokenizer: Path) -> ChatTemplate:
    """Return the chat template next to a tokenizer.json. Raises InvalidRunFile."""
    settings = settings_of(tokenizer.with_name("tokenizer_config.json"))
    template_file = tokenizer.with_name("chat_template.jinja")
    source = settings.get("chat_template")
    if template_file.is_file() and template_file.stat().st_size <= _FILE_MAX:
        try:
            source = read_text(template_file)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRunFile(f"{template_file} cannot be read: {why(error)}") from error
    if isinstance(source, list):  # several templates, each with a name
        named = {str(one.get("name")): one.get("template") for one in source if type(one) is dict}
        source = named.get("default")
    if not isinstance(source, str):
        raise InvalidRunFile(
            f"there is no chat template beside {tokenizer} (chat_template.jinja, or chat_template"
            " in tokenizer_config.json): take the tokenizer of a model that was made for chat"
        )
    return ChatTemplate(source, _token(settings, "bos_token"), _token(settings, "eos_token"))


def settings_of(path: Path) -> dict[str, object]:
    """Return the fields of a small JSON file beside a tokenizer; {} if there is no such file, or it
    is too large. Raises InvalidRunFile.
    """
    small = path.is_file() and path.stat().st_size <= _FILE_MAX
    return json_object(path) if small else {}


def _token(settings: dict[str, object], name: str) -> str:
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _never_now(form: str) -> str:
    """Return a fixed day, so that the same dialogues give the same dataset."""
    return datetime(2024, 7, 26, tzinfo=UTC).strftime(form)
