"""Devices: figures, measuring, what cannot be used and the command that mends it, each with its own
pause.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from shared.protocol import endpoints
from shared.protocol.accounts import LinkCode
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import (
    SIZES,
    SMALL,
    STATES,
    WORKERS,
    Snapshot,
    picture,
    prepared,
    settle,
)
from volunteer.control import commands, events
from volunteer.control.events import AnyEvent
from volunteer.tui.look import Look

PAGE = Look(page="device")
MENDS = "the installed torch 2.13.0 is built for cpu: pip install --force-reinstall torch"
BROKEN = replace(scenes.GPU, id="nvidia:0", usable=False, problem=MENDS)


def two_devices() -> Iterator[AnyEvent]:
    yield from scenes.filled()
    yield events.DevicesFound(devices=(scenes.CPU, BROKEN))
    yield events.Traffic(
        sent_bytes=182_400_000, received_bytes=97_300_000, up_bytes_per_s=3e6, down_bytes_per_s=12e6
    )


def measuring() -> Iterator[AnyEvent]:
    yield from two_devices()
    yield events.BenchmarkProgress(stage="step", done=0.63, device="cpu")


scenes.SCENES["two devices"] = two_devices
scenes.SCENES["measuring"] = measuring


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("state", [*STATES, "two devices", "measuring"])
def test_picture(engine: FakeEngine, snap_compare: Snapshot, state: str, size: str) -> None:
    assert picture(engine, snap_compare, "device", state=state, size=SIZES[size])


def test_picture_of_a_small_terminal(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "device", size=SMALL)


async def test_what_cannot_be_used_names_the_command_that_mends_it(engine: FakeEngine) -> None:
    async with opened(prepared(engine), two_devices(), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("down")
        await settle(app, pilot)
        text = screen_text(app)
        assert "✗ unusable" in text
        assert "--force-reinstall" in text
        await pilot.press("b")
        await settle(app, pilot)
        assert not [c for c in engine.asked if isinstance(c, commands.Measure)]


async def test_measuring_is_started_and_stopped(engine: FakeEngine) -> None:
    async with opened(prepared(engine), two_devices(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("b")
        await settle(app, pilot)
        assert [c.device for c in engine.asked if isinstance(c, commands.Measure)] == ["cpu"]
        await engine.play([events.BenchmarkProgress(stage="step", done=0.5, device="cpu")])
        await settle(app, pilot)
        assert "real training steps" in screen_text(app)
        await pilot.press("b")
        await settle(app, pilot)
        assert isinstance(engine.asked[-1], commands.StopMeasuring)


async def test_one_device_rests_alone(engine: FakeEngine) -> None:
    async with opened(prepared(engine), two_devices(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await settle(app, pilot)
        assert [c.device for c in engine.asked if isinstance(c, commands.Pause)] == ["cpu"]
        assert "‖ paused" in screen_text(app)
        await pilot.press("p")
        await settle(app, pilot)
        assert [c.device for c in engine.asked if isinstance(c, commands.Resume)] == ["cpu"]


async def test_another_machine_is_added_by_a_link(engine: FakeEngine) -> None:
    prepared(engine)
    code = LinkCode(code="abc", link="https://h/join#code=abc", expires_at=scenes.NOW + 600)
    engine.answers[commands.MakeLink] = code
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("l")
        await pilot.pause()
        assert code.link in screen_text(app)


async def test_what_a_device_does_now(engine: FakeEngine) -> None:
    feels = events.Sensed(device="cpu", utilisation=0.5, memory_bytes=2_000_000_000, celsius=61.0)
    told = [*scenes.filled(), feels]
    async with opened(prepared(engine), told, look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        text = screen_text(app).partition("cpu now")[2]
        for part in ("● training", "0.187/s", "2 GB of 33.5 GB", "50 %", "61 °C", "not measured"):
            assert part in text


async def test_comparison_and_history(engine: FakeEngine) -> None:
    async with opened(prepared(engine), two_devices(), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        text = screen_text(app)
        assert "as fast as the median of 7 machines" in text
        assert "9 times" in text
        assert "A step of this run takes 18 ms here." in text


async def test_only_what_was_measured_of_the_network_is_told(engine: FakeEngine) -> None:
    traffic = events.Traffic(sent_bytes=0, received_bytes=9, down_bytes_per_s=66_600_000.0)
    async with opened(prepared(engine), [*scenes.filled(), traffic], look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert "network    ↓ 66.6 MB/s" in screen_text(app)


async def test_a_machine_with_several_tasks_is_one_machine(engine: FakeEngine) -> None:
    prepared(engine).answers[endpoints.WORKERS] = (WORKERS[0], WORKERS[0])
    async with opened(engine, scenes.filled(), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        assert "the median of" not in screen_text(app)
