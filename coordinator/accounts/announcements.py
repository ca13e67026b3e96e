"""Announcements: sentences of the organiser, shown to every volunteer until read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.database import key_values, record, runs
from coordinator.rules.reports import line
from shared.decoding import decode
from shared.errors import BadRequest, Conflict, NotFound
from shared.protocol.heartbeat import ANNOUNCEMENTS_MAX, Announcement

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

CHARS_MAX = 300


class _AnnouncementList(msgspec.Struct, frozen=True, kw_only=True):
    """Announcements that are still shown, oldest first, and the number of the next one."""

    next_id: int = 1
    standing: tuple[Announcement, ...] = ()


class Announcements:
    """Stores the organiser's announcements."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def add(self, text: str, run: str = "", until: float | None = None) -> Announcement:
        """Announce a sentence to everybody. `until` is its end in UTC epoch seconds, None for no
        end; `run` is the run that it is about, "" for no run.

        Raises BadRequest for an empty, too long or unprintable text and for a past end, NotFound
        for an unknown run, Conflict while too many announcements are shown.
        """
        now = self._clock.now()
        if not text.strip() or line(text, CHARS_MAX) != text.strip():
            raise BadRequest(
                f"an announcement is one line of 1 to {CHARS_MAX} characters, without control "
                "characters"
            )
        if until is not None and until <= now:
            raise BadRequest("an announcement must end in the future")

        def announce(conn: Connection) -> Announcement:
            if run:
                runs.by_name(conn, run)
            announcements = self._standing(conn, lock=True)
            if len(announcements.standing) >= ANNOUNCEMENTS_MAX:
                raise Conflict(
                    f"{ANNOUNCEMENTS_MAX} announcements are shown: withdraw one with `coordinator "
                    "announce --withdraw ID`"
                )
            new = Announcement(
                id=announcements.next_id, text=text.strip(), run=run, at=now, until=until
            )
            self._put(
                conn,
                _AnnouncementList(
                    next_id=announcements.next_id + 1, standing=(*announcements.standing, new)
                ),
            )
            record.append(conn, "organiser", "announce", run, text, now)
            return new

        return await self._db.write(announce)

    async def withdraw(self, id: int) -> Announcement:
        """End an announcement. Raises NotFound."""

        def end(conn: Connection) -> Announcement:
            announcements = self._standing(conn, lock=True)
            announcement = next((one for one in announcements.standing if one.id == id), None)
            if announcement is None:
                raise NotFound(f"there is no announcement {id}: `coordinator announce` lists them")
            others = tuple(one for one in announcements.standing if one.id != id)
            self._put(conn, msgspec.structs.replace(announcements, standing=others))
            now = self._clock.now()
            record.append(conn, "organiser", "announce.withdraw", str(id), announcement.text, now)
            return announcement

        return await self._db.write(end)

    async def standing(self) -> tuple[Announcement, ...]:
        """Return the announcements that are still shown, the oldest first."""
        return (await self._db.read(self._standing)).standing

    def _standing(self, conn: Connection, *, lock: bool = False) -> _AnnouncementList:
        if lock:
            key_values.put_new(conn, key_values.ANNOUNCEMENTS, "{}")
        text = key_values.get(conn, key_values.ANNOUNCEMENTS, lock=lock)
        announcements = decode(text.encode(), _AnnouncementList) if text else _AnnouncementList()
        now = self._clock.now()
        current = (a for a in announcements.standing if a.until is None or a.until > now)
        return msgspec.structs.replace(announcements, standing=tuple(current))

    def _put(self, conn: Connection, announcements: _AnnouncementList) -> None:
        key_values.put(conn, key_values.ANNOUNCEMENTS, msgspec.json.encode(announcements).decode())
