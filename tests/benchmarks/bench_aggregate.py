"""Merging beside Flower's own aggregation helper: the same number of float32 updates of the same
size, taking turns.

    python -m tests.benchmarks.bench_aggregate --flower ENV/bin/python --json aggregate.json

Ours reads update files through memory mapping, checks the norm and for NaN, and gives the mean
piece by piece; Flower's has the arrays in memory and gives the mean as arrays in memory. Neither
writes anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregation import aggregate
from coordinator.aggregation.cohort import cohort, pieces
from coordinator.plan.plan import plan
from shared.tensors.codec import codec
from shared.tensors.spec import TensorSpec
from tests.benchmarks.bench_peers import peer

GOAL = 3.0  # times Flower's rate
TENSORS = 16


def ours(paths: Sequence[Path], schema: tuple[TensorSpec, ...], chosen: str) -> float:
    """Seconds of one pass over all updates."""
    began = time.perf_counter()
    rule = aggregate.aggregator(plan({}), 1)
    with ExitStack() as files:
        readers = [files.enter_context(codec(chosen).decode(path, schema)) for path in paths]
        gathered = cohort(readers, [float(n + 1) for n in range(len(paths))])
        grid = pieces(schema)
        factors = aggregate.prepare(rule, gathered, grid)
        for _ in aggregate.merge(rule, gathered, factors, grid):
            pass
    return time.perf_counter() - began


def measure(options: argparse.Namespace, million: float, folder: Path) -> dict[str, Any]:
    size = int(million * 1e6) // TENSORS
    schema = tuple(TensorSpec(f"t{n}", (size,)) for n in range(TENSORS))
    paths: dict[str, list[Path]] = {"float32": [], "int8": []}
    for client in range(options.clients):
        random = np.random.default_rng(client)
        update = {spec.name: random.standard_normal(size, np.float32) for spec in schema}
        for chosen, made in paths.items():
            made.append(folder / f"{chosen}-{million:g}-{client}")
            codec(chosen).encode(update, schema, made[-1])
    taken: dict[str, list[float]] = {"float32": [], "int8": [], "flower": []}
    arguments = ("--parameters", str(size * TENSORS), "--clients", str(options.clients))
    version = ""
    for _ in range(options.repeats):
        for chosen, made in paths.items():
            taken[chosen].append(min(ours(made, schema, chosen) for _ in range(3)))
        found = peer(options.flower, "flower_aggregate.py", *arguments, "--rounds", "3")
        if found:
            taken["flower"].append(found["best"])
            version = found["version"]
    for made in paths.values():
        for path in made:
            path.unlink()
    medians = {name: statistics.median(seen) for name, seen in taken.items() if seen}
    read = 4e-9 * size * TENSORS * options.clients  # GB as float32
    return {
        "million": million,
        "clients": options.clients,
        "version": version,
        "gb_per_s": {name: read / seconds for name, seconds in medians.items()},
        "goal": GOAL,
    }


def told(row: dict[str, Any]) -> str:
    rates: dict[str, float] = row["gb_per_s"]
    line = f"{row['million']:g} M x {row['clients']}: " + ", ".join(
        f"{name} {rate:.2f} GB/s" for name, rate in rates.items()
    )
    if "flower" not in rates:
        return f"{line}; Flower is missing"
    return (
        f"{line}; float32 {rates['float32'] / rates['flower']:.1f} x Flower {row['version']} "
        f"(goal {GOAL:g})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="*", default=[10.0, 50.0], help="millions")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flower", default="", help="the Python of an environment with flwr")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for million in options.sizes:
            rows.append(measure(options, million, Path(folder)))
            print(told(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
