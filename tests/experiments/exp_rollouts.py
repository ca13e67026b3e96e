"""Reinforcement learning with verified rewards, in one process of plain torch: how much staleness
costs at equal tokens, and what the forms of the objective change.

    make experiments EXPERIMENT=rollouts

A card is used where there is one, by a process for each core, since small models wait for launches.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import time
from multiprocessing import get_context
from typing import Any

import torch

from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.grpo_reference import Settings, solved, taught, warmed

SEEDS = (1, 2, 3)
WAYS: dict[str, dict[str, Any]] = {
    "lag 0": {"lr": 2e-4},
    "lag 2": {"lr": 2e-4, "lag": 2},
    "lag 8": {"lr": 2e-4, "lag": 8},
    "lag 0, falling rate": {"decay": 0.9},
    "lag 8, falling rate": {"decay": 0.9, "lag": 8},
    "lag 0, clipped": {"lr": 2e-4, "form": "clipped"},
    "lag 2, clipped": {"lr": 2e-4, "form": "clipped", "lag": 2},
    "lag 8, clipped": {"lr": 2e-4, "form": "clipped", "lag": 8},
    "mean of tokens": {"mean": "tokens"},
    "scaled": {"scaled": True},
    "twice": {"lr": 1e-4, "steps": 2, "times": 2},
    "twice, clipped": {"lr": 1e-4, "steps": 2, "times": 2, "form": "clipped"},
    "four steps": {"lr": 1e-4, "steps": 4},
    "1 M parameters": {"width": 128, "layers": 5, "warm_lr": 1e-3, "lr": 2e-4},
    "recipe": {  # `reason`
        **{"width": 208, "warm_steps": 75, "warm_lr": 1e-3, "lr": 1.5e-4},
        **{"problems": 96, "group": 16, "steps": 2, "versions": 250},
    },
}
CURVE = 50  # versions between two measurements


def work(cell: tuple[Settings, int]) -> Row:
    """Warm a model, and teach it by rewards."""
    settings, seed = cell
    began = time.monotonic()
    model = warmed(settings, seed)
    warm_s, first = time.monotonic() - began, solved(model, settings)
    curve, signals = [first], []
    for version, _, signal in taught(model, settings, seed):
        signals.append(signal)
        if version % CURVE == 0:
            curve.append(solved(model, settings))
    return {
        "before": round(first, 3),
        "after": round(curve[-1], 3),
        "signal": round(sum(signals) / len(signals), 3),
        "warm_s": round(warm_s, 1),
        "parameters": sum(each.numel() for each in model.parameters()),
        "curve": [round(each, 3) for each in curve],
    }


def worked_off(options: argparse.Namespace, cells: list[tuple[str, tuple[Settings, int]]]) -> None:
    torch.set_num_threads(1)
    work_off(options, cells, work)


def main() -> None:
    options = arguments(__doc__ or "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = {"versions": 50, "warm_steps": 20} if options.quick else {}
    cells = [
        (f"{way}, seed {seed}", (Settings(device=device)._replace(**{**more, **size}), seed))
        for way, more in WAYS.items()
        for seed in SEEDS
    ]
    wanted = [cell for cell in cells if fnmatch.fnmatch(cell[0], options.only)]
    count = len(os.sched_getaffinity(0)) - 1 if device == "cuda" else 1
    context = get_context("spawn")
    shares = [wanted[place::count] for place in range(count)]
    working = [context.Process(target=worked_off, args=(options, share)) for share in shares]
    for each in working:
        each.start()
    for each in working:
        each.join()
    print(results(options))


if __name__ == "__main__":
    main()
