"""What low communication costs in learning: loss beside bytes, for every way of merging that the
plans know.

    make experiments EXPERIMENT=learning            a model of 0.1 M parameters, two seeds; a rerun goes on
    make experiments EXPERIMENT=learning EXPERIMENT_ARGS='--full'     0.83 M parameters
    ... EXPERIMENT_ARGS='--quick'                   four cells in seconds
    ... EXPERIMENT_ARGS='--table'                   only the table and the plot again

Every cell is one run through the real queue, intake, validation and merge in virtual time, with
real training. The controls are runs of one worker: with the same batch as the others (one alone)
and with the batch of all of them (data-parallel).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.experiments.cells import Row, arguments, read, results, work_off
from tests.experiments.learning import PROBE, Run, Setup, corpus, learn
from tests.experiments.learning_cells import (
    ALONE,
    AVERAGE,
    DILOCO,
    STEPS,
    Cells,
    cells,
    full_cells,
    warm,
)
from tests.experiments.report import write_report


def quick_cells(out: Path) -> Cells:
    """A tiny model and a few steps: the same code in seconds."""
    one: dict[str, Any] = {"plan": ALONE, "workers": 1, "local_steps": 20}
    yield "data-parallel K4 s0", Run(**one, batch=32, save={40: warm(out, 4, 0)})
    yield "alone K4 s0", Run(**one)
    yield "averaging H10 K4 s0", Run(plan=AVERAGE, local_steps=10)
    warmed = Run(seed=100, start=warm(out, 4, 0), start_step=40, plan=DILOCO, local_steps=10)
    yield "warm, diloco H10 K4 s0", warmed


SMALL = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64, "dropout": 0.0}
TINY = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 32, "dropout": 0.0}


def quick_setup(folder: Path) -> Setup:
    return Setup(dataset=corpus(folder, 12), model=TINY, steps=80, batch=8, lr=1e-2, warmup=5)


def main() -> None:
    options = arguments(__doc__ or "")
    if options.quick:
        setup, listed = quick_setup(options.out), quick_cells(options.out / "quick")
    elif options.full:
        setup = Setup(dataset=corpus(options.out.parent), model=PROBE, steps=STEPS)
        listed = full_cells(options.out / "full")
    else:
        data = corpus(options.out.parent)
        setup = Setup(dataset=data, model=SMALL, steps=STEPS, lr=3e-3)
        listed = cells(options.out)

    def work(run: Run) -> Row:
        crowd = run.workers * (run.batch or setup.batch) // setup.batch
        return {"workers": crowd, "machines": run.workers} | learn(setup, run).row()

    work_off(options, listed, work)
    write_report(options, read(results(options)))


if __name__ == "__main__":
    main()
