"""Public runs, and their part of the public page.

A run file sets `[page] visible`; by default a run is shown unless its server admits people by
invitation only. The pages answer for a hidden run as for a run that does not exist.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import evaluations, experience, record, runs, statistics, versions
from coordinator.database.statistics import Stretch
from coordinator.rules import run_file
from coordinator.runs.model_card import KNOWN_LICENCES
from coordinator.ttl_cache import REST, CachedValue, KeyedCache
from shared.errors import NotFound
from shared.nearest_name import nearest
from shared.text import escaped
from shared.workloads.base import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from coordinator.database.evaluations import EvaluationRow, VersionLoss, VersionSample
    from coordinator.database.runs import RunRow
    from coordinator.database.versions import VersionRow
    from shared.clock import Clock
    from shared.protocol.heartbeat import Announcement

FRESH_S = 1.0
# Wait before a run's whole history is summed again, as a multiple of the duration of the last time.
HISTORY_REST = 500.0
# Points of a curve: at least CURVE if there are enough versions, and at most twice as many.
CURVE = 120
STRETCH_S_MIN = 60.0
STORY = 25  # most versions whose samples a run's page shows in turn, evenly spread
WORK_MAX = 256  # volunteers whose work over time is cached
NEWS = 8  # newest items of news that a page shows
NEWS_WORDS = {  # actions of the record, and the words of their news
    "run.start": "started",
    "run.pause": "paused",
    "run.resume": "resumed",
    "run.stop": "ended",
    "run.complete": "ended",
}
LOOKED_FOR = 50  # versions, spread over the run, that are searched for samples


@lru_cache(maxsize=256)
def _visible(file: str) -> bool | None:
    return run_file.decode(file).page.visible


def shown(run: RunRow, settings: Settings) -> bool:
    """Return True if a run is public: a draft never is."""
    visible = _visible(run.file)
    return (
        run.state != "draft"
        and settings.public_page
        and (not settings.by_invitation if visible is None else visible)
    )


def may_be_had(run: RunRow) -> bool:
    """Return True if the licences of a run's model and of its base model let everybody have it."""
    file = run_file.decode(run.file)
    base = load(file.workload).origin(file.model)
    licences = (file.licence, *((base.licence,) if base is not None else ()))
    return all(licence.strip().lower() in KNOWN_LICENCES for licence in licences)


def spread(head: int, interval: int, count: int) -> range:
    """Return versions spread evenly up to the head: at least `count`, at most twice as many; every
    `interval`-th if that makes fewer than `count`. A growing run drops every second point, and the
    others keep their places.
    """
    step = interval
    while head // step > 2 * count:
        step *= 2
    return range(0, head + 1, step)


class PublicVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version as the page shows it."""

    row: VersionRow
    evaluation: EvaluationRow
    before: int | None  # nearest older version with a sample
    after: int | None  # nearest newer version with a sample


class News(msgspec.Struct, frozen=True, kw_only=True):
    """Start, pause, resumption or end of a run, or an announcement."""

    at: float
    what: str  # "paused", for example; "" for an announcement
    text: str  # reason of the change, or the announcement


class PublicRuns:
    """Reads the public facts of the public runs."""

    def __init__(self, db: Database, clock: Clock, settings: Settings) -> None:
        self._db = db
        self._clock = clock
        self._settings = settings
        self._listing = CachedValue(self._read, FRESH_S, clock)
        rest = HISTORY_REST
        self._stretches: KeyedCache[int, tuple[Stretch, ...]] = KeyedCache(
            FRESH_S, clock, rest=rest
        )
        self._strength: KeyedCache[int, tuple[tuple[int, float, float], ...]] = KeyedCache(
            FRESH_S, clock, rest=rest
        )
        self._losses: KeyedCache[tuple[int, float | None], tuple[VersionLoss, ...]] = KeyedCache(
            FRESH_S, clock, rest=REST
        )
        self._work: KeyedCache[str, tuple[Stretch, ...]] = KeyedCache(
            FRESH_S, clock, rest=HISTORY_REST, most=WORK_MAX
        )
        self._story: KeyedCache[int, tuple[VersionSample, ...]] = KeyedCache(
            FRESH_S, clock, rest=REST
        )

    async def _read(self) -> tuple[tuple[RunRow, ...], bool]:
        rows = await self._db.read(runs.every)
        visible = tuple(row for row in rows if shown(row, self._settings))
        return visible, len(visible) == sum(row.state != "draft" for row in rows)

    async def listing(self) -> tuple[RunRow, ...]:
        """Return the public runs, newest first; the listing may be a second old."""
        return (await self._listing.get())[0][::-1]

    async def all_shown(self) -> bool:
        """Return True if this server hides no run."""
        return (await self._listing.get())[1]

    async def find(self, name: str) -> RunRow:
        """Find a public run. Raises NotFound with the nearest name."""
        rows = await self.listing()
        for row in rows:
            if row.name == name:
                return row
        near = nearest(name, [row.name for row in rows])
        hint = f'; did you mean "{near}"?' if near else ""
        raise NotFound(f'there is no run called "{escaped(name)}" here{hint}')

    async def version(self, run: RunRow, number: int) -> PublicVersion:
        """Return one version with its neighbours. Raises NotFound."""

        def read(conn: Connection) -> PublicVersion:
            row = versions.get(conn, run.id, number)
            evaluation = evaluations.evaluation(conn, run.id, number)
            before, after = evaluations.neighbours(conn, run.id, number)
            return PublicVersion(row=row, evaluation=evaluation, before=before, after=after)

        return await self._db.read(read)

    async def picture(self, run: RunRow, number: int) -> str:
        """Return the hash of the picture that a version drew. Raises NotFound."""

        def read(conn: Connection) -> str | None:
            versions.get(conn, run.id, number)
            return evaluations.evaluation(conn, run.id, number).sample_sha256

        if sha256 := await self._db.read(read):
            return sha256
        raise NotFound(f"version {number} drew no picture")

    async def story(self, run: RunRow) -> tuple[VersionSample, ...]:
        """Return samples evenly spread over a run, including the first and the newest."""

        def read(conn: Connection) -> tuple[VersionSample, ...]:
            file = run_file.decode(run.file).evaluation
            interval = max(1, file.every * file.sample_every)
            numbers = spread(runs.by_id(conn, run.id).head, interval, LOOKED_FOR)
            samples = evaluations.some_sampled(conn, run.id, numbers)
            last = len(samples) - 1
            if last >= STORY:
                samples = [samples[n * last // (STORY - 1)] for n in range(STORY)]
            return tuple(evaluations.samples(conn, run.id, samples))

        return await self._story.get(run.id, lambda: self._db.read(read))

    async def news(self, run: RunRow, announced: Sequence[Announcement]) -> tuple[News, ...]:
        """Return the starts, pauses and ends of a run, and the announcements, newest first."""

        def read(conn: Connection) -> list[News]:
            lines = record.about(conn, run.name, NEWS_WORDS, NEWS)
            return [
                News(at=line.at, what=NEWS_WORDS[line.action], text=line.detail) for line in lines
            ]

        news = await self._db.read(read)
        news += [
            News(at=announcement.at, what="", text=announcement.text)
            for announcement in announced
            if announcement.run in ("", run.name)
        ]
        return tuple(sorted(news, key=lambda item: -item.at)[:NEWS])

    async def losses(self, run: RunRow, newest: float | None) -> tuple[VersionLoss, ...]:
        """Return losses evenly spread over a run, oldest first; cached for each `newest` loss."""

        def read(conn: Connection) -> tuple[VersionLoss, ...]:
            interval = max(1, run_file.decode(run.file).evaluation.every)
            numbers = spread(runs.by_id(conn, run.id).head, interval, CURVE)
            return tuple(evaluations.some_measured(conn, run.id, numbers))

        return await self._losses.get((run.id, newest), lambda: self._db.read(read))

    async def strength(self, run: RunRow) -> tuple[tuple[int, float, float], ...]:
        """Return number, Elo and the error of Elo for each version that played matches, oldest
        first.
        """

        def read(conn: Connection) -> tuple[tuple[int, float, float], ...]:
            ratings = experience.measured(conn, run.id)
            return tuple(
                (version, values["elo"], values.get("elo_error", 0.0))
                for version, values in sorted(ratings.items())
                if "elo" in values
            )

        return await self._strength.get(run.id, lambda: self._db.read(read))

    async def work_of(self, volunteer_id: str) -> tuple[Stretch, ...]:
        """Return a volunteer's work on the public runs over time, from its first contribution."""
        shown_ids = [row.id for row in await self.listing()]

        def read(conn: Connection) -> tuple[Stretch, ...]:
            now = self._clock.now()
            return tuple(statistics.work_over_time(conn, volunteer_id, shown_ids, now))

        return await self._work.get(volunteer_id, lambda: self._db.read(read))

    async def activity(self, run: RunRow) -> tuple[Stretch, ...]:
        """Return the work of a run over time, in at most `STRETCHES` stretches of equal length."""

        def read(conn: Connection) -> tuple[Stretch, ...]:
            row = runs.by_id(conn, run.id)
            began, ended = row.started_at, row.ended_at
            if began is None:
                return ()
            width = max(
                STRETCH_S_MIN, ((ended or self._clock.now()) - began) / (statistics.STRETCHES - 1)
            )
            return tuple(statistics.stretches(conn, [run.id], began, width))

        return await self._stretches.get(run.id, lambda: self._db.read(read))
