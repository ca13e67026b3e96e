"""Every error that people or machines may see, as one tree.

    VolunteerError
    ├── BadRequest                 400  the request makes no sense
    │   ├── InvalidFrame           422  a tensor file is not what its manifest says
    │   ├── InvalidRunFile         422  a run file (or dataset, or setting) is wrong
    │   │   └── InvalidPlan        422  the plan cannot work
    │   └── InvalidName            422  a nickname or name is not acceptable
    ├── Unauthorized               401  the credentials are missing or wrong
    │   └── BadSignature           401  the signature does not fit
    ├── Forbidden                  403  the caller is known, but may not do this
    │   ├── Banned                 403  the organiser has banned this volunteer
    │   └── InvalidCode            403  the code of a join link admits nobody
    ├── NotFound                   404  the thing does not exist, or belongs to somebody else
    │   └── UnknownTask            404  the caller has no such task or upload, and drops its work
    ├── Conflict                   409  the same key was used for something else
    │   └── OffsetMismatch         409  an upload must go on where the server says
    ├── Gone                       410  somebody else holds this task now
    │   └── Cancelled              410  the task was cancelled
    ├── TooLarge                   413  more bytes than granted
    ├── UpgradeRequired            426  the caller's version is too old
    ├── TooManyRequests            429  the caller must slow down
    │   └── InsufficientQuota      429  not enough credit for this
    ├── Internal                   500  the coordinator failed
    ├── Unavailable                503  try again later
    │   ├── Unreachable            503  no server answered (made on the client, never sent)
    │   └── StorageFull            507  no space left
    └── Configuration                   local settings or directories are wrong (never sent)

The docstring of a class is its default message. `code` is the stable wire code; `status` the HTTP
status; `exit_code` what a command ends with. `retry_after_s` tells a client when to come back.
"""

from __future__ import annotations

import codecs
import errno
from typing import ClassVar


class VolunteerError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        self.message = message or (self.__doc__ or "").strip()
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class BadRequest(VolunteerError):
    """The request makes no sense."""

    code, status, exit_code = "bad_request", 400, 2


class InvalidFrame(BadRequest):
    """The tensor file is not what its manifest says."""

    code, status, exit_code = "invalid_frame", 422, 1


class InvalidRunFile(BadRequest):
    """The run file is wrong."""

    code, status = "invalid_run_file", 422


class InvalidPlan(InvalidRunFile):
    """The plan cannot work."""

    code = "invalid_plan"


class InvalidName(BadRequest):
    """The name is not acceptable."""

    code, status = "invalid_name", 422


class Unauthorized(VolunteerError):
    """The credentials are missing or wrong."""

    code, status, exit_code = "unauthorized", 401, 78


class BadSignature(Unauthorized):
    """The signature does not fit: what arrived is not what the coordinator signed."""

    code = "bad_signature"


class Forbidden(VolunteerError):
    """This is not allowed."""

    code, status = "forbidden", 403


class Banned(Forbidden):
    """The organiser has banned this volunteer."""

    code, exit_code = "banned", 78


class InvalidCode(Forbidden):
    """The code of a join link admits nobody, now and later."""

    code, exit_code = "invalid_code", 78


class NotFound(VolunteerError):
    """There is no such thing here."""

    code, status = "not_found", 404


class UnknownTask(NotFound):
    """There is no such task or upload of yours."""

    code = "unknown_task"


class Conflict(VolunteerError):
    """The same key was used before for something else."""

    code, status = "conflict", 409


class OffsetMismatch(Conflict):
    """The upload must go on where the server says."""

    code = "offset_mismatch"


class Gone(VolunteerError):
    """Somebody else holds this task now."""

    code, status = "gone", 410


class Cancelled(Gone):
    """The task was cancelled."""

    code = "cancelled"


class TooLarge(VolunteerError):
    """This is larger than what was granted."""

    code, status = "too_large", 413


class UpgradeRequired(VolunteerError):
    """This version is too old for the coordinator: `volunteer update`"""

    code, status, exit_code = "upgrade_required", 426, 78


class TooManyRequests(VolunteerError):
    """Too many requests: slow down."""

    code, status, exit_code = "too_many_requests", 429, 75


class InsufficientQuota(TooManyRequests):
    """There is not enough credit for this."""

    code, exit_code = "insufficient_quota", 1


class Internal(VolunteerError):
    """The coordinator failed; the request id is in its log."""

    code = "internal"


class Unavailable(VolunteerError):
    """Not now: try again later."""

    code, status, exit_code = "unavailable", 503, 75


class Unreachable(Unavailable):
    """The coordinator cannot be reached."""

    code = "unreachable"


class StorageFull(Unavailable):
    """No space is left on the disk."""

    code, status = "storage_full", 507


class Configuration(VolunteerError):
    """The local configuration is wrong."""

    code, exit_code = "configuration", 78


def why(error: Exception) -> str:
    """Return the cause of a failed file or connection in plain words, as the end of a sentence."""
    from ssl import SSLError

    from shared.sentences import Sentence

    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(error)
    reasons = {
        errno.ECONNREFUSED: Sentence("connection refused"),
        errno.EACCES: Sentence("permission denied"),
        errno.EEXIST: Sentence("file exists"),
        errno.EHOSTUNREACH: Sentence("no route to host"),
        errno.EIO: Sentence("input/output error"),
        errno.EISDIR: Sentence("is a directory"),
        errno.ENETUNREACH: Sentence("network is unreachable"),
        errno.ENOENT: Sentence("no such file or directory"),
        errno.ENOSPC: Sentence("no space left on device"),
        errno.ENOTDIR: Sentence("not a directory"),
        errno.EPERM: Sentence("operation not permitted"),
        errno.EROFS: Sentence("read-only file system"),
        errno.ETIMEDOUT: Sentence("connection timed out"),
    }
    is_tls = isinstance(error, SSLError)  # TLS errors have numbers of their own
    if isinstance(error, OSError) and not is_tls and error.errno in reasons:
        return reasons[error.errno]
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text[:1].lower() + text[1:]


def _not_utf8(error: UnicodeDecodeError) -> str:
    """Return the place of the first byte that is not UTF-8, or the name of UTF-16."""
    from shared.sentences import Sentence

    data = error.object
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Sentence("it is UTF-16, not UTF-8 text: save it as UTF-8")
    if b"\0" in data:
        return Sentence("it is not text")
    return Sentence(
        "it is not UTF-8 text, by the byte {byte} in line {line}: save it as UTF-8",
        byte=f"0x{data[error.start]:02x}",
        line=data.count(b"\n", 0, error.start) + 1,
    )


def system_error(error: OSError | UnicodeEncodeError) -> tuple[str, int]:
    """Return the sentence and the exit code of a command for an error of the operating system.

    A full disk is worth another try (75); a read-only or forbidden disk needs its owner (78).
    """
    from shared.sentences import Sentence
    from shared.text import escaped

    if isinstance(error, UnicodeEncodeError):
        word = escaped(error.object)
        return Sentence('"{word}" is not text in the encoding of this terminal', word=word), 2
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return place + why(error), StorageFull.exit_code
    if error.errno == errno.ENAMETOOLONG:
        return place + why(error), BadRequest.exit_code
    owner = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOLCK)
    code = Configuration.exit_code if owner else VolunteerError.exit_code
    return place + why(error), code


def _tree(root: type[VolunteerError]) -> dict[str, type[VolunteerError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes |= _tree(child)
    return classes


BY_CODE: dict[str, type[VolunteerError]] = _tree(VolunteerError)

# Errors about the machine on which they are raised; no coordinator sends them.
LOCAL = (Configuration, Unreachable)


def error_of_code(code: str, message: str) -> VolunteerError:
    """Return the error for a code from another program of this machine; `VolunteerError` for an
    unknown code.
    """
    return BY_CODE.get(code, VolunteerError)(message)


def from_wire(
    code: str, message: str, retry_after_s: float | None = None, *, status: int = 0
) -> VolunteerError:
    """Return the error for the code in a coordinator's reply.

    An unknown code, and one of the `LOCAL` errors, becomes `VolunteerError`, or with a status of
    500 or more `Internal`, which the client retries.
    """
    kind = BY_CODE.get(code, VolunteerError)
    if kind in (*LOCAL, VolunteerError):
        kind = Internal if status >= 500 else VolunteerError
    return kind(message, retry_after_s=retry_after_s)
