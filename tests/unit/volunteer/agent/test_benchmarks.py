"""A benchmark that other programs disturbed is noticed, and made again when they rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device
from tests.support.virtual_clock import VirtualClock
from volunteer.account.profile import Home
from volunteer.agent.benchmarks import AGAIN_MAX, AGAIN_S, Benchmarks
from volunteer.agent.lifecycle import Lifecycle
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.control.status import Status
from volunteer.machine.benchmark import ProcessorTime, disturbed
from volunteer.settings.settings import Settings
from volunteer.training.trainer import Trainer

CPU = Device(id="cpu", kind="cpu", name="a processor", memory_bytes=8 << 30)
GPU = Device(id="cuda:0", kind="cuda", name="a card", memory_bytes=8 << 30)
FAST, SLOW = 50e9, 3e9


class Inline:
    """Stands in for the thread of a device: a call runs at once."""

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function())
        return future


class Bench:
    """A machine whose owner's programs come and go: while `busy`, training steps are slow."""

    def __init__(self, home: Path, threads: int = 2) -> None:
        self.clock = VirtualClock()
        self.busy = True
        self.allowed = True
        self.seconds = 0.0
        self.sent: list[BenchmarkRequest] = []
        self.hub = EventBus(self.clock, Status())
        self.home = Home(home)
        self.trainer = cast("Trainer", Inline())
        self.benchmarks = Benchmarks(
            api=cast("Any", self),
            home=self.home,
            hub=self.hub,
            life=Lifecycle(self.clock),
            settings=Settings(threads=threads),
            scratch=home,
            timed=self._timed,
            processor=self._processor,
        )

    async def benchmark(self, request: BenchmarkRequest) -> None:
        self.sent.append(request)

    def _timed(self, device: str, **_: object) -> Benchmark:
        self.seconds += 3.0
        return Benchmark(
            device=device,
            fp32_flops=100e9,
            bf16_flops=0.0,
            memory_bytes_per_s=0.0,
            step_flops=SLOW if self.busy else FAST,
        )

    def _processor(self) -> ProcessorTime:
        at = self.seconds + self.clock.monotonic()
        return ProcessorTime(at=at, busy_s=1000.0 * at if self.busy else 0.0, own_s=0.0)

    @asynccontextmanager
    async def watching(self, *devices: Device) -> AsyncIterator[None]:
        pairs = [(device, self.trainer) for device in devices]
        await self.benchmarks.know(pairs, measure=True)
        again = asyncio.ensure_future(
            self.benchmarks.measure_again(pairs, may=lambda device: self.allowed)
        )
        await asyncio.sleep(0)
        yield
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


async def test_it_is_made_again_when_the_machine_is_idle(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.hub.subscribe() as told:
        async with bench.watching(CPU):
            assert bench.benchmarks.speed("cpu") == SLOW
            await bench.clock.advance(3 * AGAIN_S)
            assert bench.benchmarks.speed("cpu") == SLOW  # nobody waits for a busy machine
            bench.busy = False
            await bench.clock.advance(2 * AGAIN_S)
            assert bench.benchmarks.speed("cpu") == FAST
            assert bench.sent[-1].benchmarks[0].step_flops == FAST
            sent = len(bench.sent)
            await bench.clock.advance(5 * AGAIN_S)
            assert len(bench.sent) == sent  # once is enough
        bench.hub.close()
        said = [e.message async for e in told if isinstance(e, events.Notice)]
    assert said == [
        "cpu was measured while other programs used the processor: it is measured again when "
        "they rest"
    ]


async def test_a_device_at_rest_stays_at_rest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.watching(CPU):
        bench.busy, bench.allowed = False, False
        await bench.clock.advance(3 * AGAIN_S)
        assert bench.benchmarks.speed("cpu") == SLOW
        bench.allowed = True
        await bench.clock.advance(AGAIN_S)
        assert bench.benchmarks.speed("cpu") == FAST


async def test_it_is_made_again_after_a_restart(tmp_path: Path) -> None:
    async with Bench(tmp_path).watching(CPU):
        pass
    bench = Bench(tmp_path)
    bench.busy = False
    async with bench.watching(CPU):
        assert bench.benchmarks.speed("cpu") == SLOW
        await bench.clock.advance(AGAIN_S)
        assert bench.benchmarks.speed("cpu") == FAST


async def test_a_machine_that_is_never_quiet_is_not_measured_for_ever(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.watching(CPU):
        for _ in range(AGAIN_MAX + 3):
            bench.busy = False  # until it is measured
            waiting = asyncio.ensure_future(bench.clock.advance(AGAIN_S))
            bench.home.remember(disturbed=("cpu",))
            await waiting
        assert len(bench.sent) == 1 + AGAIN_MAX


async def test_other_programs_hardly_touch_a_gpu(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.watching(GPU):
        bench.busy = False
        await bench.clock.advance(2 * AGAIN_S)
        assert bench.benchmarks.speed("cuda:0") == SLOW


@pytest.mark.parametrize(
    ("threads", "cores", "others", "found"),
    [
        (2, 2, 0.1, False),
        (2, 2, 0.5, True),
        (7, 8, 1.0, False),
        (7, 8, 1.5, True),
        (2, 64, 40.0, False),  # a container on a large host
    ],
)
def test_disturbed_is_who_was_left_too_few_cores(
    threads: int, cores: int, others: float, found: bool
) -> None:
    before = ProcessorTime(at=10.0, busy_s=500.0, own_s=50.0)
    after = ProcessorTime(at=14.0, busy_s=500.0 + 4 * (others + threads), own_s=50.0 + 4 * threads)
    assert disturbed(before, after, threads=threads, cores=cores) is found
