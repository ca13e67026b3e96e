"""Benchmarks of this machine's devices: measured once, cached, and sent to the coordinator.

One that other programs disturbed is made again when they rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device
from shared.sentences import Sentence
from volunteer.account.join import enabled
from volunteer.account.profile import Home
from volunteer.agent.lifecycle import Lifecycle
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.machine.benchmark import (
    FIRST_STAGE,
    BenchmarkCancelled,
    ProcessorTime,
    benchmark,
    disturbed,
    processor_time,
)
from volunteer.machine.devices import default_threads, hardware
from volunteer.net.api import Api
from volunteer.settings.settings import Settings
from volunteer.training.trainer import Trainer

MEASURED_MAX = 50  # remembered
AGAIN_S = 60.0  # other programs rest that long before a device is measured again
AGAIN_MAX = 3  # in the life of a process


@dataclass(eq=False, kw_only=True)
class Benchmarks:
    """Stores the devices' benchmark results and publishes them. A new torch is measured anew."""

    api: Api
    home: Home
    hub: EventBus
    life: Lifecycle
    settings: Settings
    scratch: Path
    timed: Callable[..., Benchmark] = benchmark
    processor: Callable[[], ProcessorTime] = processor_time
    _torch: str = field(default_factory=lambda: hardware().torch, init=False)
    _cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Stop measuring; work begins without it."""
        self._cancelled = True

    async def know(self, pairs: list[tuple[Device, Trainer]], *, measure: bool) -> None:
        """Announce the speeds of these devices; unmeasured ones are measured quickly."""
        known = {b.device: b for b in self._remembered()}
        for device, trainer in pairs:
            if device.id in known:
                self.hub.emit(events.Benchmarked(benchmark=known[device.id]))
            elif measure:
                # A device is shown as being measured as soon as it is known.
                first = events.BenchmarkProgress(stage=FIRST_STAGE, done=0.0, device=device.id)
                self.hub.emit(first)
                await self.measure(device, trainer, quick=True)
        await self.publish()

    async def measure(self, device: Device, trainer: Trainer, *, quick: bool) -> None:
        """Benchmark a device on its own thread. Raises BenchmarkCancelled if the agent ends."""
        self._cancelled = False
        loop = asyncio.get_running_loop()

        def report(stage: str, done: float) -> None:
            event = events.BenchmarkProgress(stage=stage, done=done, device=device.id)
            loop.call_soon_threadsafe(self.hub.emit, event)

        def run() -> tuple[Benchmark, bool]:
            before = self.processor()
            result = self.timed(
                device.id,
                quick=quick,
                report=report,
                stop=lambda: self.life.ending or self._cancelled,
                scratch=self.scratch,
                now=self.life.clock.now(),
            )
            # Other programs hardly change the figures of a GPU.
            return result, device.kind == "cpu" and self._disturbed_since(before)

        try:
            measured, doubtful = await asyncio.wrap_future(trainer.call(run))
        except BenchmarkCancelled:
            if self.life.ending:
                raise
            self.hub.emit(events.BenchmarkProgress(stage="cancelled", done=1.0))
            return
        others = tuple(b for b in self._remembered() if b.device != device.id)
        marked = tuple(d for d in self.home.memory.disturbed if d != device.id)
        self.home.remember(
            benchmarks=(*others, measured),
            measured=(*self.home.memory.measured, measured)[-MEASURED_MAX:],
            disturbed=(*marked, device.id) if doubtful else marked,
            torch=self._torch,
        )
        self.hub.emit(events.Benchmarked(benchmark=measured))
        if doubtful:
            self.hub.notice(
                Sentence(
                    "{device} was measured while other programs used the processor: it is measured "
                    "again when they rest",
                    device=device.id,
                )
            )

    async def measure_again(
        self, pairs: list[tuple[Device, Trainer]], may: Callable[[str], bool]
    ) -> None:
        """Benchmark disturbed devices again once the machine is idle, where they `may`."""
        tries = 0
        while True:
            before = self.processor()
            await self.life.clock.sleep(AGAIN_S)
            if self._disturbed_since(before):
                continue
            for device, trainer in pairs:
                due = device.id in self.home.memory.disturbed and may(device.id)
                if due and tries < AGAIN_MAX:
                    tries += 1
                    await self.measure(device, trainer, quick=True)
                    await self.publish()

    def speed(self, device: str) -> float:
        """Return the operations a second of a device in training; 0 if it was not measured."""
        return next((b.step_flops for b in self._remembered() if b.device == device), 0.0)

    def _disturbed_since(self, before: ProcessorTime) -> bool:
        threads = self.settings.threads or default_threads()
        return disturbed(before, self.processor(), threads=threads)

    async def publish(self) -> None:
        """Report this machine's hardware, speed and workloads, by which tasks are sized."""
        request = BenchmarkRequest(
            benchmarks=self._remembered(),
            hardware=hardware(self.hub.status.devices),
            workloads=enabled(self.settings),
        )
        await self.api.benchmark(request)

    def _remembered(self) -> tuple[Benchmark, ...]:
        memory = self.home.memory
        return memory.benchmarks if memory.torch == self._torch else ()
