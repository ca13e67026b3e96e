"""Commands to a running volunteer, as data; the same for this process and over the local socket."""

from __future__ import annotations

from datetime import datetime
from functools import reduce
from operator import or_
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    dataclass_transform,
    get_args,
)

import msgspec

from shared.errors import BadRequest
from shared.protocol.accounts import LinkCode, ServerInfo
from shared.protocol.endpoint import Endpoint
from shared.protocol.endpoints import QUERIES
from shared.sentences import Sentence, Words
from shared.settings import SettingRow
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status
from volunteer.i18n.catalogue import N_
from volunteer.settings.schedule import end_of_pause, moment_words

How = Literal["release", "save", "finish"]
NEXT_LOGIN = -1.0  # end of a pause: the next login to this machine

T = TypeVar("T")


# Repeated from the base class, because a type checker does not inherit it.
@dataclass_transform(frozen_default=True, kw_only_default=True)
class Command(msgspec.Struct, Generic[T], frozen=True, kw_only=True, tag=True):
    """Base of all commands, each answered with a T; the tag is the class name."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Account at a coordinator."""

    server: str
    url: str
    fingerprint: str
    nickname: str
    created: bool  # False: the account existed before
    own_data: tuple[str, ...] = ()  # open runs that learn from their members' own data


class GetStatus(Command[Status]):
    """Return the status."""


class Probe(Command[ServerInfo]):
    """Return the identity of the coordinator at a join link, without sending a secret.

    Raises BadRequest, Unreachable, Unauthorized; the message says what to do.
    """

    link: str


class Join(Command[Joined]):
    """Make an account (or find the account made before) and start to work with it.

    Raises InvalidName, Forbidden.
    """

    link: str
    name: str = ""


class Begin(Command[None]):
    """Find and measure the devices; sent at the first start, after the owner has set the limits."""


class Pause(Command[None]):
    """Pause a device and keep its task."""

    device: str = ""  # "" = all devices
    by: str = "you"
    message: Words = "paused"
    until: Words = "you resume"
    # Local time at which the pause ends by itself, or NEXT_LOGIN; 0 = at the owner's resume.
    ends_at: float = 0.0


def pause_end(length: str, until: str, now: datetime) -> tuple[Words, float]:
    """Return the end of a pause, as words and as `Pause.ends_at`.

    The pause ends after `length` ("2h"), or at `until`: a time of day ("22:00") or the next
    "login"; without either, when the owner resumes. Raises BadRequest.
    """
    if until == "login" and not length:
        return N_("the next login"), NEXT_LOGIN
    end = end_of_pause(length, until, now)
    return (moment_words(end, now), end.timestamp()) if end else ("you resume", 0.0)


class Resume(Command[None]):
    """Remove one reason for a pause."""

    device: str = ""  # "" = all devices
    by: str = "you"


class Finish(Command[None]):
    """Complete the running tasks and claim no more."""


class Stop(Command[None]):
    """End the program."""

    how: How = "release"


class Retry(Command[None]):
    """Try the coordinator again now."""


class Consent(Command[None]):
    """Accept the licence of a run."""

    run: str


class ReadAnnouncements(Command[None]):
    """Hide the organiser's current announcements."""


class OrderMachine(Command[None]):
    """Send an order to another machine of the account with its next heartbeat. Raises NotFound."""

    worker_id: str
    order: Literal["pause", "resume", "finish"]


class Measure(Command[None]):
    """Benchmark a device; progress and result arrive as events."""

    device: str = ""


class StopMeasuring(Command[None]):
    """Cancel a running benchmark and drop its measurements."""


class LookAtDevices(Command[None]):
    """Read the sensors of the devices now; changes arrive as events."""


class GetInvitation(Command[str]):
    """Return a join link for other people, if the coordinator allows that."""


class ChooseRuns(Command[None]):
    """Work only for these runs from the next task on; () = any run. Also written to config.toml."""

    runs: tuple[str, ...]


class GetSettings(Command[tuple[SettingRow, ...]]):
    """Return every setting with its value and its source."""


class SetSettings(Command[tuple[SettingRow, ...]]):
    """Check settings and write them to config.toml. Work rules apply at once, other settings at the
    next start. Raises Configuration for an invalid value.
    """

    changes: dict[str, Any]


class Query(Command[tuple[Any, str]]):
    """Forward a read-only query to the coordinator; return its reply and the cursor of the next
    page.

    `endpoint` is the path of one of `shared.protocol.endpoints.QUERIES`.
    """

    endpoint: str
    args: dict[str, str | int] = {}


class GetPicture(Command[bytes]):
    """Return the PNG that a version drew. Raises NotFound if it drew no picture."""

    run: str
    version: int


class MakeLink(Command[LinkCode]):
    """Return a ten-minute code for another machine of the same account."""


if TYPE_CHECKING:
    AnyCommand: TypeAlias = Command[Any]
else:  # all commands above, for the decoder, which tells them apart by their tag
    AnyCommand = reduce(or_, Command.__subclasses__())


def reply_type(command: Command[Any]) -> Any:
    """Return the type of a command's answer; None without an answer. Raises BadRequest."""
    if isinstance(command, Query):
        return tuple[query_of(command).reply, str]  # type: ignore[misc]
    (base,) = vars(type(command))["__orig_bases__"]
    (kind,) = get_args(base)
    return None if kind is type(None) else kind


def query_of(command: Query) -> Endpoint[Any]:
    """Return the endpoint named by a query. Raises BadRequest."""
    if (endpoint := QUERIES.get(command.endpoint)) is None:
        raise BadRequest(
            Sentence("{endpoint} is not a query of this version", endpoint=command.endpoint[:64])
        )
    return endpoint


class CommandLine(msgspec.Struct, frozen=True, kw_only=True):
    """Line to the volunteer that carries a command."""

    id: int
    command: AnyCommand


class ReplyLine(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """Line from the volunteer that carries a command's result, or its error."""

    id: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    code: str = ""  # code of the error
    message: Words = ""


class EventLine(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """Line from the volunteer that carries an event."""

    event: AnyEvent


class StatusSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """First line to a client after its hello: the volunteer's status at that moment."""

    status: Status
