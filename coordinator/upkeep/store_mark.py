"""Mark of a blob store: the database whose blobs it holds, and the last turn that database took.

The file `owner` of a store and the database carry the same random mark. While a server runs it
takes a new turn each minute, a random number written to the database first, then to the store. A
server that finds a turn in the store that its database never took works on a copy of the database,
or on one that lost transactions: it deletes nothing until its organiser decides.

    same mark, known turn       this database's store
    same mark, unknown turn     this database lost its newest transactions, if the turn was taken at
                                its own address; otherwise a copy of it used the store
    other mark, other key       another coordinator's store
    no mark                     a new store, if it holds no blob that this database does not know
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from coordinator.config import without_password
from coordinator.database import datasets, key_values, unreferenced_blobs
from coordinator.database.engine.open_database import identity
from shared.decoding import decode
from shared.errors import Configuration
from shared.proofs.signing import fingerprint

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from coordinator.storage.blobs import BlobStore
    from shared.clock import Clock
    from shared.proofs.signing import SigningKey

RENEW_S = 60.0
LEASE_S = 180.0  # a server that took no turn for this long has ended
TURNS_MAX = 64  # turns that the database remembers: each replica may take some at one moment
RECOVER = "stop its servers, then `coordinator migrate --recovered`"
TAKE_OVER = (
    "name this database's own store with --blobs, or the store's own database with --database; if "
    "no other server will ever use the store again, `coordinator migrate --take-over` makes it "
    "this database's"
)


class StoreMark(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file `owner` of a store."""

    key: str  # fingerprint of the coordinator's key
    mark: str
    turn: str
    database: str  # identity that a copy of the database does not share; "" = it has none
    place: str  # address of the database, for people
    until: float  # end of a server's lease
    contested: bool = False  # two databases took turns


class _Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the database keeps about its blob store."""

    mark: str
    store: str  # address of the store that carries the mark; "" = none
    turns: tuple[str, ...]
    database: str
    lost: str  # lost transactions, in words: nothing is deleted meanwhile; "" = none


class _Problem(NamedTuple):
    """Reason why a store is not this database's, and the advice for its organiser."""

    reason: str  # "" = the store is this database's
    advice: str = TAKE_OVER
    older: bool = False  # this database lost its newest transactions


class StoreMarks:
    """Marks the blob store of this database, and refuses another database's store."""

    def __init__(
        self, settings: Settings, db: Database, blobs: BlobStore, key: SigningKey, clock: Clock
    ) -> None:
        self._db, self._blobs, self._clock = db, blobs, clock
        self._key = fingerprint(key.public_key)
        self._store = _address(settings.blobs_url)
        self._place = f"{without_password(settings.database_url)} on {socket.gethostname()}"

    async def claim(self) -> None:
        """Mark a new store. Raises Configuration for a store that is not this database's."""
        memory, mark = await self._db.read(_memory), await stored_mark(self._blobs, self._store)
        if mark is None:
            await self._check_unmarked(memory)
            await self._mark(await self._db.write(_own_mark))
        elif (problem := self._problem(memory, mark)).reason:
            raise Configuration(f"{problem.reason}: {problem.advice}")

    async def renew(self) -> bool:
        """Take a new turn if the last turn is old; return False, so that nothing is deleted, if the
        store is not this database's alone or transactions were lost. The reason is stored for the
        alerts.
        """
        if not (await self._db.read(_memory)).mark:
            await self.claim()
        memory, mark = await self._db.read(_memory), await stored_mark(self._blobs, self._store)
        if mark is None:
            problem = f"the file `owner` of {self._store} is gone"
        else:
            reason, advice, older = self._problem(memory, mark)
            problem = f"{reason}: {advice}" if older else reason
            if not problem and mark.contested:
                problem = self._foreign(mark)
        await self._db.write(lambda conn: _note(conn, problem))
        if mark is None:
            return False
        if problem:
            if mark.mark == memory.mark and not mark.contested:
                await self._write(msgspec.structs.replace(mark, contested=True))
            return False
        if mark.until - self._clock.now() < LEASE_S - RENEW_S / 2:
            await self._mark(memory.mark, LEASE_S)
        return not memory.lost

    async def release(self) -> None:
        """End the lease of a server that stops; replicas that still run take a new turn."""
        memory, mark = await self._db.read(_memory), await stored_mark(self._blobs, self._store)
        if mark is not None and not mark.contested and not self._problem(memory, mark).reason:
            await self._write(msgspec.structs.replace(mark, until=self._clock.now()))

    async def take_over(self, *, recovered: bool = False) -> None:
        """Make the store this database's from now on, with a new mark.

        Raises Configuration while a server of another database uses it, and for a database that
        lost its newest transactions, except with `recovered`, after a recovery of this database.
        """
        memory, mark = await self._db.read(_memory), await stored_mark(self._blobs, self._store)
        if mark is not None and not recovered:
            problem = self._problem(memory, mark)
            if problem.older:
                raise Configuration(f"{problem.reason}: {problem.advice}")
            if problem.reason:
                check_unused(self._store, mark, mark.key, self._clock.now())
        await self._mark(await self._db.write(_new_mark))

    async def _check_unmarked(self, memory: _Memory) -> None:
        """Raise Configuration unless this store without a mark is new or holds this database's
        blobs.
        """
        names = await self._db.read(lambda conn: set(datasets.all_registered(conn)))
        announced = await self._db.read(unreferenced_blobs.names)
        stored = {entry.sha256 async for entry in self._blobs.entries()}
        if not stored and memory.store == self._store:
            raise Configuration(
                f"{self._store} is empty, where the blobs of {self._place} were: mount its volume, "
                "or restore a backup"
            )
        if memory.store or (names and not stored):
            raise Configuration(
                f"{self._store} is not the blob store of this database, {self._place}, which last "
                f"used {memory.store or 'another'}: give every server and command the same --blobs "
                "and AWS_ENDPOINT_URL; a copy of the store needs its file `owner`, too"
            )
        if stored - names - announced:
            raise Configuration(
                f"{self._store} holds blobs that {self._place} does not know: {TAKE_OVER}"
            )

    def _problem(self, memory: _Memory, mark: StoreMark) -> _Problem:
        """Return why the store is not this database's; an empty reason if it belongs to this
        database.
        """
        if mark.key != self._key:
            return _Problem(
                f"{self._store} is the blob store of the key {mark.key} and of the database "
                f"{mark.place}, this is {self._key} and {self._place}"
            )
        if mark.mark != memory.mark or mark.database != memory.database:
            return _Problem(self._foreign(mark))
        if mark.turn in memory.turns:
            return _Problem("")
        if mark.place == self._place:
            return _Problem(
                f"{self._place} lost its newest transactions: {self._store} was last used by a "
                "later state of it; nothing is deleted",
                RECOVER,
                older=True,
            )
        return _Problem(
            self._foreign(mark),
            f"if this is that database, which moved and lost its newest transactions, {RECOVER}; "
            f"otherwise {TAKE_OVER}",
        )

    def _foreign(self, mark: StoreMark) -> str:
        return (
            f"{self._store} belongs to the database {mark.place}, this is {self._place}: nothing "
            "is deleted"
        )

    async def _mark(self, mark: str, lease_s: float = 0.0) -> None:
        turn = secrets.token_hex(8)
        memory = await self._db.write(lambda conn: _take_turn(conn, turn))
        await self._write(
            StoreMark(
                key=self._key,
                mark=mark,
                turn=turn,
                database=memory.database,
                place=self._place,
                until=self._clock.now() + lease_s,
            )
        )
        if memory.store != self._store:
            await self._db.write(
                lambda conn: key_values.put(conn, key_values.STORE_MARKED, self._store)
            )

    async def _write(self, mark: StoreMark) -> None:
        await self._blobs.set_owner(msgspec.json.encode(mark).decode())


async def stored_mark(blobs: BlobStore, store: str = "the blob store") -> StoreMark | None:
    """Return the mark of a store; None for a store without a mark. Raises Configuration for an
    unreadable mark.
    """
    text = await blobs.owner()
    try:
        return decode(text, StoreMark) if text else None
    except ValueError as error:
        raise Configuration(f"the file `owner` of {store} cannot be read") from error


def check_unused(store: str, mark: StoreMark, key: str, now: float) -> None:
    """Raise Configuration for a store of another key, or a store that a server uses at this
    moment.
    """
    if mark.key != key:
        raise Configuration(
            f"{store} is the blob store of the key {mark.key}, not of {key}: name another --blobs"
        )
    if mark.until > now and not mark.contested:
        raise Configuration(
            f"{store} is in use by the database {mark.place}: stop its servers, then wait "
            f"{mark.until - now:.0f} s"
        )


def _address(url: str) -> str:
    """Return the address of a store, for people."""
    if "://" not in url:
        return str(Path(url).expanduser().absolute())
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return without_password(url) + (f" at {without_password(endpoint)}" if endpoint else "")


def _memory(conn: Connection) -> _Memory:
    turns = key_values.get(conn, key_values.STORE_TURNS)
    return _Memory(
        mark=key_values.get(conn, key_values.STORE) or "",
        store=key_values.get(conn, key_values.STORE_MARKED) or "",
        turns=decode(turns, tuple[str, ...]) if turns else (),
        database=identity(conn),
        lost=key_values.get(conn, key_values.LOST) or "",
    )


def _own_mark(conn: Connection) -> str:
    """Return the database's mark; the first of several servers makes it."""
    key_values.locked(conn, key_values.STORE_TURNS)
    return key_values.get(conn, key_values.STORE) or _new_mark(conn)


def _new_mark(conn: Connection) -> str:
    mark = secrets.token_hex(16)
    key_values.put(conn, key_values.STORE, mark)
    return mark


def _take_turn(conn: Connection, turn: str) -> _Memory:
    key_values.locked(conn, key_values.STORE_TURNS)
    memory = _memory(conn)
    turns = [turn, *memory.turns][:TURNS_MAX]
    key_values.put(conn, key_values.STORE_TURNS, msgspec.json.encode(turns).decode())
    return memory


def _note(conn: Connection, problem: str) -> None:
    if (key_values.get(conn, key_values.STORE_TROUBLE) or "") != problem:
        key_values.put(conn, key_values.STORE_TROUBLE, problem)
