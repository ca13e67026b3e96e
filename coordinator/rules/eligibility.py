"""Eligibility: waiting workers and tasks, and the matches between them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coordinator.rules.audits import Auditor, WaitingAudit
from coordinator.rules.codec_choice import choose_codec
from coordinator.rules.task_size import Run, clamped
from shared.protocol.limits import holds, memory_on


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """Worker that asks for work on one of its devices."""

    claim_id: str
    worker_id: str
    volunteer_id: str
    device: str
    flops: float = 0.0  # operations a second in training; 0 = unknown
    memory_bytes: int = 0  # 0 = unknown
    host_bytes: int = 0  # memory of the host beside the device's own
    workloads: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()  # runs that the owner chose; empty = any run
    kinds: frozenset[str] = frozenset()
    codecs: frozenset[str] = frozenset()
    versions: Mapping[str, int] = {}  # versions of the machine's workloads, if it reported them
    libraries: frozenset[str] = frozenset()  # libraries that only some runs need
    leases_max: int = 0  # most leases of a volunteer on probation; 0 = no such limit
    vouched: bool = True  # False: its speed is believed only within bounds
    step_s: Mapping[int, float] = {}  # recent seconds a step of each run on its device
    rests: Mapping[int, float] = {}  # seconds for which it gets no task of a run that it failed
    audits: bool = False  # True: the worker's program can do audits
    auditor: Auditor | None = None  # set for an account that may do audits


class Todo(msgspec.Struct, frozen=True, kw_only=True):
    """Task that waits for a worker: a returned range of the pass, or a task outside the pass."""

    id: int
    run_id: int
    pass_no: int
    start: int
    stop: int
    failed_by: frozenset[str] = frozenset()
    beside: str = ""  # kind of a task that is not a range of the pass; such a task is never split
    steps: int = 0
    price_micro: int = 0
    audit: WaitingAudit | None = None  # terms of the audit, if the task is one
    home: str = ""  # worker whose own data the samples are positions of; "" = the dataset


def misfit(run: Run, waiter: Waiter) -> str:
    """Return the reason why a worker cannot take part in a run, in words; "" if it can."""
    if run.workload not in waiter.workloads:
        return (
            f'"{run.name}" needs the workload "{run.workload}", which is not enabled on this '
            "machine"
        )
    has = waiter.versions.get(run.workload, run.workload_version)
    if run.workload_version and has != run.workload_version:
        how = "upgrade this machine" if has < run.workload_version else "the coordinator is older"
        return (
            f'"{run.name}" needs version {run.workload_version} of the workload "{run.workload}", '
            f"here is {has}: {how}"
        )
    for library in run.libraries:
        if library not in waiter.libraries:
            return (
                f'"{run.name}" needs the library {library}, which is not installed on this machine'
            )
    if waiter.kinds and not waiter.kinds.intersection(run.kinds):
        kinds = " and ".join(f'"{kind}"' for kind in run.kinds)
        takes = " and ".join(f'"{kind}"' for kind in sorted(waiter.kinds))
        return (
            f'"{run.name}" has tasks of the kind {kinds} only, this machine takes {takes} '
            "(its setting roles)"
        )
    if not choose_codec(run.codec, waiter.codecs):
        return f'"{run.name}" wants updates as "{run.codec}", which this version cannot write'
    if not holds(
        waiter.device,
        waiter.memory_bytes,
        waiter.host_bytes,
        memory_bytes=run.memory_bytes,
        streamed_bytes=run.streamed_bytes,
    ):
        needed_bytes = memory_on(waiter.device, run.memory_bytes)
        need, have = needed_bytes / 2**30, waiter.memory_bytes / 2**30
        return f'"{run.name}" needs about {need:.1f} GiB of memory, {waiter.device} has {have:.1f}'
    return _no_member(run, waiter) if run.home else ""


def _no_member(run: Run, waiter: Waiter) -> str:
    """Return the reason why a worker is no member of a run on members' data; "" for a member."""
    if not waiter.vouched:
        return f'"{run.name}" is for members whom the organiser vouched for'
    if not run.samples_total:
        return (
            f'"{run.name}" trains on data that its members keep, and this machine has none: '
            f"`volunteer data add {run.name} PATH`"
        )
    return ""


def at_begin(run: Run, waiter: Waiter) -> Run:
    """Return a run as it is when a waiter's next task begins: a device at work begins it after its
    present task.
    """
    if run.pace is None or run.pace.round is None:
        return run
    left_s = run.pace.round.left_s.get((waiter.worker_id, waiter.device), run.left_s)
    return msgspec.structs.replace(run, left_s=left_s)


def speed(run: Run, waiter: Waiter) -> float:
    """Return the speed that sizes a waiter's work in a run, in operations a second; 0 = unknown."""
    if waiter.vouched:
        return waiter.flops
    return clamped(run, waiter.flops, waiter.step_s.get(run.id, 0.0))


def may_work_for(run: Run, waiter: Waiter) -> bool:
    """Return True if the owner of a worker lets it work for this run, and no other machine keeps
    the run's data.
    """
    return run.home in ("", waiter.worker_id) and (not waiter.runs or run.name in waiter.runs)


def takes_kind(waiter: Waiter, kind: str) -> bool:
    """Return True if a worker takes tasks of this kind."""
    return not waiter.kinds or kind in waiter.kinds
