"""How much of the time a device trains behind a home's internet connection: 20 Mbit/s up, 50 Mbit/s
down.

    python -m tests.benchmarks.bench_overlap --json overlap.json
    python -m tests.benchmarks.bench_overlap --batch 1 --block 64 --tasks 8

A real `coordinator serve` and a real `volunteer --no-ui` over loopback, through a proxy that holds
each direction to its rate. A GPT of 10 M parameters, 100 local steps a task, int8 up, a chain of
links down, every task merged into a version of its own; `overlap = true`, so that the next task
need not wait for that. The share is training (the trainer's own count: neither loading nor
encoding) over wall time, from the end of the first task to the end of the last. One task of the
default size takes a core of a laptop about a minute. What a faster device would reach is worked out
from the gap between tasks and the time of the wire.
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
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.runs.definition import of_file
from coordinator.services import opened
from shared.workloads.data.text_dataset import build_text
from tests.support.server_process import Process
from tests.support.slow_link import MBIT, SlowLink, slow_link

GOAL = 0.95
UP_MBIT, DOWN_MBIT = 20.0, 50.0
DEVICES_S = (5.0, 10.0, 20.0, 60.0)  # seconds of a task on faster devices
VOLUNTEER = [
    sys.executable,
    "-c",
    "import sys; from volunteer.__main__ import main; sys.exit(main())",
]
RUN = """
name = "overlap"
workload = "gpt"
dataset = "text"
[model]
block_size = {block}
n_layer = 6
n_head = 6
n_embd = 360
[task]
local_steps = 100
batch_size = {batch}
min_steps = 1
[train]
lr = 1e-4
[plan]
preset = "fedavg"
quorum = 1
overlap = {overlap}
codec = "int8"
downlink = "chain"
[evaluation]
every = 0
"""


async def prepare(base: Path, options: argparse.Namespace) -> int:
    """A data directory with a running run; its parameters."""
    text = base.parent / "text.txt"
    with text.open("w", encoding="utf-8") as file:
        file.writelines(
            f"the {n}th line of a text that teaches {n % 97} nobody\n" for n in range(400_000)
        )
    overlap = "false" if options.in_step else "true"
    async with opened(Settings(data_dir=str(base))) as services:
        await services.datasets.add(lambda put: build_text("text", [text], put, vocab_size=257))
        await services.runs.create(
            RUN.format(block=options.block, batch=options.batch, overlap=overlap)
        )
        await services.runs.start("overlap")
        row = await services.db.read(lambda conn: runs.by_name(conn, "overlap"))
        return sum(spec.count for spec in of_file(row.file).schema if spec.role == "parameter")


@contextlib.asynccontextmanager
async def volunteer(home: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a volunteer's process, which ends with the block."""
    child = await asyncio.create_subprocess_exec(
        *VOLUNTEER,
        *words,
        env=os.environ | {"VOLUNTEER_HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def watch(url: str, home: Path, tasks: int) -> list[tuple[float, float]]:
    """Let a volunteer do tasks; return each one's end and seconds of training."""
    async with volunteer(home, "join", f"{url}/join", "--name", "bench") as joining:
        await joining.communicate()
        assert joining.returncode == 0
    found: list[tuple[float, float]] = []
    async with volunteer(home, "--no-ui", "--json") as working:
        assert working.stdout
        async for line in working.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["type"] == "Trained":
                found.append((time.monotonic(), event["train_s"]))
                print(f"task {len(found)}: trained {event['train_s']:.1f} s", flush=True)
            if len(found) == tasks:
                break
    return found


def share_of(task_s: float, gap_s: float, up_s: float) -> float:
    """Of a device whose task takes so long: the wire may take longer than the training does."""
    return task_s / max(task_s + gap_s, up_s)


def report(
    options: argparse.Namespace,
    parameters: int,
    ended: Sequence[tuple[float, float]],
    link: SlowLink,
) -> dict[str, Any]:
    wall = ended[-1][0] - ended[0][0]
    busy = sum(spent for _, spent in ended[1:])
    count = len(ended) - 1
    gap = (wall - busy) / count
    up_s = parameters * 1.01 / (UP_MBIT * MBIT)
    return {
        "parameters": parameters,
        "overlap": not options.in_step,
        "batch": options.batch,
        "block": options.block,
        "tasks": count,
        "train_s": busy / count,
        "gap_s": gap,
        "busy": busy / wall,
        "goal": GOAL,
        "reached": busy / wall >= GOAL,
        "up_s": up_s,
        "up_bytes": link.up.passed,
        "down_bytes": link.down.passed,
        "devices": {f"{s:g}": share_of(s, gap, up_s) for s in DEVICES_S},
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        parameters = await prepare(folder / "data", options)
        server = await asyncio.to_thread(Process(folder / "data", "--port", "0").started)
        try:
            async with slow_link(server.port, up_mbit=UP_MBIT, down_mbit=DOWN_MBIT) as link:
                url = f"http://127.0.0.1:{link.port}"
                ended = await watch(url, folder / "volunteer", options.tasks + 1)
                return report(options, parameters, ended, link)
        finally:
            await asyncio.to_thread(server.stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=3, help="that count; one comes before them")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--in-step", action="store_true", help="wait for the merge, as fedavg does")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    for name, value in found.items():
        print(f"{name:12} {value:.3f}" if isinstance(value, float) else f"{name:12} {value}")
    if options.json:
        options.json.write_text(json.dumps({"rows": [found]}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
