"""Command of the organiser: name, request, reply, and one function, run here or by a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, get_type_hints

import msgspec

if TYPE_CHECKING:
    from coordinator.services import Coordinator

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R")
Needs = Literal["nothing", "database", "directory"]


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests; an unknown field is an error."""


class EmptyRequest(CommandRequest, frozen=True, kw_only=True):
    """Request without fields."""


class NameRequest(CommandRequest, frozen=True, kw_only=True):
    """Request about one run, dataset or volunteer, by its name."""

    name: str


class NumberRequest(CommandRequest, frozen=True, kw_only=True):
    """Request about one invite or announcement, by its number."""

    id: int


class ReasonedRequest(CommandRequest, frozen=True, kw_only=True):
    """Request about one run or volunteer, by its name, with a reason for the record."""

    name: str
    reason: str = ""


class ConfirmedRequest(CommandRequest, frozen=True, kw_only=True):
    """Request that only previews its effect unless `yes`."""

    name: str
    yes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OrganiserCommand(Generic[Q, R]):
    """One command; `remote` = it also works on a running server."""

    name: str
    request: type[Q]
    reply: type[R]
    run: Callable[[Coordinator, Q], Awaitable[R]]
    remote: bool
    needs: Needs


class CommandSender(Protocol):
    """Runs commands of the organiser, here or on a server, and returns their replies."""

    async def __call__(self, command: OrganiserCommand[Q, R], ask: Q, /) -> R: ...


def organiser_command(
    name: str, *, remote: bool = True, needs: Needs = "directory"
) -> Callable[[Callable[[Coordinator, Q], Awaitable[R]]], OrganiserCommand[Q, R]]:
    """Return the command of a function, whose annotations give its request and its reply.

    `needs` is what must exist before the command: nothing (it may be the first command on a data
    directory and then makes it), the database, or the data directory with its keys.
    """

    def make(run: Callable[[Coordinator, Q], Awaitable[R]]) -> OrganiserCommand[Q, R]:
        hints = get_type_hints(run, localns={"Coordinator": object})
        return OrganiserCommand(
            name=name,
            request=hints["ask"],
            reply=hints["return"],
            run=run,
            remote=remote,
            needs=needs,
        )

    return make
