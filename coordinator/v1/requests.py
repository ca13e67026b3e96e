"""Requests below /v1: strict reading, and refusals in OpenAI's form."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from coordinator.inference.answers import UnknownModel
from coordinator.inference.inference_engine import InvalidField
from coordinator.request_body import Receive, Scope, decode_body, read_body
from shared.decoding import choices, convert, in_words
from shared.errors import BadRequest, InsufficientQuota, VolunteerError
from shared.protocol.inference import (
    IDLE,
    LABELS,
    CompletionRequest,
    OpenAiError,
    OpenAiErrorBody,
)
from shared.sentences import encode_english

T = TypeVar("T")


# Headers with which pages of other sites may read a reply; the outer application adds them, to its
# own refusals too.
FOR_PAGES = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", b"*"),
)

_FIELD = re.compile(r"unknown field `([^`]*)`|missing required field `([^`]*)`")
_PLACE = re.compile(
    r"(?P<failure>.*?)"
    r"(?: - at (?P<key>`key` in )?`\$\.?(?P<path>(?P<place>[^`]*?)(?:\[[^\]`]*\])?)`)?",
    re.DOTALL,
)
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


async def read_request(scope: Scope, receive: Receive, kind: type[T]) -> T:
    """Read a JSON body strictly. Raises InvalidField with the field, BadRequest, TooLarge,
    ClientGone.
    """
    try:
        raw = decode_body(await read_body(scope, receive), dict[str, Any])
        fields = _without_neutral(raw, getattr(kind, "__struct_fields__", ()))
        if kind is CompletionRequest and "prompt" in fields:
            fields["prompt"] = _prompt_list(fields["prompt"])
        return convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(error, kind) from error
    except BadRequest as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise _invalid_field(error.__cause__, kind) from error
        raise


def _without_neutral(raw: dict[str, Any], read: Collection[str]) -> dict[str, Any]:
    """Return a request without fields at neutral values; the fields named by `read` all stay."""
    fields = _significant(raw, read)
    if isinstance(turns := fields.get("messages"), list):
        fields["messages"] = [_turn(turn) for turn in turns]
    if isinstance(options := fields.get("stream_options"), dict):
        fields["stream_options"] = _significant(options)
    return fields


def _prompt_list(prompt: Any) -> Any:
    """Return a list of prompts unchanged, and a single prompt (a text or tokens) in a list."""
    is_list = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    return prompt if is_list else [prompt]


def _significant(raw: dict[str, Any], read: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields that change the answer: not null, no label, not at a neutral value."""
    return {
        key: value
        for key, value in raw.items()
        if value is not None
        and (key in read or not any(_is_same(value, idle) for idle in IDLE.get(key, ())))
        and not (key in LABELS and isinstance(value, str))
    }


def _turn(turn: Any) -> Any:
    """Return a turn without null fields; an assistant's turn loses its empty lists too."""
    if not isinstance(turn, dict):
        return turn
    assistant = turn.get("role") == "assistant"
    fields = {
        key: field
        for key, field in turn.items()
        if field is not None and (field != [] or not assistant)
    }
    return {"content": "", **fields} if assistant else fields


def _is_same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _invalid_field(error: msgspec.ValidationError, kind: object) -> InvalidField:
    """Return the refusal of a field that is not supported or not valid."""
    match = _PLACE.fullmatch(str(error))
    failure, place = (match["failure"], match["place"] or "") if match else (str(error), "")
    if named := _FIELD.search(failure):
        field = named[1] or named[2]
        path = (f"{place}.{field}" if place else field)[:80]
        problem = "not supported here" if named[1] else "missing"
        return InvalidField(f'the field "{path}" is {problem}', path)
    right = choices(kind, match["path"] or "") if match else ()
    sentence = in_words(failure, right).replace("`", "")
    subject = f"a key of {place}" if match and match["key"] else place or "the body"
    return InvalidField(f"{subject}: {sentence}", place or "body")


def refusal(error: VolunteerError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of a refusal in OpenAI's shape."""
    status = 400 if error.status == 422 else error.status
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code, param = None, None
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, InvalidField):
        code, param = error.reason, error.param
    elif isinstance(error, UnknownModel):
        code, param = "model_not_found", "model"
    elif isinstance(error, InsufficientQuota):
        kind = code = "insufficient_quota"
        headers.append((b"x-should-retry", b"false"))
    elif status == 401:
        code = "invalid_api_key"
        headers.append((b"www-authenticate", b"Bearer"))
    elif status == 429:
        code = "rate_limit_exceeded"
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    body = OpenAiErrorBody(
        error=OpenAiError(message=error.message, type=kind, param=param, code=code)
    )
    return status, headers, msgspec.json.encode(body, enc_hook=encode_english)
