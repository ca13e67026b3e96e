"""What devices tell of themselves, and what is left open when they do not."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

from tests.support.virtual_clock import VirtualClock
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.machine.sensors import LOOK_S, SENSE_S, Sensors, SensorWatch


def work(seconds: float) -> None:
    """Keep a core busy."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


class Refused(Exception):
    """The driver's answer to a question it does not know."""


class Driver:
    """The part of NVIDIA's library that is asked; `silent` names questions that the card does not
    answer.
    """

    NVMLError = Refused
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *silent: str) -> None:
        self.silent = silent

    def __getattr__(self, question: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=83, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3_000, total=9_000),
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 142_500,
        }

        def answer(*_: object) -> Any:
            if question in self.silent:
                raise Refused
            return answers[question]

        return answer


def test_a_gpu_tells_load_memory_heat_and_power() -> None:
    assert Sensors(Driver()).read(["cuda:0"]) == (
        events.Sensed(
            device="cuda:0",
            utilisation=0.83,
            memory_bytes=3_000,
            celsius=61.0,
            watts=142.5,
        ),
    )


def test_what_a_card_does_not_answer_stays_open() -> None:
    (told,) = Sensors(Driver("nvmlDeviceGetPowerUsage")).read(["cuda:0"])
    assert (told.watts, told.celsius) == (None, 61.0)
    assert Sensors(Driver("nvmlDeviceGetHandleByIndex")).read(["cuda:0"]) == ()


def test_a_processor_tells_its_memory_and_no_power() -> None:
    sensors = Sensors(Driver())
    (told,) = sensors.read(["cpu"])
    assert told.memory_bytes
    assert told.watts is None
    assert sensors.read(["mps"]) == ()


async def test_only_changes_are_told() -> None:
    clock = VirtualClock()
    bus = EventBus(clock)
    degrees = [50.0, 50.0, 51.0]
    readings = [events.Sensed(device="cpu", celsius=celsius) for celsius in degrees]

    def read() -> tuple[events.Sensed, ...]:
        return (readings.pop(0),)

    async def read_once() -> None:
        while clock.next_at is None:  # the reading is still on its way from its thread
            await asyncio.sleep(0)

    with bus.subscribe() as stream:
        watch = SensorWatch(bus, clock, read)
        telling = asyncio.create_task(watch.run())
        for _ in degrees[1:]:
            await read_once()
            await clock.advance(LOOK_S)
            await read_once()
            await clock.advance(SENSE_S - LOOK_S)
        await read_once()
        bus.close()
        told = [event async for event in stream]
    telling.cancel()
    assert [e.celsius for e in told if isinstance(e, events.Sensed)] == [50.0, 51.0]


def test_the_load_is_that_since_the_last_look_whichever_thread_looks() -> None:
    sensors = Sensors(Driver())
    work(0.2)
    found: list[events.Sensed] = []
    looking = threading.Thread(target=lambda: found.extend(sensors.read(["cpu"])))
    looking.start()
    looking.join()
    assert found[0].utilisation is not None
    assert 0 < found[0].utilisation <= 1


async def test_who_looks_is_told_at_once_and_nobody_more_often_than_twice_a_second() -> None:
    clock = VirtualClock()
    bus = EventBus(clock)
    looks: list[float] = []

    def read() -> tuple[events.Sensed, ...]:
        looks.append(clock.now())
        return ()

    async def resting() -> None:
        while clock.next_at is None:
            await asyncio.sleep(0)

    watch = SensorWatch(bus, clock, read)
    telling = asyncio.create_task(watch.run())
    began = clock.now()
    for _ in range(3):
        await resting()
        watch.look()
        await clock.advance(LOOK_S)
    await resting()
    telling.cancel()
    assert [at - began for at in looks] == [0.0, LOOK_S, 2 * LOOK_S, 3 * LOOK_S]
