"""What devices tell of themselves, and what is left open when they do not."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

from tests.support.virtual_clock import VirtualClock
from volunteer.control import events
from volunteer.control.event_bus import Hub
from volunteer.machine.sensors import SENSE_S, Sensors, keep_telling


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
        self.energy_mj = 5_000_000

    def __getattr__(self, question: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=83, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3_000, total=9_000),
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 142_500,
            "nvmlDeviceGetTotalEnergyConsumption": self.energy_mj,
        }

        def answer(*_: object) -> Any:
            if question in self.silent:
                raise Refused
            return answers[question]

        return answer


def test_a_gpu_tells_load_memory_heat_power_and_the_energy_since_the_start() -> None:
    driver = Driver()
    sensors = Sensors(driver)
    assert sensors.read(["cuda:0"])[0].joules == 0.0
    driver.energy_mj += 7_200_000
    assert sensors.read(["cuda:0"]) == (
        events.Sensed(
            device="cuda:0",
            utilisation=0.83,
            memory_bytes=3_000,
            celsius=61.0,
            watts=142.5,
            joules=7_200.0,
        ),
    )


def test_what_a_card_does_not_answer_stays_open() -> None:
    driver = Driver("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption")
    (told,) = Sensors(driver).read(["cuda:0"])
    assert (told.watts, told.joules) == (None, None)
    assert told.celsius == 61.0
    assert Sensors(Driver("nvmlDeviceGetHandleByIndex")).read(["cuda:0"]) == ()


def test_a_processor_tells_its_memory_and_no_energy() -> None:
    sensors = Sensors(Driver())
    (told,) = sensors.read(["cpu"])
    assert told.memory_bytes
    assert (told.watts, told.joules) == (None, None)
    assert sensors.read(["mps"]) == ()


async def test_only_changes_are_told() -> None:
    clock = VirtualClock()
    hub = Hub(clock)
    degrees = [50.0, 50.0, 51.0]
    readings = [events.Sensed(device="cpu", celsius=celsius) for celsius in degrees]

    def read(_: object) -> tuple[events.Sensed, ...]:
        return (readings.pop(0),)

    async def read_once() -> None:
        while clock.next_at is None:  # the reading is still on its way from its thread
            await asyncio.sleep(0)

    with hub.subscribe() as stream:
        telling = asyncio.create_task(keep_telling(hub, clock, lambda: ("cpu",), read))
        for _ in degrees[1:]:
            await read_once()
            await clock.advance(SENSE_S)
        await read_once()
        hub.close()
        told = [event async for event in stream]
    telling.cancel()
    assert [e.celsius for e in told if isinstance(e, events.Sensed)] == [50.0, 51.0]


def test_the_load_is_that_since_the_last_look_whichever_thread_looks() -> None:
    sensors, until = Sensors(Driver()), time.process_time() + 0.2
    while time.process_time() < until:
        pass
    found: list[events.Sensed] = []
    looking = threading.Thread(target=lambda: found.extend(sensors.read(["cpu"])))
    looking.start()
    looking.join()
    assert found[0].utilisation is not None
    assert 0 < found[0].utilisation <= 1
