"""Churn: eight volunteers, one of them five times slower, who disappear 4.3 times an hour: 30 % of
tasks of five minutes end with the machine gone.

    make experiments EXPERIMENT=churn                            about ten minutes; a rerun goes on
    make experiments EXPERIMENT=churn EXPERIMENT_ARGS='--quick'

Waiting for everybody sets the mark: its loss in the end, and when that was. Every other way gets
the same virtual time; the figure is how much of it passed until the mark was reached. Controls: the
slow one left out, and the barrier kept with a task for the slow one that is as short as its speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.experiments.cells import Row, arguments, read, results, work_off
from tests.experiments.exp_learning import SMALL, TINY
from tests.experiments.learning import Run, Setup, corpus, defaults, learn

PACE = 0.1  # steps a second of a fast one: a task of 30 steps is five minutes
SLOWER = 5.0
LOST_PER_HOUR = 4.3
BACK_MINUTES = 1.0
STEPS = 180  # of each volunteer, waiting
LEVEL = {"min_lr_ratio": 1.0}  # nobody knows how many steps a way will make
NO_DEADLINE = 100_000.0
SHARE = 0.4  # of waiting's time that the other ways get
WAITING = "waiting for all"


def machines(slow: bool = True, waits: bool = False) -> tuple[dict[str, Any], ...]:
    one = {"lost_per_hour": LOST_PER_HOUR, "back_after_minutes": BACK_MINUTES, "latency_ms": 50.0}
    one["waits"] = waits
    fast = {"name": "fast", "count": 7, "steps_per_s": PACE, **one}
    late = {"name": "slow", "count": 1, "steps_per_s": PACE / SLOWER, **one}
    return (fast, late) if slow else (fast,)


def ways(steps: int) -> dict[str, Run]:
    """Return the ways to merge, waiting first, since the others have a share of its time."""
    common: dict[str, Any] = {
        "workers": 8,
        "train": LEVEL,
        "curve_s": steps / PACE / 9,
        "tick_s": 5.0,
        "local_steps": 30,
    }
    barrier = {"preset": "fedavg", "quorum": 8, "deadline_seconds": NO_DEADLINE}
    same = {"task": {"by_speed": False}}
    sized = {"task": {"target_seconds": 30 / PACE, "min_steps": 1}}
    seven = barrier | {"quorum": 7}
    found = {
        WAITING: Run(plan=barrier, machines=machines(waits=True), **common | same),
        "the slow one left out": Run(plan=seven, machines=machines(False, True), **common),
        "waiting, the slow one's task as short as it is slow": Run(
            plan=barrier, machines=machines(waits=True), **common | sized
        ),
    }
    for preset in ("fedavg", "fedbuff", "fedasync", "diloco", "async-diloco"):
        run = Run(plan=defaults(preset), machines=machines(), **common | sized)
        found[f"preset {preset}, tasks sized by speed"] = run
    for preset in ("fedavg", "fedbuff"):
        run = Run(plan=defaults(preset), machines=machines(), **common | same)
        found[f"preset {preset}, tasks of 30 steps"] = run
    return found


def main() -> None:
    options = arguments(__doc__ or "")
    steps = 60 if options.quick else STEPS
    model = TINY if options.quick else SMALL
    data = corpus(options.out.parent, 12 if options.quick else 0)
    setup = Setup(dataset=data, model=model, steps=steps, lr=3e-3)
    for seed in (0,) if options.quick else (0, 1):
        waited: list[float] = []

        def work(run: Run, seed: int = seed, waited: list[float] = waited) -> Row:
            if waited:
                run = replace(run, hours=waited[0] * SHARE / 3600, tokens_share=100.0)
            row = learn(setup, replace(run, seed=seed)).row()
            return {"seed": seed} | row

        for name, run in ways(steps).items():
            cell = f"{name} s{seed}"
            done = work_off(options, {cell: run}, work)
            if name == WAITING:
                if cell not in done:
                    break
                waited.append(done[cell]["virtual_s"])
    lines = table(list(read(results(options)).values()))
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def reached(row: Row, mark: float) -> float | None:
    """Return the virtual second at which the loss first reached the mark."""
    return next((at for _, at, loss in row["curve"] if loss <= mark), None)


def table(rows: Sequence[Row]) -> list[str]:
    """Time to the mark as a share of waiting's, for each seed, and the loss at the end of that
    time.
    """
    lines = [
        "| way | time to waiting's final loss, by seed | loss at the same time | refused |",
        "|---|---|---|---|",
    ]
    by_way: dict[str, list[Row]] = {}
    for row in rows:
        by_way.setdefault(row["cell"].rsplit(" s", 1)[0], []).append(row)
    marks = {row["seed"]: row for row in by_way.get(WAITING, ())}
    for way, found in by_way.items():
        shares, losses, refused = [], [], 0
        for row in found:
            mark = marks[row["seed"]]
            at = reached(row, mark["loss"])
            shares.append("never" if at is None else f"{at / mark['virtual_s']:.2f} x")
            losses.append(f"{row['loss']:.3f}")
            refused += sum(row["refused"].get(why, 0) for why in ("norm", "loss", "stale"))
        lines.append(f"| {way} | {', '.join(shares)} | {', '.join(losses)} | {refused} |")
    return lines


if __name__ == "__main__":
    main()
