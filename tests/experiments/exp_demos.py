"""Learning of the demo's runs of pictures and adapters, with all their defaults, in virtual time.

    make experiments EXPERIMENT=demos                              a rerun goes on
    make experiments EXPERIMENT=demos EXPERIMENT_ARGS='--quick'    the same code in seconds

Each cell is one run of two equal machines through the real queue, intake and merge, with real
training, so that equal virtual time is an equal number of steps. The same file measures an older
version of the product: `PYTHONPATH=/path/to/its/clone python tests/experiments/exp_demos.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import tomlkit
import torch

from coordinator.demo.runs import demo_run
from coordinator.simulate import loop
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import Dataset, Hooks, MergedHead, simulate
from shared.tensors.frame import open_frame
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.learning import local
from tests.experiments.torch_labour import TorchLabour

if TYPE_CHECKING:
    from coordinator.runs.definition import Definition
    from shared.workloads.data.local_data import LocalData

MACHINES, SEEDS = 2, (0, 1)
STEPS = {"dcgan": 600, "causal-lm": 400}  # of each machine
QUICK_STEPS = 60
CURVE = 4  # measurements of a run, its end among them
EVALUATE_S = 600.0
FAST = {"up_mbit": 1e6, "down_mbit": 1e6}


class DemoCell(msgspec.Struct, frozen=True):
    """One run of a demo's file."""

    workload: str
    seed: int
    steps: int


def built(workload: str) -> Dataset:
    """Return the dataset of a demo and its blobs."""
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return name

    build = demo_run(workload, MACHINES).build
    assert build is not None
    return build(put), blobs


class Curve:
    """Losses of a run's versions on its held-out data."""

    def __init__(self, dataset: Dataset, every: float) -> None:
        manifest = dataset[0]
        self._heldout = local(dataset, (*manifest.heldout, *manifest.assets.values()))
        # the judge of pictures and the tokenizer are files beside the held-out chunks
        self._heldout.manifest = msgspec.structs.replace(manifest, chunks=manifest.heldout)
        self._every, self._due = every, every
        self._newest: tuple[Mapping[str, torch.Tensor], Definition, float] | None = None
        self.losses: list[tuple[float, float]] = []  # virtual seconds, loss

    def see(self, head: MergedHead) -> None:
        """Keep a version, and measure it if it is due."""
        with open_frame(head.weights, head.about.schema) as frame:
            weights = {name: torch.from_numpy(np.array(frame.array(name))) for name in frame}
        self._newest = weights, head.about, head.seconds
        if head.seconds >= self._due:
            self._due += self._every
            self.measure()

    def measure(self) -> float:
        """Return the loss of the newest version."""
        assert self._newest is not None, "no version was merged"
        weights, about, seconds = self._newest
        if not self.losses or self.losses[-1][0] != seconds:
            figures = about.workload.evaluate(
                about.file.model, weights, self._heldout, EVALUATE_S, lambda: False
            )
            self.losses.append((seconds, figures["loss"]))
        return self.losses[-1][1]


def table(cell: DemoCell) -> dict[str, Any]:
    """Return the scenario of a cell: equal machines, a step a second, links that cost nothing."""
    run = tomlkit.parse(demo_run(cell.workload, MACHINES).toml).unwrap()
    run |= {"name": "demo", "seed": cell.seed, "evaluation": {"every": 0}}
    run["retention"] = {"latest": 2, "every": 0}
    machine = {"steps_per_s": 1.0, "jitter": 0.0, "overhead_s": 0.0}
    return {
        "seed": cell.seed + 1,
        "hours": cell.steps / 3600,
        "server": FAST,
        "run": {key: value for key, value in run.items() if key != "dataset"},
        "workers": [
            FAST | machine | {"name": f"worker-{index}", "latency_ms": 2.0 * (index + 1)}
            for index in range(MACHINES)
        ],
    }


def trained(cell: DemoCell) -> Row:
    """Train one cell and return its losses and bytes."""
    dataset = built(cell.workload)
    curve = Curve(dataset, cell.steps / CURVE)

    def labour(about: Definition, scratch: Path, data: LocalData | None, index: int) -> TorchLabour:
        assert data is not None
        return TorchLabour(about, scratch, data)

    hooks = Hooks(labour=labour, dataset=dataset, on_version=curve.see, tick_s=2.0)
    outcome = loop.run(simulate(from_table(table(cell)), hooks))
    loss = curve.measure()
    sent = sum(trace.up_bytes for trace in outcome.traces)
    return {
        "loss": round(loss, 4),
        "curve": [(round(at), round(value, 4)) for at, value in curve.losses],
        "versions": len(outcome.merged_at),
        "up": round(sent / outcome.parameters / MACHINES, 1),
    }


def main() -> None:
    options = arguments(__doc__ or "")
    cells = {
        f"{workload} s{seed}": DemoCell(workload, seed, QUICK_STEPS if options.quick else steps)
        for seed in SEEDS[: 1 if options.quick else None]
        for workload, steps in STEPS.items()
    }
    for name, row in work_off(options, cells, trained).items():
        print(f"{name}: {row['loss']}, by time {row['curve']}")
    print(results(options))


if __name__ == "__main__":
    main()
