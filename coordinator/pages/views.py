"""Contents of the pages: read from the services once a second at most, and rendered for all
viewers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.accounts import not_shown
from coordinator.accounts.install_lines import System, installations
from coordinator.pages import charts, templates
from coordinator.pages.charts import ChartColumn, Line, Period, Point
from coordinator.pages.page_replies import HTML, JSON, FinishedPage, finish
from coordinator.pages.public_figures import ServerFigures, run_figures
from coordinator.pages.templates import render
from coordinator.runs.definition import definition
from coordinator.runs.member_figures import MemberFigures
from coordinator.runs.public_runs import HISTORY_REST, News, PublicRuns, may_be_had
from coordinator.runs.share_picture import SharedRun, share_picture
from coordinator.storage.blobs import in_pool
from coordinator.ttl_cache import KeyedCache
from shared.errors import NotFound, VolunteerError
from shared.network.links import format_link
from shared.protocol.base import Cause
from shared.protocol.limits import process_on
from shared.text import counted, duration, whole_percent
from shared.workloads.declaration import Measure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from coordinator.database.evaluations import VersionLoss
    from coordinator.database.runs import RunRow
    from coordinator.database.standings import CostOfChecks
    from coordinator.database.statistics import Stretch
    from coordinator.rules.machine_time import MachineTime
    from coordinator.runs.queries import DecidedCounts, RolloutFigures
    from coordinator.services import Coordinator
    from shared.protocol.accounts import RunInfo
    from shared.protocol.listings import LeaderRow
    from shared.protocol.versions import VersionInfo

FRESH_S = 1.0
SHARED_S = 60.0  # age up to which the picture for shared links is reused
PAGES_MAX = 256  # finished pages in memory
VERSIONS = 10  # newest versions that a run's page lists
LEADERS = 10
QUICK_S = 60.0  # versions that follow each other faster than this share a row
RUNS = 20  # runs that the first page shows in full, live ones first
QUIET = 4  # width of the light margin around a QR code, in its modules
WINDOWS = {"day": 1, "week": 7, "month": 30, "ever": None}


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of a run's page that change while it is open."""

    state: str
    version: str
    loss: str
    workers: str
    accepted: str
    items: str
    device: str
    merging: str
    standstill: str  # why the run does not go on, or ""
    progress: str  # a percentage, or ""


class RolloutCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Curve of one figure of judged answers by version, with its title."""

    title: str
    name: str
    line: Line


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a run's page."""

    info: RunInfo
    live: Live
    sums: RunSums
    curve: Line | None
    strength: Line | None
    columns: Sequence[ChartColumn]
    crowd: int  # volunteers in the highest column
    began_at: float | None  # ends of the columns' axis of time
    until: float
    versions: Sequence[VersionInfo]  # the newest first
    hurry: str  # sentence on fast versions that share a row; "" if each version has a row
    leaders: Sequence[LeaderRow]
    story: Sequence[object]  # samples, the oldest first
    first: object
    newest: object
    last_at: float | None  # time of the newest version


class RunSums(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a run's page that are computed from its whole history: less often if the history is
    long.
    """

    figures: DecidedCounts
    checks: CostOfChecks
    time: MachineTime | None
    members: MemberFigures | None  # of a run whose members keep its data
    news: tuple[News, ...]  # news of the organiser, the newest first
    rollouts: Sequence[RolloutCurve]


class Views:
    """Makes pages, each once a second at most."""

    def __init__(self, coordinator: Coordinator, public: PublicRuns) -> None:
        self._coordinator = coordinator
        self._queries = coordinator.run_queries
        self._public = public
        clock = coordinator.clock
        self._pages: KeyedCache[str, FinishedPage] = KeyedCache(FRESH_S, clock, most=PAGES_MAX)
        self._models: KeyedCache[str, RunPage] = KeyedCache(FRESH_S, clock, most=PAGES_MAX)
        self._shared: KeyedCache[str, FinishedPage] = KeyedCache(SHARED_S, clock)
        self._sums: KeyedCache[str, RunSums] = KeyedCache(FRESH_S, clock, rest=HISTORY_REST)

    async def _cached(self, key: str, make: Callable[[], Awaitable[FinishedPage]]) -> FinishedPage:
        return await self._pages.get(key, make)

    def _page(self, template: str, **values: object) -> str:
        server = self._coordinator.server
        settings = self._coordinator.settings
        return render(
            template,
            server=settings.name,
            contact=settings.contact,
            public=settings.public_page,
            base=server.address.url,
            now=self._coordinator.clock.now(),
            closed=self._coordinator.space.read_only,
            **values,
        )

    # --- the server ---

    async def home(self) -> FinishedPage:
        """Return the page of all public runs."""

        async def make() -> FinishedPage:
            runs, more_names = await self._front_runs()
            dated = [run for run in runs if run.last_at is not None and run.info.version > 0]
            newest = max(dated, key=lambda run: run.last_at or 0.0, default=None)
            body = self._page(
                "home.html", runs=runs, others=more_names, newest=newest, invited=self._invited
            )
            return finish(HTML, body)

        return await self._cached("/", make)

    async def figures(self) -> FinishedPage:
        """Return the figures of the public runs that the first page shows, as JSON."""

        async def make() -> FinishedPage:
            runs, _ = await self._front_runs()
            base = self._coordinator.server.address.url
            figures = ServerFigures(
                server=self._coordinator.settings.name,
                at=self._coordinator.clock.now(),
                runs=[run_figures(run, base) for run in runs],
            )
            return finish(JSON, msgspec.json.encode(figures), anywhere=True)

        return await self._cached("figures", make)

    async def _front_runs(self) -> tuple[list[RunPage], Sequence[str]]:
        """Return the runs of the first page, running ones first, and the names of all others."""
        rows = await self._public.listing()
        live = [row.name for row in rows if row.state in ("running", "paused")]
        over = [row.name for row in rows if row.name not in live]
        runs = [await self.model(name) for name in (*live, *over)[:RUNS]]
        runs.sort(key=lambda run: (run.info.state != "running", -run.info.workers))
        return runs, (*live, *over)[RUNS:]

    @property
    def _invited(self) -> bool:
        return self._coordinator.settings.by_invitation

    async def join(self, system: System) -> FinishedPage:
        """Return the page of ways to join for a visitor's system: its install line first."""

        async def make() -> FinishedPage:
            server = self._coordinator.server
            link = format_link(server.link())
            wheel = await server.wheel()
            pinned = bool(server.address.tls_pin)
            lines = installations(wheel, server.address.url, pinned=pinned) if wheel else ()
            running = [row for row in await self._public.listing() if row.state == "running"]
            body = self._page(
                "join.html",
                phone=system == "phone",
                systems=sorted(lines, key=lambda line: line.system != system),
                install=self._coordinator.settings.install,
                pinned=pinned,
                link=link,
                code=None if self._invited else qr_code(link),
                invited=self._invited,
                members_runs=[row.name for row in running if definition(row).at_members],
            )
            return finish(HTML, body, varies="accept-encoding, user-agent")

        return await self._cached(f"/join {system}", make)

    async def leaderboard(self, run: str, window: str) -> FinishedPage:
        """Return the ranking of volunteers by credits. Raises NotFound."""
        window = window if window in WINDOWS else "ever"
        name = await self._ranked(run)

        async def make() -> FinishedPage:
            board = self._coordinator.volunteers.leaderboard
            leaders = await board(name or None, WINDOWS[window], seldom=True)
            body = self._page(
                "leaderboard.html",
                leaders=leaders,
                run=name,
                runs=[run.name for run in await self._public.listing()],
                window=window,
                windows=list(WINDOWS),
                whole=await self._public.all_shown(),
            )
            return finish(HTML, body)

        return await self._cached(f"leaderboard {window} {name}", make)

    async def _ranked(self, run: str) -> str:
        """Return the name of the run to rank. Without a `run`: "" (all runs together), or if some
        run is hidden, the first shown run. Raises NotFound if no run is shown.
        """
        if run:
            return (await self._public.find(run)).name
        if await self._public.all_shown():
            return ""
        listing = await self._public.listing()
        if not listing:
            raise NotFound("nothing is shown here")
        return listing[0].name

    async def volunteer(self, name: str) -> FinishedPage:
        """Return the page of a public volunteer. Raises NotFound, also for a hidden volunteer."""
        volunteers = self._coordinator.volunteers
        who, nickname = await volunteers.public(name)

        async def make() -> FinishedPage:
            rows_of_name = []
            for row in await self._public.listing():
                rows = await volunteers.leaderboard(row.name, None, who, seldom=True)
                rows_of_name += [(row.name, leader) for leader in rows if leader.me]
            if not rows_of_name:
                raise not_shown(name)
            work = await self._public.work_of(who)
            body = self._page(
                "volunteer.html",
                nickname=nickname,
                rows=rows_of_name,
                first_at=work[0].at if work else None,
                columns=_columns(
                    work,
                    lambda stretch: stretch.contributions,
                    work[0].at if work else 0.0,
                    self._coordinator.clock.now(),
                ),
                most=max((stretch.contributions for stretch in work), default=0),
            )
            return finish(HTML, body)

        return await self._cached(f"volunteer {who} {nickname}", make)

    # --- a run ---

    async def run(self, name: str) -> FinishedPage:
        """Return the page of a run. Raises NotFound."""
        await self._public.find(name)

        async def make() -> FinishedPage:
            row = await self._public.find(name)
            page = await self.model(name)
            values = {
                "run": page,
                "name": name,
                "takes": may_be_had(row),
                "processor": process_on("cpu", page.info.memory_bytes),
            }
            return finish(HTML, self._page("run.html", **values))

        return await self._cached(f"run {name}", make)

    async def shared(self, name: str) -> FinishedPage:
        """Return the picture of a run for shared links. Raises NotFound."""
        await self._public.find(name)

        async def make() -> FinishedPage:
            page = await self.model(name)
            run = shared_run(page, self._coordinator.settings.name)
            picture = await in_pool(share_picture, run)
            return finish("image/png", picture, keep=f"public, max-age={SHARED_S:.0f}")

        return await self._shared.get(name, make)

    async def version(self, name: str, number: int) -> FinishedPage:
        """Return the page of one version of a run. Raises NotFound."""
        await self._public.find(name)

        async def make() -> FinishedPage:
            row = await self._public.find(name)
            version = await self._public.version(row, number)
            story = await self._public.story(row)
            body = self._page(
                "version.html",
                name=row.name,
                run=row,
                version=version,
                first=story[0] if story else None,
                story=story,
                best=row.best == number,
                takes=may_be_had(row),
                licence=definition(row).file.licence,
                measure=(await self._queries.describe(row)).measure,
            )
            return finish(HTML, body)

        return await self._cached(f"version {name} {number}", make)

    async def model(self, name: str) -> RunPage:
        """Return the content of a run's page, at most a second old. Raises NotFound."""
        return await self._models.get(name, lambda: self._read(name))

    async def _read(self, name: str) -> RunPage:
        row = await self._public.find(name)
        info = await self._queries.describe(row)
        sums = await self._sums.get(name, lambda: self._read_sums(row))
        losses = await self._public.losses(row, info.loss)
        newest = await self._queries.versions(row.name, after=max(-1, row.head - VERSIONS))
        stretches = await self._public.activity(row)
        story = await self._public.story(row)
        board = self._coordinator.volunteers.leaderboard
        leaders = await board(name, seldom=True)
        rated = await self._public.strength(row)
        now = self._coordinator.clock.now()
        until = row.ended_at or now
        return RunPage(
            info=info,
            sums=sums,
            live=live(info, sums.figures, sums.checks.work_s),
            curve=_curve(losses, info.measure),
            strength=charts.line([Point(*rating) for rating in rated]),
            columns=_columns(
                stretches, lambda stretch: stretch.volunteers, row.started_at or now, until
            ),
            crowd=max((stretch.volunteers for stretch in stretches), default=0),
            began_at=row.started_at,
            until=until,
            versions=_version_rows(newest[::-1][:VERSIONS]),
            hurry=_hurry_sentence(newest[::-1][:VERSIONS]),
            leaders=leaders[:LEADERS],
            story=story,
            first=story[0] if story else None,
            newest=story[-1] if story else None,
            last_at=newest[-1].created_at if newest else None,
        )

    async def _read_sums(self, row: RunRow) -> RunSums:
        announced = await self._coordinator.heartbeats.announcements.standing()
        return RunSums(
            figures=await self._queries.decided(row.name),
            checks=await self._queries.checks(row.name),
            time=await self._queries.machine_time(row.name),
            members=await self._queries.members(row.name),
            news=await self._public.news(row, announced),
            rollouts=_rollout_curves(await self._queries.rollouts(row.name)),
        )

    def error(self, error: VolunteerError) -> FinishedPage:
        """Return the page of an error."""
        return finish(HTML, self._page("error.html", error=error), status=error.status)


def _columns(
    stretches: Sequence[Stretch], height: Callable[[Stretch], int], start: float, end: float
) -> list[ChartColumn]:
    """Return the columns of stretches over an axis of time from `start` to `end`."""
    periods = [
        Period(
            start=stretch.at,
            seconds=stretch.seconds,
            value=float(height(stretch)),
            title=_column_title(stretch),
        )
        for stretch in stretches
    ]
    return charts.columns(periods, start, end)


def _is_hurry(versions: Sequence[VersionInfo]) -> bool:
    """Return True if versions follow each other too fast for a row each."""
    if len(versions) < VERSIONS:
        return False
    return versions[0].created_at - versions[-1].created_at < QUICK_S * len(versions)


def _version_rows(versions: Sequence[VersionInfo]) -> Sequence[VersionInfo]:
    """Return the rows of the table of versions: all versions; if they follow each other fast, only
    the newest, the best and rollbacks.
    """
    if not _is_hurry(versions):
        return versions
    newest = versions[0].version
    return [v for v in versions if v.version == newest or v.best or v.kind == "rollback"]


def _hurry_sentence(versions: Sequence[VersionInfo]) -> str:
    """Return the sentence on versions that follow each other fast; "" for slower versions."""
    if not _is_hurry(versions):
        return ""
    took = duration(versions[0].created_at - versions[-1].created_at)
    last = versions[-1].version
    return f"{len(versions)} versions in {took}, from {last} to {versions[0].version}."


def _column_title(stretch: Stretch) -> str:
    people = counted(stretch.volunteers, "volunteer")
    work = counted(stretch.contributions, "contribution")
    return f"{templates.day(stretch.at)} UTC: {people}, {work}, {templates.hours(stretch.device_s)}"


def _curve(losses: Sequence[VersionLoss], measure: Measure) -> Line | None:
    most = 100.0 if measure == "share solved" else math.inf
    return charts.line([_point(loss, measure) for loss in losses], most)


def _rollout_curves(figures: Sequence[RolloutFigures]) -> list[RolloutCurve]:
    """Return the curves of judged answers over versions."""
    percent = 100.0
    values: dict[str, tuple[str, list[float], float]] = {
        "Reward": ("mean of the answers that were judged", [f.reward for f in figures], 1.0),
        "Entropy": ("nats a token", [f.entropy for f in figures], math.inf),
        "Length": ("tokens of an answer", [f.length for f in figures], math.inf),
        "Cut off": ("% of answers without an end", [percent * f.cut for f in figures], percent),
    }
    curves = []
    for name, (words, ys, most) in values.items():
        points = [Point(f.version, y) for f, y in zip(figures, ys, strict=True)]
        if line := charts.line(points, most):
            curves.append(RolloutCurve(title=f"{name} by version, {words}", name=name, line=line))
    return curves


def _point(loss: VersionLoss, measure: Measure) -> Point:
    """Return a measured version as a point; for problems the value is the share that is solved."""
    y = 100 * (1 - loss.loss) if measure == "share solved" else loss.loss
    return Point(loss.version, y, at=loss.at)


def shared_run(page: RunPage, server: str) -> SharedRun:
    """Return the content of the picture for shared links."""
    info = page.info
    first = info.loss_first
    since = "" if first is None else f", from {templates.loss(first, info.measure)}"
    measured = f"{templates.measure(info.measure)} {page.live.loss}{since}"
    return SharedRun(
        name=info.name,
        server=server,
        figures=(
            f"version {info.version}, {counted(info.workers, 'machine')} at work",
            *(() if info.loss is None else (measured,)),
        ),
        points=page.curve.places if page.curve is not None else (),
    )


def live(info: RunInfo, figures: DecidedCounts, device_s: float) -> Live:
    """Return the changing texts of a run's page."""
    return Live(
        state=info.state,
        version=str(info.version),
        loss=templates.loss(info.loss, info.measure),
        workers=str(info.workers),
        accepted=f"{figures.accepted:,}",
        items=templates.amount(info.tokens),
        device=templates.hours(device_s),
        merging=info.merging.partition(" or ")[0],
        standstill=_standstill_text(info),
        progress="" if info.progress is None else str(whole_percent(info.progress)),
    )


def _standstill_text(info: RunInfo) -> str:
    """Return why a run does not go on; "" if it does, or if its organiser paused it, which the page
    says with the date.
    """
    still = info.standstill
    if still is None or still.cause == Cause.PAUSED:
        return ""
    return f"This run does not go on: {still.message}"


class QrCode(msgspec.Struct, frozen=True):
    """QR code as an SVG path with a light margin; each module is one unit wide."""

    side: int  # width and height, margin included
    path: str


def qr_code(text: str) -> QrCode:
    """Draw a text as a QR code (ISO/IEC 18004)."""
    import segno

    matrix = segno.make(text, error="m", micro=False).matrix
    path = "".join(
        f"M{x + QUIET},{y + QUIET}h1v1h-1z"
        for y, row in enumerate(matrix)
        for x, dark in enumerate(row)
        if dark
    )
    return QrCode(len(matrix) + 2 * QUIET, path)
