"""Replay window and its pace: episodes are sealed into chunks, learners get tasks that read them,
and versions play matches.

    chunk full, or a long wait ──> the episodes are sealed: a blob, listed by hash in learn tasks
    too little learnt so far ──> a learn task
    too many episodes wait for learners ──> no new ones are handed out
    the newest version, at intervals ──> a match against the best one

Learners do not remove episodes from the window, so a learner that dies loses nothing, and several
learners do not disturb each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.database import datasets, experience, runs, tasks, versions
from coordinator.database.experience import ChunkRow, HarvestRow, Totals
from coordinator.database.runs import RunRow
from coordinator.experience.harvest import OPPONENT, experience_of
from coordinator.plan.merge_readiness import quorum_of
from coordinator.platform import Platform, PlatformService
from coordinator.rules.task_size import task_seed
from coordinator.runs.definition import price_of_flops
from coordinator.runs.queries import RunQueries
from coordinator.scheduling import lease_message
from coordinator.scheduling.lease_message import DATA, Spec
from shared.decoding import convert, decode
from shared.errors import VolunteerError
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.elo import MatchScore, Meeting, Rating, ratings
from shared.workloads.experience import EpisodeChunk, Pacing, warm_start

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.experience import MatchRow

POLL_S = 2.0
IDLE_S = 5.0  # time between rounds while no run makes its own data
SEAL_S = 20.0  # longest wait of games for others that fill the chunk
FILES_MAX = 512  # files in one chunk
WARM_STEPS = 1000  # steps of one warm-start task; the learning rate falls towards its end

log = structlog.get_logger("replay")


CERTAIN = 0.9  # probability of being stronger at which a challenger becomes the best
ANCHOR = 0  # the version whose rating is zero


class Replay(PlatformService):
    """Seals episodes, adds tasks and rates versions of the runs that make their own data."""

    def __init__(
        self,
        on: Platform,
        of_runs: RunQueries,
        seal: Callable[[RunRow, Sequence[bytes]], EpisodeChunk] | None = None,
    ) -> None:
        super().__init__(on)
        self._sealed = seal or (lambda run, files: experience_of(run).seal(files))
        self._runs = of_runs
        self._rated: dict[int, int] = {}  # run -> number of matches in its ratings
        self._specs: dict[int, Spec] = {}  # unchanging facts of a run, read once

    async def run(self, stop: asyncio.Event) -> None:
        """Tend every running run until `stop` is set."""
        watch = self._signals.watch()
        while not stop.is_set():
            watch.topics = ("runs",)  # no other topic matters while no run makes its own data
            for row in await self._db.read(lambda conn: runs.every(conn, ("running",))):
                try:
                    await self.tend(row.id)
                except (VolunteerError, OSError) as error:
                    log.warning("replay not tended", run=row.name, error=str(error))
                if row.id not in self._specs or self._specs[row.id].pacing is not None:
                    watch.topics = ("runs", "contributions", "versions", "queue")
            await watch.wait(IDLE_S if watch.topics == ("runs",) else POLL_S)

    async def tend(self, run_id: int) -> bool:
        """Seal due chunks, rate new matches, add due tasks. Return True if there is new work."""
        spec = self._specs.get(run_id)
        if spec is None:
            spec = await self._db.read(lambda conn: lease_message.read_spec(conn, run_id))
            self._specs[run_id] = spec
        pacing = spec.pacing
        if pacing is None:
            return False
        while await self._seal(run_id, pacing):
            pass
        await self._rate(run_id)
        changed = await self._db.write(lambda conn: self._pace(conn, spec, pacing))
        if changed:
            self._signals.notify("queue")
        return changed

    # --- sealing ---

    async def _seal(self, run_id: int, pacing: Pacing) -> bool:
        """Seal one chunk if it is due."""
        rows = await self._db.read(lambda conn: experience.unsealed(conn, run_id, FILES_MAX))
        rows = _due(rows, pacing.replay.chunk, self._clock.now())
        if not rows:
            return False
        run = await self._db.read(lambda conn: runs.by_id(conn, run_id))
        paths = [await self._blobs.local(row.sha256) for row in rows]
        loop = asyncio.get_running_loop()
        sealed = await loop.run_in_executor(
            self._threads, lambda: self._sealed(run, [path.read_bytes() for path in paths])
        )
        sha256 = await self._blobs.put_bytes(sealed.data)

        def store(conn: Connection) -> bool:
            now = self._clock.now()
            runs.by_id(conn, run_id, lock=True)
            chunk = ChunkRow(
                run_id=run_id,
                number=experience.next_chunk(conn, run_id),
                sha256=sha256,
                size=len(sealed.data),
                episodes=sum(row.episodes for row in rows),
                samples=sealed.samples,
                sealed_at=now,
                retired_at=None,
            )
            datasets.register(conn, [(sha256, chunk.size, "chunk")], now, self._blobs.serials)
            return experience.seal(conn, chunk, [row.contribution_id for row in rows])

        done = await self._db.write(store)
        if done:
            log.info("sealed", run=run.name, files=len(rows), samples=sealed.samples)
        return done

    # --- pacing ---

    def _pace(self, conn: Connection, spec: Spec, pacing: Pacing) -> bool:
        """Lock the run, insert its due tasks, and set how many episodes may be begun."""
        run, now = runs.by_id(conn, spec.id, lock=True), self._clock.now()
        if run.state != "running":
            return False
        _, live = self._runs.readiness(conn, run)
        totals = _merged(experience.totals(conn, run.id), quorum_of(spec.plan, live))
        batch = spec.file.task.batch_size
        window = experience.window(conn, run.id, pacing.replay.window, batch)
        if window:
            experience.retire(conn, run.id, window[0].number, now)
        if pacing.fresh:
            since = versions.get(conn, run.id, max(0, run.head - pacing.fresh)).created_at
            window = [chunk for chunk in window if chunk.sealed_at >= since]
        warm = warm_start(spec.file.train, pacing.warm_steps) * batch
        if totals.learnt < warm or (warm and not run.head):
            return self._add_warm(conn, spec, run, totals)  # no episodes before its end
        totals = msgspec.structs.replace(
            totals, planned=totals.planned - warm, learnt=totals.learnt - warm
        )
        learn_due = self._learn_due(spec, pacing, totals, window)
        changed = self._allow(
            conn, run, pacing, totals, starved=not learn_due and not totals.learning
        )
        while self._learn_due(spec, pacing, totals, window):
            totals = self._add_learn(conn, spec, run, totals, window)
            changed = True
        return self._add_match(conn, spec, run, totals) or changed

    def _allow(
        self, conn: Connection, run: RunRow, pacing: Pacing, totals: Totals, *, starved: bool
    ) -> bool:
        """Let actors begin at most `queue` episodes more than learners have used, or more than are
        sealed if the learners are `starved` of samples. Return True if the limit has risen.
        """
        per_episode = totals.samples / max(1, totals.sealed)
        used = totals.learnt / (pacing.replay.reuse * per_episode) if per_episode else 0.0
        used = totals.sealed if starved else used
        allowed = int(used) + pacing.replay.queue
        if allowed <= run.samples_total:
            return False
        runs.set_values(conn, run.id, samples_total=allowed)
        return True

    def _learn_due(
        self, spec: Spec, pacing: Pacing, totals: Totals, window: list[ChunkRow]
    ) -> bool:
        task = spec.file.task
        positions = spec.file.steps * task.batch_size
        return (
            totals.sealed >= pacing.replay.window_min
            and totals.learning < pacing.replay.learners
            and totals.planned + positions <= pacing.replay.reuse * totals.samples
            and sum(chunk.samples for chunk in window) >= task.batch_size
        )

    def _add_warm(self, conn: Connection, spec: Spec, run: RunRow, totals: Totals) -> bool:
        """Add the learn tasks of the warm start, which read no episodes."""
        pacing, changed = spec.pacing, False
        assert pacing is not None  # `tend` has checked this
        left = pacing.warm_steps - totals.planned // spec.file.task.batch_size
        # all steps are done, but updates were lost, or too few wait for a merge
        if left <= 0 and not totals.learning:
            left = min(WARM_STEPS, pacing.warm_steps)
        while totals.learning < pacing.replay.learners and left > 0:
            steps = min(WARM_STEPS, left)
            totals = self._add_learn(conn, spec, run, totals, [], steps)
            left, changed = left - steps, True
        return changed

    def _add_learn(
        self,
        conn: Connection,
        spec: Spec,
        run: RunRow,
        totals: Totals,
        window: list[ChunkRow],
        steps: int = 0,
    ) -> Totals:
        """Add a learn task with this number of steps, or with the run's usual number."""
        task, usual = spec.file.task, spec.file.steps
        steps = steps or min(usual, run.steps_provable or usual)
        start = experience.next_start(conn, run.id)
        positions = steps * task.batch_size
        data = DatasetManifest(
            name=f"{run.name} replay",
            kind="experience",
            licence=spec.file.licence,
            source="self-play",
            chunks=tuple(_ref(chunk) for chunk in window),
        )
        values = {
            "run_id": run.id,
            "kind": "learn",
            "start": start,
            "stop": start + positions,
            "seed": task_seed(run.seed, 0, start),
            "steps": steps,
            "batch_size": task.batch_size,
            "price_micro": run.price_micro * steps,
            "options": _options(data),
        }
        tasks.add_beside(conn, values)
        return msgspec.structs.replace(
            totals, planned=totals.planned + positions, learning=totals.learning + 1
        )

    def _add_match(self, conn: Connection, spec: Spec, run: RunRow, totals: Totals) -> bool:
        """Add a match of the newest version against the best, if it is due and no match runs;
        return True if it was added.
        """
        pacing = spec.pacing
        if pacing is None or not pacing.match_every or totals.measuring:
            return False
        best = run.best or 0
        _, last = experience.count_matches(conn, run.id)
        if run.head == best or run.head < last + pacing.match_every:
            return False
        other = versions.get(conn, run.id, best)
        data = DatasetManifest(
            name=f"{run.name} match",
            kind="weights",
            licence=spec.file.licence,
            source="",
            chunks=(),
            assets={OPPONENT: ChunkRef(sha256=other.published_sha256, size=other.size, items=1)},
            meta={OPPONENT: best},
        )
        flops = pacing.match_games * pacing.episode_flops
        values = {
            "run_id": run.id,
            "kind": "evaluate",
            "start": 0,  # every match plays the same fixed openings
            "stop": pacing.match_games,
            "seed": 0,
            "steps": pacing.match_games,
            "batch_size": 1,
            "price_micro": price_of_flops(run.price_micro, run.step_flops, flops),
            "options": _options(data),
        }
        tasks.add_beside(conn, values)
        return True

    # --- strength ---

    async def _rate(self, run_id: int) -> None:
        """Rate the versions after new matches."""
        count, _ = await self._db.read(lambda conn: experience.count_matches(conn, run_id))
        if count == self._rated.get(run_id, 0):
            return
        rows = await self._db.read(lambda conn: experience.matches_of(conn, run_id))
        loop = asyncio.get_running_loop()
        table = await loop.run_in_executor(self._threads, standing, rows)
        await self._db.write(lambda conn: self._store_rating(conn, run_id, table))
        self._rated[run_id] = len(rows)
        log.info("rated", run=run_id, matches=len(rows), best=table.best)
        self._signals.notify(f"run:{run_id}")

    def _store_rating(self, conn: Connection, run_id: int, table: RatingTable) -> None:
        figures = {
            version: {"elo": rating.elo, "elo_error": rating.error}
            for version, rating in table.ratings.items()
        }
        experience.measure(conn, run_id, figures, self._clock.now())
        runs.set_values(conn, run_id, best=table.best)


def opponents(conn: Connection, run_id: int) -> set[int]:
    """Return the opponents in running matches, whose files must stay."""
    numbers = set()
    for open_option in experience.open_matches(conn, run_id):
        data = decode(open_option).get(DATA)
        if data is not None:
            numbers.add(int(convert(data, DatasetManifest).meta[OPPONENT]))
    return numbers


def _due(rows: list[HarvestRow], chunk: int, now: float) -> list[HarvestRow]:
    """Return the files of games for the next chunk."""
    total = 0
    for count, row in enumerate(rows, 1):
        total += row.episodes
        if total >= chunk:
            return rows[:count]
    waited = bool(rows) and now - rows[0].at >= SEAL_S
    return rows if waited or len(rows) == FILES_MAX else []


def _merged(totals: Totals, quorum: int) -> Totals:
    """Return the totals with accepted learn tasks as unfinished while their merge is due, since an
    episode or a task begun now would use the version that the merge replaces.
    """
    if totals.merging < quorum:
        return totals
    return msgspec.structs.replace(totals, learning=totals.learning + totals.merging)


def _ref(chunk: ChunkRow) -> ChunkRef:
    return ChunkRef(sha256=chunk.sha256, size=chunk.size, items=chunk.episodes)


def _options(data: DatasetManifest) -> str:
    return msgspec.json.encode({DATA: data}).decode()


class RatingTable(msgspec.Struct, frozen=True, kw_only=True):
    """Ratings from all matches of a run."""

    ratings: dict[int, Rating]
    best: int


def standing(rows: Sequence[MatchRow]) -> RatingTable:
    """Return the ratings relative to version 0, and the best version: the last version that beat
    the best version before it.
    """
    met: dict[tuple[int, int], MatchScore] = {}
    best = ANCHOR
    for row in rows:
        before = met.get((row.version, row.against), MatchScore())
        score = MatchScore(
            wins=before.wins + row.wins,
            draws=before.draws + row.draws,
            losses=before.losses + row.losses,
        )
        met[row.version, row.against] = score
        if row.against == best and score.superiority >= CERTAIN:
            best = row.version
    meetings = [Meeting(one=one, other=other, score=score) for (one, other), score in met.items()]
    return RatingTable(ratings=ratings(meetings, ANCHOR), best=best)
