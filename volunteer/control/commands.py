"""Commands to a running volunteer, as data: the same in this process and over the local socket."""

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
    get_origin,
)

import msgspec

from shared.errors import BadRequest
from shared.protocol.accounts import Benchmark, LinkCode, MachineOrder, ServerInfo
from shared.protocol.endpoints import QUERIES, Endpoint
from shared.sentences import Sentence, Words
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status
from volunteer.i18n.catalogue import N_
from volunteer.settings.schedule import end_of_pause, moment_words

How = Literal["release", "save", "finish"]
NEXT_LOGIN = -1.0  # as the end of a pause: when somebody logs in to this machine

T = TypeVar("T")


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, its value, and the source of the value."""

    name: str
    value: Any
    source: str  # "flag", "environment", "config.toml", "default"
    type: str
    default: str
    unit: str
    help: str


# Repeats for the type checker what the base says of all.
@dataclass_transform(frozen_default=True, kw_only_default=True)
class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all commands; the tag is the class name."""


class Ask(Command, Generic[T]):
    """Base of the commands that are answered with a value."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Account at a coordinator."""

    server: str
    url: str
    fingerprint: str
    nickname: str
    created: bool  # False: it was there before


class GetStatus(Ask[Status]):
    pass


class Probe(Ask[ServerInfo]):
    """Get the identity of the coordinator at a join link; nothing is sent to it."""

    link: str


class Join(Ask[Joined]):
    """Make an account (or find the one made before) and start to work with it."""

    link: str
    name: str = ""


class Begin(Command):
    """Find and measure the devices; sent once the owner has chosen their limits."""


class Pause(Command):
    device: str = ""  # empty: all
    by: str = "you"
    message: Words = "paused"
    until: Words = "you resume"
    # Local time at which it ends by itself, or NEXT_LOGIN; 0: not before it is resumed.
    ends_at: float = 0.0


def pause_end(length: str, until: str, now: datetime) -> tuple[Words, float]:
    """Return the end of a pause in words, and as `Pause.ends_at`: after a length ("2h"), at a time
    of the day ("22:00") or the next "login", or by the owner alone.

    Raises BadRequest.
    """
    if until == "login" and not length:
        return N_("the next login"), NEXT_LOGIN
    end = end_of_pause(length, until, now)
    return (moment_words(end, now), end.timestamp()) if end else ("you resume", 0.0)


class Resume(Command):
    device: str = ""
    by: str = "you"


class Finish(Command):
    """Complete the tasks in work and take no more."""


class Stop(Command):
    """End the program."""

    how: How = "release"


class Retry(Command):
    """Try the coordinator again now."""


class Consent(Command):
    run: str


class ReadAnnouncements(Command):
    """Mark the organiser's announcements as read."""


class OrderMachine(Command):
    """Let another machine of the account pause, resume or finish with its next heartbeat."""

    request: MachineOrder


class Measure(Command):
    """Benchmark a device."""

    device: str = ""
    quick: bool = False


class StopMeasuring(Command):
    """Cancel a running benchmark."""


class LookAtDevices(Command):
    """Read the sensors of the devices now, because a person looks."""


class GetMeasured(Ask[tuple[Benchmark, ...]]):
    """Return all remembered benchmarks of this machine, oldest first."""


class GetInvitation(Ask[str]):
    """Return a link with which others can join the same coordinator, if it allows that."""


class ChooseRuns(Command):
    """Help only these runs from the next task on; empty = any. Also written to config.toml."""

    runs: tuple[str, ...]


class GetSettings(Ask[tuple[SettingRow, ...]]):
    pass


class SetSettings(Ask[tuple[SettingRow, ...]]):
    """Write settings to config.toml; work rules hold at once, the rest from the next start."""

    changes: dict[str, Any]


class Query(Ask[tuple[Any, str]]):
    """Forward a read-only query to the coordinator; answered with its reply and the cursor of the
    next page.

    `endpoint` is the path of one of `shared.protocol.endpoints.QUERIES`.

    """

    endpoint: str
    args: dict[str, str | int] = {}


class GetPicture(Ask[bytes]):
    """Return the PNG that a version drew."""

    run: str
    version: int


class MakeLink(Ask[LinkCode]):
    """Return a ten-minute code for another machine of the same account."""


if TYPE_CHECKING:
    AnyCommand: TypeAlias = Command
else:  # every command above, for the decoder: tags tell them apart
    AnyCommand = reduce(or_, {*Command.__subclasses__(), *Ask.__subclasses__()} - {Ask})


def reply_type(command: Command) -> Any:
    """Return the type of the answer to a command; None where it has none. Raises BadRequest."""
    if isinstance(command, Query):
        return tuple[query_of(command).reply, str]  # type: ignore[misc]
    bases = getattr(type(command), "__orig_bases__", ())
    return next((get_args(base)[0] for base in bases if get_origin(base) is Ask), None)


def query_of(command: Query) -> Endpoint[Any]:
    """Return the endpoint that a query names. Raises BadRequest."""
    if (endpoint := QUERIES.get(command.endpoint)) is None:
        raise BadRequest(
            Sentence("{endpoint} is not a query of this version", endpoint=command.endpoint[:64])
        )
    return endpoint


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One line to the volunteer: a command."""

    id: int
    command: AnyCommand


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """One line back: the value of a command, or its error."""

    id: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    code: str = ""  # of the error
    message: Words = ""


class EventLine(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """One line back: an event."""

    event: AnyEvent


class StatusSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """First line back, and repeated to a client that fell behind."""

    status: Status
