"""Advice on run files that are valid but unwise, as sentences for their authors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.plan.plan import in_phase
from coordinator.plan.plan_tables import Plan
from coordinator.rules.run_file import RunFile, TaskSettings
from coordinator.rules.sizing import phase_lengths
from shared.protocol.accounts import Device
from shared.protocol.limits import memory_on
from shared.text import printable, size

# Outer momentum on deltas of 30 local steps (docs/decisions/0021-steady-defaults.md): up to this
# value the updates kept their direction; at 1.4 they turned back, and the run lowered its rate.
LR_STEADY, LR_UNSTEADY = 0.9, 1.4
MOMENTUM_MIN = 0.5
LEAST_AFTER = 0.25  # least share of the versions that the plan's own optimiser should make


def advice(file: RunFile, plan: Plan, samples: int, sample_size: int = 1) -> tuple[str, ...]:
    """Return warnings about a run; `samples` is the size of a pass (0: no end)."""
    found = (*_unsteady(file, plan), *_other_steps(file, plan))
    return (*found, *too_short(file, plan, samples, sample_size))


def too_large(needed: int, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the advice for a run that needs more memory than any online device has."""
    known = [device for device in devices if device.memory_bytes > 0 and not device.problem]
    largest = max(known, key=lambda device: device.memory_bytes, default=None)
    if largest is None or any(memory_on(d.kind, needed) <= d.memory_bytes for d in known):
        return ()
    return (
        f"no device that is online can hold this run: it needs about {size(needed)} of a GPU or "
        f"{size(memory_on('cpu', needed))} of a computer's memory, and the largest, "
        f"{printable(largest.name, 80)}, has {size(largest.memory_bytes)}. A smaller model, "
        'train = "lora" where all weights are trained, or a shorter context makes it smaller',
    )


def _unsteady(file: RunFile, plan: Plan) -> Iterator[str]:
    last = in_phase(plan, len(plan.phases))
    if last.update != "delta" or last.momentum < MOMENTUM_MIN:
        return
    if last.lr >= LR_UNSTEADY:
        yield (
            f"[plan] lr = {last.lr:g} with momentum = {last.momentum:g} was measured to be "
            f"unstable: at 30 local steps updates agreed with the momentum up to lr {LR_STEADY:g} "
            f"and opposed it at {LR_UNSTEADY:g}, where a run lowers its rate by itself, and ends "
            "at a higher loss than a run that began with a lower rate"
        )
    if not file.train.init_from and in_phase(plan, 0).momentum >= MOMENTUM_MIN:
        yield (
            "[plan] has outer momentum from the first version on, and random weights: measured "
            "runs like this ended at a higher loss than runs that began with plain averaging; "
            "leave phases out to begin with that, or name weights in [train] init_from"
        )


def _other_steps(file: RunFile, plan: Plan) -> Iterator[str]:
    own, phases = file.task.local_steps, range(len(plan.phases) + 1)
    others = {in_phase(plan, index).local_steps for index in phases} - {0, own}
    if own != TaskSettings().local_steps and others:
        steps = " or ".join(map(str, sorted(others)))
        yield (
            f"[plan] has {steps} local steps{' in some phases' if plan.phases else ''} instead of "
            f"the {own} of [task]: name local_steps or phases in [plan] to change that"
        )


def too_short(file: RunFile, plan: Plan, samples: int, sample_size: int) -> tuple[str, ...]:
    """Return a sentence for a run that leaves the plan's own optimiser too few versions."""
    lengths = phase_lengths(file, plan, samples, sample_size)
    if len(lengths) < 2:  # the plan has no phases, or the run has no end
        return ()
    last = in_phase(plan, len(plan.phases)).optimizer
    whole = sum(phase.versions for phase in lengths)
    after = sum(
        phase.versions
        for index, phase in enumerate(lengths)
        if in_phase(plan, index).optimizer == last
    )
    if after >= LEAST_AFTER * whole:
        return ()
    what = "never begins" if after < 1 else f"is left {after:.0f} of them"
    return (
        f"this run makes about {whole:.0f} versions, the first {whole - after:.0f} of them in "
        f'phases with another optimiser: "{plan.preset}" itself {what}. Let it run longer ([stop]), '
        "shorten the phases ([plan] phases), or choose fedavg",
    )
