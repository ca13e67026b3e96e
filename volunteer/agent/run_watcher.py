"""Polls runs, versions, losses and credits for display; training does not depend on it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from shared.errors import NotFound, VolunteerError
from shared.protocol.accounts import RunInfo
from shared.protocol.heartbeat import RunBeat
from shared.protocol.versions import VersionInfo
from volunteer.agent.context import Parts
from volunteer.agent.shared_state import FATAL
from volunteer.control import events
from volunteer.control.events import Picture

GAP_S = 3.0  # between two rounds of questions
LISTING_S = 300.0  # the list of runs is asked for at least this often
FOLLOWED_MAX = 8


def merging_words(beat: RunBeat) -> str:
    """Return when the next version comes, as people say it."""
    if beat.state != "running":
        return f"the run is {beat.state}"
    count = f"{beat.needs} more contribution{'s' if beat.needs != 1 else ''}"
    if beat.merge_in_s is None:
        return f"merging after {count}" if beat.needs else "merging now"
    seconds = max(0, round(beat.merge_in_s))
    wait = f"{seconds // 60}:{seconds % 60:02}"
    return f"merging after {count} or {wait}" if beat.needs else "merging now"


class Follower:
    """Polls the coordinator for what is shown and not needed for training.

    `beats`, `credits` and `listing` say what has changed; the loop asks for the rest.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._beats: dict[str, RunBeat] = {}
        self._measured: dict[str, int] = {}  # run -> newest version whose loss was told
        self._due_runs: set[str] = set()
        self._due_me = True
        self._due_listing = False
        self._due = asyncio.Event()

    def beats(self, beats: tuple[RunBeat, ...]) -> None:
        """Tell what is new about the runs of the coordinator."""
        for beat in beats[:FOLLOWED_MAX]:
            before = self._beats.get(beat.run)
            if before == beat:
                continue
            self._beats[beat.run] = beat
            self._parts.desk.heard(beat.run, beat.version)
            self._parts.hub.emit(events.RunProgress(beat=beat, message=merging_words(beat)))
            if before is None or (before.version, before.loss) != (beat.version, beat.loss):
                self._due_runs.add(beat.run)
            if before is None or before.state != beat.state:
                self._due_listing = True
        if self._due_runs or self._due_listing:
            self._due.set()

    def credits(self) -> None:
        """The balance has changed."""
        self._due_me = True
        self._due.set()

    def listed(self, runs: tuple[RunInfo, ...]) -> None:
        self._parts.hub.emit(events.RunsListed(runs=runs))

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._due.clear()
            if self._due_me:
                self._due_me = False
                await self._try(self._ask_me())
            if self._due_listing:
                self._due_listing = False
                await self._try(self._ask_runs())
            while self._due_runs:
                await self._try(self._ask_versions(self._due_runs.pop()))
            await self._parts.clock.sleep(GAP_S)
            await self._parts.desk.unless(self._due.is_set, self._rest())

    async def _rest(self) -> None:
        timer = asyncio.ensure_future(self._parts.clock.sleep(LISTING_S))
        due = asyncio.ensure_future(self._due.wait())
        try:
            await asyncio.wait({timer, due}, return_when=asyncio.FIRST_COMPLETED)
            self._due_listing = self._due_listing or timer.done()
        finally:
            timer.cancel()
            due.cancel()
            self._due_me = self._due_me or self._parts.home.memory.show_name is not None

    async def _try(self, question: Coroutine[Any, Any, None]) -> None:
        try:
            await question
        except FATAL as error:
            self._parts.desk.give_up(error)
        except VolunteerError:
            pass  # it is asked again when something changes

    async def _ask_me(self) -> None:
        wanted = self._parts.home.memory.show_name
        if wanted is not None:
            await self._show_name(wanted)
        self._parts.hub.emit(events.Credits(me=await self._parts.api.me()))

    async def _show_name(self, public: bool) -> None:
        """Tell whether others may see the nickname; tried again with the next listing if there is
        no answer.
        """
        try:
            await self._parts.api.visibility(public)
        except NotFound:
            self._parts.hub.notice(
                "this coordinator cannot change who sees your nickname: ask its organiser",
                "warning",
            )
        if self._parts.home.memory.show_name is public:  # nobody thought better of it meanwhile
            self._parts.home.remember(show_name=None)

    async def _ask_runs(self) -> None:
        self.listed(await self._parts.api.runs())

    async def _ask_versions(self, run: str) -> None:
        """Losses measured since the last time; what was measured before we started keeps its own
        time.
        """
        after = self._measured.get(run)
        rows = await self._parts.api.versions(run, "" if after is None else str(after))
        pictures = await self._pictures(rows, first=after is None)
        listed = self._parts.hub.status.runs
        measure = next((info.measure for info in listed if info.name == run), "")
        for row in rows:
            if row.kind == "rollback" and after is not None:
                devices = tuple(device.id for device in self._parts.hub.status.devices)
                self._parts.residuals.forget(run, devices)
            if row.loss is None or (after is not None and row.version <= after):
                continue
            self._measured[run] = max(row.version, self._measured.get(run, 0))
            self._parts.hub.emit(
                events.LossMeasured(
                    at=row.created_at - self._parts.desk.offset_s if after is None else 0.0,
                    run=run,
                    version=row.version,
                    loss=row.loss,
                    mine=row.mine,
                    measure=measure,
                    sample=row.sample,
                    picture=pictures.get(row.version),
                )
            )

    async def _pictures(
        self, rows: tuple[VersionInfo, ...], *, first: bool
    ) -> dict[int, events.Picture]:
        """Return what the newest of the versions drew, and at first the oldest; without them
        everything goes on.
        """
        drawn = [(row.version, row.picture) for row in rows if row.picture is not None]
        found = {}
        for version, ref in {**dict(drawn[:1] if first else ()), **dict(drawn[-1:])}.items():
            if ref.size > FILE_BYTES_MAX:
                continue
            try:
                path = await self._parts.transfers.fetch(ref, lambda _: None)
                found[version] = await asyncio.to_thread(thumbnail, path)
            except FATAL:
                raise
            except (VolunteerError, OSError):
                continue  # it is only to look at
        return found


# What a version drew, made small enough for an event and a terminal.

FILE_BYTES_MAX = 8 << 20
SIDE = 72  # pixels, the longer one


def thumbnail(path: Path) -> Picture:
    """The upper left part of a PNG file, at most 72 pixels wide and high.

    Raises BadRequest for what is no picture.
    """
    import numpy as np

    from shared.workloads.data.png import read_png
    from shared.workloads.data.resize import corner, resize

    part = corner(read_png(path.read_bytes()))
    scale = min(1.0, SIDE / max(part.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in part.shape[:2])
    small = resize(part, height, width)
    colour = np.repeat(small[..., None], 3, axis=-1) if small.ndim == 2 else small
    return Picture(width=width, height=height, pixels=colour.tobytes())


# How much was sent and received, told every few seconds while it moves.

TRAFFIC_S = 10.0


async def keep_counting(parts: Parts) -> None:
    """Emit the counts when they have changed, until cancelled."""
    client, told = parts.api.client, (0, 0)
    while True:
        now = (client.sent_bytes, client.received_bytes)
        if now != told:
            told = now
            parts.hub.emit(
                events.Traffic(
                    sent_bytes=now[0],
                    received_bytes=now[1],
                    up_bytes_per_s=parts.transfers.up_bytes_per_s,
                    down_bytes_per_s=parts.transfers.down_bytes_per_s,
                )
            )
        await parts.clock.sleep(TRAFFIC_S)
