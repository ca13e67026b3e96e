"""Cost of draws beside the honest work of 1,000 tasks, by the rules of an open run.

    make bench BENCH=trust
    python -m tests.benchmarks.bench_trust --json trust.json --tasks 1000

A task is timed on one thread, and what comparing its update takes: a recompute is both. How often
the first tasks of a new account are drawn comes from the real rules, by their own draws. "cost" is
the seconds of recomputes over the seconds of the tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coordinator.rules import draws as rules
from shared.proofs import proof_of_work
from shared.tensors.codec import codec
from shared.workloads.base import Job
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, Weights, config, job, sums

GOAL = 0.06
SIZES: dict[str, dict[str, int]] = {
    "0.1 M": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64},
    "0.9 M": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128},
    "10 M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 128},
}
CODEC = "int8"
Row = NDArray[np.float32]
SECRET = b"a secret of the server"


def drawn(tasks: int, accounts: int) -> float:
    """Return how many of the first tasks of an account are done again, on average."""
    count = 0
    for account in range(accounts):
        draws = 0
        for task in range(tasks):
            chance = rules.chance(draws, 1, 1.0, rules.FLOOR)
            draws += rules.drawn(SECRET, "recompute", account * tasks + task, "digest", chance)
        count += draws
    return count / accounts


def timed(task: Job, data: Folder, weights: Weights, folder: Path) -> tuple[float, float]:
    """Return the seconds of a task, and of comparing its update with another of the same."""
    began = time.perf_counter()
    work = WORKLOAD.begin(task, weights, data, "cpu")
    while not work.done:
        work.advance()
    after = work.result()[1]
    worked = time.perf_counter()
    schema = WORKLOAD.schema(task.config)
    ours = {name: (value - after[name]).numpy() for name, value in weights.items()}
    codec(CODEC).encode(ours, schema, folder / "update")
    with codec(CODEC).decode(folder / "update", schema) as theirs:
        cosine(ours, theirs)
    return worked - began, time.perf_counter() - worked


def cosine(ours: Mapping[str, Row], theirs: Mapping[str, Row]) -> float:
    """Return the cosine of two updates."""
    sums = [0.0, 0.0, 0.0]
    for name, one in ours.items():
        a, b = np.ravel(one).astype(np.float64), np.ravel(theirs[name]).astype(np.float64)
        for at, value in enumerate((a @ b, a @ a, b @ b)):
            sums[at] += float(value)
    return sums[0] / math.sqrt(max(1e-30, sums[1] * sums[2]))


def measure(name: str, options: argparse.Namespace, recomputes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = sums(Path(folder), documents=200)
        model = config(data, **SIZES[name])
        weights = WORKLOAD.init(model, 0)
        task = job(model, options.steps, options.batch)
        turns = [timed(task, data, weights, Path(folder)) for _ in range(options.repeats + 1)][1:]
    seconds, compared = (statistics.median(side) for side in zip(*turns, strict=True))
    share = recomputes * (seconds + compared) / (options.tasks * seconds)
    return {
        "model": name,
        "steps": options.steps,
        "task_s": round(seconds, 3),
        "compared_s": round(compared, 3),
        "recomputes": round(recomputes, 1),
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
    recomputes = drawn(options.tasks, options.accounts)
    rows = [measure(name, options, recomputes) for name in SIZES]
    for row in [*rows, puzzle()]:
        print("\n".join(f"{name:24} {value}" for name, value in row.items()), end="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "puzzle": puzzle()}, indent=1))


if __name__ == "__main__":
    main()
