"""Queries about a run: its state, its history, its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.database import (
    contributions,
    datasets,
    evaluations,
    experience,
    runs,
    versions,
    volunteers,
)
from coordinator.database.monitoring import machine_hours
from coordinator.database.runs import RunRow
from coordinator.database.standings import CostOfChecks, cost
from coordinator.database.volunteers import worker_state
from coordinator.plan import privacy
from coordinator.plan.merge_readiness import Pending, Ready, ready
from coordinator.rules.advice import (
    alone,
    brief_games,
    few_learnt,
    long_dialogues,
    padded,
    too_large,
    unsteady,
)
from coordinator.rules.machine_time import MachineSeconds, MachineTime
from coordinator.rules.provable_length import bounded
from coordinator.rules.task_size import memory_bytes
from coordinator.runs.definition import Definition, definition
from coordinator.runs.member_figures import MemberFigures, figures
from coordinator.runs.standstills import Standstills, ThisServer
from coordinator.runs.version_files import MANIFEST_LIFE_S, renewed
from coordinator.ttl_cache import REST, KeyedCache
from shared.clock import Clock
from shared.decoding import decode
from shared.protocol.accounts import Benchmark, PrivacySpent, RunInfo, WorkerInfo
from shared.protocol.base import Standstill
from shared.protocol.heartbeat import RunBeat
from shared.protocol.limits import HEARTBEAT_S
from shared.protocol.listings import LossPoint
from shared.protocol.members import MembersData
from shared.protocol.versions import (
    BlobRef,
    SignedManifest,
    SuiteCourse,
    SuiteScore,
    VersionInfo,
)
from shared.text import counted
from shared.workloads.base import DatasetManifest
from shared.workloads.data.chat_template import ChatFrame
from shared.workloads.data.dialogue_windows import dialogues_of
from shared.workloads.experience import RolloutSums, warm_start
from shared.workloads.generation.suite_score import standard_error

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from shared.proofs.signing import SigningKey

LIVE_S = 4 * HEARTBEAT_S
PATIENCE_S = 300.0  # longest wait for silent vetted volunteers, if the plan has no deadline
PROGRESS_MIN = 0.01  # least share of [stop] from which its end is estimated
LISTING_MAX = 1000
LOSSES_MAX = 2000
ROLLOUT_POINTS = 48  # most points of the curves of judged answers
MANIFEST_S = 1.0  # time for which the manifest of a version is cached


class DecidedCounts(
    msgspec.Struct, frozen=True, kw_only=True, rename={"accepted": "good", "rejected": "refused"}
):
    """Contributions of a run by their verdict."""

    accepted: int
    rejected: int


class RolloutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the judged answers of neighbouring versions; `version` is the last version."""

    version: int
    answers: int
    reward: float
    entropy: float  # nats a token: minus the log-probability of a drawn token
    length: float  # tokens of an answer, its end included
    cut: float  # share of answers that did not end


class ExperienceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Experience of a run in numbers."""

    unit: str  # word for an episode
    made: int  # sealed episodes
    an_hour: float
    samples: int  # samples that the episodes hold for learners
    learnt: int  # samples that learners have used, each use counted
    signal: float | None = None  # share of episodes that learners can learn from
    # versions between the version that made a sample and the version that learns from it
    behind: float | None = None
    rollouts: tuple[RolloutFigures, ...] = ()  # judged answers by version; () for games
    tokens_per_s: float | None = None  # tokens a second of one actor that generates text
    learnt_per_s: float | None = None  # tokens a second of one learner


class RunQueries:
    """Reads runs, versions and figures."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        key: SigningKey | None = None,
        server: ThisServer | None = None,
    ) -> None:
        self._db = db
        self.standstills = Standstills(
            db, clock, server or ThisServer(), lambda conn, run: self.readiness(conn, run)[0]
        )
        self._clock = clock
        self._key = key
        self._counts: KeyedCache[str, dict[str, int]] = KeyedCache(0.0, clock, rest=REST)
        self._manifests: KeyedCache[tuple[str, int], SignedManifest] = KeyedCache(MANIFEST_S, clock)
        self._losses: KeyedCache[str, tuple[LossPoint, ...]] = KeyedCache(0.0, clock, rest=REST)

    async def listing(self) -> tuple[RunInfo, ...]:
        """Return every run, oldest first."""
        rows = await self._db.read(runs.every)
        return tuple([await self.describe(row) for row in rows])

    async def info(self, name: str) -> RunInfo:
        """Return one run. Raises NotFound."""
        return await self.describe(await self._db.read(lambda conn: runs.by_name(conn, name)))

    async def describe(self, run: RunRow) -> RunInfo:
        standstill = (await self.standstills.get()).get(run.name)
        return await self._db.read(lambda conn: self._info(conn, run, standstill))

    def _info(self, conn: Connection, run: RunRow, standstill: Standstill | None) -> RunInfo:
        about = definition(run)
        dataset = datasets.of_run(conn, run)
        state, _ = self.readiness(conn, run)
        beat = self._beat(conn, run, standstill, state)
        goes_on = run.state == "running" and standstill is None
        origin = about.workload.origin(about.file.model)
        origin_files = about.workload.files(about.file.model) if origin else {}
        bits = _bits(conn, run, about)
        progress = _progress(run, about)
        return RunInfo(
            name=run.name,
            state=run.state,
            workload=run.workload,
            workload_version=run.workload_version,
            parameters=run.parameters,
            step_flops=run.step_flops,
            tokens=run.tokens,
            description=about.file.description,
            licence=about.file.licence,
            contact=about.file.contact,
            loss=beat.loss,
            workers=beat.workers,
            items=about.declaration.items,
            output=about.declaration.output,
            taught_by=about.declaration.taught_by,
            measure=beat.measure,
            origin=origin.name if origin else "",
            origin_licence=origin.licence if origin else "",
            origin_bytes=sum(file.size for file in origin_files.values()),
            bits_first=bits.first,
            bits=bits.newest,
            dataset=dataset.name if dataset else "",
            dataset_licence=dataset.manifest.licence if dataset else "",
            version=run.head,
            loss_first=evaluations.first_loss(conn, run.id),
            progress=progress,
            ends_at=ends_at(run.started_at, run.idle_s, progress, self._clock.now())
            if goes_on
            else None,
            credits_per_step=run.price_micro / 1e6,
            memory_bytes=_memory(run, about),
            streamed_bytes=about.workload.streamed_bytes(about.file.model),
            libraries=tuple(about.workload.libraries(about.file.model)),
            steps=run.global_step,
            merging=merging_text(state) if goes_on else "",
            standstill=standstill,
            suites=suite_courses(conn, run),
            privacy=_privacy(conn, run, about),
            members=_members(about, dataset),
        )

    def readiness(self, conn: Connection, run: RunRow) -> tuple[Ready, int]:
        """Return whether the next merge of a run is due, and the number of workers that it waits
        for.

        The workers of vetted volunteers count; others' updates are merged along with theirs. All
        workers and updates count while no vetted volunteer is active, or none has submitted for
        long.
        """
        now, about = self._clock.now(), definition(run)
        plan, least = about.plan, about.members_min
        waiting = runs.turnout(conn, run, now - LIVE_S, vetted=True)
        live = waiting.workers
        if not (live and waiting.count):
            everyone = runs.turnout(conn, run, now - LIVE_S, vetted=False)
            long_ago = now - (plan.deadline_seconds or PATIENCE_S)
            if not live or (everyone.oldest_at is not None and everyone.oldest_at <= long_ago):
                waiting = everyone
            live = live or everyone.workers
        newest = waiting.newest_at
        members = None
        if least > 1:
            members = len(contributions.waiting_accounts(conn, run.id, least))
        pending = Pending(
            count=waiting.count,
            members=members,
            work=waiting.samples if plan.update == "gradient" else waiting.steps,
            waited_s=now - waiting.oldest_at if waiting.oldest_at is not None else 0.0,
            quiet_s=now - newest if newest is not None else 0.0,
            round_s=waiting.longest_s,
            live_workers=live,
        )
        return ready(plan, pending), live

    def _beat(
        self, conn: Connection, run: RunRow, standstill: Standstill | None, state: Ready
    ) -> RunBeat:
        now, about = self._clock.now(), definition(run)
        pacing = about.pacing
        return RunBeat(
            run=run.name,
            state=run.state,
            version=run.head,
            loss=evaluations.newest_loss(conn, run.id),
            needs=state.needs,
            merge_in_s=state.deadline_in_s,
            workers=runs.live_workers(conn, run.id, now - LIVE_S),
            episodes_per_hour=experience.per_hour(conn, run.id, now) if pacing else None,
            episodes=f"{pacing.unit}s" if pacing else "",
            measure=about.declaration.measure,
            standstill=standstill,
        )

    async def beats(self) -> tuple[RunBeat, ...]:
        """Return the state of each open run as every heartbeat reply contains it."""

        answers = await self.standstills.get()

        def read(conn: Connection) -> tuple[RunBeat, ...]:
            return tuple(
                self._beat(conn, run, answers.get(run.name), self.readiness(conn, run)[0])
                for run in runs.every(conn, runs.OPEN)
            )

        return await self._db.read(read)

    async def versions(
        self, name: str, after: int = -1, limit: int = LISTING_MAX, volunteer_id: str = ""
    ) -> tuple[VersionInfo, ...]:
        """Return the versions above version `after`, oldest first, at most `limit`. With
        `volunteer_id` each has the number of that volunteer's merged contributions.
        """

        def read(conn: Connection) -> tuple[VersionInfo, ...]:
            run = runs.by_name(conn, name)
            pairs = versions.listing(conn, run.id, after, max(1, min(limit, LISTING_MAX)))
            own_counts = {}
            if volunteer_id and pairs:
                first, last = pairs[0][0].version, pairs[-1][0].version
                own_counts = contributions.merged_by(conn, run.id, volunteer_id, first, last)
            rated = experience.measured(conn, run.id)
            infos = [_version_info(row, evaluation, run, rated) for row, evaluation in pairs]
            pictures = _pictures(conn, [evaluation for _, evaluation in pairs])
            return tuple(
                msgspec.structs.replace(
                    info,
                    mine=own_counts.get(info.version, 0),
                    picture=pictures.get(info.version),
                )
                for info in infos
            )

        return await self._db.read(read)

    async def advice(self, name: str) -> tuple[str, ...]:
        """Return the warnings about a run file. Raises NotFound."""

        def read(conn: Connection) -> tuple[str, ...]:
            run = runs.by_name(conn, name)
            about = definition(run)
            devices = volunteers.devices_since(conn, self._clock.now() - LIVE_S)
            file, pacing = about.file, about.pacing
            trained = bool(file.train.init_from or about.workload.origin(file.model))
            dataset = None if about.at_members else datasets.of_run(conn, run)
            return (
                *unsteady(about.plan, file.train, trained=trained),
                *(brief_games(pacing.unit, file.steps) if pacing else ()),
                *too_large(_memory(run, about), devices),
                *(() if dataset is None else _dialogues_advice(run, dataset.manifest)),
                *bounded(run.steps_provable),
                *privacy.noise_advice(file.privacy, about.plan, about.parameters),
                *(alone(about.plan, noise=file.privacy.on) if about.at_members else ()),
            )

        return await self._db.read(read)

    async def checks(self, name: str) -> CostOfChecks:
        """Return the checks of a run's updates, and the device time of its accepted updates. Raises
        NotFound.
        """
        return await self._db.read(lambda conn: cost(conn, runs.by_name(conn, name).id))

    async def manifest(self, name: str, version: int | None = None) -> SignedManifest:
        """Return the signed manifest of a version, by default of the head; an old manifest is
        signed anew. Raises NotFound for an unknown run or version.
        """

        def read(conn: Connection) -> SignedManifest:
            run = runs.by_name(conn, name)
            row = versions.get(conn, run.id, run.head if version is None else version)
            manifest = SignedManifest(payload=row.manifest, signature=row.signature)
            now = self._clock.now()
            if self._key is None or now < row.created_at + MANIFEST_LIFE_S / 2:
                return manifest
            return renewed(self._key, manifest, now)

        if version is None:
            return await self._db.read(read)
        return await self._manifests.get((name, version), lambda: self._db.read(read))

    async def loss_history(self, name: str) -> tuple[LossPoint, ...]:
        """Return measured losses, oldest first, thinned to the resolution of a curve."""

        def read(conn: Connection) -> tuple[LossPoint, ...]:
            run = runs.by_name(conn, name)
            rows = evaluations.measured(conn, run.id, LOSSES_MAX)
            return tuple(LossPoint(version=v, loss=loss, at=at) for v, loss, at in rows)

        return await self._losses.get(name, lambda: self._db.read(read))

    async def workers(self, name: str) -> tuple[WorkerInfo, ...]:
        """Return the workers now at work on a run."""

        def read(conn: Connection) -> tuple[WorkerInfo, ...]:
            run, now = runs.by_name(conn, name), self._clock.now()
            return tuple(
                WorkerInfo(
                    worker_id=row["id"][:8],
                    hostname="",
                    state=worker_state(row["state"], row["last_seen_at"], now),
                    device=row["device"],
                    last_seen=row["last_seen_at"],
                    rate=_rate(row, run),
                    task=row["task_id"],
                )
                for row in runs.workers_of(conn, run.id)
            )

        return await self._db.read(read)

    async def experience(self, name: str) -> ExperienceFigures | None:
        """Return the figures of a run's experience; None for a run that makes no experience. Raises
        NotFound.
        """

        def read(conn: Connection) -> ExperienceFigures | None:
            run = runs.by_name(conn, name)
            about = definition(run)
            pacing = about.pacing
            if pacing is None:
                return None
            totals = experience.totals(conn, run.id)
            warm = warm_start(about.file.train, pacing.warm_steps) * about.file.task.batch_size
            return ExperienceFigures(
                unit=pacing.unit,
                made=totals.sealed,
                an_hour=experience.per_hour(conn, run.id, self._clock.now()),
                samples=totals.samples,
                learnt=max(0, totals.learnt - warm),
                signal=totals.samples / (pacing.samples * max(1, totals.sealed))
                if pacing.samples
                else None,
                behind=experience.reported(conn, run.id, "behind", contributions.UPDATES),
                rollouts=rollout_course(experience.rollouts(conn, run.id)),
                tokens_per_s=experience.reported(conn, run.id, "tokens_per_s", ("experience",)),
                learnt_per_s=experience.reported(
                    conn, run.id, "answer_tokens", contributions.UPDATES, a_second=True
                ),
            )

        return await self._db.read(read)

    async def rollouts(self, name: str) -> tuple[RolloutFigures, ...]:
        """Return the figures of a run's judged answers by version; () for a run without judged
        answers.
        """

        def read(conn: Connection) -> tuple[RolloutFigures, ...]:
            return rollout_course(experience.rollouts(conn, runs.by_name(conn, name).id))

        return await self._db.read(read)

    async def machine_time(self, name: str) -> MachineTime | None:
        """Return the shares of the time of a run's machines by use; None if the machines were
        present for too short a time. Raises NotFound.
        """

        def read(conn: Connection) -> MachineTime | None:
            hours = machine_hours.lately(conn, self._clock.now())
            return hours.get(runs.by_name(conn, name).id, MachineSeconds()).shares

        return await self._db.read(read)

    async def members(self, name: str) -> MemberFigures | None:
        """Return the figures of the members of a run; None if the members keep no data. Raises
        NotFound for an unknown run.
        """
        return await self._db.read(lambda conn: figures(conn, runs.by_name(conn, name)))

    async def decided(self, name: str) -> DecidedCounts:
        """Return the counts of a run's decided contributions; they may be a moment old."""

        def count(conn: Connection) -> dict[str, int]:
            return contributions.counts(conn, runs.by_name(conn, name).id)

        counts = await self._counts.get(name, lambda: self._db.read(count))
        good = sum(counts.get(state, 0) for state in ("accepted", "merged", "superseded"))
        return DecidedCounts(accepted=good, rejected=counts.get("rejected", 0))


def rollout_course(
    rows: Sequence[RolloutSums], most: int = ROLLOUT_POINTS
) -> tuple[RolloutFigures, ...]:
    """Return the means of judged answers by version; neighbours of many versions are joined to
    `most` points.
    """
    count = min(most, len(rows))
    ends = [len(rows) * (at + 1) // count for at in range(count)]
    return tuple(
        _rollout_figures(rows[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)
    )


def _rollout_figures(rows: Sequence[RolloutSums]) -> RolloutFigures:
    answers, tokens = sum(row.answers for row in rows), sum(row.tokens for row in rows)
    return RolloutFigures(
        version=rows[-1].version,
        answers=answers,
        reward=sum(row.reward for row in rows) / answers,
        entropy=sum(row.surprise for row in rows) / tokens,
        length=tokens / answers,
        cut=sum(row.cut for row in rows) / answers,
    )


def merging_text(state: Ready) -> str:
    """Return the sentence on the next merge: "merging after 2 more contributions or 3:12"."""
    if state.needs <= 0:
        return "merging now"
    text = f"merging after {counted(state.needs, 'more contribution')}"
    if state.members:
        text += f", {state.members} of {'other members' if state.members > 1 else 'another member'}"
    if state.deadline_in_s is not None:
        minutes, seconds = divmod(max(0, round(state.deadline_in_s)), 60)
        text += f" or {minutes}:{seconds:02d}"
    return text


def _dialogues_advice(run: RunRow, manifest: DatasetManifest) -> tuple[str, ...]:
    """Return the advice for a run on dialogues of which little is learnt, or that are long."""
    share = manifest.meta.get("answer_share")
    if not isinstance(share, float):
        return ()
    lengths = dialogues_of(manifest).lengths
    return (
        *few_learnt(manifest.name, share),
        *long_dialogues(manifest.name, run.sample_size, lengths.tolist()),
        *padded(run.samples_total, run.sample_size, int(lengths.sum())),
    )


def _members(about: Definition, dataset: datasets.DatasetRow | None) -> MembersData | None:
    """Return the description of the data that members of a run keep; None if the organiser keeps
    the data.
    """
    if not about.at_members or dataset is None:
        return None
    return MembersData(
        dataset=dataset.name,
        kind=dataset.kind,
        heldout_share=about.file.data.heldout_share,
        train=msgspec.structs.replace(about.file.train, init_from=""),
        batch_size=about.file.task.batch_size,
        quorum=about.plan.quorum,
        least=about.plan.min_contributions,
    )


def _privacy(conn: Connection, run: RunRow, about: Definition) -> PrivacySpent | None:
    """Return the cost of the merges so far; None in a run without noise, whose merges are not
    counted.
    """
    settings = about.file.privacy
    if not settings.on:
        return None
    return privacy.privacy_spent(settings, versions.count_merges(conn, run.id))


def _memory(run: RunRow, about: Definition) -> int:
    return memory_bytes(run.parameters, about.workload.fixed_bytes(about.file.model))


def suite_courses(
    conn: Connection, run: RunRow, up_to: int | None = None
) -> tuple[SuiteCourse, ...]:
    """Return a run's first and newest score in each suite, among its versions up to `up_to`."""
    names = definition(run).file.evaluation.suites
    if not names:
        return ()
    scores = evaluations.course(conn, run.id, up_to)
    data = datasets.by_id(conn, run.dataset_id).manifest if run.dataset_id is not None else None
    chat = data is not None and ChatFrame.of(data) is not None
    courses = []
    for name in names:
        manifest = datasets.by_name(conn, name).manifest
        rows = scores.get(name)
        first = None if rows is None else _suite_score(rows[0])
        later = rows is not None and rows[1].version > rows[0].version
        courses.append(
            SuiteCourse(
                name=name,
                chance=float(manifest.meta.get("chance", 0.0)),
                total=manifest.heldout[0].items,
                chat=chat,
                first=first,
                newest=_suite_score(rows[1]) if rows is not None and later else None,
            )
        )
    return tuple(courses)


def _suite_score(row: evaluations.SuiteScoreRow) -> SuiteScore:
    return SuiteScore(
        version=row.version,
        share=row.correct / row.examples,
        error=standard_error(row.correct, row.examples),
        examples=row.examples,
    )


class _Bits(msgspec.Struct, frozen=True, kw_only=True):
    """Loss in bits for each byte of held-out text, at version 0 and the newest."""

    first: float | None = None
    newest: float | None = None


def _bits(conn: Connection, run: RunRow, about: Definition) -> _Bits:
    """Return the loss of a run on text in bits a byte."""
    if about.declaration.output != "text":
        return _Bits()
    ends = evaluations.metrics_of_ends(conn, run.id)
    first, newest = [decode(text, dict[str, float]).get("bits_per_byte") for text in ends]
    return _Bits(first=first, newest=newest)


def _progress(run: RunRow, about: Definition) -> float | None:
    """Return the finished share of `[stop]` by its nearest condition; None for dates and losses."""
    stop = about.file.stop
    if not (stop.versions or stop.tokens or stop.passes):
        return None
    return min(1.0, about.share_done(run, max(0, run.head), run.tokens))


def ends_at(
    started_at: float | None, idle_s: float, progress: float | None, now: float
) -> float | None:
    """Return when a run ends if it keeps its pace since the start (pauses left out); None while
    less than PROGRESS_MIN is done.
    """
    if started_at is None or progress is None or not PROGRESS_MIN <= progress < 1:
        return None
    worked_s = max(0.0, now - started_at - idle_s)
    return now + worked_s * (1 - progress) / progress


def _rate(worker: Mapping[str, Any], run: RunRow) -> float | None:
    """Return a device's steps a second in a run, estimated by its benchmark; None without a
    benchmark.
    """
    benchmarks = decode(worker["benchmark"], tuple[Benchmark, ...])
    flops = next((b.step_flops for b in benchmarks if b.device == worker["device"]), 0.0)
    return flops / run.step_flops if flops and run.step_flops else None


def _pictures(conn: Connection, rows: Sequence[evaluations.EvaluationRow]) -> dict[int, BlobRef]:
    """Return the pictures of the versions that have one."""
    hashes = {row.version: row.sample_sha256 for row in rows if row.sample_sha256}
    sizes = datasets.blob_sizes(conn, sorted(set(hashes.values()))) if hashes else {}
    return {
        version: BlobRef(sha256=sha256, size=sizes[sha256])
        for version, sha256 in hashes.items()
        if sha256 in sizes
    }


def _version_info(
    row: versions.VersionRow,
    evaluation: evaluations.EvaluationRow,
    run: RunRow,
    rated: Mapping[int, Mapping[str, float]],
) -> VersionInfo:
    metrics = decode(evaluation.metrics, dict[str, float])
    return VersionInfo(
        version=row.version,
        kind=row.kind,
        created_at=row.created_at,
        global_step=row.global_step,
        tokens=row.tokens,
        published_sha256=row.published_sha256,
        loss=evaluation.loss,
        sample=evaluation.sample,
        update_norm=row.update_norm,
        contributions=len(decode(row.contributions)),
        evaluation=evaluation.state,
        best=run.best == row.version,
        metrics=metrics | dict(rated.get(row.version, {})),
    )
