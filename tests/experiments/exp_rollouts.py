"""Reinforcement learning with verified rewards, in one process of plain torch: how much staleness
costs at equal tokens, and what the forms of the objective change.

    make experiments EXPERIMENT=rollouts

A card is used where there is one; `--only "lag 8, seed 1"` runs one cell.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.grpo_reference import Settings, solved, taught, warmed

SEEDS = (1, 2, 3)
WAYS: dict[str, dict[str, Any]] = {
    "lag 0": {},
    "lag 2": {"lag": 2},
    "lag 8": {"lag": 8},
    "mean of tokens": {"mean": "tokens"},
    "scaled": {"scaled": True},
    "half the rate": {"lr": 2e-4},
    "1 M parameters": {"width": 128, "layers": 5, "warm_lr": 1e-3, "lr": 2e-4},
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


def main() -> None:
    options = arguments(__doc__ or "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = {"versions": 50, "warm_steps": 20} if options.quick else {}
    cells = {
        f"{way}, seed {seed}": (Settings(device=device)._replace(**{**more, **size}), seed)
        for way, more in WAYS.items()
        for seed in SEEDS
    }
    work_off(options, cells, work)
    print(results(options))


if __name__ == "__main__":
    main()
