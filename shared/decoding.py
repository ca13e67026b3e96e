"""Decoding into types: the only way to msgspec's typed decoding in this house.

msgspec describes a type to itself when the type is first decoded, and remembers the description
before it is complete. A second thread that decodes the same type at that moment reads the half of
it and the process dies of a segmentation fault (measured with 0.22: 4 threads and a new type,
within the first hundred types; a busy coordinator that was killed and started again and again, in 1
of 15 starts). Here a type is described once, under a lock, before anybody decodes it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any, TypeVar, overload

import msgspec

from shared.sentences import heard

T = TypeVar("T")

_WHERE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)

_KINDS = {  # what msgspec calls them, and people
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_CHOICE = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_TYPE = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")

_describing = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


@overload
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The JSON decoder of a type, which any thread may use."""
    found = _decoders.get(kind)
    if found is None:
        with _describing:
            found = _decoders[kind] = msgspec.json.Decoder(kind, dec_hook=heard)
    return found


@overload
def decode(data: bytes | str, kind: type[T]) -> T: ...
@overload
def decode(data: bytes | str, kind: Any = Any) -> Any: ...
def decode(data: bytes | str, kind: Any = Any) -> Any:
    """JSON as a value of this type.

    Raises msgspec.DecodeError, and UnicodeDecodeError and RecursionError of bad bytes.
    """
    return decoder(kind).decode(data)


@overload
def convert(value: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def convert(value: Any, kind: Any, *, strict: bool = True) -> Any: ...
def convert(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """A value of plain Python (dicts, lists, numbers) as one of this type.

    Raises msgspec.ValidationError.
    """
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict, dec_hook=heard)


def complaint(error: msgspec.ValidationError, table: str, kind: Any = None) -> str:
    """msgspec says "Expected `int` >= 1 - at `$.quorum`"; a person wants "[plan] quorum: expected a
    whole number of at least 1". Of a `kind` a wrong choice names the right ones.
    """
    key, what = _parted(error, kind)
    return f"{table} {key}: {what[:1].lower()}{what[1:]}" if key else f"{table}: {what}"


def misuse(error: msgspec.ValidationError, kind: Any) -> str:
    """The same of options: "Invalid value for --port: expected a whole number of at most 65535"."""
    key, what = _parted(error, kind)
    option = f" for --{key.replace('_', '-')}" if key else ""
    return f"Invalid value{option}: {what[:1].lower()}{what[1:]}"


def _parted(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """The key that is wrong, if it is one, and what a person should know of it."""
    found = _WHERE.fullmatch(str(error))
    what, key = (found[1], found[2] or "") if found else (str(error), "")
    wrong = _CHOICE.fullmatch(what)
    if wrong and kind is not None and (right := _choices(kind, key)):
        import difflib

        near = difflib.get_close_matches(wrong[1].lower(), right, n=1, cutoff=0.7)
        hint = f', did you mean "{near[0]}"?' if near else ""
        return key, f"'{wrong[1]}' is none of " + ", ".join(f'"{one}"' for one in right) + hint
    return key, in_words(what).replace("`", "")


def _choices(kind: Any, key: str) -> tuple[str, ...]:
    """Return the texts that a value may be, where only some are; `key` is its place in a type, as
    msgspec writes it.
    """
    from msgspec.inspect import type_info  # takes 13 ms, for the few who are wrong

    found: list[Any] = [type_info(kind)]
    for name in ("", *re.findall(r"[^.\[\]]+", key)):
        inner = [part for one in found for part in _inside(one, name)] if name else found
        bare = [getattr(part, "type", part) for part in inner]  # without what else is said of it
        found = [one for part in bare for one in getattr(part, "types", (part,))]
    return tuple(str(v) for one in found for v in getattr(one, "values", ()))


def _inside(kind: Any, name: str) -> Iterator[Any]:
    """Yield the type of a field of a struct, or of what a list or a table holds."""
    for field in getattr(kind, "fields", ()):
        if field.encode_name == name:
            yield field.type
    for part in ("item_type", "value_type"):
        if hasattr(kind, part):
            yield getattr(kind, part)


def _people_say(found: re.Match[str]) -> str:
    """Return one of msgspec's types as people say it, `int | null` as a whole number."""
    kinds = [kind for kind in found[1].split(" | ") if kind != "null"] or ["null"]
    known = all(kind in _KINDS for kind in kinds)
    return " or ".join(_KINDS[kind] for kind in kinds) if known else found[0]


def in_words(what: str) -> str:
    """Return what a value must be, as people say it, from the words of msgspec."""
    what = _TYPE.sub(_people_say, what)
    what = re.sub(r"^Invalid enum value (.+)$", r"\1 is none of its values", what)
    what = what.replace("Expected ", "expected ", 1).replace(", got ", ", not ")
    what = what.replace(" >= ", " of at least ").replace(" <= ", " of at most ")
    return what.replace(" > ", " above ").replace(" < ", " below ")
