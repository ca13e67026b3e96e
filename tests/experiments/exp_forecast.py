"""Forecast of credits an hour after the first tasks, held against the credits that came.

    make experiments EXPERIMENT=forecast EXPERIMENT_ARGS='--minutes 13'

A real coordinator with the runs of the demo for three workloads and one real volunteer without a
screen. Its events are kept as lines; they are folded as the screen folds them, and the forecast of
each run, as soon as there is one (after three of its tasks; of a run of games as soon as the shares
that it pays for are known, or after eight) is held against the credits of the tasks that followed,
over the time that they took on this machine, waits included. `--read FILE` reads events that were
kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.demo.demo import prepare
from coordinator.demo.runs import demo_run
from shared.decoding import decode
from shared.text import MICRO
from tests.support.server_process import Process
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status, WorkDone, fold
from volunteer.tui.run_estimate import pace

ROOT = str(Path(__file__).resolve().parents[2])
VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
WORKLOADS = ("gpt", "dcgan", "gomoku")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a run beside the credits that came."""

    run: str
    promised: float  # credits an hour
    known: int  # tasks before it
    came: float
    tasks: int  # that followed
    seconds: float  # that they took

    def line(self) -> str:
        return (
            f"{self.run}: {self.promised:,.0f} credits an hour after {self.known} tasks, "
            f"{self.came:,.0f} came in {self.tasks} tasks of {self.seconds:.0f} s: "
            f"{self.promised / self.came - 1:+.0%}"
        )


def forecasts(told: Sequence[AnyEvent], within_s: float) -> Iterator[Forecast]:
    """Yield of each run the first forecast beside what the next tasks brought."""
    status, work = Status(), list[WorkDone]()
    promised: dict[str, tuple[float, int]] = {}  # credits an hour, tasks before
    paid: dict[int, int] = {}
    for event in told:
        before = status.work
        status = fold(status, event)
        match event:
            case events.Judged(verdict=verdict):
                paid[verdict.task] = verdict.credits_micro
            case events.Credits(verdicts=verdicts):
                paid |= {verdict.task: verdict.credits_micro for verdict in verdicts}
        if status.work and status.work[-1:] != before[-1:]:
            work.append(status.work[-1])
        for name in {done.run for done in status.work} - set(promised):
            if found := pace(status, name):
                promised[name] = found.credits_per_hour, sum(done.run == name for done in work)
    for name, (per_hour, known) in sorted(promised.items()):
        mine = [done for done in work if done.run == name]
        until = mine[known - 1].at + within_s
        after = [done for done in mine[known:] if done.at <= until]
        seconds = sum(done.seconds for done in after)
        if seconds > 0:
            earned = sum(paid.get(done.task, done.price_micro) for done in after) / MICRO
            yield Forecast(
                run=name,
                promised=per_hour,
                known=known,
                came=3600 * earned / seconds,
                tasks=len(after),
                seconds=seconds,
            )


def record(directory: Path, minutes: float, workloads: Sequence[str]) -> Path:
    """Start everything for so many minutes. Return the file of the volunteer's events."""
    data, home, out = directory / "coordinator", directory / "home", directory / "events.jsonl"
    for workload in workloads:
        asyncio.run(prepare(data, demo_run(workload, 1)))
    here = os.environ | {"PYTHONPATH": ROOT, "VOLUNTEER_HOME": str(home)}
    with Process(data, "--port", "0", PYTHONPATH=ROOT) as server, out.open("w") as lines:
        subprocess.run(
            [*VOLUNTEER, "join", server.link, "--name", "ada"],
            env=here,
            check=True,
            capture_output=True,
        )
        worker = subprocess.Popen([*VOLUNTEER, "--no-ui", "--json"], env=here, stdout=lines)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(60 * minutes)
        worker.terminate()
        worker.wait()
        server.stop()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a folder to keep; else a temporary one")
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--within-s", type=float, default=3600.0, help="what came in this time")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--read", type=Path, help="events that were kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.out or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        file = options.read or record(directory, options.minutes, options.workloads)
        told = [decode(line, AnyEvent) for line in file.read_text().splitlines()]
    for found in forecasts(told, options.within_s):
        print(found.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
