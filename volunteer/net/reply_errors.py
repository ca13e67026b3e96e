"""Errors in replies of the coordinator."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from shared import errors
from shared.decoding import MALFORMED, decode
from shared.errors import VolunteerError
from shared.protocol.base import ErrorBody
from shared.protocol.inference import OpenAiError, OpenAiErrorBody
from shared.sentences import Sentence
from shared.text import printable
from volunteer.i18n.coordinator import error_sentence

SENTENCE_CHARS_MAX = 500
TOO_LONG = "context_length_exceeded"  # code of an error in OpenAI's form
REQUEST_ID = "x-request-id"  # header of every reply of a coordinator

T = TypeVar("T")


class ForeignReply(errors.Unreachable):
    """Another program answers at the coordinator's address."""


class PromptTooLong(errors.BadRequest):
    """The prompt and its answer do not fit the model's window."""


def refusal(
    host: str, status: int, headers: Mapping[str, str], body: bytes, *, v1: bool = False
) -> VolunteerError:
    """Return the error that the coordinator sent; `v1` is True for an error in OpenAI's form. If
    the answer comes from a proxy or a portal instead, return Unreachable.
    """
    wait = _seconds(headers.get("retry-after"))
    try:
        if v1:
            error = openai_error(status, decode(body, OpenAiErrorBody).error)
            error.retry_after_s = wait
            return error
        error_body = decode(body, ErrorBody)
    except MALFORMED:
        error_body = ErrorBody(code="", message="")
    if not _is_own(status, error_body):
        no_reason = Sentence(
            "{host} answered with HTTP status {status} and no reason", host=host, status=status
        )
        away = status in (408, 429, 502, 503, 504)
        return (errors.Unreachable if away else ForeignReply)(no_reason, retry_after_s=wait)
    wait = error_body.retry_after_s or _seconds(headers.get("retry-after"))
    message = printable(error_body.message, SENTENCE_CHARS_MAX)
    message = message or errors.from_wire(error_body.code, "", status=status).message
    if error_body.request_id and status >= 500:
        message += f" (request {printable(error_body.request_id, 64)})"
    return errors.from_wire(
        error_body.code, error_sentence(error_body.code, message), wait, status=status
    )


def openai_error(status: int, error: OpenAiError) -> VolunteerError:
    """Return the error of an answer in OpenAI's form; `status` is 0 for an event of a stream."""
    kinds: dict[int, type[VolunteerError]] = {
        0: errors.Internal,
        401: errors.Unauthorized,
        403: errors.Forbidden,
        404: errors.NotFound,
        413: errors.TooLarge,
        429: errors.TooManyRequests,
        503: errors.Unavailable,
    }
    kind = kinds.get(status, errors.Internal if status >= 500 else errors.BadRequest)
    if error.code == errors.InsufficientQuota.code:
        kind = errors.InsufficientQuota
    elif error.code == TOO_LONG:
        kind = PromptTooLong
    message = printable(error.message, SENTENCE_CHARS_MAX) or kind().message
    return kind(error_sentence(kind.code, message))


def _is_own(status: int, body: ErrorBody) -> bool:
    """Return True for the answer of a coordinator: it names the request, and its code fits the
    status. An unknown code may come from a newer coordinator.
    """
    kind = errors.BY_CODE.get(body.code)
    fits = kind is None or kind.status // 100 == status // 100
    return bool(body.code and body.request_id) and status >= 400 and fits


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None  # a date, for which the backoff is used


def decode_reply(data: bytes, kind: type[T], *, foreign: bool = False) -> T:
    """Decode a reply; `foreign` is True if the reply lacks the mark of a coordinator.

    Raises UpgradeRequired for a message that only another version of this program understands,
    Unreachable for the answer of a portal, Internal for other malformed replies.
    """
    if kind is type(None):
        return None  # the endpoint replies without content
    try:
        return decode(data, kind)
    except msgspec.ValidationError as error:
        if foreign:
            raise ForeignReply(
                Sentence(
                    "the answer is not a coordinator's: does this network ask you to log in first?"
                )
            ) from error
        raise errors.UpgradeRequired(
            Sentence(
                "the coordinator's reply is not understood ({error}): `volunteer update`",
                error=printable(str(error), SENTENCE_CHARS_MAX),
            )
        ) from error
    except MALFORMED as error:
        if data.lstrip()[:1] == b"<":
            raise errors.Unreachable(
                Sentence(
                    "a web page came instead of the coordinator's reply: does this network ask you "
                    "to log in first?"
                )
            ) from error
        raise errors.Internal(
            Sentence("the coordinator's reply is invalid: {error}", error=error)
        ) from error


# Reasons of failed connections in plain words, without error numbers or names of exceptions.

_NUMBER = re.compile(r"\[[A-Za-z ]*(Errno|WinError) -?\d+\] ?")
_HTTP_CLIENT = "All connection attempts failed"  # text of httpx that gives no reason


def connection_failure(error: BaseException) -> str:
    """Return why a connection failed, as a short clause; "" if the reason is unknown."""
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return Sentence(
                "its name cannot be resolved; is the link complete, and is this machine online?"
            )
        if isinstance(cause, ConnectionRefusedError):
            return Sentence("connection refused; is the coordinator running?")
        if isinstance(cause, ConnectionError):
            return Sentence("the connection was interrupted")
        if isinstance(cause, OSError) and cause.strerror:
            cause_words = errors.why(cause)
            return cause_words if isinstance(cause_words, Sentence) else _plain(cause.strerror)
    return _plain(str(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes, with all members of exception groups."""
    ids: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop(0)
        if cause is None or id(cause) in ids:
            continue
        ids.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            waiting += cause.exceptions
        waiting += [cause.__cause__, cause.__context__]


def _plain(text: str) -> str:
    text = _NUMBER.sub("", printable(text, 200)).strip()
    return "" if text == _HTTP_CLIENT else text[:1].lower() + text[1:]
