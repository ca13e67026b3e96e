"""Benchmarks of this machine's devices: measured once, cached, and sent to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.protocol import endpoints
from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device
from shared.sentences import Sentence
from volunteer.account.join import enabled
from volunteer.agent.collaborators import Workplace
from volunteer.control import events
from volunteer.machine.benchmark import (
    FIRST_STAGE,
    BenchmarkCancelled,
    benchmark,
)
from volunteer.machine.devices import hardware
from volunteer.settings.settings import Settings
from volunteer.training.trainer import Trainer


@dataclass(eq=False, kw_only=True)
class Benchmarks:
    """Stores the devices' benchmark results and publishes them. Another release of torch makes the
    results invalid.
    """

    place: Workplace
    settings: Settings
    timed: Callable[..., Benchmark] = benchmark
    _torch: str = field(default_factory=lambda: hardware().torch, init=False)
    _cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Stop measuring; work begins without it."""
        self._cancelled = True

    async def know(self, pairs: list[tuple[Device, Trainer]], *, measure: bool) -> None:
        """Announce the speeds of these devices; unmeasured ones get a quick benchmark."""
        by_device = {b.device: b for b in self._remembered()}
        for device, trainer in pairs:
            if device.id in by_device:
                self.place.hub.emit(events.Benchmarked(benchmark=by_device[device.id]))
            elif measure:
                # A device is shown as being measured as soon as it is known.
                first = events.BenchmarkProgress(stage=FIRST_STAGE, done=0.0, device=device.id)
                self.place.hub.emit(first)
                self.place.hub.notice(Sentence("{device}: measuring its speed", device=device.id))
                await self.measure(device, trainer, quick=True)
        await self.publish()

    async def measure(self, device: Device, trainer: Trainer, *, quick: bool) -> None:
        """Benchmark a device on its own thread. Raises BenchmarkCancelled if the agent ends."""
        self._cancelled = False
        loop = asyncio.get_running_loop()

        def report(stage: str, done: float) -> None:
            event = events.BenchmarkProgress(stage=stage, done=done, device=device.id)
            loop.call_soon_threadsafe(self.place.hub.emit, event)

        def run() -> Benchmark:
            return self.timed(
                device.id,
                quick=quick,
                report=report,
                stop=lambda: self.place.life.ending or self._cancelled,
                now=self.place.life.clock.now(),
            )

        try:
            measured = await asyncio.wrap_future(trainer.call(run))
        except BenchmarkCancelled:
            if self.place.life.ending:
                raise
            self.place.hub.emit(events.BenchmarkProgress(stage="cancelled", done=1.0))
            return
        rest = tuple(b for b in self._remembered() if b.device != device.id)
        self.place.store.home.remember(benchmarks=(*rest, measured), torch=self._torch)
        self.place.hub.emit(events.Benchmarked(benchmark=measured))

    def speed(self, device: str) -> float:
        """Return the operations a second of a device in training; 0 if it was not measured."""
        return next((b.step_flops for b in self._remembered() if b.device == device), 0.0)

    async def publish(self) -> None:
        """Report this machine's hardware, speeds and workloads, by which the coordinator picks its
        tasks.
        """
        request = BenchmarkRequest(
            benchmarks=self._remembered(),
            hardware=hardware(self.place.hub.status.devices),
            workloads=enabled(self.settings),
        )
        await self.place.remote.api.call(endpoints.BENCHMARK, body=request)

    def _remembered(self) -> tuple[Benchmark, ...]:
        memory = self.place.store.home.memory
        return memory.benchmarks if memory.torch == self._torch else ()
