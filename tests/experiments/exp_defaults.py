"""Share of data-parallel's gain that the presets keep by default, on two corpora and by six seeds,
beside controls at their own best learning rate.

    make experiments EXPERIMENT=defaults                              about two hours of one core
    ... EXPERIMENT_ARGS='--only "code*"'                              one corpus
    ... EXPERIMENT_ARGS='--full'                                      0.83 M: two hours more
    ... EXPERIMENT_ARGS='--table'                                     only the tables again

Four equal machines, 1,200 steps each, 30 local steps, 0.1 M parameters, fresh momentum in each
task; `shared momentum`, with 15 local steps, is the default of such a model. The rate of each
control is the one of four that is best on the validation texts, by the mean of the seeds; presets
take the one of data-parallel. The tables are of test texts, which no choice has seen. Presets that
merge gradients, whose versions are single steps, make 200. The large size has only `diloco` beside
its controls, whose rates are chosen by one seed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.experiments.cells import Row, arguments, read, results, work_off
from tests.experiments.learning import (
    OWN_SCHEDULE,
    PROBE,
    TEXTS,
    Run,
    Setup,
    corpus,
    defaults,
    learn,
    unseen_chunks,
)
from tests.experiments.learning_cells import ALONE, EVERY_STEP, LONG, ROUNDS_200, SHORT

MODEL = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64, "dropout": 0.0}  # 0.1 M
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
SHORT_RATES = (7.5e-4, 1.5e-3, 3e-3, 6e-3)  # of 200 steps: the lower are better there
SEEDS = range(6)
FEWER = range(3)
CODEC_SEEDS = range(12)
SLOWER = 5.0
FIRST = ("diloco", "fedavg")
OTHERS = ("fedavgm", "fedadam", "fedyogi", "fedprox", "fedbuff", "fedasync", "async-diloco")
BESIDE_A_SLOW_ONE = ("async-diloco", "fedbuff", "fedasync", "diloco", "fedavg")
CODECS = ("int8", "int4", "float32")
CONTROLS = {"data-parallel": 16, "alone": 4}  # batch of one machine
SLOW = "one slow"
Cell = tuple[str, float, Run]  # corpus, rate, run


def name_of(texts: str, what: str, rate: float, seed: int, steps: int = LONG) -> str:
    length = "" if steps == LONG else f" T{steps}"
    return f"{texts} {what}{length} {rate:g} s{seed}"


def controls(
    seeds: range = SEEDS,
    steps: int = LONG,
    corpora: tuple[str, ...] = tuple(TEXTS),
    rates: tuple[float, ...] = (),
) -> Iterator[tuple[str, Cell]]:
    for texts in corpora:
        for name, batch in CONTROLS.items():
            for rate in rates or rates_of(steps):
                for seed in seeds:
                    yield from _control(texts, name, batch, rate, seed, steps)


def rates_of(steps: int) -> tuple[float, ...]:
    """Return the rates to try for controls of so many steps."""
    return SHORT_RATES if steps == SHORT else RATES


def _control(
    texts: str, name: str, batch: int, rate: float, seed: int, steps: int
) -> Iterator[tuple[str, Cell]]:
    run = Run(
        plan=ALONE,
        workers=1,
        local_steps=100,
        batch=batch,
        steps=steps,
        seed=seed,
        curve_every=steps,
    )
    yield name_of(texts, name, rate, seed, steps), (texts, rate, run)


def of_preset(preset: str, seed: int, steps: int = LONG, **more: Any) -> Run:
    plan = defaults(preset) | more.pop("plan", {})
    return Run(plan=plan, steps=steps, train=OWN_SCHEDULE, seed=seed, curve_every=steps, **more)


def presets(done: Mapping[str, Row]) -> Iterator[tuple[str, Cell]]:
    """Cells of the presets, at the rate that is data-parallel's."""
    for names, seeds in ((FIRST, SEEDS), (OTHERS, FEWER)):
        for seed in seeds:
            for name in names:
                for texts in TEXTS:
                    rate = best(done, texts, "data-parallel")
                    yield name_of(texts, name, rate, seed), (texts, rate, of_preset(name, seed))


def shared(done: Mapping[str, Row]) -> Iterator[tuple[str, Cell]]:
    """Cells of `diloco` whose tasks begin with the mean momentum of the last ones."""
    merge = {"lr": 1.0, "momentum": 0.3}  # the workload's defaults with a shared momentum
    for seed in FEWER:
        rate = best(done, "code", "data-parallel")
        run = of_preset("diloco", seed, plan=merge, local_steps=15, model={"shared_momentum": True})
        yield name_of("code", "shared momentum", rate, seed), ("code", rate, run)


def beside_a_slow_one(done: Mapping[str, Row]) -> Iterator[tuple[str, Cell]]:
    """Cells with one machine five times slower; together the four train as much as equal ones."""
    fast = {"steps_per_s": 1.0, "jitter": 0.0, "overhead_s": 0.0, "latency_ms": 2.0}
    slow = fast | {"name": "slow", "count": 1, "steps_per_s": 1 / SLOWER}
    machines = (fast | {"name": "fast", "count": 3}, slow)
    for seed in FEWER:
        for name in BESIDE_A_SLOW_ONE:
            for texts in TEXTS:
                rate = best(done, texts, "data-parallel")
                run = of_preset(name, seed, machines=machines)
                yield name_of(texts, f"{SLOW} {name}", rate, seed), (texts, rate, run)


def codecs(done: Mapping[str, Row]) -> Iterator[tuple[str, Cell]]:
    """Cells of `diloco` with each codec, on the same texts of a seed."""
    rate = best(done, "code", "data-parallel")
    for seed in CODEC_SEEDS:
        for codec in CODECS:
            run = of_preset("diloco", seed, plan={"codec": codec})
            yield name_of("code", f"codec {codec}", rate, seed), ("code", rate, run)


def longer(done: Mapping[str, Row]) -> Iterator[tuple[str, Cell]]:
    """Cells of 200 rounds of 30 steps, at the rate that suits data-parallel there."""
    rate = best(done, "code", "data-parallel", ROUNDS_200)
    for seed in FEWER:
        run = of_preset("diloco", seed, ROUNDS_200)
        yield name_of("code", "diloco", rate, seed, ROUNDS_200), ("code", rate, run)


def gradients(done: Mapping[str, Row]) -> Iterator[tuple[str, Cell]]:
    """Cells of presets that merge a gradient for each mini-batch: a version is a step."""
    for seed in FEWER:
        for name in EVERY_STEP:
            for texts in TEXTS:
                rate = best(done, texts, "data-parallel", SHORT)
                steps = 1 if name == "gradient-average" else 30
                run = of_preset(name, seed, SHORT, local_steps=steps)
                yield name_of(texts, name, rate, seed, SHORT), (texts, rate, run)


def large(done: Mapping[str, Row], seed: int) -> Iterator[tuple[str, Cell]]:
    """Cells of the larger model, one seed: controls at their best rates, and `diloco`."""
    for texts in TEXTS:
        for name, batch in CONTROLS.items():
            rate = best(done, texts, name)
            yield from _control(texts, name, batch, rate, seed, LONG)
        rate = best(done, texts, "data-parallel")
        yield name_of(texts, "diloco", rate, seed), (texts, rate, of_preset("diloco", seed))


def best(done: Mapping[str, Row], texts: str, control: str, steps: int = LONG) -> float:
    """Return the rate with the lowest mean loss on the validation texts, over the seeds that
    were tried at every rate.
    """

    def losses(rate: float) -> dict[int, float]:
        rows = {seed: done.get(name_of(texts, control, rate, seed, steps)) for seed in SEEDS}
        return {seed: row["loss"] for seed, row in rows.items() if row}

    rates = rates_of(steps)
    known = {rate: losses(rate) for rate in rates}
    known = {rate: rows for rate, rows in known.items() if rows} or {rates[0]: {}}
    seeds = set.intersection(*(set(rows) for rows in known.values()))
    means = {rate: math.fsum(rows[seed] for seed in seeds) for rate, rows in known.items()}
    return min(means, key=lambda rate: means[rate])


def shares(
    done: Mapping[str, Row], texts: str, what: str, steps: int = LONG
) -> tuple[list[float], list[Row]]:
    """Return the shares of the gain in per cent, a seed each, and the rows behind them."""
    low, high = (best(done, texts, name, steps) for name in CONTROLS)
    found, rows = [], []
    for seed in SEEDS:
        row = done.get(name_of(texts, what, low, seed, steps))
        alone = done.get(name_of(texts, "alone", high, seed, steps))
        whole = done.get(name_of(texts, "data-parallel", low, seed, steps))
        if row and alone and whole:
            gain = alone["test"] - whole["test"]
            found.append(100 * (alone["test"] - row["test"]) / gain)
            rows.append(row)
    return found, rows


def tables(done: Mapping[str, Row]) -> Iterator[str]:
    """The tables in lines of Markdown."""
    yield "| corpus | control | " + " | ".join(f"{rate:g}" for rate in RATES) + " |"
    yield "|---|---|" + "---|" * len(RATES)
    for texts in TEXTS:
        for control in CONTROLS:
            yield f"| {texts} | {control} | " + " | ".join(_means(done, texts, control)) + " |"
    yield ""
    yield "| corpus | preset | seeds | mean | worst | sd | busy | bytes up, down a parameter |"
    yield "|---|---|---|---|---|---|---|---|"
    for what, steps in (("", LONG), (f"{SLOW} ", LONG), ("", ROUNDS_200), ("", SHORT)):
        for texts in TEXTS:
            for name in (*FIRST, "shared momentum", *OTHERS, *EVERY_STEP):
                yield from _line(done, texts, what + name, steps)
    yield ""
    yield from _codecs(done)


def _means(done: Mapping[str, Row], texts: str, control: str) -> Iterator[str]:
    for rate in RATES:
        rows = [done.get(name_of(texts, control, rate, seed)) for seed in SEEDS]
        known = [row["loss"] for row in rows if row]
        yield f"{statistics.mean(known):.3f}" if known else ""


def _line(done: Mapping[str, Row], texts: str, what: str, steps: int) -> Iterator[str]:
    kept, rows = shares(done, texts, what, steps)
    if not rows:
        return
    sd = statistics.stdev(kept) if len(kept) > 1 else 0.0
    busy = 100 * steps / statistics.mean(row["virtual_s"] for row in rows)
    up, down = (statistics.mean(row[way] for row in rows) for way in ("up", "down"))
    told = "" if what.startswith(SLOW) else f"{busy:.0f} %"
    yield (
        f"| {texts} | {what}{'' if steps == LONG else f', {steps:,} steps'} | {len(rows)} "
        f"| {statistics.mean(kept):.0f} % | {min(kept):.0f} % | {sd:.0f} | {told} "
        f"| {up:.0f}, {down:.0f} |"
    )


def _codecs(done: Mapping[str, Row]) -> Iterator[str]:
    rate = best(done, "code", "data-parallel")
    for codec in CODECS[:-1]:
        gaps = []
        for seed in CODEC_SEEDS:
            row, plain = (
                done.get(name_of("code", f"codec {each}", rate, seed))
                for each in (codec, "float32")
            )
            if row and plain:
                gaps.append(100 * (row["test"] / plain["test"] - 1))
        if len(gaps) > 1:
            error = statistics.stdev(gaps) / math.sqrt(len(gaps))
            mean = statistics.mean(gaps)
            yield f"{codec} beside float32, {len(gaps)} seeds: {mean:+.2f} % +- {error:.2f}"


def main() -> None:
    options = arguments(__doc__ or "")
    folder: Path = options.out.parent

    def work(cell: Any) -> Row:
        texts, rate, run = cell
        data = corpus(folder, 0, texts)
        model = PROBE if options.full else MODEL
        setup = Setup(dataset=data, model=model, steps=run.steps, lr=rate, warmup=None)
        return learn(dataclasses.replace(setup, test=unseen_chunks(folder, texts)), run).row()

    if options.full:
        done = work_off(options, controls(range(1), rates=RATES[:-1]), work)
        for seed in SEEDS:
            done = work_off(options, large(done, seed), work)
        print("\n".join(tables(done)))
        return
    done = work_off(options, controls(), work)
    for cells in (presets, shared, beside_a_slow_one, codecs):
        done = work_off(options, cells(done), work)
    done = work_off(options, controls(FEWER, ROUNDS_200, ("code",)), work)
    work_off(options, longer(done), work)
    done = work_off(options, controls(FEWER, SHORT), work)
    work_off(options, gradients(done), work)
    print("\n".join(tables(read(results(options)))))


if __name__ == "__main__":
    main()
