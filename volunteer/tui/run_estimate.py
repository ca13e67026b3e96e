"""Estimate of a run on a device: memory, time of a step, credits an hour. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from shared.protocol.accounts import Benchmark, Device, RunInfo
from shared.protocol.limits import memory_on
from shared.text import size

STATES = {
    "draft": "being prepared",
    "running": "running",
    "paused": "paused by its organiser",
    "completed": "completed",
    "failed": "failed",
}
SLOW_STEP_S = 60.0  # a longer step hardly helps


class RunEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimate for a run: if it fits or why not; figures that were not measured are None."""

    fits: bool
    sentence: str
    step_s: float | None = None
    credits_per_hour: float | None = None


def estimate(
    info: RunInfo,
    devices: Sequence[Device],
    benchmarks: Sequence[Benchmark],
    workloads: Collection[str],
) -> RunEstimate:
    """Return the estimate of a run for the best device here."""
    if info.state != "running":
        return RunEstimate(fits=False, sentence=f"the run is {STATES[info.state]}")
    if info.workload not in workloads:
        return RunEstimate(
            fits=False,
            sentence=f'the workload "{info.workload}" is not installed or not allowed here',
        )
    usable = [device for device in devices if device.usable]
    if not usable:
        if devices:
            return RunEstimate(fits=False, sentence="torch cannot use any device here")
        return RunEstimate(fits=True, sentence="your devices are not known yet")
    needs = {device.id: memory_on(device.id, info.memory_bytes) for device in usable}
    able = [d for d in usable if not d.memory_bytes or d.memory_bytes >= needs[d.id]]
    if not able:
        most = max(usable, key=lambda device: device.memory_bytes)
        need, have = size(needs[most.id]), size(most.memory_bytes)
        return RunEstimate(fits=False, sentence=f"needs {need} of memory, your devices have {have}")
    return _measured(info, able, benchmarks)


def _measured(
    info: RunInfo, devices: Sequence[Device], benchmarks: Sequence[Benchmark]
) -> RunEstimate:
    speeds = {b.device: b.step_flops for b in benchmarks if b.step_flops > 0}
    best = max(devices, key=lambda device: speeds.get(device.id, 0.0))
    speed = speeds.get(best.id)
    if speed is None or info.step_flops <= 0:
        return RunEstimate(fits=True, sentence=f"fits {best.id}; its speed is not measured yet")
    step_s = info.step_flops / speed
    earns = info.credits_per_step * 3600 / step_s
    if step_s > SLOW_STEP_S:
        sentence = f"{duration_words(step_s)} per step on {best.id}: tasks will be short"
    else:
        sentence = f"fits {best.id}, {duration_words(step_s)} per step"
    return RunEstimate(fits=True, sentence=sentence, step_s=step_s, credits_per_hour=earns)


def duration_words(seconds: float) -> str:
    """Return a short time: 2.1 ms, 0.35 s, 12 s, 3.4 min."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.2g} min"
