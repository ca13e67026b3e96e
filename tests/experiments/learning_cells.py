"""The cells of `exp_learning`: every run of it by name, the most telling first.

A name ends with the number of workers, with the steps of each where they are not 600, and with the
seed: "K4 T1200 s0". Runs with the same end share their controls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.experiments.learning import OWN_SCHEDULE, Run, defaults

STEPS = 600  # of each worker
BATCH = 4
LONG = 1200  # so that half is left when the presets' warm-up is over
SHORT = 200  # for presets that make a version of every step
ROUNDS_200 = 6000  # steps: 200 rounds of 30
WARM = 300  # steps before a warm start
SEEDS = (0, 1)
MORE_SEEDS = (0, 1, 2, 3, 4)
AVERAGE: dict[str, Any] = {"preset": "fedavg"}
DILOCO: dict[str, Any] = {"preset": "diloco"}
ALONE: dict[str, Any] = {"preset": "fedavg", "codec": "float32"}
EVERY_STEP = ("gradient-average", "sync-sgd", "async-sgd")
PRESETS = (
    "diloco",
    "async-diloco",
    "fedasync",
    "fedbuff",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedprox",
    "fedavg",
)
FEWER_BYTES = (  # way, preset, local steps, codec
    ("averaging H10", "fedavg", 10, "int8"),
    ("averaging H100", "fedavg", 100, "int8"),
    ("diloco H10", "diloco", 10, "int8"),
    ("diloco H100", "diloco", 100, "int8"),
    ("diloco H30 int4", "diloco", 30, "int4"),
    ("diloco H100 int4", "diloco", 100, "int4"),
)

Cells = Iterator[tuple[str, Run]]


def cells(out: Path) -> Cells:
    """Cells with 0.1 M parameters."""
    for seed in SEEDS:
        yield from presets(out, seed)
        yield from fewer_bytes(seed)
        yield from gradients(out, seed)
    for seed in MORE_SEEDS:
        yield from codecs(out, seed)
    yield from long(out, 0)


def full_cells(out: Path) -> Cells:
    """Cells with 0.83 M parameters."""
    for seed in SEEDS:
        for part in (controls, after_warm, eight, from_nothing):
            yield from part(out, seed)


def end(seed: int, workers: int = 4, steps: int = STEPS) -> str:
    """Return the end of a cell's name."""
    return f"K{workers} s{seed}" if steps == STEPS else f"K{workers} T{steps} s{seed}"


def warm(out: Path, workers: int, seed: int) -> Path:
    """Return the file of the weights of a warm start."""
    return out / f"warm-K{workers}-s{seed}"


def controls(out: Path, seed: int, workers: int = 4, steps: int = STEPS) -> Cells:
    """Cells of data-parallel training, which stores the warm start, and of one machine alone."""
    named = end(seed, workers, steps)
    save = {WARM: warm(out, workers, seed)} if steps == STEPS else {}
    one: dict[str, Any] = {"plan": ALONE, "workers": 1, "local_steps": 100, "seed": seed}
    one["steps"] = steps
    yield f"data-parallel {named}", Run(**one, batch=BATCH * workers, save=save)
    yield f"alone {named}", Run(**one)


def from_warm(out: Path, seed: int, workers: int = 4) -> dict[str, Any]:
    """Return settings that continue from the warm start, with data-parallel's next text."""
    return {
        "workers": workers,
        "seed": seed,
        "start": warm(out, workers, seed),
        "start_step": WARM,
        "start_sample": WARM * BATCH * workers,
    }


def warm_alone(out: Path, seed: int, workers: int = 4) -> Cells:
    then = from_warm(out, seed, workers) | {"workers": 1}
    yield f"warm, alone {end(seed, workers)}", Run(**then, plan=ALONE, local_steps=100)


def after_warm(out: Path, seed: int) -> Cells:
    """Cells of outer momentum from a warm start, by codec."""
    named, then = end(seed), from_warm(out, seed)
    yield from warm_alone(out, seed)
    for steps in (10, 30):
        yield f"warm, diloco H{steps} {named}", Run(**then, plan=DILOCO, local_steps=steps)
    for codec in ("int4", "float32"):
        yield f"warm, diloco H30 {codec} {named}", Run(**then, plan={**DILOCO, "codec": codec})


def from_nothing(out: Path, seed: int) -> Cells:
    """Cells of plain averaging from scratch."""
    for steps in (30, 10, 100):
        run = Run(plan=AVERAGE, local_steps=steps, seed=seed)
        yield f"averaging H{steps} {end(seed)}", run


def codecs(out: Path, seed: int) -> Cells:
    """Cells of one run with the same text (plain averaging, H 30), one for each codec."""
    for codec in ("float32", "int8", "int4", "bf16"):
        plan = {**AVERAGE, "codec": codec}
        yield f"averaging H30 {codec} {end(seed)}", Run(plan=plan, seed=seed)


def presets(out: Path, seed: int) -> Cells:
    """Cells of presets with every default, long enough to end their warm-up."""
    yield from controls(out, seed, steps=LONG)
    for preset in PRESETS:
        run = Run(plan=defaults(preset), steps=LONG, train=OWN_SCHEDULE, seed=seed)
        yield f"preset {preset} {end(seed, steps=LONG)}", run


def fewer_bytes(seed: int) -> Cells:
    """Cells that send more and fewer bytes than the presets' defaults, for the plot."""
    named = end(seed, steps=LONG)
    for way, preset, steps, codec in FEWER_BYTES:
        run = Run(
            plan={**defaults(preset), "codec": codec},
            steps=LONG,
            local_steps=steps,
            train=OWN_SCHEDULE,
            seed=seed,
        )
        yield f"{way} {named}", run


def gradients(out: Path, seed: int) -> Cells:
    """Cells of presets that merge gradients, with every default and a gradient a mini-batch."""
    yield from controls(out, seed, steps=SHORT)
    for preset in EVERY_STEP:
        steps = 1 if preset == "gradient-average" else 30
        run = Run(
            plan=defaults(preset),
            steps=SHORT,
            local_steps=steps,
            train=OWN_SCHEDULE,
            seed=seed,
        )
        yield f"preset {preset} {end(seed, steps=SHORT)}", run


def long(out: Path, seed: int) -> Cells:
    """Cells of 200 rounds of 30 steps."""
    yield from controls(out, seed, steps=ROUNDS_200)
    for name, plan in (("preset diloco", {"preset": "diloco"}), ("averaging H30", AVERAGE)):
        run = Run(plan=plan, steps=ROUNDS_200, curve_every=1500, seed=seed)
        yield f"{name} {end(seed, steps=ROUNDS_200)}", run


def eight(out: Path, seed: int) -> Cells:
    """Cells of eight workers."""
    named = end(seed, 8)
    yield from controls(out, seed, 8)
    yield from warm_alone(out, seed, 8)
    yield f"warm, diloco H30 {named}", Run(**from_warm(out, seed, 8), plan=DILOCO)
