"""Target of a command: the coordinator on which it acts, opened in this process or reached on a
server.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Group, Parameter

from coordinator.cli.listing import Columns, as_json, table
from shared.decoding import complaint, convert
from shared.errors import BadRequest, Configuration
from shared.programs.command_hints import complete_commands, options

if TYPE_CHECKING:
    from coordinator.admin.command import CommandSender, Needs, OrganiserCommand, Q, R
    from coordinator.admin.remote_server import RemoteServer
    from coordinator.config import Settings
    from coordinator.services import Coordinator

WATCHED_S = 5.0  # time that a watched server has for one answer
TARGET = Group("Which coordinator", sort_key=50)
URLS = ("database", "blobs")  # settings that may hold a password
T = TypeVar("T")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoragePlace:
    """Settings that name the storage of a coordinator."""

    data_dir: Annotated[str | None, Parameter(group=TARGET, help="Data directory.")] = None
    database: Annotated[
        str | None,
        Parameter(group=TARGET, help="Database URL (default: SQLite in the data directory)."),
    ] = None
    blobs: Annotated[
        str | None, Parameter(group=TARGET, help="A directory, or s3://bucket/prefix.")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Where(StoragePlace):
    """Coordinator of a command: a data directory (the default), a database, or a running server."""

    config: Annotated[Path | None, Parameter(group=TARGET, help="Settings file.")] = None
    server: Annotated[
        str | None, Parameter(group=TARGET, help="A running server: its address or join link.")
    ] = None
    token_file: Annotated[
        Path | None, Parameter(group=TARGET, help="The organiser's token for --server.")
    ] = None

    @property
    def remote(self) -> str:
        """Return the address of the server; "" if no server is named. A typed storage place wins
        over the server of the environment. Raises BadRequest for options that contradict.
        """
        storage = [name for name, place in self.flags.items() if place is not None]
        if self.server is None:
            server = "" if storage else os.environ.get("COORDINATOR_SERVER", "")
        elif not self.server.strip():
            raise BadRequest("--server is empty: name a running server, or leave it out")
        elif storage:
            option = storage[0].replace("_", "-")
            raise BadRequest(
                f"--{option} and --server name two coordinators: leave --server out, or --{option}"
            )
        else:
            server = self.server
        if self.token_file is not None and not server:
            raise BadRequest("--token-file is for --server, which is missing")
        return server

    def settings(self) -> Settings:
        """Return the settings in force."""
        from coordinator.config import load

        return load(self.flags, config=self.config)

    @property
    def flags(self) -> dict[str, str | None]:
        """Return the settings that are given on the command line."""
        return {"data_dir": self.data_dir, "database": self.database, "blobs": self.blobs}

    def connection(self) -> RemoteServer:
        """Return a client of the named server."""
        from coordinator.admin.remote_server import RemoteServer

        named = os.environ.get("COORDINATOR_TOKEN_FILE")
        return RemoteServer.of(self.remote, self.token_file or (Path(named) if named else None))

    @property
    def typed(self) -> str:
        """Return the options that name this coordinator, as typed, but without passwords."""
        from coordinator.config import without_password

        fields_of_where = {one.name: getattr(self, one.name) for one in fields(Where)}
        urls = {
            name: fields_of_where[name] and without_password(fields_of_where[name]) for name in URLS
        }
        return options(fields_of_where | urls)

    def hint(self, text: str) -> str:
        """Return a text in which commands in backticks name the same coordinator."""
        return complete_commands(text, "coordinator", self.typed)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TargetOptions(Where):
    """Coordinator of a command, and the form of its answer."""

    json: Annotated[bool, Parameter(help="As JSON, for machines.", negative="")] = False


HERE = TargetOptions()


def of_command_line(argv: Sequence[str]) -> Where:
    """Return the coordinator that a command line names, even where the line cannot be parsed."""
    values: dict[str, str] = {}
    for word, following in pairwise([*argv, ""]):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in Where.__dataclass_fields__:
            values[name] = value if equals else following
    paths = {name: Path(values[name]) for name in ("config", "token_file") if name in values}
    return Where(
        data_dir=values.get("data_dir"),
        database=values.get("database"),
        blobs=values.get("blobs"),
        server=values.get("server"),
        config=paths.get("config"),
        token_file=paths.get("token_file"),
    )


def call(where: Where, command: OrganiserCommand[Q, R], ask: Q) -> R:
    """Run a command in this process or on a server; return its reply. Raises BadRequest for values
    out of their bounds.
    """
    import msgspec

    if where.remote and not command.remote:
        name = command.name.replace(".", " ")
        raise BadRequest(f"{name} works on the server's own machine: leave --server out")
    try:
        ask = convert(msgspec.to_builtins(ask), command.request)
    except msgspec.ValidationError as error:
        raise BadRequest(complaint(error, "option")) from error
    reply = where.connection().call(command, ask) if where.remote else _here(where, command, ask)
    return reply if getattr(where, "json", False) else addressed(where, command, reply)


def addressed(where: Where, command: OrganiserCommand[Q, R], reply: R) -> R:
    """Return the reply of a command with sentences that name the coordinator of `where`."""
    import msgspec

    def complete(value: object) -> object:
        match value:
            case str():
                return where.hint(value)
            case list():
                return [complete(item) for item in value]
            case dict():
                return {key: complete(item) for key, item in value.items()}
        return value

    return convert(complete(msgspec.to_builtins(reply)), command.reply) if where.typed else reply


def tell(
    where: TargetOptions, command: OrganiserCommand[Q, R], ask: Q, says: Callable[[R], str]
) -> None:
    """Run a command; print its reply as JSON, or as a sentence by `says`."""
    reply = call(where, command, ask)
    as_json(reply) if where.json else print(says(reply))


def listed(
    where: TargetOptions,
    command: OrganiserCommand[Q, tuple[T, ...]],
    ask: Q,
    columns: Columns[T],
    empty: str,
) -> None:
    """Run a command that lists; print its rows as JSON or as a table, or `empty`."""
    rows = call(where, command, ask)
    as_json(rows) if where.json else table(rows, columns, where.hint(empty))


@asynccontextmanager
async def connected(where: Where) -> AsyncIterator[CommandSender]:
    """Keep one coordinator open for commands: a database or a server. Raises Configuration."""
    async with reached(where, WATCHED_S) as (ask, _):
        yield ask


@asynccontextmanager
async def reached(
    where: Where, timeout_s: float, needs: Needs = "database"
) -> AsyncIterator[tuple[CommandSender, Coordinator | RemoteServer]]:
    """Yield a function that runs commands, and their target: an open coordinator, or the client of
    a server with this timeout. Raises Configuration.
    """
    import asyncio
    from importlib import import_module

    # loaded in a thread: this takes a second, in which the screen is drawn
    await asyncio.to_thread(import_module, "coordinator.services")

    if where.remote:
        server = where.connection().within(timeout_s)

        async def there(command: OrganiserCommand[Q, R], ask: Q, /) -> R:
            return addressed(where, command, await asyncio.to_thread(server.call, command, ask))

        yield there, server
        return
    from coordinator.services import opened

    with await _place(where.settings(), needs) as (place, keyless):
        async with opened(place, keyless=keyless) as coordinator:

            async def here(command: OrganiserCommand[Q, R], ask: Q, /) -> R:
                return addressed(where, command, await command.run(coordinator, ask))

            yield here, coordinator


def _here(where: Where, command: OrganiserCommand[Q, R], ask: Q) -> R:
    import asyncio

    from coordinator.storage.folders import data_directory

    settings = where.settings()
    if command.needs == "nothing":
        data_directory(settings.directory)  # refused before the slow imports if unusable
    from coordinator.log import configure
    from coordinator.services import opened

    configure("warning", as_json=False)

    async def run() -> R:
        with await _place(settings, command.needs) as (place, keyless):
            async with opened(place, keyless=keyless) as coordinator:
                if command.needs != "database":
                    await coordinator.store_marks.claim()
                if command.needs == "nothing":  # the command stores new data
                    coordinator.space.check_command()
                return await command.run(coordinator, ask)

    return asyncio.run(run())


async def _place(settings: Settings, needs: Needs) -> AbstractContextManager[tuple[Settings, bool]]:
    """Return a context of the settings to open, and of True if the signing key is missing.

    A mistyped place is refused here, because opening would make a new coordinator there.

    Raises Configuration when there is no database, or no key although the command signs something
    or checks what was signed.
    """
    from coordinator.config import without_password
    from coordinator.database.engine.open_database import is_new

    if needs == "nothing":
        return nullcontext((settings, False))
    if await is_new(settings.database_url):
        named = "--database" if settings.database else "--data-dir"
        place = without_password(settings.database) or settings.directory
        raise Configuration(
            f"there is no coordinator in {place}: name yours with {named}, or make a new"
            " one there with `coordinator serve`"
        )
    if not settings.database or settings.signing_key_file.is_file():
        return nullcontext((settings, False))
    if needs == "directory":
        raise Configuration(
            f"{settings.directory} holds no signing.key: name the data directory of a server of "
            "this"
            " database with --data-dir"
        )
    return _without_directory(settings)


@contextmanager
def _without_directory(settings: Settings) -> Iterator[tuple[Settings, bool]]:
    """Yield settings with a temporary data directory, for a command that needs only a database."""
    import tempfile

    import msgspec

    with tempfile.TemporaryDirectory(prefix="coordinator-") as folder:
        yield msgspec.structs.replace(settings, data_dir=folder), True
