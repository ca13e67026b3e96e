"""One coordinator, every built-in workload at once, machines that are eight times as fast as
others: all of it counts, and each run gets its share of the device time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.runs.definition import CREDIT_FLOPS, MICRO
from shared.protocol.leases import Lease
from shared.workloads.data.documents import Document
from shared.workloads.data.text_dataset import build_text
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.scripted_worker import Player
from tests.support.workloads.tiny_dcgan import stripes

# Tasks of about five million operations each, so that a short test sees many of them.
TEXT = """
name = "text"
workload = "gpt"
dataset = "sums"
weight = 2.0
[model]
block_size = 8
n_layer = 1
n_head = 1
n_embd = 8
dropout = 0.0
[task]
local_steps = 16
batch_size = 2
[plan]
preset = "fedavg"
quorum = 1
codec = "float32"
"""
IMAGES = """
name = "images"
workload = "dcgan"
dataset = "stripes"
[model]
generator_width = 8
discriminator_width = 8
latent = 16
[task]
local_steps = 5
batch_size = 16
[plan]
quorum = 1
codec = "float32"
"""
GAMES = """
name = "games"
workload = "gomoku"
[model]
size = 5
win = 4
blocks = 1
channels = 8
[task]
local_steps = 2
batch_size = 16
[plan]
codec = "float32"
[task.options]
games = 1
simulations = 8
match_simulations = 8
match_games = 2
window = 64
window_min = 2
chunk = 2
"""
TINY = TEXT.replace('"text"', '"tiny"').replace("weight = 2.0", "weight = 1.0")
WEIGHTS = {"text": 2.0, "images": 1.0, "games": 1.0, "tiny": 1.0}
MACHINES = {
    "gpu": ("cuda:0", 4e6),
    "laptop": ("mps", 2e6),
    "desk": ("cpu", 1e6),
    "old": ("cpu", 5e5),
}
TASKS = 36


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        text = [Document(str(n), f"{n} plus {n} is {n + n};\n" * 60) for n in range(60)]
        await made.coordinator.datasets.add(
            lambda put: build_text("sums", text, put, vocab_size=300, chunk_tokens=2048)
        )
        await made.coordinator.datasets.add(stripes)
        for run in (TEXT, IMAGES, GAMES, TINY):
            created = await made.coordinator.runs.create(run)
            await made.coordinator.runs.start(created.name)
        yield made


def operations(lease: Lease) -> float:
    """Return the operations of a task, from the server's price for it."""
    return lease.price_micro / MICRO * CREDIT_FLOPS


async def merge(home: LocalCoordinator) -> None:
    """Seal games into chunks, and make every merge that is due."""
    await home.coordinator.replay.tend(3)
    for run in range(1, 5):
        while await home.coordinator.merger.merge_if_due(run):
            pass


@pytest.mark.slow
async def test_all_workloads_run_side_by_side_and_each_has_its_share(
    home: LocalCoordinator,
) -> None:
    workloads = ["gpt", "dcgan", "gomoku"]
    machines = [
        Player(home, await home.join(name, workloads=workloads), device=device, flops=flops)
        for name, (device, flops) in MACHINES.items()
    ]
    given: Counter[str] = Counter()  # operations, by run
    done: Counter[tuple[str, str]] = Counter()  # tasks, by run and machine
    ends: list[tuple[float, int, Lease]] = []
    began = home.clock.monotonic()

    async def hand_out(at: float, number: int) -> None:
        lease = await machines[number].claim()
        given[lease.job.run] += round(operations(lease))
        heapq.heappush(ends, (at + operations(lease) / machines[number].flops, number, lease))

    for number in range(len(machines)):
        await hand_out(0.0, number)
    for _ in range(TASKS):
        at, number, lease = heapq.heappop(ends)
        await home.clock.advance(max(0.0, began + at - home.clock.monotonic()))
        verdict = await machines[number].do(lease)
        assert verdict.state in ("accepted", "merged"), verdict
        done[lease.job.run, machines[number].worker.name] += 1
        await merge(home)
        await hand_out(at, number)

    total = sum(given.values())
    for run, weight in WEIGHTS.items():
        fair = weight / sum(WEIGHTS.values())
        assert given[run] / total == pytest.approx(fair, rel=0.25), given
    assert {who for _, who in done} == set(MACHINES)
    assert {run for run, who in done if who == "gpu"} == set(WEIGHTS)
    for run in WEIGHTS:
        assert (await home.coordinator.runs.queries.info(run)).version >= 1
    ranks = await home.coordinator.volunteers.leaderboard()
    assert [row.nickname for row in ranks] == list(MACHINES)  # who did most has most
    assert (await home.coordinator.checks.run()).breaches == ()
    assert await home.coordinator.ledger.check() == ()
