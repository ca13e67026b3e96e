"""Benchmarks of this machine's devices: measured once, cached, and sent to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from shared.errors import VolunteerError
from shared.protocol import endpoints
from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device
from shared.sentences import Sentence
from shared.text import printable
from shared.workloads.training.memory_release import release_memory
from volunteer.account.join import enabled
from volunteer.agent.workplace import Workplace
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
    """Measures the devices, stores the results, and sends them to the coordinator. Results of
    another release of torch do not count.
    """

    place: Workplace
    settings: Settings
    run_benchmark: Callable[..., Benchmark] = benchmark
    _torch: str = field(default_factory=lambda: hardware().torch, init=False)
    _cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Stop measuring; work begins without a measured speed."""
        self._cancelled = True

    async def ensure_measured(self, pairs: list[tuple[Device, Trainer]], *, measure: bool) -> None:
        """Announce the speeds of these devices; unmeasured devices get a quick benchmark."""
        by_device = {b.device: b for b in self._stored()}
        for device, trainer in pairs:
            if device.id in by_device:
                self.place.bus.emit(events.Benchmarked(benchmark=by_device[device.id]))
            elif measure:
                # A device is shown as being measured as soon as it is known.
                first = events.BenchmarkProgress(stage=FIRST_STAGE, done=0.0, device=device.id)
                self.place.bus.emit(first)
                self.place.bus.notice(Sentence("{device}: measuring its speed", device=device.id))
                await self.measure(device, trainer, quick=True)
        await self.publish()

    async def measure(self, device: Device, trainer: Trainer, *, quick: bool) -> None:
        """Benchmark a device on its own thread; a device that fails it works without a known speed.
        Raises BenchmarkCancelled if the agent ends, ThreadDied.
        """
        self._cancelled = False
        loop = asyncio.get_running_loop()

        def report(stage: str, done: float) -> None:
            event = events.BenchmarkProgress(stage=stage, done=done, device=device.id)
            loop.call_soon_threadsafe(self.place.bus.emit, event)

        def run() -> Benchmark:
            return self.run_benchmark(
                device.id,
                quick=quick,
                report=report,
                stop=lambda: self.place.life.ending or self._cancelled,
                now=self.place.life.clock.now(),
            )

        try:
            result = await asyncio.wrap_future(trainer.call(run))
        except BenchmarkCancelled:
            if self.place.life.ending:
                raise
            self.place.bus.emit(events.BenchmarkProgress(stage="cancelled", done=1.0))
            return
        except VolunteerError:
            raise
        except Exception as error:  # its model needs more memory than a small device has
            self.place.bus.emit(events.BenchmarkProgress(stage="cancelled", done=1.0))
            why = printable(str(error).partition("\n")[0], 200) or type(error).__name__
            sentence = Sentence(
                "{device} could not be measured, and works without a known speed: {why}",
                device=device.id,
                why=why,
            )
            self.place.bus.notice(sentence, "warning")
            trainer.call(partial(release_memory, device.id))
            return
        other_results = tuple(b for b in self._stored() if b.device != device.id)
        self.place.store.home.remember(benchmarks=(*other_results, result), torch=self._torch)
        self.place.bus.emit(events.Benchmarked(benchmark=result))

    def speed(self, device: str) -> float:
        """Return the operations a second of a device in training; 0 if it was not measured."""
        return next((b.step_flops for b in self._stored() if b.device == device), 0.0)

    async def publish(self) -> None:
        """Send this machine's hardware, speeds and workloads to the coordinator, which picks tasks
        by them.
        """
        request = BenchmarkRequest(
            benchmarks=self._stored(),
            hardware=hardware(self.place.bus.status.devices),
            workloads=enabled(self.settings),
        )
        await self.place.remote.api.call(endpoints.BENCHMARK, body=request)

    def _stored(self) -> tuple[Benchmark, ...]:
        memory = self.place.store.home.memory
        return memory.benchmarks if memory.torch == self._torch else ()
