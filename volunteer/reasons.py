"""Why a connection failed, as a person would say it: no numbers of the system, no names of exceptions."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

from volunteer.wording import printable

_NUMBER = re.compile(r"\[[A-Za-z ]*(Errno|WinError) -?\d+\] ?")
_HTTP_CLIENT = "All connection attempts failed"  # of several addresses of one name: says nothing


def reason(error: BaseException) -> str:
    """A short clause; empty when there is nothing to say."""
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return "its name is not known; is the link whole, and is this machine online?"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there; is the coordinator running?"
        if isinstance(cause, ConnectionError):
            return "the connection broke off"
        if isinstance(cause, OSError) and cause.strerror:
            return _plain(cause.strerror)
    return _plain(str(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, the innermost last; of a group all its members."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop(0)
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            waiting += cause.exceptions
        waiting += [cause.__cause__, cause.__context__]


def _plain(text: str) -> str:
    text = _NUMBER.sub("", printable(text, 200)).strip()
    return "" if text == _HTTP_CLIENT else text[:1].lower() + text[1:]
