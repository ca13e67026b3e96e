"""Presets: named strategies, each with some keys of `Plan`; the other keys keep their defaults.

They are plain data, checked like a run file.
"""

from __future__ import annotations

# Share of the live workers in a merge. With half or less, two halves of the workers could
# alternate, each half merging without the other's work.
MORE_THAN_HALF = 0.6

_AVERAGING: dict[str, object] = {"update": "delta", "optimizer": "sgd", "lr": 1.0}
# Measured with Muon as the inner optimiser, fresh in each task (docs/experiments.md). With AdamW,
# training from scratch with outer momentum ended worse than one worker alone.
_OUTER_MOMENTUM: dict[str, object] = {"update": "delta", "lr": 0.7, "momentum": 0.8}
# Adam's step on deltas has the size of lr in every coordinate, so lr is about the movement of a
# coordinate in one task.
_ADAPTIVE: dict[str, object] = {"update": "delta", "lr": 0.003, "beta1": 0.9, "beta2": 0.99}
_GRADIENT: dict[str, object] = {
    "update": "gradient",
    "grace": 0.0,
    "arrival_scale": "one",
    "optimizer": "adamw",
}
_SAME_VERSION: dict[str, object] = {"max_staleness": 0, "table": "constant", "overlap": True}
_EVERY_BATCH: dict[str, object] = {"gradient_every": 1, "pull_every": 1}
_EVERY_ARRIVAL: dict[str, object] = {
    "quorum": 1,
    "grace": 0.0,
    "deadline_seconds": 0.0,
    "arrival_scale": "one",
    "damping": True,
    "overlap": True,
}

PRESETS: dict[str, dict[str, object]] = {
    "fedavg": _AVERAGING,
    "fedprox": _AVERAGING | {"prox_mu": 0.01},
    # Heavy-ball momentum has no look-ahead, so the momentum 0.9 and rate 0.7 of Nesterov's rule do
    # not suit it.
    "fedavgm": _AVERAGING | {"lr": 0.35, "momentum": 0.8},
    "fedadam": _ADAPTIVE | {"optimizer": "adam", "bias_correction": True},
    "fedyogi": _ADAPTIVE | {"optimizer": "yogi"},
    "diloco": _OUTER_MOMENTUM
    | {"optimizer": "nesterov", "codec": "int4", "quorum_share": MORE_THAN_HALF},
    "fedbuff": _OUTER_MOMENTUM
    | {
        "optimizer": "nesterov",
        "quorum": 2,
        "quorum_share": MORE_THAN_HALF,
        "table": "polynomial",
        "damping": True,
    },
    "fedasync": _AVERAGING
    | _EVERY_ARRIVAL
    | {"lr": 0.6, "table": "polynomial", "max_staleness": 50},
    # Merges of three synchronise workers, since a late worker waits once. In merges of one, equal
    # machines never begin at the same version; in merges of two, four machines may stay two
    # separate pairs. There is no damping, since versions from a slow machine's short tasks make no
    # work outdated.
    "async-diloco": _OUTER_MOMENTUM
    | {
        "optimizer": "delayed-nesterov",
        "quorum": 3,
        "table": "polynomial",
        "max_staleness": 100,
        "arrival_scale": "one",
    },
    "gradient-average": _GRADIENT | _SAME_VERSION | {"in_flight": "cancel"},
    "sync-sgd": _GRADIENT
    | _SAME_VERSION
    | _EVERY_BATCH
    | {"deadline_seconds": 60.0, "in_flight": "redo"},
    "async-sgd": _GRADIENT
    | _EVERY_ARRIVAL
    | _EVERY_BATCH
    | {"table": "inverse", "max_staleness": 50},
    "self-play": _AVERAGING
    | {
        "quorum": 1,
        "grace": 0.0,
        "deadline_seconds": 0.0,
        "arrival_scale": "one",  # most workers play games and bring no update
        "max_staleness": 2,
        "table": "constant",
        "overlap": True,
    },
}

# Defaults of `[task]` by preset, unless the run file or the workload sets others. A task's gradient
# makes one step of the model, however many mini-batches it averages: with 50 the loss ended far
# above that of one worker alone, with 5 a little below (docs/experiments.md).
TASKS: dict[str, dict[str, object]] = {"gradient-average": {"local_steps": 1}}
