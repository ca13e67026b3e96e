"""What low communication costs in learning: loss beside bytes, for every way of merging that the plans know.

    make experiments EXPERIMENT=learning            a model of 0.1 M parameters: half an hour; a rerun goes on
    make experiments EXPERIMENT=learning EXPERIMENT_ARGS='--full'     0.83 M parameters: above an hour more
    ... EXPERIMENT_ARGS='--quick'                   four cells in seconds
    ... EXPERIMENT_ARGS='--table'                   only the table and the plot again

Every cell is one run through the real queue, intake, validation and merge in virtual time, with real training. The controls
are runs of one worker: with the same batch as the others (one alone) and with the batch of all of them (data-parallel).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.experiments.cells import Row, arguments, read, results, work_off
from tests.experiments.learning import PROBE, Run, Setup, corpus, learn
from tests.experiments.report import write_report

FLOAT32_BYTES = 4.0
WARM = 300  # steps before a warm start
STEPS = 600
AVERAGE: dict[str, Any] = {"preset": "fedavg"}
DILOCO: dict[str, Any] = {"preset": "diloco", "phases": []}
ALONE: dict[str, Any] = {"preset": "fedavg", "codec": "float32"}
# Presets that merge each arrival from the start: K versions where others make one.
ARRIVALS = ("async-sgd",)
EVERY_STEP = ("gradient-average", "sync-sgd", "async-sgd")


def compressed(
    versions: int, codec: str = "int4", lr: float = 1e-3, **later: Any
) -> dict[str, Any]:
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
    return {"preset": "diloco", "phases": [phase], **later}


def averaged(versions: int, steps: int, **later: Any) -> dict[str, Any]:
    """Plain averaging every few steps for so many versions, then diloco."""
    overrides = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0, "local_steps": steps}
    phase = {"until_versions": versions, "overrides": overrides}
    return {"preset": "diloco", "phases": [phase], **later}


def controls(out: Path, workers: int, seed: int) -> Iterator[tuple[str, Run]]:
    """Data-parallel (it leaves the warm start behind) and one alone."""
    save = {WARM: warm(out, workers, seed)}
    one: dict[str, Any] = {"plan": ALONE, "workers": 1, "local_steps": 100, "seed": seed}
    yield f"data-parallel K{workers} s{seed}", Run(**one, batch=4 * workers, save=save)
    yield f"alone K{workers} s{seed}", Run(**one)


def warm(out: Path, workers: int, seed: int) -> Path:
    """Where the weights of a warm start are kept."""
    return out / f"warm-K{workers}-s{seed}"


def from_warm(out: Path, workers: int, seed: int) -> dict[str, Any]:
    return {
        "workers": workers,
        "seed": seed + 100,  # other text than before
        "start": warm(out, workers, seed),
        "start_step": WARM,
    }


def cells(out: Path) -> Iterator[tuple[str, Run]]:
    """All of them, the most telling first."""
    yield from controls(out, 4, 0)
    then = from_warm(out, 4, 0)
    yield "warm, alone K4 s0", Run(**then | {"workers": 1}, plan=ALONE, local_steps=100)
    yield "warm, diloco H30 K4 s0", Run(**then, plan=DILOCO)
    yield "averaging H30 K4 s0", Run(plan=AVERAGE)
    yield "int4 gradients 60, diloco H10 K4 s0", Run(plan=compressed(60), local_steps=10)
    yield "averaging H10 K4 s0", Run(plan=AVERAGE, local_steps=10)
    for steps in (6, 10):
        plan = {**AVERAGE, "codec": "int4"}
        yield f"averaging H{steps} int4 K4 s0", Run(plan=plan, local_steps=steps)
    for preset in ("async-diloco", "fedadam", "fedbuff", "fedasync"):
        yield f"preset {preset} H30 K4 s0", _preset(preset)
    yield "warm, diloco H10 K4 s0", Run(**then, plan=DILOCO, local_steps=10)
    yield "preset diloco H30 K4 s0", Run(plan={"preset": "diloco"})
    yield "averaging H5 40, diloco H10 K4 s0", Run(plan=averaged(40, 5), local_steps=10)
    yield "warm, diloco H100 K4 s0", Run(**then, plan=DILOCO, local_steps=100)
    yield "warm, diloco H30 int4 K4 s0", Run(**then, plan={**DILOCO, "codec": "int4"})
    yield "warm, diloco H30 float32 K4 s0", Run(**then, plan={**DILOCO, "codec": "float32"})
    yield "warm, averaging H30 K4 s0", Run(**then, plan=AVERAGE)
    yield "warm, diloco H30 reset K4 s0", Run(**then, plan=DILOCO, inner="reset")
    yield (
        "top-k gradients 120, diloco H10 K4 s0",
        Run(plan=compressed(120, "topk-int4"), local_steps=10),
    )
    yield "averaging H100 K4 s0", Run(plan=AVERAGE, local_steps=100)
    for preset in ("async-diloco", "fedasync"):
        each = {"preset": preset, "phases": [], "quorum": 1, "deadline_seconds": 0.0}
        yield f"{preset} H30 from nothing K4 s0", Run(plan=each, stretch=4.0)
    half = {"preset": "fedbuff", "phases": [], "quorum": 2, "deadline_seconds": 0.0}
    yield "fedbuff H30 from nothing K4 s0", Run(plan=half, stretch=2.0)
    yield from _rest(out)


def _rest(out: Path) -> Iterator[tuple[str, Run]]:
    then = from_warm(out, 4, 0)
    for preset in ("fedavgm", "fedyogi", "fedprox", "gradient-average", "sync-sgd", "async-sgd"):
        yield f"preset {preset} H30 K4 s0", _preset(preset)
    for codec in ("bf16", "topk-int4"):
        yield f"warm, diloco H30 {codec} K4 s0", Run(**then, plan={**DILOCO, "codec": codec})
    plain = {**DILOCO, "codec": "int4"}
    yield "warm, diloco H30 int4 without feedback K4 s0", Run(**then, plan=plain, feedback=False)
    rewarmed = Run(**then, plan=DILOCO, inner="reset", rewarm=5)
    yield "warm, diloco H30 reset, re-warmed K4 s0", rewarmed
    yield "diloco H30 from nothing K4 s0", Run(plan=DILOCO)
    for steps in (10, 30, 100):
        reset = Run(plan=AVERAGE, local_steps=steps, inner="reset")
        yield f"averaging H{steps} reset K4 s0", reset
    yield "int4 gradients 100, diloco H30 K4 s0", Run(plan=compressed(100))
    yield (
        "averaging H2 60, diloco H10 int4 K4 s0",
        Run(plan=averaged(60, 2, codec="int4"), local_steps=10),
    )
    yield from controls(out, 4, 1)
    second = from_warm(out, 4, 1)
    yield "warm, alone K4 s1", Run(**second | {"workers": 1}, plan=ALONE, local_steps=100)
    yield "warm, diloco H30 K4 s1", Run(**second, plan=DILOCO)
    yield "averaging H30 K4 s1", Run(plan=AVERAGE, seed=1)
    yield from controls(out, 8, 0)
    eight = from_warm(out, 8, 0)
    yield "warm, alone K8 s0", Run(**eight | {"workers": 1}, plan=ALONE, local_steps=100)
    yield "warm, diloco H30 K8 s0", Run(**eight, plan=DILOCO)
    yield "averaging H30 K8 s0", Run(plan=AVERAGE, workers=8)


def _preset(name: str) -> Run:
    """With every default but its quorum."""
    plan: dict[str, Any] = {"preset": name}
    if name in ARRIVALS:
        plan |= {"quorum": 1, "deadline_seconds": 0.0}
    stretch = 4.0 if name in ARRIVALS else 1.0
    return Run(plan=plan, stretch=stretch, local_steps=1 if name in EVERY_STEP else 30)


def quick_cells(out: Path) -> Iterator[tuple[str, Run]]:
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
        listed = cells(options.out / "full")
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
