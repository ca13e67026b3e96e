"""Surroundings: battery, people, temperature, programs, network and disk of this machine.

A fact that cannot be read is None; reading never raises. Costly facts are read less often. A
reading may start a small system program and wait for it, so it runs in a thread, not on the event
loop.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from shared.programs.machine_limits import disk_bytes
from volunteer.machine.policy import MachineFacts
from volunteer.machine.presence import Run, run_command, unused_s
from volunteer.settings.work_rules import WorkRules

PROGRAMS_MAX = 10_000
# Longest age of a cached answer, in seconds.
FRESH_S = {"programs": 10.0, "metered": 60.0, "disk": 30.0}

T = TypeVar("T")

LINUX_METERED = (
    "busctl",
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)
WINDOWS_METERED = (
    "powershell",
    "-NoProfile",
    "-Command",
    "[Windows.Networking.Connectivity.NetworkInformation,Windows,ContentType=WindowsRuntime]"
    "::GetInternetConnectionProfile().GetConnectionCost().NetworkCostType",
)


class SurroundingsReader:
    """Reads the facts of this machine that the rules need."""

    def __init__(
        self,
        disk: Path,
        *,
        system: str = sys.platform,
        run: Run = run_command,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._system = system
        self._run = run
        self._monotonic = monotonic
        self._answers: dict[str, tuple[float, Any]] = {}

    def read(self, rules: WorkRules, devices: Sequence[str]) -> MachineFacts:
        """Return the facts that active rules need, some up to FRESH_S old; all other facts are None
        or empty.
        """
        battery = None if rules.on_battery else _battery()
        return MachineFacts(
            on_battery=None if battery is None else battery[0],
            battery_percent=None if battery is None else battery[1],
            unused_s=unused_s(self._system, self._run) if rules.in_use != "work" else None,
            temperatures=temperatures(devices) if rules.temperature_max else {},
            programs=self._cached("programs", _programs) if rules.programs else None,
            metered=self._cached("metered", self._metered) if rules.metered == "pause" else None,
            disk_free_bytes=self._cached("disk", self._free) if rules.disk_free_gb else None,
        )

    def _cached(self, topic: str, ask: Callable[[], T]) -> T:
        """Return the cached answer on a topic; ask again if it is too old."""
        now = self._monotonic()
        at, answer = self._answers.get(topic, (float("-inf"), None))
        if now - at >= FRESH_S[topic]:
            answer = ask()
            self._answers[topic] = (now, answer)
        result: T = answer
        return result

    def _metered(self) -> bool | None:
        return metered(self._system, self._run)

    def _free(self) -> int | None:
        try:
            return disk_bytes(self._disk)[0]
        except OSError:
            return None


def _battery() -> tuple[bool | None, float] | None:
    """Return whether the machine runs on battery (None if unknown), and the charge in percent; None
    if no battery is found.
    """
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):  # systems without such a sensor
        return None
    if battery is None:
        return None
    return (None if battery.power_plugged is None else not battery.power_plugged), battery.percent


def _programs() -> tuple[str, ...] | None:
    try:
        names = {process.info["name"] or "" for process in psutil.process_iter(["name"])}
    except (OSError, psutil.Error):
        return None
    return tuple(sorted(names - {""}))[:PROGRAMS_MAX]


def metered(system: str, run: Run) -> bool | None:
    """Return whether the connection to the internet costs by the byte; None if unknown."""
    if system == "linux":
        # 1 yes, 2 no, 3 probably, 4 probably not, 0 unknown
        match = re.fullmatch(r"u (\d)", run(LINUX_METERED).strip())
        return {"1": True, "3": True, "2": False, "4": False}.get(match[1] if match else "")
    if system == "win32":
        cost = run(WINDOWS_METERED).strip()
        return {"Fixed": True, "Variable": True, "Unrestricted": False}.get(cost)
    return None


def temperatures(devices: Sequence[str]) -> dict[str, float]:
    """Return the temperature, in °C, of each device that has a sensor."""
    sensors = _sensors()
    hottest: dict[str, float] = {}
    for device in devices:
        kind, _, index = device.partition(":")
        degrees = None
        if kind == "cuda":
            number = int(index or 0)
            degrees = _nvidia(number)
            if degrees is None:
                degrees = dict(enumerate(sensors.get("amdgpu", []))).get(number)
        elif kind == "cpu":
            chips = [t for name in _CPU_CHIPS for t in sensors.get(name, [])]
            degrees = max(chips, default=None)
        if degrees is not None:
            hottest[device] = degrees
    return hottest


_CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")


def _sensors() -> dict[str, list[float]]:
    """Return the kernel's sensor readings by chip; for a graphics card only the edge sensor."""
    try:
        chips = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError):
        return {}
    return {
        name: [t.current for t in readings if name != "amdgpu" or t.label in ("", "edge")]
        for name, readings in chips.items()
    }


def _nvidia(number: int) -> float | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(physical(number))
        return float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def physical(number: int) -> int:
    """Return the driver's number of torch's device `cuda:number`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = visible[number].strip() if number < len(visible) else ""
    return int(index) if index.isdigit() else number
