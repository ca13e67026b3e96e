"""Sentences for people: English text, with the message and the values that a translation needs.

The layers below the screens return a `Sentence`: a `str` that is English in logs, in `--json` and
in a terminal. A screen looks up its message in the owner's language and inserts the values again.
Foreign text is never looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

FIGURE = "#"  # message of a number with its unit, which a language writes with its own signs

NOTHING: Mapping[str, object] = MappingProxyType({})


class Sentence(str):
    """Sentence in English, with its message in the catalogue and its values.

    The message is empty for foreign text, which is shown unchanged.
    """

    __slots__ = ("many", "message", "values")

    message: str
    many: str  # message for numbers other than one; the number is the value `n`
    values: Mapping[str, object]

    def __new__(cls, message: str, /, **values: object) -> Sentence:
        return sentence_of(message.format_map(values) if values else message, message, values)


def sentence_of(
    text: str, message: str = "", values: Mapping[str, object] = NOTHING, many: str = ""
) -> Sentence:
    """Return a sentence from its English text, its message in the catalogue ("" for foreign text)
    and its values.
    """
    sentence = str.__new__(Sentence, text)
    sentence.message, sentence.many = message, many
    sentence.values = {name: _value(value) for name, value in values.items()}
    return sentence


def plural(one: str, many: str, count: int, /, **values: object) -> Sentence:
    """Return the sentence for `count`, which fills in `{n}`."""
    english = (one if count == 1 else many).format_map({"n": f"{count:,}", **values})
    return sentence_of(english, one, {"n": count, **values}, many)


def figure(text: str) -> Sentence:
    """Return a number with its unit in English form, to be shown with the signs of any language."""
    return sentence_of(text, FIGURE)


def _value(value: object) -> object:
    """Return a value in a form that other processes can decode."""
    return value if type(value) in (Sentence, str, int, float, bool) else str(value)


def encode_english(value: object) -> str:
    """Return a sentence as plain English text: an encoding hook for msgspec, which encodes no
    subclass of `str`.
    """
    if isinstance(value, Sentence):
        return str(value)
    raise NotImplementedError(
        f"cannot encode {type(value).__name__}: of special types only Sentence is known here"
    )


def encode_parts(value: object) -> object:
    """Return a sentence as [text, message, many, values], for another program of the same owner: an
    encoding hook for msgspec.
    """
    if isinstance(value, Sentence):
        return [str(value), value.message, value.many, dict(value.values)]
    raise NotImplementedError(
        f"cannot encode {type(value).__name__}: of special types only Sentence is known here"
    )


def decode_sentence(kind: type, value: Any) -> Any:
    """Return a sentence from its parts, or from a plain text: a decoding hook for msgspec."""
    if kind is not Sentence:
        if isinstance(value, kind):  # msgspec asks for `object`, too
            return value
        raise NotImplementedError(
            f"cannot decode {kind.__name__}: of special types only Sentence is known here"
        )
    if isinstance(value, str):
        return sentence_of(value)
    try:
        text, message, many, values, *_later = value  # a newer program may send more
        return sentence_of(
            str(text), str(message), {n: _decoded_value(v) for n, v in values.items()}, str(many)
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise msgspec.ValidationError("Expected a sentence") from error


def _decoded_value(value: object) -> object:
    return decode_sentence(Sentence, value) if isinstance(value, list) else value


# Type of a field that may hold a sentence; a type checker sees `str`.
if TYPE_CHECKING:
    Words: TypeAlias = str
else:
    Words = Sentence
