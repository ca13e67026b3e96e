"""Share of the time at work behind home lines: 20 Mbit/s up, 50 Mbit/s down, 40 ms, on the wire and
in the simulator.

    python -m tests.benchmarks.bench_home_lines --json home.json
    python -m tests.benchmarks.bench_home_lines --minutes 30 --drop-every 120

A real `coordinator serve` and real `volunteer --no-ui` processes, each through a proxy of its own
that holds both directions to their rates; with `--drop-every` it breaks all connections as often. A
GPT of 25 M parameters with every default of `diloco`; AdamW inside, whose steps are cheap enough
for a shared processor, which `duty_percent` paces to the steps of an ordinary machine. Busy is
training (the trainer's own count: neither loading nor encoding) over the time of each machine from
its start to the end of its last task, goodput the training behind merged updates over the time of
the machines up to the last merge. `coordinator simulate` predicts both for the same machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.database.tables.contributions import contributions
from coordinator.services import opened
from coordinator.simulate import prediction
from shared.workloads.data.text_dataset import build_text
from tests.support.server_process import Process
from tests.support.slow_link import SlowLink, slow_link

UP_MBIT, DOWN_MBIT, LATENCY_S = 20.0, 50.0, 0.04
GOAL_BUSY, GOAL_NEAR = 0.90, 0.10
VOLUNTEER = [
    sys.executable,
    "-c",
    "import sys; from volunteer.__main__ import main; sys.exit(main())",
]
RUN = """
name = "home"
workload = "gpt"
dataset = "text"
[model]
block_size = {block}
n_layer = {layers}
n_head = 8
n_embd = 512
[task]
batch_size = 1
[train]
optimizer = "adamw"
lr = 1e-4
[plan]
preset = "diloco"
[evaluation]
every = 0
"""
SCENARIO = """
hours = {hours}
[model]
parameters = {parameters}
[[workers]]
count = {count}
steps_per_s = {steps_per_s}
up_mbit = {up}
down_mbit = {down}
latency_ms = {latency_ms}
[run]
"""


@dataclass
class Machine:
    """Volunteer's process and its tasks."""

    link: SlowLink
    began: float = 0.0
    ended: float = 0.0  # end of its last task
    trained_s: list[float] = field(default_factory=list)
    steps: int = 0


def run_file(options: argparse.Namespace) -> str:
    return RUN.format(block=options.block, layers=options.layers)


async def prepare(base: Path, options: argparse.Namespace) -> int:
    """A data directory with a running run; its parameters."""
    text = base.parent / "text.txt"
    with text.open("w", encoding="utf-8") as file:
        file.writelines(
            f"the {n}th line of a text that teaches {n % 97} nobody\n" for n in range(400_000)
        )
    async with opened(Settings(data_dir=str(base))) as services:
        await services.datasets.add(lambda put: build_text("text", [text], put, vocab_size=257))
        await services.runs.create(run_file(options))
        await services.runs.start("home")
        row = await services.db.read(lambda conn: runs.by_name(conn, "home"))
        return row.parameters


async def work(machine: Machine, home: Path, options: argparse.Namespace) -> None:
    """Join and work until cancelled."""
    environment = os.environ | {
        "VOLUNTEER_HOME": str(home),
        "VOLUNTEER_DUTY_PERCENT": str(options.duty),
        "VOLUNTEER_PRIORITY": "normal",
        "OMP_NUM_THREADS": "1",
    }
    url = f"http://127.0.0.1:{machine.link.port}"
    joining = await asyncio.create_subprocess_exec(
        *VOLUNTEER, "join", f"{url}/join", "--name", home.name, env=environment
    )
    assert await joining.wait() == 0
    child = await asyncio.create_subprocess_exec(
        *VOLUNTEER,
        *("--no-ui", "--json"),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    machine.began = time.monotonic()
    try:
        assert child.stdout
        async for line in child.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["type"] == "Trained":
                machine.ended = time.monotonic()
                machine.trained_s.append(event["train_s"])
                machine.steps += event["steps"]
                pace = event["train_s"] / event["steps"]
                print(f"{home.name}: {event['steps']} steps of {pace:.2f} s", flush=True)
            elif event["type"] in ("Notice", "TaskEnded", "Judged"):
                print(home.name, line.decode().strip()[:300], flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def drop_often(machines: Sequence[Machine], every_s: float) -> int:
    dropped = 0
    with contextlib.suppress(asyncio.CancelledError):
        while every_s:
            await asyncio.sleep(every_s)
            dropped += sum(machine.link.drop() for machine in machines)
        await asyncio.Event().wait()
    return dropped


def merged(conn: sa.Connection) -> tuple[float, float, int]:
    """Seconds of training behind merged updates, the last merge, and the versions."""
    c = contributions.c
    rows = sa.select(sa.func.sum(c.train_s), sa.func.max(c.merged_at), sa.func.max(c.version))
    seconds, at, version = conn.execute(rows.where(c.state == "merged")).one()
    return float(seconds or 0), float(at or 0), int(version or 0)


def simulated(options: argparse.Namespace, parameters: int, steps_per_s: float) -> dict[str, Any]:
    """Prediction of `coordinator simulate` for these machines."""
    table = tomllib.loads(run_file(options))
    run = "".join(
        f"{key} = {json.dumps(value)}\n"
        for key, value in table.items()
        if isinstance(value, str)
        if key not in ("name", "dataset")
    )
    for key, values in table.items():
        if isinstance(values, dict):
            run += f"[run.{key}]\n"
            run += "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    text = SCENARIO.format(
        hours=options.minutes / 60,
        parameters=parameters,
        count=options.volunteers,
        steps_per_s=steps_per_s,
        up=UP_MBIT,
        down=DOWN_MBIT,
        latency_ms=LATENCY_S * 1000,
    )
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "scenario.toml"
        file.write_text(text + run)
        found: dict[str, Any] = json.loads(prediction.run(file, as_json=True))
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        parameters = await prepare(folder / "data", options)
        server = await asyncio.to_thread(Process(folder / "data", "--port", "0").started)
        try:
            async with AsyncExitStack() as stack:
                machines = [
                    Machine(
                        await stack.enter_async_context(
                            slow_link(
                                server.port,
                                up_mbit=UP_MBIT,
                                down_mbit=DOWN_MBIT,
                                latency_s=LATENCY_S,
                            )
                        )
                    )
                    for _ in range(options.volunteers)
                ]
                began = time.time() - time.monotonic()
                working = [
                    asyncio.create_task(work(machine, folder / f"volunteer-{number}", options))
                    for number, machine in enumerate(machines)
                ]
                dropping = asyncio.create_task(drop_often(machines, options.drop_every))
                await asyncio.wait(
                    working, timeout=options.minutes * 60, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in [*working, dropping]:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
                dropped = await dropping
        finally:
            await asyncio.to_thread(server.stop)
        async with opened(Settings(data_dir=str(folder / "data"))) as services:
            seconds, last, versions = await services.db.read(merged)
    trained_s = sum(sum(machine.trained_s) for machine in machines)
    present_s = sum(machine.ended - machine.began for machine in machines)
    until_last = sum(last - began - machine.began for machine in machines)
    steps_per_s = sum(machine.steps for machine in machines) / trained_s
    return {
        "parameters": parameters,
        "machines": options.volunteers,
        "tasks": sum(len(machine.trained_s) for machine in machines),
        "steps_a_task": sum(m.steps for m in machines) / sum(len(m.trained_s) for m in machines),
        "step_s": 1 / steps_per_s,
        "versions": versions,
        "connections_broken": dropped,
        "busy": trained_s / present_s,
        "goodput": seconds / until_last,
        "up_bytes_a_parameter_and_task": sum(m.link.up.passed for m in machines)
        / parameters
        / sum(len(m.trained_s) for m in machines),
        "down_bytes_a_parameter_and_task": sum(m.link.down.passed for m in machines)
        / parameters
        / sum(len(m.trained_s) for m in machines),
    }


def compared(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """The figures beside those of the simulator."""
    told = simulated(options, found["parameters"], 1 / found["step_s"])
    busy = 1 - told["device_idle_share"]
    return found | {
        "busy_simulated": busy,
        "goodput_simulated": told["goodput"],
        "versions_simulated": told["versions"],
        "reached": found["busy"] >= GOAL_BUSY,
        "near": abs(busy / found["busy"] - 1) <= GOAL_NEAR,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--volunteers", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="of 3.1 M parameters each")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--duty", type=int, default=20, help="percent of the time")
    parser.add_argument("--drop-every", type=float, default=0.0, help="seconds; 0 = never")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    found = compared(options, asyncio.run(measure(options)))
    for name, value in found.items():
        print(f"{name:12} {value:.3f}" if isinstance(value, float) else f"{name:12} {value}")
    if options.json:
        options.json.write_text(json.dumps({"rows": [found]}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
