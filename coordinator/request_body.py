"""Parts of a request: headers, byte ranges, and bodies, whose size, depth and numbers are limited.

The deadlines for slow headers and bodies, and the limit on connections, need the transport and are
in `coordinator.http.deadlines`. Quotas of uploads are in `coordinator.intake.uploads`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from shared.decoding import complaint, decode
from shared.errors import BadRequest, TooLarge, UpgradeRequired
from shared.protocol.limits import JSON_BYTES_MAX, JSON_DEPTH_MAX

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

INTEGER_DIGITS_MAX = 18  # digits that surely fit a 64-bit column
_UNKNOWN_FIELD = "Object contains unknown field"  # beginning of msgspec's error for such a field

_RANGE = re.compile(rf"bytes=([0-9]{{0,{INTEGER_DIGITS_MAX}}})-([0-9]{{0,{INTEGER_DIGITS_MAX}}})")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # PostgreSQL cannot store NUL
_LONG_RUN = re.compile(rb"[0-9]{%d}" % (INTEGER_DIGITS_MAX + 1))
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE+])[0-9]{%d,}(?![0-9.eE])" % (INTEGER_DIGITS_MAX + 1))
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class ClientGone(Exception):
    """Raised when a client closed the connection or reads too slowly; no reply is possible."""


async def until_gone(receive: Receive) -> None:
    """Wait until the client hangs up; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def raw_header(scope: Scope, name: bytes) -> bytes:
    """Return the bytes of a request header by its lower-case name, or b""."""
    for key, value in scope["headers"]:
        if key == name:
            header_value: bytes = value
            return header_value
    return b""


def byte_range(text: str, size: int) -> tuple[int, int] | None:
    """Return [start, stop) of a Range header (RFC 9110, 14.1.2); None = everything.

    Ranges that are not served (several, other units, nonsense) are ignored, as the RFC allows.
    Raises ValueError when the range lies beyond the end.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
        if int(last) == 0:
            raise ValueError
    else:
        start, stop = int(first), min(int(last) + 1 if last else size, size)
        if last and int(last) < int(first):
            return None
    if start >= size:
        raise ValueError
    return start, stop


def header(scope: Scope, name: bytes) -> str:
    """Return a request header by its lower-case name, or ""."""
    return raw_header(scope, name).decode("latin-1")


async def body_stream(scope: Scope, receive: Receive) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives. Raises ClientGone, BadRequest for an encoded body."""
    if header(scope, b"content-encoding") not in ("", "identity"):
        raise BadRequest("send the body as it is, without Content-Encoding")
    traffic = scope.get("traffic")
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if data := message.get("body", b""):
            if traffic is not None:
                traffic.bytes_in += len(data)
            yield data
        if not message.get("more_body", False):
            scope["body_read"] = True
            return


async def read_body(scope: Scope, receive: Receive, bytes_max: int = JSON_BYTES_MAX) -> bytes:
    """Read the whole body, counted as it arrives. Raises TooLarge before it exceeds `bytes_max`."""
    sentence = f"this body is larger than the {bytes_max} bytes allowed here"
    announced = header(scope, b"content-length")
    if announced and (len(announced) > INTEGER_DIGITS_MAX or int(announced) > bytes_max):
        raise TooLarge(sentence)
    data_read = bytearray()  # a list of pieces of a few bytes would take twenty times the memory
    async for data in body_stream(scope, receive):
        if len(data_read) + len(data) > bytes_max:
            raise TooLarge(sentence)
        data_read += data
    return bytes(data_read)


def read_json(body: bytes, kind: type[T]) -> T:
    """Decode JSON strictly, with integers that a database can store. Raises BadRequest."""
    decoded = decode_body(body, kind)
    if _LONG_RUN.search(body) and _LONG_INTEGER.search(_STRING.sub(b"", body)):
        raise BadRequest(f"an integer has more than {INTEGER_DIGITS_MAX} digits")
    return decoded


def read_message(body: bytes, kind: type[T]) -> T:
    """Decode a volunteer's message. Raises BadRequest, or UpgradeRequired for a field that a strict
    message does not have: an older program sends it.
    """
    try:
        return read_json(body, kind)
    except BadRequest as error:
        problem = str(error.__cause__)
        if not problem.startswith(_UNKNOWN_FIELD):
            raise
        name = problem.removeprefix(_UNKNOWN_FIELD).strip(" `")[:64]
        raise UpgradeRequired(
            f'this coordinator does not know the field "{name}" of this request: update the '
            "program, `volunteer update`"
        ) from error


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode strictly: UTF-8, no NaN, bounded depth, no NUL.

    Raises BadRequest, whose cause is a msgspec.ValidationError if the JSON is not of the type
    `kind`.
    """
    if not body:
        raise BadRequest("the body is empty; JSON was expected")
    try:
        if not body.isascii():
            str(body, "utf-8")
        decoded = decode(body, kind)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise BadRequest(f"the JSON is nested deeper than {JSON_DEPTH_MAX} levels") from error
    except msgspec.ValidationError as error:
        raise BadRequest(complaint(error, "the body", kind)) from error
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    _check_depth(body)
    if _NUL.search(body) is not None:
        raise BadRequest("the JSON holds the character NUL, which is not allowed")
    return decoded


def _check_depth(body: bytes) -> None:
    """Raise BadRequest for JSON nested too deeply. `body` must be valid JSON, or this is slow."""
    if body.count(b"[") + body.count(b"{") <= JSON_DEPTH_MAX:
        return
    brackets = _STRING.sub(b"", body).translate(_TO_SQUARE, delete=_NO_BRACKET)
    for _ in range(JSON_DEPTH_MAX):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise BadRequest(f"the JSON is nested deeper than {JSON_DEPTH_MAX} levels")
