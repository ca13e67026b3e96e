"""Cost of the checks of work beside the honest work of 1,000 tasks, by the rules of an open run.

    make bench BENCH=trust
    python -m tests.benchmarks.bench_trust --json trust.json --tasks 1000

A task, its forward check and its recompute are timed in turns on one thread (the recompute is the
task again, with encoding and comparing left out as they take a hundredth of it). How often each is
drawn over the first tasks of a new account comes from the real rules, by their own draws. "cost" is
the seconds of checks over the seconds of the tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from coordinator.rules import checks, standing
from coordinator.rules.checks import OPEN_RATES, Kind, Streaks
from shared import proof_of_work
from shared.workloads.base import Job
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, Weights, config, job, sums

GOAL = 0.06
SIZES: dict[str, dict[str, int]] = {
    "0.1 M": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64},
    "0.9 M": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128},
    "10 M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 128},
}
SECRET = b"a secret of the server"


def drawn(tasks: int, accounts: int) -> dict[Kind, float]:
    """Return how many checks of each kind the first tasks of an account get, on average."""
    counts: dict[Kind, int] = {"forward": 0, "recompute": 0}
    for account in range(accounts):
        streaks: dict[Kind, int] = {"forward": 0, "recompute": 0}
        for task in range(tasks):
            passed = sum(streaks.values())
            now = Streaks(
                vetted=passed >= standing.PASSED_MIN,
                forward_streak=streaks["forward"],
                recompute_streak=streaks["recompute"],
            )
            for kind in streaks:
                chance = checks.chance(kind, now, OPEN_RATES)
                if checks.drawn(SECRET, kind, account * tasks + task, "digest", chance):
                    counts[kind] += 1
                    streaks[kind] += 1
    return {kind: count / accounts for kind, count in counts.items()}


def timed(task: Job, data: Folder, weights: Weights) -> tuple[float, float]:
    """Return the seconds of a task and of its forward check."""
    began = time.perf_counter()
    work = WORKLOAD.begin(task, weights, data, "cpu", None)
    while not work.done:
        work.advance()
    updated = work.result()[1]
    worked = time.perf_counter()
    WORKLOAD.check(task, weights, updated, (data, data.heldout()), 7)
    return worked - began, time.perf_counter() - worked


def measure(name: str, options: argparse.Namespace, counts: dict[Kind, float]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = sums(Path(folder), documents=200)
        model = config(data, **SIZES[name])
        weights = WORKLOAD.init(model, 0)
        task = job(model, options.steps, options.batch)
        turns = [timed(task, data, weights) for _ in range(options.repeats + 1)][1:]
    seconds, check = (statistics.median(side) for side in zip(*turns, strict=True))
    cost = counts["forward"] * check + counts["recompute"] * seconds
    share = cost / (options.tasks * seconds)
    return {
        "model": name,
        "steps": options.steps,
        "task_s": round(seconds, 3),
        "forward_check_s": round(check, 3),
        "forward_checks": round(counts["forward"], 1),
        "recomputes": round(counts["recompute"], 1),
        "cost": round(share, 4),
        "goal": GOAL,
        "reached": share <= GOAL,
    }


def puzzle(bits: int = 20) -> dict[str, Any]:
    """Return what registering costs the newcomer and the server."""
    challenge = proof_of_work.challenge(SECRET, "someone", 4e9)
    began = time.perf_counter()
    nonce = proof_of_work.solve(challenge, bits, lambda _: True)
    solved = time.perf_counter()
    assert nonce is not None
    for _ in range(1000):
        proof_of_work.check(SECRET, "someone", challenge, 1.0)
        proof_of_work.solves(challenge, nonce, bits)
    checked = (time.perf_counter() - solved) / 1000
    return {
        "bits": bits,
        "microseconds_a_hash": round(1e6 * (solved - began) / (nonce + 1), 3),
        "verified_in_microseconds": round(1e6 * checked, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--accounts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = drawn(options.tasks, options.accounts)
    rows = [measure(name, options, counts) for name in SIZES]
    for row in [*rows, puzzle()]:
        print("\n".join(f"{name:24} {value}" for name, value in row.items()), end="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "puzzle": puzzle()}, indent=1))


if __name__ == "__main__":
    main()
