"""Sensors of the lent devices: load, memory, heat, power and energy, as far as their drivers
report. Nothing is estimated.

Power and energy come from NVIDIA's management library only and are those of the whole GPU, whoever
uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from shared.clock import Clock
from volunteer.control.event_bus import Hub
from volunteer.control.events import Sensed
from volunteer.machine.surroundings import physical, temperatures

SENSE_S = 5.0


class Sensors:
    """Reads devices; a question that a driver does not answer is left open.

    Belongs to one thread at a time.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._tried = nvml is not None
        self._first_mj: dict[str, int] = {}
        self._process = psutil.Process()
        self._times = psutil.cpu_times()

    def read(self, devices: Sequence[str]) -> tuple[Sensed, ...]:
        """Return what is known of each device now; nothing of one that no sensor knows."""
        hot = temperatures([d for d in devices if not d.startswith("cuda")])
        found = []
        for device in devices:
            if device == "cpu":
                told: Sensed | None = self._cpu(hot.get(device))
            elif device.startswith("cuda"):
                told = self._cuda(device)
            else:
                told = Sensed(device=device, celsius=hot[device]) if device in hot else None
            if told is not None:
                found.append(told)
        return tuple(found)

    def _cpu(self, celsius: float | None) -> Sensed:
        return Sensed(
            device="cpu",
            utilisation=self._load(),
            memory_bytes=self._process.memory_info().rss,
            celsius=celsius,
        )

    def _load(self) -> float | None:
        """Share of all cores since the last look. psutil's own figure is kept by thread, and 0 at
        the first look of each.
        """
        before, self._times = self._times, psutil.cpu_times()
        spent = {
            kind: after - getattr(before, kind) for kind, after in self._times._asdict().items()
        }
        # Time of guests is in user and nice too.
        total = float(sum(s for kind, s in spent.items() if not kind.startswith("guest")))
        if total <= 0:
            return None
        idle = float(spent["idle"] + spent.get("iowait", 0.0))
        return min(1.0, max(0.0, 1 - idle / total))

    def _cuda(self, device: str) -> Sensed | None:
        nvml = self._library()
        if nvml is None:
            return None
        number = int(device.partition(":")[2] or 0)
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(physical(number))
        except nvml.NVMLError:
            return None

        def ask(question: str, *more: Any) -> Any:
            try:
                return getattr(nvml, question)(gpu, *more)
            except nvml.NVMLError:
                return None  # older and smaller cards answer fewer questions

        load, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
        heat = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        power, energy = (
            ask("nvmlDeviceGetPowerUsage"),
            ask("nvmlDeviceGetTotalEnergyConsumption"),
        )
        first = self._first_mj.setdefault(device, energy) if energy is not None else None
        return Sensed(
            device=device,
            utilisation=None if load is None else load.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            celsius=None if heat is None else float(heat),
            watts=None if power is None else power / 1000,
            joules=None if first is None else (energy - first) / 1000,
        )

    def _library(self) -> Any:
        """NVIDIA's management library, opened once; None where there is none."""
        if not self._tried:
            self._tried = True
            import pynvml

            try:
                pynvml.nvmlInit()
                self._nvml = pynvml
            except pynvml.NVMLError:
                pass  # no such driver here
        return self._nvml


async def keep_telling(
    hub: Hub,
    clock: Clock,
    devices: Callable[[], tuple[str, ...]],
    read: Callable[[Sequence[str]], tuple[Sensed, ...]],
) -> None:
    """Emit what has changed every few seconds, until cancelled."""
    told: dict[str, Sensed] = {}
    while True:
        for sensed in await asyncio.to_thread(read, devices()):
            if told.get(sensed.device) != sensed:
                told[sensed.device] = sensed
                hub.emit(sensed)
        await clock.sleep(SENSE_S)
