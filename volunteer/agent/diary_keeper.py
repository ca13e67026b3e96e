"""Keeps the diary of the account in a file, and tells of each milestone once."""

from __future__ import annotations

import logging
from pathlib import Path

from shared.clock import Clock
from shared.errors import Configuration, StorageFull
from volunteer.control import events
from volunteer.control.event_bus import Hub
from volunteer.files import read_record, set_aside, write_record
from volunteer.stats.diary import Diary, noted

log = logging.getLogger(__name__)

WRITE_S = 60.0  # between two writings of a day that is known already


class DiaryKeeper:
    """The diary of one account, read once and written as the account grows."""

    def __init__(self, path: Path, hub: Hub, clock: Clock) -> None:
        self._path = path
        self._hub = hub
        self._clock = clock
        self._written_at = float("-inf")
        self.diary = self._read()

    async def run(self) -> None:
        """Follow the account until cancelled."""
        with self._hub.subscribe() as stream:
            async for event in stream:
                if isinstance(event, events.Credits):
                    self._see(event)

    def _see(self, event: events.Credits) -> None:
        before = self.diary
        self.diary, passed = noted(before, event.me, self._clock.now())
        days = len(self.diary.days) != len(before.days) or not before.days
        changed = days or passed or self.diary.marks != before.marks
        due = self._clock.monotonic() - self._written_at >= WRITE_S
        if self.diary != before and (changed or due):
            self._write()
        for mark in passed:
            self._hub.emit(events.Celebrated(message=mark.sentence))

    def _read(self) -> Diary:
        try:
            return read_record(self._path, Diary) or Diary()
        except Configuration:
            set_aside(self._path)  # nothing in it is worth refusing to work
            return Diary()

    def _write(self) -> None:
        self._written_at = self._clock.monotonic()
        try:
            write_record(self._path, self.diary)
        except StorageFull as error:
            log.warning("the diary is not kept: %s", error.message)
