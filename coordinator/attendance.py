"""Attendance of machines: for each run, the seconds of devices that were present, that trained, and
whose training was merged.

The seconds are summed in memory, and added to the hours of the run once a minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.rules.machine_time import MachineSeconds
from shared.protocol.limits import HEARTBEAT_S

if TYPE_CHECKING:
    from shared.clock import Clock

FORGOTTEN_S = 20 * HEARTBEAT_S  # a machine that is silent for longer is forgotten

RunDevice = tuple[int, str]  # number of a run, and a device that has a lease of it


@dataclass(slots=True)
class _Presence:
    """Time of a machine's last heartbeat, and its devices with leases in the last heartbeat that
    named any.
    """

    beat_at: float
    devices: Set[RunDevice] = field(default_factory=frozenset)


class Attendance:
    """Seconds of the machines of each run since the last write."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._present: defaultdict[int, float] = defaultdict(float)
        self._trained: defaultdict[int, float] = defaultdict(float)
        self._merged: defaultdict[int, float] = defaultdict(float)
        self._machines: dict[str, _Presence] = {}

    def beat(self, worker_id: str, devices: Set[RunDevice], *, paused: bool) -> None:
        """Count the time since a machine's last heartbeat for the runs of its devices' leases; of a
        machine without a lease, for the runs of its last leases.

        One heartbeat counts HEARTBEAT_S at most: replicas that receive the heartbeats of a machine
        in turn count its time once, and an absence adds at most HEARTBEAT_S.
        """
        now = self._clock.monotonic()
        machine = self._machines.setdefault(worker_id, _Presence(now))
        machine.devices = devices or machine.devices
        if not paused:
            for run_id, _ in machine.devices:
                self._present[run_id] += min(HEARTBEAT_S, now - machine.beat_at)
        machine.beat_at = now

    def count_trained(self, run_id: int, seconds: float) -> None:
        """Count the seconds of training of a received contribution."""
        self._trained[run_id] += seconds

    def count_merged(self, run_id: int, seconds: float) -> None:
        """Count the seconds of training of merged updates, or of experience."""
        self._merged[run_id] += seconds

    def drain(self) -> dict[int, MachineSeconds]:
        """Return the seconds since the last call, by run, and forget machines that are silent."""
        silent_before = self._clock.monotonic() - FORGOTTEN_S
        self._machines = {
            worker_id: machine
            for worker_id, machine in self._machines.items()
            if machine.beat_at >= silent_before
        }
        sums = (self._present, self._trained, self._merged)
        run_ids = sorted({run_id for seconds in sums for run_id in seconds})
        drained = {
            run_id: MachineSeconds(
                present=self._present[run_id],
                trained=self._trained[run_id],
                merged=self._merged[run_id],
            )
            for run_id in run_ids
        }
        for seconds in sums:
            seconds.clear()
        return drained
