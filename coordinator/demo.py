"""The demo: a real coordinator and real volunteers on this machine, for two minutes, then what came out of it.

It starts the same server and the same `volunteer --no-ui` processes that people run, in a directory of its own, and only
watches them: through the database, as the organiser's commands do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.demo_runs import DemoRun, demo_run
from shared.decoding import decode
from shared.errors import NotFound, Unavailable
from shared.protocol import LeaderRow, RunInfo, VersionInfo

START_S = 60.0
DRAIN_S = 25.0
MEASURE_S = 45.0
TICK_S = 0.5


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    workload: str = "gpt"
    volunteers: int = 2
    minutes: float = 2.0
    data_dir: str = ""  # empty: a temporary one, removed at the end
    json: bool = False


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one volunteer process said when it ended."""

    sent_bytes: int = 0
    received_bytes: int = 0
    tasks: int = 0


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands at a moment."""

    run: RunInfo
    versions: tuple[VersionInfo, ...]
    leaders: tuple[LeaderRow, ...]
    elapsed_s: float
    total_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The summary."""

    workload: str
    run: str
    seconds: float
    versions: int
    loss_first: float | None
    loss_last: float | None
    sample_prompt: str
    sample_first: str
    sample_last: str
    tokens: int
    items: str  # what `tokens` counts
    measure: str  # what the loss is
    accepted: int
    rejected: int
    credits: dict[str, float]
    ledger: str  # "balanced", or the first breach
    sent_bytes: int  # by all volunteers
    received_bytes: int
    data_dir: str
    history: tuple[VersionInfo, ...] = ()
    pictures: tuple[str, ...] = ()  # files in `data_dir`

    @property
    def improved(self) -> bool:
        return (
            self.loss_first is not None
            and self.loss_last is not None
            and self.loss_last < self.loss_first
        )


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """What the first and the last version drew, as PNG."""

    first: bytes
    last: bytes


def demo(options: Options) -> int:
    """Run it and print the summary. Exit code 0 when the model got better and the books balance."""
    from coordinator.demo_view import View

    view = View(json=options.json)
    directory = Path(options.data_dir or tempfile.mkdtemp(prefix="volunteer-demo-"))
    try:
        report, drawn = asyncio.run(_demo(options, directory, view))
    finally:
        if not options.data_dir:
            shutil.rmtree(directory, ignore_errors=True)
    view.summary(report, drawn)
    return 0 if report.improved and report.ledger == "balanced" else 1


async def _demo(options: Options, directory: Path, view: Any) -> tuple[Report, Drawn | None]:
    plan = demo_run(options.workload, options.volunteers)
    base = directory / "coordinator"
    with view.stage(plan.preparing):
        await _prepare(base, plan)
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    async with contextlib.AsyncExitStack() as processes:
        with view.stage(f"starting the coordinator at {url}"):
            server = await processes.enter_async_context(_server(base, port, directory))
        with view.stage(f"{options.volunteers} volunteers are joining"):
            volunteers = [
                await processes.enter_async_context(_volunteer(directory, url, number))
                for number in range(1, options.volunteers + 1)
            ]
        await _watch(base, plan.name, options, view, [server, *volunteers])
        with view.stage("finishing: volunteers hand in what they have"):
            await _end(volunteers)
        with view.stage("measuring the last version on held-out data"):
            await _measured(base, plan.name)
    traffic = [
        _traffic(directory / f"volunteer-{n}.jsonl") for n in range(1, options.volunteers + 1)
    ]
    report = await _report(base, plan, options, traffic, time.monotonic() - started)
    drawn = await _drawn(base, report)
    if drawn and options.data_dir:
        files = await _keep(base, report, drawn, directory)
        report = msgspec.structs.replace(report, pictures=files)
    return report, drawn


async def _prepare(base: Path, plan: DemoRun) -> None:
    async with _coordinator(base) as services:
        await services.datasets.add(plan.build)
        await services.runs.create(plan.toml)
        await services.runs.start(plan.name)


@contextlib.asynccontextmanager
async def _coordinator(base: Path) -> AsyncIterator[Any]:
    """The services on the demo's data directory, as an organiser's command opens them."""
    from coordinator.app import opened
    from coordinator.config import Settings

    async with opened(Settings(data_dir=str(base))) as services:
        yield services


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(name: str) -> list[str]:
    """The console script beside this interpreter, or the module when it is run from a checkout."""
    script = Path(sys.executable).with_name(name)
    if script.exists():
        return [str(script)]
    return [sys.executable, "-c", f"import sys; from {name}.cli import main; sys.exit(main())"]


@contextlib.asynccontextmanager
async def _process(
    command: Sequence[str], log: Path, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child that never outlives us; its standard output goes to `log`, its complaints beside it."""
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **environment}
    with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, env=env
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(child.wait(), DRAIN_S)
            except TimeoutError:
                child.kill()
                await child.wait()


@contextlib.asynccontextmanager
async def _server(
    base: Path, port: int, directory: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [*_command("coordinator"), "serve", "--data-dir", str(base), "--port", str(port)]
    async with _process(command, directory / "coordinator.log") as child:
        await _listening(port, child, directory / "coordinator.err")
        yield child


async def _listening(port: int, child: asyncio.subprocess.Process, complaints: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if child.returncode is not None:
            raise Unavailable(f"the coordinator ended at once: {_tail(complaints)}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
    raise Unavailable(f"the coordinator did not listen within {START_S:.0f} s: {_tail(complaints)}")


@contextlib.asynccontextmanager
async def _volunteer(
    directory: Path, url: str, number: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    home = {"VOLUNTEER_HOME": str(directory / f"volunteer-{number}")}
    join = [*_command("volunteer"), "join", f"{url}/join", "--name", f"volunteer-{number}"]
    async with _process(join, directory / f"join-{number}.log", **home) as child:
        if await asyncio.wait_for(child.wait(), START_S) != 0:
            raise Unavailable(
                f"volunteer {number} could not join: {_tail(directory / f'join-{number}.err')}"
            )
    work = [*_command("volunteer"), "--no-ui", "--json"]
    async with _process(work, directory / f"volunteer-{number}.jsonl", **home) as child:
        yield child


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return " | ".join(lines[-3:]) or "it said nothing"


async def _watch(
    base: Path,
    name: str,
    options: Options,
    view: Any,
    children: Sequence[asyncio.subprocess.Process],
) -> None:
    """Draw until the time is over. A child that ends early ends the demo."""
    total_s, began = options.minutes * 60, time.monotonic()
    async with _coordinator(base) as services:
        with view.live():
            while (elapsed := time.monotonic() - began) < total_s:
                view.draw(await _glance(services, name, elapsed, total_s))
                for child in children:
                    if child.returncode is not None:
                        raise Unavailable(
                            "a process of the demo ended early; run with --data-dir to keep its log"
                        )
                await asyncio.sleep(TICK_S)


async def _glance(services: Any, name: str, elapsed_s: float, total_s: float) -> Glance:
    return Glance(
        run=await services.runs.info(name),
        versions=await services.runs.versions(name),
        leaders=tuple(await services.volunteers.leaderboard()),
        elapsed_s=elapsed_s,
        total_s=total_s,
    )


async def _end(volunteers: Sequence[asyncio.subprocess.Process]) -> None:
    for child in volunteers:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
    await asyncio.wait([asyncio.create_task(child.wait()) for child in volunteers], timeout=DRAIN_S)


async def _measured(base: Path, name: str) -> None:
    """Wait for the server to evaluate the newest version."""
    until = time.monotonic() + MEASURE_S
    async with _coordinator(base) as services:
        while time.monotonic() < until:
            versions = await services.runs.versions(name)
            if versions and versions[-1].evaluation not in ("waiting", "running"):
                return
            await asyncio.sleep(TICK_S)


def _traffic(path: Path) -> Traffic:
    """The last word of a volunteer: its `Stopped` event, or its last `Traffic`."""
    found = Traffic()
    for line in path.read_bytes().splitlines():
        try:
            event = decode(line)
        except msgspec.DecodeError:
            continue
        if event.get("type") in ("Stopped", "Traffic"):
            found = Traffic(
                sent_bytes=event["sent_bytes"],
                received_bytes=event["received_bytes"],
                tasks=event.get("tasks", found.tasks),
            )
    return found


async def _report(
    base: Path, plan: DemoRun, options: Options, traffic: Sequence[Traffic], seconds: float
) -> Report:
    async with _coordinator(base) as services:
        glance = await _glance(services, plan.name, seconds, seconds)
        summary = await services.runs.summary(plan.name)
        breaches = await services.check_ledger()
        measured = [version for version in glance.versions if version.loss is not None]
        return Report(
            workload=options.workload,
            run=plan.name,
            seconds=seconds,
            versions=glance.run.version,
            loss_first=measured[0].loss if measured else None,
            loss_last=measured[-1].loss if measured else None,
            sample_prompt=plan.prompt,
            sample_first=measured[0].sample if measured else "",
            sample_last=measured[-1].sample if measured else "",
            tokens=summary.tokens,
            items=glance.run.items,
            measure=glance.run.measure,
            accepted=summary.accepted,
            rejected=summary.rejected,
            credits={row.nickname: row.earned_micro / 1e6 for row in glance.leaders},
            ledger=breaches[0] if breaches else "balanced",
            sent_bytes=sum(item.sent_bytes for item in traffic),
            received_bytes=sum(item.received_bytes for item in traffic),
            data_dir=options.data_dir,
            history=tuple(measured),
        )


async def _drawn(base: Path, report: Report) -> Drawn | None:
    """The pictures of the first and the last version, where the workload draws."""
    pictures = [version.picture.sha256 for version in report.history if version.picture]
    if not pictures:
        return None
    async with _coordinator(base) as services:
        first, last = [(await services.blobs.local(pictures[at])).read_bytes() for at in (0, -1)]
    return Drawn(first=first, last=last)


async def _keep(base: Path, report: Report, drawn: Drawn, directory: Path) -> tuple[str, ...]:
    """Write the pictures and their time-lapse beside the logs."""
    files = {"first.png": drawn.first, "last.png": drawn.last}
    async with _coordinator(base) as services:
        with contextlib.suppress(NotFound):  # no Pillow here
            files["timelapse.gif"] = await services.samples.timelapse(report.run, "gif")
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return tuple(str(directory / name) for name in files)
