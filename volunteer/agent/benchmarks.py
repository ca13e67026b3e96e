"""Benchmarks of this machine's devices: measured once, cached, and sent to the coordinator."""

from __future__ import annotations

import asyncio

from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device
from volunteer.account.join import enabled
from volunteer.agent.context import Parts
from volunteer.control import events
from volunteer.machine.benchmark import BenchmarkCancelled, benchmark
from volunteer.machine.devices import hardware
from volunteer.training.trainer import Trainer

MEASURED_MAX = 50  # remembered


class Speeds:
    """Keeps the benchmark results of the devices and publishes them.

    A new torch means new measurements.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._torch = hardware().torch
        self._cancelled = False

    def cancel(self) -> None:
        """Stop measuring; work begins without it."""
        self._cancelled = True

    async def know(self, pairs: list[tuple[Device, Trainer]], *, measure: bool) -> None:
        """Tell the speeds of these devices, after a quick measurement of those that have none."""
        known = {b.device: b for b in self._remembered()}
        for device, trainer in pairs:
            if device.id in known:
                self._parts.hub.emit(events.Benchmarked(benchmark=known[device.id]))
            elif measure:
                await self.measure(device, trainer, quick=True)
        await self.publish()

    async def measure(self, device: Device, trainer: Trainer, *, quick: bool) -> None:
        """Benchmark a device on its own thread.

        Raises BenchmarkCancelled when the agent ends meanwhile.
        """
        self._cancelled = False
        loop, parts = asyncio.get_running_loop(), self._parts

        def report(stage: str, done: float) -> None:
            event = events.BenchmarkProgress(stage=stage, done=done)
            loop.call_soon_threadsafe(parts.hub.emit, event)

        def run() -> Benchmark:
            return benchmark(
                device.id,
                quick=quick,
                report=report,
                stop=lambda: parts.desk.ending or self._cancelled,
                scratch=parts.cache.root,
                now=parts.clock.now(),
            )

        try:
            measured = await asyncio.wrap_future(trainer.call(run))
        except BenchmarkCancelled:
            if parts.desk.ending:
                raise
            parts.hub.emit(events.BenchmarkProgress(stage="cancelled", done=1.0))
            return
        others = tuple(b for b in self._remembered() if b.device != device.id)
        parts.home.remember(
            benchmarks=(*others, measured),
            measured=(*parts.home.memory.measured, measured)[-MEASURED_MAX:],
            torch=self._torch,
        )
        parts.hub.emit(events.Benchmarked(benchmark=measured))

    async def publish(self) -> None:
        """Tell the coordinator what this machine is, how fast, and what it may run: tasks are
        chosen and sized by it.
        """
        parts = self._parts
        request = BenchmarkRequest(
            benchmarks=self._remembered(),
            hardware=hardware(parts.hub.status.devices),
            workloads=enabled(parts.settings),
        )
        await parts.api.benchmark(request)

    def _remembered(self) -> tuple[Benchmark, ...]:
        memory = self._parts.home.memory
        return memory.benchmarks if memory.torch == self._torch else ()
