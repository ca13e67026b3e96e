"""Seconds a FedAvg round without training, beside Flower and hivemind in the same run.

    python -m tests.benchmarks.bench_peers --flower ENV/bin/python --hivemind ENV/bin/python --json peers.json
    python -m tests.benchmarks.bench_peers --sizes 10 --volunteers 2,4 --rounds 3
    python -m tests.benchmarks.bench_peers --sizes 50 --volunteers 4 --json peers.json --add    its rows join those in the file
    python -m tests.benchmarks.bench_peers --json peers.json --table                            the file as Markdown, nothing run

Ours is a real `coordinator serve` on SQLite with every commit synced and N resident volunteers as
processes over loopback: each round a volunteer claims, begins, fetches and checks the new version,
encodes a pseudo-random delta, uploads it and hands it in; the coordinator checks, merges, signs and
publishes. `float32` sends everything raw, `int8` quantised blocks up and whole files down, `chain`
quantised blocks both ways. Each peer lives in an environment of its own (`pip install flwr`; `pip
install hivemind 'numpy<2.3'`), named by its Python; one that is not given or does not run is said
to be missing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.runs.definition import of_file
from coordinator.services import opened
from shared.tensors.spec import Schema
from shared.workloads.data.text_dataset import build_text
from tests.benchmarks.peers.table import HEAD, joined, line, told
from tests.benchmarks.resident import STAGES, WARM
from tests.benchmarks.wire import Memory, until_idle
from tests.support.server_process import Process

PEERS = Path(__file__).parent / "peers"
LIMIT_S = 900.0  # a cell that takes longer has no figure
FLOWER_ALONE = 100.0  # million parameters: from here on Flower runs with two nodes only
MODELS = {  # million parameters -> layers and width of a GPT with so many
    0.1: (2, 64),
    1.0: (5, 128),
    10.0: (6, 368),
    50.0: (7, 768),
    124.0: (17, 776),
}
WAYS = {  # name -> codec up, downlink
    "float32": ("float32", "float32"),
    "int8": ("int8", "float32"),  # quantised up, exact weights down
    "chain": ("int8", "chain"),
}
RUN = """
name = "peers"
workload = "gpt"
dataset = "text"
[model]
block_size = 8
n_layer = {layers}
n_head = 8
n_embd = {width}
[task]
local_steps = 1
batch_size = 1
[plan]
preset = "fedavg"
quorum = {volunteers}
codec = "{codec}"
downlink = "{downlink}"
snapshot_every = 1000
[evaluation]
every = 0
budget_seconds = 1.0
"""


async def prepare(base: Path, million: float, volunteers: int, chosen: str) -> Schema:
    """A data directory with a running run; the tensors of its model."""
    text = base.parent / "text.txt"
    text.write_text("".join(f"the {n}th line of a text that teaches nobody\n" for n in range(9999)))
    layers, width = MODELS[million]
    file = RUN.format(
        layers=layers,
        width=width,
        volunteers=volunteers,
        codec=WAYS[chosen][0],
        downlink=WAYS[chosen][1],
    )
    async with opened(Settings(data_dir=str(base))) as services:
        await services.datasets.add(lambda put: build_text("text", [text], put, vocab_size=257))
        await services.runs.create(file)
        await services.runs.start("peers")
        while await services.evaluation.evaluate_next():
            # here and now: in the server it would take the time and memory of the first rounds
            pass
        row = await services.db.read(lambda conn: runs.by_name(conn, "peers"))
        return of_file(row.file).schema


def ours(million: float, volunteers: int, rounds: int, chosen: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        schema = asyncio.run(prepare(folder / "data", million, volunteers, chosen))
        (folder / "schema.json").write_bytes(msgspec.json.encode(schema))
        parameters = sum(spec.count for spec in schema)
        server = Process(folder / "data", "--port", "0").started()
        command = [sys.executable, "-m", "tests.benchmarks.resident", "--url", server.url]
        command += ["--rounds", str(rounds), "--codec", WAYS[chosen][0], "--folder", directory]
        try:
            until_idle(server.child.pid)
            before = sum(psutil.Process(server.child.pid).cpu_times()[:2])
            with Memory(server.child.pid) as memory:
                children = [
                    subprocess.Popen(
                        [*command, "--number", str(n + 1)], stdout=subprocess.PIPE, text=True
                    )
                    for n in range(volunteers)
                ]
                said = [
                    json.loads(child.communicate(timeout=LIMIT_S)[0].splitlines()[-1])
                    for child in children
                ]
            spent = sum(psutil.Process(server.child.pid).cpu_times()[:2]) - before
        finally:
            server.stop()
    starts = [min(times) for times in zip(*(one["began"] for one in said), strict=True)][WARM:]
    seconds = [after - before for before, after in itertools.pairwise(starts)]
    stages = zip(*itertools.chain(*(one["stages"] for one in said)), strict=True)
    each = (rounds + 1) * parameters * volunteers
    return {
        "seconds": statistics.median(seconds),
        "stages": dict(zip(STAGES, map(statistics.median, stages), strict=True)),
        "cpu": {  # seconds a round
            "coordinator": spent / (rounds + WARM + 1),
            "a volunteer": statistics.mean(one["cpu"] for one in said),
        },
        "up": sum(one["traffic"][0] for one in said) / each,
        "down": sum(one["traffic"][1] for one in said) / each,
        "above_idle_mb": memory.above_mb,
        "anonymous_mb": memory.anonymous_mb,
        "parameters": parameters,
    }


def peer(python: str, script: str, *arguments: str) -> dict[str, Any] | None:
    """What a peer's program printed, or None where it is not installed or did not come to an
    end.
    """
    if not python:
        return None
    command = [python, str(PEERS / script), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"    {script}: {error}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"seconds": statistics.median(found["seconds"]), "best": min(found["seconds"])}


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for million in options.sizes:
        for volunteers in options.volunteers:
            row: dict[str, Any] = {"million": million, "volunteers": volunteers}
            for chosen in WAYS:
                row[chosen] = ours(million, volunteers, options.rounds, chosen)
            size: tuple[str, ...] = ("--parameters", str(row["float32"]["parameters"]))
            size += ("--nodes", str(volunteers))
            few = ("--rounds", str(min(options.rounds, options.peer_rounds)))
            flower = options.flower if million < FLOWER_ALONE or volunteers == 2 else ""
            row["flower"] = peer(flower, "flower_rounds.py", *size, *few)
            row["hivemind"] = peer(options.hivemind, "hivemind_steps.py", *size, *few)
            yield row


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(f"{size:g}" for size in MODELS)
    parser.add_argument("--sizes", type=numbers, default=[1.0, 10.0], help=f"millions: {known}")
    parser.add_argument("--volunteers", type=counts, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=2, help="at most, of each peer")
    parser.add_argument("--flower", default="", help="the Python of an environment with flwr")
    parser.add_argument("--hivemind", default="", help="the Python of one with hivemind")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="keep the rows that --json has already")
    parser.add_argument(
        "--table", action="store_true", help="print --json as Markdown, run nothing"
    )
    options = parser.parse_args(argv)
    kept = options.add or options.table
    rows = json.loads(options.json.read_text())["rows"] if kept and options.json.exists() else []
    print(line(HEAD), line(["---"] * len(HEAD)), sep="\n")
    for row in rows if options.table else cells(options):
        print(line(told(row)), flush=True)
        if options.json and not options.table:
            rows = joined(rows, [row])
            options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
