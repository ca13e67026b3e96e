"""Sensors of the lent devices: load, memory, temperature and power, as far as drivers report them.

Power is the whole device's, including other programs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import psutil

from shared.clock import Clock
from volunteer.control.event_bus import EventBus
from volunteer.control.events import Sensed
from volunteer.machine.surroundings import physical, temperatures

Sense: TypeAlias = Callable[[Sequence[str]], tuple[Sensed, ...]]
SENSE_S = 5.0
LOOK_S = 0.5  # shortest interval, while a person watches


class Sensors:
    """Reads the devices' sensors; a value that no driver reports is None. Not thread-safe."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._tried = nvml is not None
        self._process = psutil.Process()
        self._times = psutil.cpu_times()

    def read(self, devices: Sequence[str]) -> tuple[Sensed, ...]:
        """Return one reading a device; devices without sensors are left out."""
        hot = temperatures([d for d in devices if not d.startswith("cuda")])
        readings = []
        for device in devices:
            if device == "cpu":
                reading: Sensed | None = Sensed(
                    device=device,
                    utilisation=self._load(),
                    memory_bytes=self._process.memory_info().rss,
                    celsius=hot.get(device),
                )
            elif device.startswith("cuda"):
                reading = self._cuda(device)
            else:
                reading = Sensed(device=device, celsius=hot[device]) if device in hot else None
            if reading is not None:
                readings.append(reading)
        return tuple(readings)

    def _load(self) -> float | None:
        """Return the share of all cores in use since the last reading; None if no time has passed.
        psutil's own figure is per thread, and 0 at the first reading of each thread.
        """
        before, self._times = self._times, psutil.cpu_times()
        spent = {
            kind: after - getattr(before, kind) for kind, after in self._times._asdict().items()
        }
        # The times of user and nice include those of guests.
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

        def ask(question: str, *more: object) -> Any:
            try:
                return getattr(nvml, question)(gpu, *more)
            except nvml.NVMLError:
                return None  # older and smaller cards report fewer values

        load, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
        heat = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        power = ask("nvmlDeviceGetPowerUsage")
        return Sensed(
            device=device,
            utilisation=None if load is None else load.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            celsius=None if heat is None else float(heat),
            watts=None if power is None else power / 1000,
        )

    def _library(self) -> Any:
        """Return NVIDIA's management library, opened once; None if it is missing."""
        if not self._tried:
            self._tried = True
            import pynvml

            try:
                pynvml.nvmlInit()
                self._nvml = pynvml
            except pynvml.NVMLError:
                pass  # NVIDIA's driver is missing
        return self._nvml


class SensorWatch:
    """Reads the sensors every few seconds, and at once when a person looks."""

    def __init__(self, bus: EventBus, clock: Clock, read: Callable[[], tuple[Sensed, ...]]) -> None:
        self._bus = bus
        self._clock = clock
        self._read = read
        self._look_asked = asyncio.Event()
        self._emitted: dict[str, Sensed] = {}

    def look(self) -> None:
        """Make `run` read the sensors now."""
        self._look_asked.set()

    def celsius(self) -> float | None:
        """Return the last reading of the hottest device; None if no device has a thermometer."""
        readings = (sensed.celsius for sensed in self._emitted.values())
        return max((heat for heat in readings if heat is not None), default=None)

    async def run(self) -> None:
        """Emit changed readings, until cancelled."""
        while True:
            self._look_asked.clear()
            await self._emit_changes()
            await self._clock.sleep(LOOK_S)
            await self._wait_for_look(SENSE_S - LOOK_S)

    async def _emit_changes(self) -> None:
        for sensed in await asyncio.to_thread(self._read):
            if self._emitted.get(sensed.device) != sensed:
                self._emitted[sensed.device] = sensed
                self._bus.emit(sensed)

    async def _wait_for_look(self, seconds: float) -> None:
        """Wait for these seconds, or until a person looks."""
        waits: list[asyncio.Future[object]] = [
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(self._look_asked.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
