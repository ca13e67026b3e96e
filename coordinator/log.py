"""Log lines: structured, on standard error, with secrets removed from every line.

Values are encoded, so that a nickname with a line feed cannot forge a line.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO, cast

import structlog
from typing_extensions import override

HIDDEN = "[hidden]"
# seconds of a filter's window, most lines of one message in a window, and most different messages
# that are counted
WINDOW_S, LINES_MAX, KEYS_MAX = 60.0, 10, 100
_SECRET_KEY = re.compile(r"(?i)secret|token|authorization|password|^code$|private")
_SECRET_TEXT = re.compile(
    r"(?i)(bearer\s+)\S+|((?:code|secret|token|password)=)[^\s&+;/'\"]+|(://[^\s:/@]+:)[^\s@/]+(?=@)"
)
# control characters that renderers do not escape
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def hide(value: object) -> object:
    """Return a value for the log, without bearer tokens, codes of join links, passwords in URLs."""
    if isinstance(value, str):
        value = _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", value)
        return _SECRET_TEXT.sub(lambda m: (m[1] or m[2] or m[3]) + HIDDEN, value)
    if isinstance(value, dict):
        return {
            key: HIDDEN if _SECRET_KEY.search(str(key)) else hide(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [hide(item) for item in value]
    return value


def _redact(_: object, __: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    for key, value in event.items():
        event[key] = HIDDEN if _SECRET_KEY.search(key) else hide(value)
    return event


class LossyFile:
    """File for lines that may get lost, since a full disk or a closed pipe must not fail a
    request.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except (OSError, ValueError):  # ValueError: the file is closed
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except (OSError, ValueError):
            return


class MessageLimit(logging.Filter):
    """Filter that passes each message of a library LINES_MAX times a minute, so that clients cannot
    fill the disk.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._since = 0.0
        self._seen: Counter[str] = Counter()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        now = self._monotonic()
        if now - self._since >= WINDOW_S:
            self._seen.clear()
            self._since = now
        key = str(record.msg) if len(self._seen) < KEYS_MAX else ""
        self._seen[key] += 1
        return self._seen[key] <= LINES_MAX


class CauseLimit:
    """Processor that passes one line a minute about each cause of a failure, with the number of
    suppressed lines: an outage affects every job, and each job retries every second.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since = 0.0
        self._seen: Counter[str] = Counter()
        self._before: Counter[str] = Counter()

    def __call__(
        self, _: object, __: str, event: MutableMapping[str, object]
    ) -> MutableMapping[str, object]:
        """Return the line. Raises DropEvent for a repetition within the minute."""
        now = self._monotonic()
        if now - self._since >= WINDOW_S:
            self._before, self._seen, self._since = self._seen, Counter(), now
        cause = _cause(event)
        if not cause or (len(self._seen) >= KEYS_MAX and cause not in self._seen):
            return event
        self._seen[cause] += 1
        if self._seen[cause] > 1:
            raise structlog.DropEvent
        if (more := self._before.pop(cause, 1) - 1) > 0:
            event["kept_back"] = more
        return event


def _cause(event: MutableMapping[str, object]) -> str:
    """Return the cause of a failure, as a key; "" for a line that reports no failure."""
    raised = event.get("exc_info")
    if raised:
        error = raised if isinstance(raised, BaseException) else sys.exc_info()[1]
        return f"{event.get('event')} {event.get('job', '')} {error!r}"
    return str(event.get("error", ""))


def configure(level: str, *, as_json: bool) -> None:
    """Set up structlog, and make the standard library's logging use it."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact,
    ]
    last: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.processors.LogfmtRenderer(
            key_order=["timestamp", "level", "event"], bool_as_flag=False
        )
    )
    number = getattr(logging, level.upper())
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, CauseLimit(), *shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyFile(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    server = logging.getLogger("uvicorn.error")
    server.filters = [MessageLimit()]
    # These libraries log each connection and plugin; only their warnings and errors are of use.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "alembic"):
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
