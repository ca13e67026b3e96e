"""Forms of the learner for answers of older versions: solved at equal tokens, many runs at once.

    make experiments EXPERIMENT=staleness

Processes share a card; a batch of runs is worked off by one of them, in the order of `BATCHES`.
No batch is begun that would end after `--minutes`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.experiments.cells import arguments, read, results
from tests.experiments.grpo_cells import Cells, Way, taught
from tests.experiments.grpo_reference import Settings, warmed

SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)
OFF = {"low": 0.0, "high": 1e9}
BOTH = {"over_worse": False, **OFF}


def bounded(kind: str, most: float) -> dict[str, Any]:
    """Importance weights up to a bound, nothing clipped."""
    return {"kind": kind, "kind_worse": kind, "most": most, "most_worse": most, **BOTH}


NOW = {"baseline": 1.0}
WIDE = {"low": 0.4, "high": 1.56}
FORMS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "wide": WIDE,
    "wider": {"low": 0.2, "high": 2.5},
    "m2 .04": {**OFF, "most": 10.0, "second": 0.04},
    "m2 .01": {**OFF, "most": 10.0, "second": 0.01},
    "m2 .2": {**OFF, "most": 10.0, "second": 0.2},
    "token 1": bounded("token", 1.0),
    "token 4": bounded("token", 4.0),
    "prefix 1": bounded("prefix", 1.0),
    "prefix 3": bounded("prefix", 3.0),
    "sequence 1": bounded("sequence", 1.0),
    "sequence 3": bounded("sequence", 3.0),
    "sequence 3 now": {**bounded("sequence", 3.0), **NOW},
    "sequence 1 now": {**bounded("sequence", 1.0), **NOW},
    "prefix 3 now": {**bounded("prefix", 3.0), **NOW},
    "mean 1.5": bounded("mean", 1.5),
    "traced": bounded("traced", 3.0),
    "tapered": {**bounded("sequence", 1.0), "kind": "none"},
    "tapered token": {**bounded("token", 1.0), "kind": "none"},
    "tapered decay": {**bounded("sequence", 1.0), "kind": "none", "decay": 0.9},
    "none": bounded("none", 1.0),
    "clipped now": NOW,
    "wide now": {**WIDE, **NOW},
    "worse 1": {"most_worse": 1.0, "over_worse": False, "high": 1.56},
    "worse seq 1": {"most_worse": 1.0, "over_worse": False, "kind_worse": "sequence", **WIDE},
    "drop 1": {"drop": 1.0},
    "drop 2 wide": {"drop": 2.0, **WIDE},
    "trust .03": {"trust": 0.03},
    "trust .01": {"trust": 0.01},
    "trust .003": {"trust": 0.003},
    "trust .01 wide": {"trust": 0.01, **WIDE},
    "beta1 0": {"beta1": 0.0},
    "beta1 .8": {"beta1": 0.8},
    "beta2 .99": {"beta2": 0.99},
    "beta2 .999": {"beta2": 0.999},
    "eps 1e-4": {"eps": 1e-4},
    "decay": {"decay": 0.9},
    "wide decay": {"decay": 0.9, **WIDE},
    "sequence 3 now decay": {**bounded("sequence", 3.0), **NOW, "decay": 0.9},
    "sequence 3 now trust": {**bounded("sequence", 3.0), **NOW, "trust": 0.01},
}
SMALL = Settings(problems=8, versions=1600)
FOUR = Settings(steps=4)
MILLION = Settings(width=128, layers=5, warm_lr=1e-3)


def grid(
    forms: tuple[str, ...], lags: tuple[int, ...], rates: tuple[float, ...], warmup: int = 20
) -> dict[str, Way]:
    """Return forms at lags and rates (in 1e-4)."""
    return {
        f"{form} @{lag} {rate:g}" + ("" if warmup == 20 else f" u{warmup}"): Way(
            **{"lr": rate * 1e-4, "lag": lag, "warmup": warmup, **FORMS[form]}
        )
        for form in forms
        for lag in lags
        for rate in rates
    }


Batch = tuple[str, Settings, dict[str, Way]]
TWO = ("clipped", "tapered")
GRIDS: list[Batch] = [
    ("", Settings(), grid(TWO, (0, 8, 2), (1, 2, 4))),
    ("", Settings(), grid(tuple(FORMS), (8,), (2,))),
    ("", Settings(), grid(("decay", "tapered decay"), (0, 8), (2, 4))),
    ("million ", MILLION, grid(TWO, (0, 8), (1, 2))),
    ("", Settings(), grid(TWO, (0, 8, 2), (1, 2, 4), 0)),
    ("four ", FOUR, grid(TWO, (0, 8), (0.5, 1, 2), 80)),
    ("small ", SMALL, grid(TWO, (0, 8), (0.5, 1, 2), 80)),
    ("", Settings(), grid(tuple(FORMS), (8,), (1, 4))),
]


def batches(options: argparse.Namespace) -> Iterator[Batch]:
    """Cut the grids into what is worked off together, each way once and no finished one."""
    seen = {name.rpartition(", seed")[0] for name in read(results(options))}
    for prefix, settings, ways in GRIDS:
        left = {n: w for n, w in ways.items() if prefix + n not in seen}
        wanted = {n: w for n, w in left.items() if fnmatch.fnmatch(prefix + n, options.only)}
        seen |= {prefix + name for name in wanted}
        size = 60 // len(SEEDS) if settings.width < 100 else 3
        names = list(wanted)
        for start in range(0, len(names), size):
            yield prefix, settings, {name: wanted[name] for name in names[start : start + size]}


def warm_weights(settings: Settings, seed: int, folder: Path) -> dict[str, torch.Tensor]:
    """Return a warm model's weights, made once."""
    path = folder / f"warm-{settings.width}-{settings.layers}-{settings.length}-{seed}.pt"
    if not path.exists():
        torch.set_num_threads(1)
        found = {n: p.detach().cpu() for n, p in warmed(settings, seed).named_parameters()}
        part = path.with_suffix(f".{os.getpid()}")
        torch.save(found, part)
        part.rename(path)
    return dict(torch.load(path))


def worked_off(
    options: argparse.Namespace, device: str, began: float, places: Any, listed: list[Batch]
) -> None:
    """Work off batches, in turns with other processes, while there is time."""
    torch.set_num_threads(1)
    took = dict[str, float]()
    while True:
        with places.get_lock():
            place, places.value = places.value, places.value + 1
        if place >= len(listed):
            return
        prefix, settings, ways = listed[place]
        at = time.time()
        left = options.minutes * 60 - (at - began) if options.minutes else math.inf
        if left < 1.1 * took.get(prefix, max([*took.values(), 0.0])):
            continue
        if options.quick:
            settings = settings._replace(versions=8, warm_steps=10)
        settings = settings._replace(device=device)
        seeds = SEEDS[:2] if options.quick else SEEDS
        warm = {seed: warm_weights(settings, seed, options.out) for seed in seeds}
        cells = Cells(settings, [(way, seed) for way in ways.values() for seed in seeds], warm)
        found = taught(cells, settings.versions // 8)
        took[prefix] = time.time() - at
        names = [(name, seed) for name in ways for seed in seeds]
        lines = [
            {
                "cell": f"{prefix}{name}, seed {seed}",
                "curve": [round(each, 3) for each in solved],
                "far": [round(each, 3) for each in far],
                "took_s": round(took[prefix], 1),
            }
            for (name, seed), solved, far in zip(names, found["solved"], found["far"], strict=True)
        ]
        with results(options).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{place}/{len(listed)} {prefix}{names[0][0]} {took[prefix]:.0f} s", flush=True)


def summary(options: argparse.Namespace) -> str:
    """Return a line a way: mean of seeds at the end and its error, of the last three measurements,
    the first three seeds at the end, and the middle distance of ratios.
    """
    found = dict[str, list[dict[str, Any]]]()
    for name, row in read(results(options)).items():
        found.setdefault(name.rpartition(", seed")[0], []).append(row)
    lines = []
    for way, rows in found.items():
        ends = torch.tensor([row["curve"][-1] for row in rows]) * 100
        late = torch.tensor([row["curve"][-3:] for row in rows]).mean() * 100
        first = ",".join(f"{each:.0f}" for each in ends[:3])
        far = sorted(row["far"][-1] for row in rows)[len(rows) // 2]
        error = ends.std() / len(rows) ** 0.5 if len(rows) > 1 else 0.0
        lines.append(f"{way}: {ends.mean():.1f}+-{error:.1f} l{late:.1f} {first} {far:.2f}")
    return "\n".join(lines)


def main() -> None:
    options = arguments(__doc__ or "")
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.time()
    context = get_context("spawn")
    if not options.quick and device == "cuda":
        with context.Pool(min(len(SEEDS), len(os.sched_getaffinity(0)))) as pool:
            pool.starmap(warm_weights, [(Settings(), seed, options.out) for seed in SEEDS])
    places, listed = context.Value("i", 0), list(batches(options))
    working = [
        context.Process(target=worked_off, args=(options, device, began, places, listed))
        for _ in range(5 if device == "cuda" else 1)
    ]
    for each in working:
        each.start()
    for each in working:
        each.join()
    print(summary(options))


if __name__ == "__main__":
    main()
