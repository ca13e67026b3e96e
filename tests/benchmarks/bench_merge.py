"""Merging: our aggregation beside a plain one-thread chunked accumulation over the same
memory-mapped files.

    python tests/benchmarks/bench_merge.py --json merge.json
    python tests/benchmarks/bench_merge.py --contributions 8 --elements 1000000 --repeats 3

Both sides walk over the same files in turns; a ratio is the median over the pairs. Aggregation
only: the optimiser's step and the writing (hash, fsync) stand apart. Memory is anonymous (RssAnon),
without the mapped files, in a pass of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.aggregation import aggregate
from coordinator.aggregation.aggregate import Mean
from coordinator.aggregation.cohort import Cohort, Floats, TensorPiece, cohort, pieces
from coordinator.aggregation.robust import (
    MEDIAN,
    Aggregator,
    CentredClip,
    Krum,
    NormClip,
    TrimmedMean,
)
from coordinator.aggregation.server_optimizer import Push, server_optimizer
from coordinator.plan.plan import plan
from shared.tensors.frame import Frame, FrameWriter, open_frame
from shared.tensors.spec import Schema, TensorSpec, grid

# At least 0.8 x the rate of a plain accumulation; rules that bound a hostile minority at most 4 x
# the time of the mean. Krum's distances grow with the square of the contributions and have no goal.
PLAIN_GOAL, ROBUST_GOAL = 1.25, 4.0
PLAIN_CHUNK = 256 * 1024  # elements; the best of 64 Ki to 1 Mi for the plain loop
WHOLE = "weights"


@dataclass(frozen=True)
class MappedReader:
    """A contribution in a raw float32 frame."""

    frame: Frame

    def read(self, name: str, start: int, stop: int, room: Floats | None = None) -> Floats:
        found: Floats = self.frame.array(name).reshape(-1)[start:stop]
        return found


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    seconds: float
    gb_per_s: float  # of contributions read
    ratio: float  # median of the pairs; below 1 is faster than what it is compared with
    beside: str
    goal: float | None  # what the ratio may be at most


@contextmanager
def crowd(directory: Path, count: int, elements: int) -> Iterator[tuple[Schema, list[Frame]]]:
    """Contributions in files of their own, memory-mapped, in the page cache."""
    schema: Schema = (TensorSpec(WHOLE, (elements,)),)
    with ExitStack() as stack:
        frames = []
        for index in range(count):
            path = directory / f"{index}.safetensors"
            rng = np.random.default_rng(index)
            with FrameWriter(path, schema, {}) as writer:
                for start, stop in grid(elements):
                    values = rng.standard_normal(stop - start, dtype=np.float32)
                    writer.write(WHOLE, values * np.float32(1e-3))
            # A private mapping is still the file's own pages; torch warns of read-only ones.
            frames.append(stack.enter_context(open_frame(path, schema, copy_on_write=True)))
        yield schema, frames


def plain_torch(frames: Sequence[Frame], elements: int, *, fused: bool) -> Callable[[], None]:
    tensors = [torch.from_numpy(frame.array(WHOLE)) for frame in frames]
    weight = 1 / len(frames)
    room = torch.empty(min(elements, 1 << 22))

    def run() -> None:
        for start, stop in grid(elements, PLAIN_CHUNK):
            at = start % (1 << 22)
            total = room[at : at + stop - start].zero_()
            for tensor in tensors:
                if fused:
                    total.add_(tensor[start:stop], alpha=weight)
                else:
                    total.add_(tensor[start:stop] * weight)

    return run


def ours(
    rule: Aggregator, group: Cohort, walk: Sequence[TensorPiece], threads: int = 1
) -> Callable[[], None]:
    def run() -> None:
        factors = aggregate.prepare(rule, group, walk, threads)
        for _ in aggregate.merge(rule, group, factors, walk, threads):
            pass

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(one: Callable[[], None], other: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median seconds of `one` and median of its ratio to `other`, run in turns after one warm-up
    each.
    """
    one()
    other()
    times, ratios = [], []
    for index in range(repeats):
        order = (one, other) if index % 2 == 0 else (other, one)
        taken = {run: seconds(run) for run in order}
        times.append(taken[one])
        ratios.append(taken[one] / taken[other])
    return statistics.median(times), statistics.median(ratios)


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not tell RssAnon")


def peak_above_base(run: Callable[[], None]) -> int:
    """The most anonymous memory seen during `run`, looked at every millisecond, above what there
    was before.
    """
    # What earlier runs freed may still lie in the heap, and would hide what this one takes.
    ctypes.CDLL(None).malloc_trim(0)
    base, peak, over = anonymous_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    run()
    peak = max(peak, anonymous_bytes())
    over.set()
    watcher.join()
    return max(0, peak - base)


def aggregation_rows(frames: Sequence[Frame], schema: Schema, repeats: int) -> list[Row]:
    elements = schema[0].count
    group = cohort([MappedReader(frame) for frame in frames], [1.0] * len(frames))
    walk = pieces(schema)
    size = len(frames) * elements * 4 / 1e9
    plain = plain_torch(frames, elements, fused=False)
    mean = ours(Mean(), group, walk)
    compared: list[tuple[str, Callable[[], None], str, Callable[[], None], float | None]] = [
        ("mean, result checked", mean, "plain", plain, PLAIN_GOAL),
        ("mean, 2 threads", ours(Mean(), group, walk, 2), "plain", plain, None),
        (
            "mean, result checked",
            mean,
            "plain fused",
            plain_torch(frames, elements, fused=True),
            None,
        ),
    ]
    robust: dict[str, tuple[Aggregator, float | None]] = {
        "median": (MEDIAN, ROBUST_GOAL),
        "trimmed mean": (TrimmedMean(0.2), ROBUST_GOAL),
        "norm clip": (NormClip(1.5), ROBUST_GOAL),
        "Krum": (Krum(0.2, several=False), None),
        "multi-Krum": (Krum(0.2, several=True), None),
        "centred clip": (CentredClip(1.0), ROBUST_GOAL),
    }
    compared += [
        (name, ours(rule, group, walk), "mean", mean, goal) for name, (rule, goal) in robust.items()
    ]
    rows = []
    for what, one, beside, other, goal in compared:
        taken, ratio = paired(one, other, repeats)
        rate = size / taken
        rows.append(
            Row(what=what, seconds=taken, gb_per_s=rate, ratio=ratio, beside=beside, goal=goal)
        )
    return rows


def step_rows(directory: Path, schema: Schema) -> dict[str, float]:
    """Seconds of what comes after the aggregation, for the whole model."""
    elements = schema[0].count
    found: dict[str, float] = {}
    update, params = np.full(elements, 1e-3, np.float32), np.zeros(elements, np.float32)
    for preset in ("fedavg", "diloco", "fedadam"):
        optimizer = server_optimizer(plan({"preset": preset}))
        state = {slot: np.zeros(elements, np.float32) for slot in optimizer.slots}
        optimizer.step(params, update, state, optimizer.begin({}, Push()))
        start = time.perf_counter()
        optimizer.step(params, update, state, optimizer.begin({}, Push()))
        found[f"server step of {preset}"] = time.perf_counter() - start
    start = time.perf_counter()
    with FrameWriter(directory / "out.safetensors", schema, {}) as writer:
        for first, last in grid(elements):
            writer.write(WHOLE, params[first:last])
    found["write, hash and fsync"] = time.perf_counter() - start
    return found


def memory_rows(frames: Sequence[Frame], schema: Schema) -> dict[str, float]:
    """Anonymous bytes above the base, in contributions of this size."""
    group = cohort([MappedReader(frame) for frame in frames], [1.0] * len(frames))
    walk, size = pieces(schema), schema[0].nbytes
    runs = {
        "mean": ours(Mean(), group, walk),
        "mean, 2 threads": ours(Mean(), group, walk, 2),
        "median": ours(MEDIAN, group, walk),
        "centred clip": ours(CentredClip(1.0), group, walk),
    }
    return {name: peak_above_base(run) / size for name, run in runs.items()}


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        with crowd(directory, arguments.contributions, arguments.elements) as (schema, frames):
            rows = aggregation_rows(frames, schema, arguments.repeats)
            return {
                "contributions": arguments.contributions,
                "elements": arguments.elements,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "aggregation": [asdict(row) for row in rows],
                "after": step_rows(directory, schema),
                "memory": memory_rows(frames, schema),
            }


def verdict(row: dict[str, Any]) -> str:
    if row["goal"] is None:
        return ""
    return f"<= {row['goal']:g} {'reached' if row['ratio'] <= row['goal'] else 'MISSED'}"


def show(found: dict[str, Any]) -> None:
    print(
        f"merge of {found['contributions']} x {found['elements']:,} float32 ({found['machine']})\n"
    )
    print(f"{'aggregation':<34}{'s':>8}{'GB/s':>8}{'ratio':>8}  beside")
    for row in found["aggregation"]:
        numbers = f"{row['seconds']:>8.3f}{row['gb_per_s']:>8.1f}{row['ratio']:>8.2f}"
        print(f"{row['what']:<34}{numbers}  {row['beside']:<13}{verdict(row)}")
    print(f"\n{'after it':<34}{'s':>8}")
    for name, value in found["after"].items():
        print(f"{name:<34}{value:>8.3f}")
    print(f"\n{'anonymous memory above base':<34}{'contributions':>14}")
    for name, value in found["memory"].items():
        print(f"{name:<34}{value:>14.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contributions", type=int, default=32)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the files are made (and removed)")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    found = report(arguments)
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
