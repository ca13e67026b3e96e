"""Rounds a second: a model of about 1,000 parameters, no training, two resident volunteers in
processes of their own.

    python -m tests.benchmarks.bench_rounds --json rounds.json
    python -m tests.benchmarks.bench_rounds --rounds 40 --volunteers 4

A real `coordinator serve` on SQLite with every commit synced; each volunteer claims, begins (which
waits for the merge it has a part in), uploads a pseudo-random delta and hands it in, through the
volunteer's own client. A round is a version. Version 0 is evaluated before the server starts: it
would import PyTorch meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.runs.definition import of_file
from coordinator.services import opened
from shared.clock import SystemClock
from shared.protocol import endpoints
from shared.protocol.accounts import RegisterRequest
from shared.protocol.leases import ClaimRequest
from shared.tensors.codec import codec
from shared.tensors.spec import Schema
from shared.workloads.data.text_dataset import build_text
from tests.benchmarks.handing import Handing
from tests.support.server_process import Process
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.storage.blob_cache import Cache

GOAL = 8.0  # rounds a second
WARM = 5  # rounds before the clock starts
RUN = """
name = "tiny"
workload = "gpt"
dataset = "text"
[model]
block_size = 8
n_layer = 1
n_head = 1
n_embd = 3
[task]
local_steps = 1
batch_size = 1
[plan]
preset = "fedavg"
quorum = {volunteers}
codec = "float32"
downlink = "float32"
[evaluation]
every = 0
"""


async def prepare(base: Path, volunteers: int) -> Schema:
    """A data directory with a running run."""
    text = base.parent / "text.txt"
    text.write_text(
        "".join(f"the {n}th line of a text that teaches nobody\n" for n in range(20_000))
    )
    async with opened(Settings(data_dir=str(base))) as services:
        await services.datasets.add(lambda put: build_text("text", [text], put, vocab_size=257))
        await services.runs.create(RUN.format(volunteers=volunteers))
        await services.runs.start("tiny")
        while await services.evaluation.evaluate_next():
            pass
        row = await services.db.read(lambda conn: runs.by_name(conn, "tiny"))
        return of_file(row.file).schema


async def volunteer(url: str, number: int, schema: Schema, rounds: int, folder: Path) -> None:
    """One resident volunteer. Prints the time of the first and of the last round it counts."""
    clock = SystemClock()
    worker, secret = secrets.token_hex(16), secrets.token_hex(32)
    request = RegisterRequest(
        volunteer_id=worker,
        worker_id=worker,
        secret=secret,
        nickname=f"bench-{number}",
        workloads=("gpt",),
    )
    client = Client(Address(url=url), clock=clock, token=f"{worker}.{secret}")
    api = Api(client)
    await api.call(endpoints.REGISTER, body=request)
    transfers = Transfers(api, Cache(folder / "cache", 1 << 30))
    random = np.random.default_rng(number)
    began = 0.0
    for turn in range(rounds + WARM):
        if turn == WARM:
            began = time.time()
        await one_round(api, transfers, schema, random, folder / f"update-{number}")
    print(json.dumps({"began": began, "ended": time.time(), "sent": client.sent_bytes}))
    await client.close()


async def one_round(
    api: Api, transfers: Transfers, schema: Schema, random: np.random.Generator, path: Path
) -> None:
    claim = ClaimRequest(claim_id=random.bytes(16).hex(), step_flops=1e9)
    reply = await api.claim(claim)
    lease = reply.lease
    assert lease is not None, reply.idle
    begun = await api.begin(lease.task, lease.attempt)
    delta = {spec.name: random.normal(0, 1e-5, spec.shape).astype(np.float32) for spec in schema}
    path.unlink(missing_ok=True)
    encoded = codec("float32").encode(delta, schema, path)
    handing = Handing(lease, begun, encoded, "float32")
    await handing.upload(transfers, path)
    await handing.submit(api)


def measure(volunteers: int, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        schema = asyncio.run(prepare(folder / "data", volunteers))
        server = Process(folder / "data", "--port", "0").started()
        try:
            command = [
                sys.executable,
                "-m",
                "tests.benchmarks.bench_rounds",
                "--url",
                server.url,
                "--rounds",
                str(rounds),
            ]
            stored = msgspec.json.encode(schema).decode()
            children = [
                subprocess.Popen(
                    [*command, "--number", str(n + 1), "--schema", stored, "--folder", directory],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for n in range(volunteers)
            ]
            said = [json.loads(child.communicate(timeout=600)[0]) for child in children]
        finally:
            server.stop()
    seconds = max(one["ended"] for one in said) - min(one["began"] for one in said)
    rate = rounds / seconds
    return {
        "volunteers": volunteers,
        "parameters": sum(spec.count for spec in schema),
        "rounds": rounds,
        "seconds": round(seconds, 2),
        "rounds_per_s": round(rate, 2),
        "goal": GOAL,
        "reached": rate >= GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--volunteers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    for hidden in ("--url", "--schema", "--folder"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.number:
        schema = msgspec.json.decode(options.schema, type=Schema)
        folder = Path(options.folder) / f"volunteer-{options.number}"
        folder.mkdir(exist_ok=True)
        asyncio.run(volunteer(options.url, options.number, schema, options.rounds, folder))
        return
    row = measure(options.volunteers, options.rounds)
    print("\n".join(f"{name:14} {value}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": [row]}, indent=1))


if __name__ == "__main__":
    main()
