"""Benchmarks of this machine's devices: measured once, cached, and sent to the coordinator."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device
from volunteer.account.join import enabled
from volunteer.account.profile import Home
from volunteer.agent.lifecycle import Lifecycle
from volunteer.control import events
from volunteer.control.event_bus import Hub
from volunteer.machine.benchmark import FIRST_STAGE, BenchmarkCancelled, benchmark
from volunteer.machine.devices import hardware
from volunteer.net.api import Api
from volunteer.settings.settings import Settings
from volunteer.training.trainer import Trainer

MEASURED_MAX = 50  # remembered


@dataclass(eq=False, kw_only=True)
class Benchmarks:
    """Keeps the benchmark results of the devices and publishes them.

    A new torch means new measurements.
    """

    api: Api
    home: Home
    hub: Hub
    life: Lifecycle
    settings: Settings
    scratch: Path
    _torch: str = field(default_factory=lambda: hardware().torch, init=False)
    _cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Stop measuring; work begins without it."""
        self._cancelled = True

    async def know(self, pairs: list[tuple[Device, Trainer]], *, measure: bool) -> None:
        """Announce the speeds of these devices; measure those that have none, quickly."""
        known = {b.device: b for b in self._remembered()}
        for device, trainer in pairs:
            if device.id in known:
                self.hub.emit(events.Benchmarked(benchmark=known[device.id]))
            elif measure:
                # From the moment it is known, it is shown as being measured.
                first = events.BenchmarkProgress(stage=FIRST_STAGE, done=0.0, device=device.id)
                self.hub.emit(first)
                await self.measure(device, trainer, quick=True)
        await self.publish()

    async def measure(self, device: Device, trainer: Trainer, *, quick: bool) -> None:
        """Benchmark a device on its own thread.

        Raises BenchmarkCancelled when the agent ends meanwhile.
        """
        self._cancelled = False
        loop = asyncio.get_running_loop()

        def report(stage: str, done: float) -> None:
            event = events.BenchmarkProgress(stage=stage, done=done, device=device.id)
            loop.call_soon_threadsafe(self.hub.emit, event)

        def run() -> Benchmark:
            return benchmark(
                device.id,
                quick=quick,
                report=report,
                stop=lambda: self.life.ending or self._cancelled,
                scratch=self.scratch,
                now=self.life.clock.now(),
            )

        try:
            measured = await asyncio.wrap_future(trainer.call(run))
        except BenchmarkCancelled:
            if self.life.ending:
                raise
            self.hub.emit(events.BenchmarkProgress(stage="cancelled", done=1.0))
            return
        others = tuple(b for b in self._remembered() if b.device != device.id)
        self.home.remember(
            benchmarks=(*others, measured),
            measured=(*self.home.memory.measured, measured)[-MEASURED_MAX:],
            torch=self._torch,
        )
        self.hub.emit(events.Benchmarked(benchmark=measured))

    async def publish(self) -> None:
        """Report to the coordinator what this machine is, how fast, and what it may run: tasks are
        chosen and sized by it.
        """
        request = BenchmarkRequest(
            benchmarks=self._remembered(),
            hardware=hardware(self.hub.status.devices),
            workloads=enabled(self.settings),
        )
        await self.api.benchmark(request)

    def _remembered(self) -> tuple[Benchmark, ...]:
        memory = self.home.memory
        return memory.benchmarks if memory.torch == self._torch else ()
