"""Estimate of a run on a device: if it fits, the time of a step, and the credits an hour."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

import msgspec

from shared.protocol.accounts import Benchmark, Device, RunInfo
from shared.protocol.limits import holds, memory_on
from shared.text import MICRO, duration
from shared.workloads.base import is_here
from volunteer.control.shortage import shortage_words
from volunteer.control.status import GAMES, Status, WorkDone
from volunteer.i18n.catalogue import N_, _, ngettext, number, translated
from volunteer.i18n.formats import duration_words, size

STATES = {
    "draft": N_("being prepared"),
    "running": N_("running"),
    "paused": N_("paused by its organiser"),
    "completed": N_("completed"),
    "failed": N_("failed"),
}
# Shorter words of the states, for a table.
STATES_SHORT = {**STATES, "paused": N_("paused")}
SLOW_STEP_S = 60.0  # the estimate of a longer step warns of short tasks
TASKS_MIN = 3  # tasks trained here from which their pace replaces the benchmark
STEADY_MIN = 8  # tasks from which the pay is total credits over total time, not a median
TASKS_MAX = 20  # newest tasks that count for the pace
MIXED = frozenset((*GAMES, "learn"))  # kinds of tasks of runs with several kinds


class RunEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimate of a run. `fits` is True if the run fits this machine, `sentence` says why or why
    not; unknown figures are None.
    """

    fits: bool
    sentence: str
    step_s: float | None = None
    credits_per_hour: float | None = None
    tasks: int = 0  # tasks trained here that were measured; 0: computed from the benchmark
    measured: bool = False  # measured by the first steps of the run's own model

    @property
    def basis(self) -> str:
        """Return the source of the figures, in words."""
        if self.measured:
            return _("its first steps here")
        return (
            ngettext("your last {n} task", "your last {n} tasks", self.tasks)
            if self.tasks
            else _("estimate")
        )


class MachinePace(msgspec.Struct, frozen=True, kw_only=True):
    """Speed and pay of one device in its last tasks."""

    device: str
    tasks: int
    step_s: float
    credits_per_hour: float  # waits included


def pace(
    status: Status, run: str = "", devices: Collection[str] | None = None
) -> MachinePace | None:
    """Return the pace of the last tasks, of one `run` or of all runs, on the device that earns
    most, of `devices` or of all devices.

    A device counts from `TASKS_MIN` tasks on; in a run with several kinds of tasks, whose pay
    differs, from `STEADY_MIN` on. None if no device counts.
    """
    paces = []
    work = [w for w in status.work if w.priced and run in ("", w.run)]
    for device in dict.fromkeys(done.device for done in work):
        last = [w for w in work if w.device == device][-TASKS_MAX:]
        steps, seconds = sum(w.steps for w in last), sum(w.seconds for w in last)
        if devices is not None and device not in devices:
            continue
        if len(last) >= TASKS_MIN and steps > 0 and seconds > 0:
            rate = _credits_per_s(last)
            if run and len(last) < STEADY_MIN:
                if any(w.kind in MIXED for w in last):
                    continue
                rate = median(_credits_per_s([w]) for w in last if w.seconds > 0)
            paces.append(
                MachinePace(
                    device=device,
                    tasks=len(last),
                    step_s=sum(w.train_s for w in last) / steps,
                    credits_per_hour=3600 * rate,
                )
            )
    return max(paces, key=lambda speed: speed.credits_per_hour, default=None)


def _credits_per_s(work: Sequence[WorkDone]) -> float:
    """Return the credits that some work earned in a second."""
    return sum(w.price_micro for w in work) / MICRO / sum(w.seconds for w in work)


def time_to(micro: int, status: Status) -> str:
    """Return the time in which this machine earns an amount at its present pace; "" if unknown."""
    speed = pace(status)
    if speed is None or speed.credits_per_hour <= 0 or micro <= 0:
        return ""
    return _("about {time}", time=duration(micro / MICRO / speed.credits_per_hour * 3600))


def estimate(
    info: RunInfo, status: Status, workloads: Collection[str], device: str = ""
) -> RunEstimate:
    """Return the estimate of a run for the best device here, or for one device."""
    devices = [candidate for candidate in status.devices if device in ("", candidate.id)]
    if info.state != "running":
        return RunEstimate(
            fits=False, sentence=_("the run is {state}", state=_(STATES[info.state]))
        )
    if info.workload not in workloads:
        return RunEstimate(
            fits=False,
            sentence=_(
                'the workload "{workload}" is not installed or not allowed here',
                workload=info.workload,
            ),
        )
    if missing := [library for library in info.libraries if not is_here(library)]:
        sentence = _("needs the library {library}, which is not installed here", library=missing[0])
        return RunEstimate(fits=False, sentence=sentence)
    usable = [device for device in devices if device.usable]
    if not usable:
        if devices:
            return RunEstimate(fits=False, sentence=_("torch cannot use any device here"))
        return RunEstimate(fits=True, sentence=_("your devices are not known yet"))
    fitting_devices, why = _fitting(info, usable, status)
    if not fitting_devices:
        return RunEstimate(fits=False, sentence=why)
    ids = {fit.id for fit in fitting_devices}
    if speed := pace(status, info.name, ids):
        words = _(
            "{time} per step on {device}", time=duration_words(speed.step_s), device=speed.device
        )
        return RunEstimate(
            fits=True,
            sentence=ngettext(
                "{pace}, in your last {n} task",
                "{pace}, in your last {n} tasks",
                speed.tasks,
                pace=words,
            ),
            step_s=speed.step_s,
            credits_per_hour=speed.credits_per_hour,
            tasks=speed.tasks,
        )
    return _estimate_from_steps(info, fitting_devices, status) or _estimate_from_benchmark(
        info, fitting_devices, status.benchmarks
    )


def _fitting(info: RunInfo, usable: Sequence[Device], status: Status) -> tuple[list[Device], str]:
    """Return the devices whose memory holds a task of a run, and ""; if no device fits, [] and the
    reason.
    """
    needs = {device.id: memory_on(device.id, info.memory_bytes) for device in usable}
    lent = {
        candidate.id: status.lent_bytes.get(candidate.id) or candidate.memory_bytes
        for candidate in usable
    }
    fitting_devices = [
        candidate
        for candidate in usable
        if holds(
            candidate.id,
            lent[candidate.id],
            status.host_bytes if candidate.kind not in ("cpu", "mps") else 0,
            memory_bytes=info.memory_bytes,
            streamed_bytes=info.streamed_bytes,
        )
    ]
    if not fitting_devices:
        most = max(usable, key=lambda candidate: lent[candidate.id])
        need, have = size(needs[most.id]), size(lent[most.id])
        whole = lent[most.id] >= most.memory_bytes
        room = (
            _("your devices have {have}", have=have)
            if whole
            else _("a task may use {have} here", have=have)
        )
        return [], _("needs {need} of memory, {said}", need=need, said=room)
    short = {
        shortage.device: shortage
        for shortage in status.shortages
        if shortage.run == info.name and shortage.stands((info,), status.lent_bytes, status.at)
    }
    fitting = [candidate for candidate in fitting_devices if candidate.id not in short]
    return fitting, "" if fitting else translated(shortage_words(short[fitting_devices[-1].id]))


def _estimate_from_steps(
    info: RunInfo, devices: Sequence[Device], status: Status
) -> RunEstimate | None:
    """Return the estimate from the measured steps of the run's model; None without such steps."""
    ids = {device.id for device in devices}
    steps = [step for step in status.steps if step.run == info.name and step.device in ids]
    best = min(steps, key=lambda step: step.step_s, default=None)
    if best is None:
        return None
    sentence = _("fits {id}, {time} per step", id=best.device, time=duration_words(best.step_s))
    earns = info.credits_per_step * 3600 / best.step_s
    return RunEstimate(
        fits=True, sentence=sentence, step_s=best.step_s, credits_per_hour=earns, measured=True
    )


def _estimate_from_benchmark(
    info: RunInfo, devices: Sequence[Device], benchmarks: Sequence[Benchmark]
) -> RunEstimate:
    """Return the estimate from the FLOPs of a step and the benchmark of the fastest device."""
    speeds = {b.device: b.step_flops for b in benchmarks if b.step_flops > 0}
    best = max(devices, key=lambda device: speeds.get(device.id, 0.0))
    speed = speeds.get(best.id)
    if speed is None or info.step_flops <= 0:
        return RunEstimate(
            fits=True, sentence=_("fits {id}; its speed is not measured yet", id=best.id)
        )
    step_s = info.step_flops / speed
    earns = info.credits_per_step * 3600 / step_s
    if step_s > SLOW_STEP_S:
        sentence = _(
            "{time} per step on {id}: tasks will be short",
            time=duration_words(step_s),
            id=best.id,
        )
    else:
        sentence = _("fits {id}, {time} per step", id=best.id, time=duration_words(step_s))
    return RunEstimate(fits=True, sentence=sentence, step_s=step_s, credits_per_hour=earns)


def game_part_words(status: Status, run: str, device: str, roles: Sequence[str]) -> str:
    """Return what a device does in a run of games or answers, and how many games or answers an hour
    this device and all machines make; "" for other runs.
    """
    beat = next((beat for beat in status.beats if beat.run == run), None)
    if beat is None or beat.episodes_per_hour is None:
        return ""
    parts = _PARTS if beat.measure == "matches" else _ANSWERING
    does = [_(word) for role, word in parts.items() if role in roles or not roles]
    if not does:
        return _("This device takes no part in it: its roles are for other runs.")
    sentence = _(
        "This device {does}.",
        does=_("{one} and {other}", one=does[0], other=does[1]) if len(does) > 1 else does[0],
    )
    done = [work for work in status.work if work.run == run and work.device == device]
    played = [work for work in done if work.kind == "selfplay"][-TASKS_MAX:]
    # wall-clock time, as the coordinator counts: it includes the time for other runs
    seconds = status.at - played[0].at + played[0].seconds if played else 0.0
    here = sum(work.steps for work in played) * 3600 / seconds if seconds > 0 else None
    # after hours without games, the coordinator's figure may be older than the first games here
    amount = number(max(beat.episodes_per_hour, here or 0.0), ",.0f")
    whole = _("{n} {things} an hour by all machines", n=amount, things=_(beat.episodes))
    return (
        f"{sentence} {whole}."
        if here is None
        else _("{said} {here} of {whole}.", said=sentence, here=number(here, ",.0f"), whole=whole)
    )


_PARTS = {"play": N_("plays games and matches"), "learn": N_("learns from them")}
_ANSWERING = {"play": N_("answers problems"), "learn": N_("learns from the answers")}
