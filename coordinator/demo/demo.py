"""Demo: a real coordinator and real volunteers on this machine for a few minutes, then a summary.

The demo starts the same server and `volunteer --no-ui` processes that people run, in a directory of
its own, and watches them through the database, like the organiser's commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.demo.demo_report import (
    DemoPictures,
    Report,
    ReportInputs,
    report,
    sample_pictures,
    save_pictures,
    traffic_of,
)
from coordinator.demo.runs import DemoRun, demo_run
from shared.errors import InvalidRunFile, Unavailable
from shared.files.deletions import delete_folder
from shared.programs.installation import missing_extra_error
from shared.text import counted
from shared.workloads.base import missing_extra

START_S = 60.0  # longest wait for a process to start, or for its command
DRAIN_S = 25.0  # longest wait for a process to end
MEASURE_S = 45.0  # longest wait for the last evaluation
TICK_S = 0.5  # interval of reading the run's state
VOLUNTEERS_MAX = 64  # each volunteer is a process with a model in its memory
MINUTES_MAX = 7 * 24 * 60.0
SETTINGS = ("COORDINATOR_", "VOLUNTEER_")  # begin the variables of settings
DATABASE = "coordinator.sqlite3"  # file name in the data directory of a coordinator


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `coordinator demo`."""

    workload: str = "gpt"
    volunteers: int = 2
    minutes: float = 0.0  # 0 = a time that suits the workload
    data_dir: str = ""  # "" = a temporary directory, removed at the end
    json: bool = False


def check(options: DemoOptions) -> None:
    """Check the options of a demo. Raises InvalidRunFile, Configuration for a missing extra."""
    demo_run(options.workload, 1)
    if extra := missing_extra(options.workload):
        raise missing_extra_error(f'the demo of "{options.workload}"', extra)
    if not 1 <= options.volunteers <= VOLUNTEERS_MAX:
        raise InvalidRunFile(f"--volunteers must be between 1 and {VOLUNTEERS_MAX}")
    if not 0 <= options.minutes <= MINUTES_MAX:
        raise InvalidRunFile(
            f"--minutes must be between 0 and {MINUTES_MAX:,.0f}; "
            "0 is as long as suits the workload"
        )
    folder = Path(options.data_dir)
    if options.data_dir and (
        (folder / DATABASE).exists() or (folder / "coordinator" / DATABASE).exists()
    ):
        raise InvalidRunFile(
            f"{options.data_dir} is the data directory of a coordinator: --data-dir of a demo names"
            " a new folder"
        )


def demo(options: DemoOptions) -> int:
    """Run the demo and print the summary. Return the exit code: 0 if the model got better and the
    ledger balances.
    """
    from coordinator.demo.demo_view import DemoView

    check(options)
    view = DemoView(json=options.json)
    directory = Path(options.data_dir or tempfile.mkdtemp(prefix="volunteer-demo-"))
    try:
        summary, pictures = asyncio.run(_demo(options, directory, view))
    finally:
        if not options.data_dir:
            delete_folder(directory, "scratch")
    view.summary(summary, pictures)
    return 0 if summary.improved and summary.ledger == "balanced" else 1


async def _demo(
    options: DemoOptions, directory: Path, view: Any
) -> tuple[Report, DemoPictures | None]:
    run, started = demo_run(options.workload, options.volunteers), time.monotonic()
    base = directory / "coordinator"
    with view.stage(run.preparing):
        await prepare(base, run)
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as processes:
        with view.stage(f"starting the coordinator at {url}"):
            server = await processes.enter_async_context(_server(base, port, directory))
        view.note(f"watch it in a browser: {url}/runs/{run.name}")
        with view.stage(f"joining: {counted(options.volunteers, 'volunteer')}"):
            volunteers = [
                await processes.enter_async_context(_volunteer(directory, url, number, run))
                for number in range(1, options.volunteers + 1)
            ]
        await _watch(base, run, options, view, [server, *volunteers])
        with view.stage("finishing: volunteers submit what they have"):
            await _stop(volunteers)
        with view.stage("measuring the last version"):
            await _wait_for_evaluation(base, run.name)
    traffic = [
        traffic_of(directory / f"volunteer-{n}.jsonl") for n in range(1, options.volunteers + 1)
    ]
    inputs = ReportInputs(
        workload=options.workload,
        prompt=run.prompt,
        seconds=time.monotonic() - started,
        data_dir=options.data_dir,
    )
    async with _coordinator(base) as services:
        with view.stage("looking at the result"):
            summary = await report(services, run.name, inputs, traffic)
            pictures = await sample_pictures(services, summary)
            if pictures and options.data_dir:
                files = save_pictures(pictures, directory)
                summary = msgspec.structs.replace(summary, pictures=files)
    return summary, pictures


async def prepare(base: Path, run: DemoRun) -> None:
    """Store the run of a demo in a data directory, and start it."""
    async with _coordinator(base) as services:
        if run.build is not None:
            await services.datasets.add(run.build)
        await services.runs.create(run.toml)
        await services.runs.start(run.name)


@contextlib.asynccontextmanager
async def _coordinator(base: Path) -> AsyncIterator[Any]:
    """Open the services on the demo's data directory, as an organiser's command does."""
    from coordinator.config import Settings
    from coordinator.http.app import opened

    async with opened(Settings(data_dir=str(base))) as services:
        yield services


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> list[str]:
    """Return the console script next to this interpreter, or the module in a checkout."""
    script = Path(sys.executable).with_name(name)
    if script.exists():
        return [str(script)]
    module = {"volunteer": "volunteer.__main__"}.get(name, "coordinator.entry_point")
    return [sys.executable, "-c", f"from {module} import main; main()"]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the demo's processes: without settings of a real coordinator or
    volunteer, such as its database or a link to join by.
    """
    variables = {name: value for name, value in environ.items() if not name.startswith(SETTINGS)}
    return {"OMP_NUM_THREADS": "1", **variables}


@contextlib.asynccontextmanager
async def _process(
    command: Sequence[str], log: Path, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a child process that ends with this one; its output goes to `log` and to `.err`."""
    env = {**child_environment(os.environ), **environment}
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
    command = [*program("coordinator"), "serve", "--data-dir", str(base), "--port", str(port)]
    async with _process(command, directory / "coordinator.log") as child:
        await _listening(port, child, directory / "coordinator.err")
        yield child


async def _listening(port: int, child: asyncio.subprocess.Process, error_log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if child.returncode is not None:
            raise Unavailable(f"the coordinator ended at once: {_tail(error_log)}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
    raise Unavailable(f"the coordinator did not listen within {START_S:.0f} s: {_tail(error_log)}")


@contextlib.asynccontextmanager
async def _volunteer(
    directory: Path, url: str, number: int, run: DemoRun
) -> AsyncIterator[asyncio.subprocess.Process]:
    home = {"VOLUNTEER_HOME": str(directory / f"volunteer-{number}")}
    join = [*program("volunteer"), "join", f"{url}/join", "--name", f"volunteer-{number}"]
    async with _process(join, directory / f"join-{number}.log", **home) as child:
        if await asyncio.wait_for(child.wait(), START_S) != 0:
            raise Unavailable(
                f"volunteer {number} could not join: {_tail(directory / f'join-{number}.err')}"
            )
    if run.members_files:
        await _add_data(run, number, directory, home)
    work = [*program("volunteer"), "--no-ui", "--json"]
    async with _process(work, directory / f"volunteer-{number}.jsonl", **home) as child:
        yield child


async def _add_data(run: DemoRun, number: int, directory: Path, home: dict[str, str]) -> None:
    """Let a volunteer add the files that it keeps, by the command that people type. Raises
    Unavailable if the command fails.
    """
    paths = map(str, run.members_files[number - 1])
    add = [*program("volunteer"), "data", "add", run.name, *paths, "--yes"]
    async with _process(add, directory / f"data-{number}.log", **home) as child:
        if await asyncio.wait_for(child.wait(), START_S) != 0:
            reason = _tail(directory / f"data-{number}.err")
            raise Unavailable(f"volunteer {number} could not add its data: {reason}")


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return " | ".join(lines[-3:]) or "it said nothing"


async def _watch(
    base: Path,
    run: DemoRun,
    options: DemoOptions,
    view: Any,
    children: Sequence[asyncio.subprocess.Process],
) -> None:
    """Report progress until the time is over. Raises Unavailable if a process ends early."""
    total_s, began = (options.minutes or run.minutes) * 60, time.monotonic()
    async with _coordinator(base) as services:
        queries = services.runs.queries
        while (elapsed := time.monotonic() - began) < total_s:
            view.progress(elapsed, await queries.info(run.name), await queries.versions(run.name))
            for child in children:
                if child.returncode is not None:
                    raise Unavailable(
                        "a process of the demo ended early; run with --data-dir to keep its log"
                    )
            await asyncio.sleep(TICK_S)


async def _stop(volunteers: Sequence[asyncio.subprocess.Process]) -> None:
    for child in volunteers:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
    await asyncio.wait([asyncio.create_task(child.wait()) for child in volunteers], timeout=DRAIN_S)


async def _wait_for_evaluation(base: Path, name: str) -> None:
    """Wait for the server to evaluate the newest version."""
    until = time.monotonic() + MEASURE_S
    async with _coordinator(base) as services:
        while time.monotonic() < until:
            versions = await services.runs.queries.versions(name)
            if versions and versions[-1].evaluation not in ("waiting", "running"):
                return
            await asyncio.sleep(TICK_S)
