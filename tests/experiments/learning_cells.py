"""The cells of `exp_learning`: every run of it by name, the most telling first.

A name ends with the number of workers, with the steps of each where they are not 600, and with the seed: "K4 T1200 s0". Runs with
the same end share their controls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.experiments.learning import Run

STEPS = 600  # of each worker
LONG = 1200  # so that half is left when the presets' warm-up is over
SHORT = 200  # for presets that merge gradients of every step
WARM = 300  # steps before a warm start
SEEDS = (0, 1)
AVERAGE: dict[str, Any] = {"preset": "fedavg"}
DILOCO: dict[str, Any] = {"preset": "diloco", "phases": []}
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
ARRIVALS: Mapping[str, tuple[dict[str, Any], float]] = {
    "fedbuff": ({"quorum": 2}, 1.75),
    "fedasync": ({"quorum": 1, "deadline_seconds": 0.0}, 3.0),
    "async-diloco": ({"quorum": 1, "deadline_seconds": 0.0}, 3.0),
}

Cells = Iterator[tuple[str, Run]]


def cells(out: Path) -> Cells:
    """0.1 M parameters."""
    for part in (headline, codecs, presets, eight, frontier, gradients):
        for seed in SEEDS:
            yield from part(out, seed)
    yield from more_codecs(out)
    yield from rest(out)


def full_cells(out: Path) -> Cells:
    """0.83 M parameters."""
    for seed in SEEDS:
        yield from headline(out, seed)
    yield from codecs(out, 0)
    yield from eight(out, 0)
    yield from rest(out)


def end(seed: int, workers: int = 4, steps: int = STEPS) -> str:
    """The end of a cell's name."""
    return f"K{workers} s{seed}" if steps == STEPS else f"K{workers} T{steps} s{seed}"


def warm(out: Path, workers: int, seed: int) -> Path:
    """Where the weights of a warm start are kept."""
    return out / f"warm-K{workers}-s{seed}"


def controls(out: Path, seed: int, workers: int = 4, steps: int = STEPS) -> Cells:
    """Data-parallel (it leaves the warm start behind) and one alone."""
    named = end(seed, workers, steps)
    save = {WARM: warm(out, workers, seed)} if steps == STEPS else {}
    one: dict[str, Any] = {"plan": ALONE, "workers": 1, "local_steps": 100, "seed": seed}
    one["steps"] = steps
    yield f"data-parallel {named}", Run(**one, batch=4 * workers, save=save)
    yield f"alone {named}", Run(**one)


def from_warm(out: Path, seed: int, workers: int = 4) -> dict[str, Any]:
    return {
        "workers": workers,
        "seed": seed + 100,  # other text than before
        "start": warm(out, workers, seed),
        "start_step": WARM,
    }


def headline(out: Path, seed: int) -> Cells:
    """Plain averaging from nothing, and outer momentum from a warm start."""
    named, then = end(seed), from_warm(out, seed)
    yield from controls(out, seed)
    yield f"warm, alone {named}", Run(**then | {"workers": 1}, plan=ALONE, local_steps=100)
    for steps in (30, 10):
        yield f"warm, diloco H{steps} {named}", Run(**then, plan=DILOCO, local_steps=steps)
        yield f"averaging H{steps} {named}", Run(plan=AVERAGE, local_steps=steps, seed=seed)
    yield f"averaging H100 {named}", Run(plan=AVERAGE, local_steps=100, seed=seed)


def codecs(out: Path, seed: int) -> Cells:
    """The same run (plain averaging, H 30) through each codec; int8 is the default."""
    for codec in ("float32", "bf16", "int4", "topk-int4"):
        plan = {**AVERAGE, "codec": codec}
        yield f"averaging H30 {codec} {end(seed)}", Run(plan=plan, seed=seed)


def more_codecs(out: Path) -> Cells:
    """Three more seeds: which text a worker gets depends on who is first, so pairs differ by more than what is asked."""
    for seed in (2, 3, 4):
        for codec in ("float32", "int8", "int4"):
            plan = {**AVERAGE, "codec": codec}
            yield f"averaging H30 {codec} {end(seed)}", Run(plan=plan, seed=seed)


def presets(out: Path, seed: int) -> Cells:
    """With every default, and long enough to leave their warm-up behind."""
    yield from controls(out, seed, steps=LONG)
    for preset in PRESETS:
        # `learn` waits for all unless it is told otherwise: what merges arrivals must not. Its steps count each
        # arrival, so there are more of them to spread the schedule over.
        own, stretch = ARRIVALS.get(preset, ({}, 1.0))
        run = Run(plan={"preset": preset} | own, steps=LONG, stretch=stretch, seed=seed)
        yield f"preset {preset} {end(seed, steps=LONG)}", run


def gradients(out: Path, seed: int) -> Cells:
    """Presets that merge gradients of every step, with every default."""
    yield from controls(out, seed, steps=SHORT)
    for preset in EVERY_STEP:
        plan: dict[str, Any] = {"preset": preset}
        stretch = 1.0
        if preset == "async-sgd":  # K versions where others make one
            plan, stretch = plan | {"quorum": 1, "deadline_seconds": 0.0}, 4.0
        run = Run(plan=plan, local_steps=1, steps=SHORT, stretch=stretch, seed=seed)
        yield f"preset {preset} {end(seed, steps=SHORT)}", run


def eight(out: Path, seed: int) -> Cells:
    """Eight workers."""
    named, then = end(seed, 8), from_warm(out, seed, 8)
    yield from controls(out, seed, 8)
    yield f"warm, alone {named}", Run(**then | {"workers": 1}, plan=ALONE, local_steps=100)
    yield f"warm, diloco H30 {named}", Run(**then, plan=DILOCO)
    yield f"averaging H30 {named}", Run(plan=AVERAGE, workers=8, seed=seed)


def frontier(out: Path, seed: int) -> Cells:
    """Fewer bytes for the same loss, from nothing."""
    for steps, codec in ((6, "int4"), (6, "topk-int4"), (10, "int4"), (3, "topk-int4")):
        plan = {**AVERAGE, "codec": codec}
        run = Run(plan=plan, local_steps=steps, seed=seed)
        yield f"averaging H{steps} {codec} {end(seed)}", run
    plan = averaged(40, 5, codec="int4")
    named = f"averaging H5 40, diloco H10 int4 {end(seed)}"
    yield named, Run(plan=plan, local_steps=10, seed=seed)


def compressed(versions: int, codec: str = "int4", lr: float = 1e-3) -> dict[str, Any]:
    """Gradients of every step through a codec for so many versions, then diloco."""
    phase = {
        "until_versions": versions,
        "overrides": {
            "update": "gradient",
            "optimizer": "adam",
            "momentum": 0.0,
            "lr": lr,
            "beta2": 0.95,
            "tau": 1e-8,
            "bias_correction": True,
            "local_steps": 1,
            "codec": codec,
        },
    }
    return {"preset": "diloco", "phases": [phase]}


def averaged(versions: int, steps: int, **later: Any) -> dict[str, Any]:
    """Plain averaging every few steps for so many versions, then diloco."""
    overrides = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0, "local_steps": steps}
    phase = {"until_versions": versions, "overrides": overrides}
    return {"preset": "diloco", "phases": [phase], **later}


def rest(out: Path) -> Cells:
    """What is good to know, one seed."""
    named, then = end(0), from_warm(out, 0)
    yield f"warm, averaging H30 {named}", Run(**then, plan=AVERAGE)
    yield f"warm, diloco H30 reset {named}", Run(**then, plan=DILOCO, inner="reset")
    rewarmed = Run(**then, plan=DILOCO, inner="reset", rewarm=5)
    yield f"warm, diloco H30 reset, re-warmed {named}", rewarmed
    yield f"warm, diloco H100 {named}", Run(**then, plan=DILOCO, local_steps=100)
    for codec in ("float32", "int4"):
        yield f"warm, diloco H30 {codec} {named}", Run(**then, plan={**DILOCO, "codec": codec})
    yield f"diloco H30 from nothing {named}", Run(plan=DILOCO)
    for preset, stretch in (("async-diloco", 4.0), ("fedasync", 4.0), ("fedbuff", 2.0)):
        quorum = 2 if preset == "fedbuff" else 1
        each = {"preset": preset, "phases": [], "quorum": quorum, "deadline_seconds": 0.0}
        yield f"{preset} H30 from nothing {named}", Run(plan=each, stretch=stretch)
    yield f"int4 gradients 60, diloco H10 {named}", Run(plan=compressed(60), local_steps=10)
    yield f"averaging H30 reset {named}", Run(plan=AVERAGE, inner="reset")
