"""Watcher of runs, versions, losses and credits, for screens; training does not depend on it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shared.clock import Clock
from shared.errors import NotFound, VolunteerError
from shared.protocol import endpoints
from shared.protocol.accounts import VisibilityRequest
from shared.protocol.base import Standstill
from shared.protocol.heartbeat import Announcement, HeartbeatReply, RunBeat
from shared.protocol.versions import VersionInfo
from shared.sentences import Sentence, plural
from shared.text import printable
from shared.workloads.declaration import Measure
from volunteer.agent.lifecycle import FATAL
from volunteer.agent.verdict_news import Verdicts
from volunteer.agent.workplace import Workplace
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.control.events import Picture
from volunteer.control.status import lasting_standstill
from volunteer.i18n.coordinator import standstill_sentence
from volunteer.net.api import ASK_S
from volunteer.net.client import Client
from volunteer.net.transfers import Transfers

GAP_S = 3.0  # wait between two rounds of requests
LISTING_S = 300.0  # longest time between two requests of the list of runs
FOLLOWED_MAX = 8
TEXT_CHARS = 400  # longest shown announcement


def merging_words(beat: RunBeat) -> str:
    """Return the sentence on when the next version comes, or why no version comes."""
    if beat.standstill is not None:
        return standstill_sentence(beat.standstill)
    if beat.state != "running":
        return Sentence("the run is {state}", state=beat.state)
    if not beat.needs:
        return Sentence("merging now")
    if beat.merge_in_s is None:
        return plural(
            "next version after {n} more contribution",
            "next version after {n} more contributions",
            beat.needs,
        )
    seconds = max(0, round(beat.merge_in_s))
    wait = f"{seconds // 60}:{seconds % 60:02}"
    return plural(
        "next version after {n} more contribution or {time}",
        "next version after {n} more contributions or {time}",
        beat.needs,
        time=wait,
    )


def _printable(announcement: Announcement) -> Announcement:
    """Return an announcement with only printable characters."""
    return msgspec.structs.replace(
        announcement,
        text=printable(announcement.text, TEXT_CHARS),
        run=printable(announcement.run, 64),
    )


@dataclass(eq=False, kw_only=True)
class RunWatcher:
    """Announces facts that screens show and training does not need: heartbeats report that they
    changed, and the loop requests the details.
    """

    place: Workplace
    verdicts: Verdicts
    _beats: dict[str, RunBeat] = field(default_factory=dict, init=False)
    # run -> newest version whose loss was announced
    _measured: dict[str, int] = field(default_factory=dict, init=False)
    _open: frozenset[str] = field(default_factory=frozenset, init=False)  # names of open runs
    _balance: tuple[int | None, int | None] = field(default=(None, None), init=False)
    _announced: tuple[Announcement, ...] = field(default=(), init=False)
    _due_runs: set[str] = field(default_factory=set, init=False)
    _due_me: bool = field(default=True, init=False)
    _due_listing: bool = field(default=False, init=False)
    _due: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _listed_at: float = field(default=float("-inf"), init=False)  # by the monotonic clock

    def notice(self, message: str, level: str = "info") -> None:
        """Announce a sentence to the owner."""
        self.place.bus.notice(message, level)

    def apply_heartbeat(self, reply: HeartbeatReply) -> None:
        """Announce the content of a heartbeat reply: verdicts, runs, the balance."""
        self.verdicts.apply(reply.news, me=reply.me, until=reply.news_until)
        self._apply_beats(reply.runs)
        self._announced = reply.announcements
        self._announce()
        balance = (reply.earned_micro, reply.pending_micro)
        if balance != (None, None) and balance != self._balance:
            self._balance = balance
            if reply.me is None:  # the coordinator sent no account
                self.request_balance()

    def read_announcements(self) -> None:
        """Mark the current announcements as read."""
        self.place.store.home.remember(
            read=tuple(announcement.id for announcement in self._announced)
        )
        self._announce()

    def _announce(self) -> None:
        """Announce the unread announcements, when they have changed."""
        read = set(self.place.store.home.memory.read)
        unread = tuple(
            _printable(announcement)
            for announcement in self._announced
            if announcement.id not in read
        )
        if unread != self.place.bus.status.announcements:
            self.place.bus.emit(events.Announced(announcements=unread))

    def _apply_beats(self, beats: tuple[RunBeat, ...]) -> None:
        names = frozenset(beat.run for beat in beats)
        if names != self._open:
            self._due_listing = True  # a run is new (perhaps not among the followed) or has ended
        self._open = names
        for reported in beats[:FOLLOWED_MAX]:
            standstill = lasting_standstill(
                reported.standstill, reported.run, self.place.bus.status
            )
            beat = msgspec.structs.replace(reported, standstill=standstill)
            before = self._beats.get(beat.run)
            if before == beat:
                continue
            self._beats[beat.run] = beat
            self.place.bus.emit(events.RunProgress(beat=beat, message=merging_words(beat)))
            self._announce_standstill(beat, None if before is None else before.standstill)
            if before is None or before.version < beat.version:
                self.place.life.notify()
            if before is None or (before.version, before.loss) != (beat.version, beat.loss):
                self._due_runs.add(beat.run)
            if before is None or (before.version, before.state) != (beat.version, beat.state):
                self._due_listing = True  # its progress has changed too
        if self._due_runs or self._due_listing:
            self._due.set()

    def _announce_standstill(self, beat: RunBeat, before: Standstill | None) -> None:
        """Announce the cause of a standstill when it begins or changes, and its end."""
        standstill = beat.standstill
        if standstill is None and before is not None and beat.state == "running":
            self.notice(Sentence("{run} goes on", run=beat.run))
        if standstill is not None and (before is None or before.cause != standstill.cause):
            why = standstill_sentence(standstill)
            sentence = Sentence("{run} does not go on: {why}", run=beat.run, why=why)
            self.notice(sentence, "warning")

    def request_balance(self) -> None:
        """Request the balance soon: it has changed."""
        self._due_me = True
        self._due.set()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            self._due.clear()
            if self._due_me:
                self._due_me = False
                await self._try(self._request_me())
            if self._due_listing or self._listing_age_s() >= LISTING_S:
                self._due_listing = False
                self._listed_at = self.place.life.clock.monotonic()
                await self._try(self._request_runs())
            while self._due_runs:
                await self._try(self._request_versions(self._due_runs.pop()))
            await self.place.life.clock.sleep(GAP_S)
            await self.place.life.unless(self._due.is_set, self._wait_for_news())

    async def _wait_for_news(self) -> None:
        """Wait for news, or until the list of runs is too old."""
        left_s = max(0.0, LISTING_S - self._listing_age_s())
        timer = asyncio.ensure_future(self.place.life.clock.sleep(left_s))
        news = asyncio.ensure_future(self._due.wait())
        try:
            await asyncio.wait({timer, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            news.cancel()
            self._due_me = self._due_me or self.place.store.home.memory.show_name is not None

    def _listing_age_s(self) -> float:
        return self.place.life.clock.monotonic() - self._listed_at

    async def _try(self, request: Coroutine[Any, Any, None]) -> None:
        try:
            await request
        except FATAL as error:
            self.place.life.give_up(error)
        except VolunteerError:
            pass  # requested again after the next change

    async def _request_me(self) -> None:
        shown_name = self.place.store.home.memory.show_name
        if shown_name is not None:
            await self._show_name(shown_name)
        me = await self.place.remote.api.query(endpoints.ME)
        self.place.bus.emit(events.Credits(me=me))

    async def _show_name(self, public: bool) -> None:
        """Send the setting `public` of the nickname; a failed request is repeated with the next
        request of the account.
        """
        try:
            request = VisibilityRequest(public=public)
            await self.place.remote.api.call(endpoints.VISIBILITY, body=request, patience_s=ASK_S)
        except NotFound:
            self.place.bus.notice(
                Sentence(
                    "this coordinator cannot change who sees your nickname: ask its organiser"
                ),
                "warning",
            )
        if self.place.store.home.memory.show_name is public:  # unchanged meanwhile
            self.place.store.home.remember(show_name=None)

    async def _request_runs(self) -> None:
        runs = await self.place.remote.api.query(endpoints.RUNS)
        self.place.bus.emit(events.RunsListed(runs=runs))
        self.place.life.notify()  # a claim that lists runs may add a new run

    async def _request_versions(self, run: str) -> None:
        """Announce the losses measured since the last call, each with its own time."""
        after = self._measured.get(run)
        cursor = "" if after is None else str(after)
        rows = await self.place.remote.api.query(endpoints.VERSIONS, run=run, cursor=cursor)
        pictures = await self._pictures(rows, first=after is None)
        listed = self.place.bus.status.runs
        measure: Measure = next((info.measure for info in listed if info.name == run), "loss")
        for row in rows:
            if row.loss is None:
                continue
            self._measured[run] = row.version
            self.place.bus.emit(
                events.LossMeasured(
                    version=row.version,
                    loss=row.loss,
                    mine=row.mine,
                    sample=row.sample,
                    at=self.place.server_clock.local(row.created_at) if after is None else 0.0,
                    run=run,
                    measure=measure,
                    picture=pictures.get(row.version),
                )
            )

    async def _pictures(
        self, rows: tuple[VersionInfo, ...], *, first: bool
    ) -> dict[int, events.Picture]:
        """Return thumbnails by version: the newest picture, the `first` time the oldest too."""
        drawn = [(row.version, row.picture) for row in rows if row.picture is not None]
        pictures = {}
        for version, ref in {**dict(drawn[:1] if first else ()), **dict(drawn[-1:])}.items():
            if ref.size > FILE_BYTES_MAX:
                continue
            try:
                path = await self.place.remote.transfers.fetch(ref, lambda _: None)
                pictures[version] = await asyncio.to_thread(thumbnail, path)
            except FATAL:
                raise
            except (VolunteerError, OSError):
                continue  # the picture is only for display
        return pictures


# Pictures of versions, made small enough for an event and a terminal.

FILE_BYTES_MAX = 8 << 20
SIDE = 72  # longer side in pixels


def thumbnail(path: Path) -> Picture:
    """Return the upper left part of a PNG, shrunk to at most 72 x 72 pixels. Raises BadRequest if
    it is unreadable.
    """
    from shared.workloads.data.image_files import read_png
    from shared.workloads.data.resize import corner, shrunk

    small = shrunk(corner(read_png(path.read_bytes())), SIDE)
    return Picture(width=small.shape[1], height=small.shape[0], pixels=small.tobytes())


# Bytes sent and received, announced every few seconds while they change.

TRAFFIC_S = 10.0


async def announce_traffic(
    transfers: Transfers, client: Client, bus: EventBus, clock: Clock
) -> None:
    """Emit the counts when they have changed, until cancelled."""
    sent = (0, 0)
    while True:
        now = (client.sent_bytes, client.received_bytes)
        if now != sent:
            sent = now
            bus.emit(
                events.Traffic(
                    sent_bytes=now[0],
                    received_bytes=now[1],
                    up_bytes_per_s=transfers.up_bytes_per_s,
                    down_bytes_per_s=transfers.down_bytes_per_s,
                )
            )
        await clock.sleep(TRAFFIC_S)
