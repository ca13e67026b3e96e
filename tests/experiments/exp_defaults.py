"""Share of data-parallel's gain that the presets keep by default, on two corpora and by six seeds,
beside controls at their own best learning rate.

    make experiments EXPERIMENT=defaults                              about an hour of one core
    ... EXPERIMENT_ARGS='--only "code*"'                              one corpus
    ... EXPERIMENT_ARGS='--table'                                     only the table again

Four equal machines, 1,200 steps each, 30 local steps, 0.1 M parameters. The rate of each control is
the one of three that is best on the validation texts, by the mean of the seeds; presets take the
one of data-parallel. The table is of test texts, which no choice has seen.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.experiments.cells import Row, arguments, read, results, work_off
from tests.experiments.learning import (
    OWN_SCHEDULE,
    TEXTS,
    Run,
    Setup,
    corpus,
    defaults,
    learn,
    unseen_chunks,
)
from tests.experiments.learning_cells import ALONE, LONG

MODEL = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64, "dropout": 0.0}
RATES = (1.5e-3, 3e-3, 6e-3)
SEEDS = range(6)
FIRST = ("diloco", "fedavg")
OTHERS = ("fedavgm", "fedadam", "fedyogi", "fedprox", "fedbuff", "fedasync", "async-diloco")
CONTROLS = {"data-parallel": 16, "alone": 4}  # batch of one machine
Cell = tuple[str, float, Run]  # corpus, rate, run


def controls() -> Iterator[tuple[str, Cell]]:
    for texts in TEXTS:
        for name, batch in CONTROLS.items():
            for rate in RATES:
                for seed in SEEDS:
                    run = Run(
                        plan=ALONE,
                        workers=1,
                        local_steps=100,
                        batch=batch,
                        steps=LONG,
                        seed=seed,
                        curve_every=LONG,
                    )
                    yield f"{texts} {name} {rate:g} s{seed}", (texts, rate, run)


def presets(done: Mapping[str, Row]) -> Iterator[tuple[str, Cell]]:
    """Cells of the presets, at the rate that is data-parallel's."""
    for names, seeds in ((FIRST, SEEDS), (OTHERS, SEEDS[:3])):
        for seed in seeds:
            for name in names:
                for texts in TEXTS:
                    rate = best(done, texts, "data-parallel")
                    run = Run(
                        plan=defaults(name),
                        steps=LONG,
                        train=OWN_SCHEDULE,
                        seed=seed,
                        curve_every=LONG,
                    )
                    yield f"{texts} {name} {rate:g} s{seed}", (texts, rate, run)


def best(done: Mapping[str, Row], texts: str, control: str) -> float:
    """The rate with the lowest mean loss on the validation texts."""

    def mean(rate: float) -> float:
        rows = [done.get(f"{texts} {control} {rate:g} s{seed}") for seed in SEEDS]
        return float(statistics.mean([row["loss"] for row in rows if row] or [99.0]))

    return min(RATES, key=mean)


def table(done: Mapping[str, Row]) -> Iterator[str]:
    """Share of the gain by corpus and preset, in lines of Markdown."""
    yield "| corpus | preset | seeds | mean | worst | sd | busy | bytes up, down a parameter |"
    yield "|---|---|---|---|---|---|---|---|"
    for texts in TEXTS:
        low, high = (best(done, texts, name) for name in ("data-parallel", "alone"))
        for name in (*FIRST, *OTHERS):
            shares: list[float] = []
            rows: list[Row] = []
            for seed in SEEDS:
                row = done.get(f"{texts} {name} {low:g} s{seed}")
                top = done.get(f"{texts} alone {high:g} s{seed}")
                base = done.get(f"{texts} data-parallel {low:g} s{seed}")
                if row and top and base:
                    gain = top["test"] - base["test"]
                    shares.append(100 * (top["test"] - row["test"]) / gain)
                    rows.append(row)
            if rows:
                sd = statistics.stdev(shares) if len(shares) > 1 else 0.0
                busy = 100 * LONG / statistics.mean(row["virtual_s"] for row in rows)
                up, down = (statistics.mean(row[way] for row in rows) for way in ("up", "down"))
                yield (
                    f"| {texts} | {name} | {len(rows)} | {statistics.mean(shares):.0f} % "
                    f"| {min(shares):.0f} % | {sd:.0f} | {busy:.0f} % | {up:.0f}, {down:.0f} |"
                )


def main() -> None:
    options = arguments(__doc__ or "")
    folder: Path = options.out.parent

    def work(cell: Any) -> Row:
        texts, rate, run = cell
        data = corpus(folder, 0, texts)
        setup = Setup(dataset=data, model=MODEL, steps=LONG, lr=rate, warmup=None)
        return learn(dataclasses.replace(setup, test=unseen_chunks(folder, texts)), run).row()

    done = work_off(options, controls(), work)
    work_off(options, presets(done), work)
    print("\n".join(table(read(results(options)))))


if __name__ == "__main__":
    main()
