"""Devices: figures, measuring, what cannot be used and the command that mends it, each with its own
pause.
"""

from __future__ import annotations

from msgspec.structs import replace

from shared.protocol import endpoints
from shared.protocol.accounts import LinkCode, WorkerInfo
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import (
    SIZES,
    WORKERS,
    Snapshot,
    picture,
    prepared,
    settle,
)
from volunteer.control import commands, events
from volunteer.machine.devices import rank_groups
from volunteer.tui.appearance import Look

PAGE = Look(page="device")


def test_picture(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "device", state="live", size=SIZES["120x36"])


async def test_equal_cards_are_one_device_of_the_page(engine: FakeEngine) -> None:
    cards = tuple(replace(scenes.GPU, id=f"cuda:{n}", name="RTX 4090") for n in range(3))
    [(worker, _)] = rank_groups(cards)
    told = [*scenes.filled(), events.DevicesFound(devices=(worker,))]
    async with opened(prepared(engine), told, look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        text = screen_text(app)
        assert text.count("RTX 4090") == text.count("3 x RTX 4090") > 0
        assert "cuda:1" not in text


async def test_what_cannot_be_used_names_the_command_that_mends_it(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.two_devices(), look=PAGE, size=(120, 36)) as (
        app,
        pilot,
    ):
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
    async with opened(prepared(engine), scenes.two_devices(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("b")
        await settle(app, pilot)
        assert [c.device for c in engine.asked if isinstance(c, commands.Measure)] == ["cpu"]
        await engine.play([events.BenchmarkProgress(stage="step", done=0.5, device="cpu")])
        await settle(app, pilot)
        assert "real training steps" in screen_text(app)
        await pilot.press("b")
        await settle(app, pilot)
        assert any(isinstance(c, commands.StopMeasuring) for c in engine.asked)


async def test_one_device_rests_alone(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.two_devices(), look=PAGE) as (app, pilot):
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


async def test_comparison(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.two_devices(), look=PAGE, size=(120, 36)) as (
        app,
        pilot,
    ):
        await settle(app, pilot)
        text = screen_text(app)
        assert "as fast as the median of 7 machines" in text
        assert "A step of this run takes 18 ms here." in text


async def test_only_what_was_measured_of_the_network_is_told(engine: FakeEngine) -> None:
    traffic = events.Traffic(sent_bytes=0, received_bytes=9, down_bytes_per_s=66_600_000.0)
    told = [*scenes.filled(), traffic]
    async with opened(prepared(engine), told, look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        assert "network    ↓ 66.6 MB/s" in screen_text(app)


async def test_a_machine_with_several_tasks_is_one_machine(engine: FakeEngine) -> None:
    prepared(engine).answers[endpoints.WORKERS] = (WORKERS[0], WORKERS[0])
    async with opened(engine, scenes.filled(), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        assert "the median of" not in screen_text(app)


def looks(engine: FakeEngine) -> int:
    return sum(isinstance(asked, commands.LookAtDevices) for asked in engine.asked)


async def test_sensors_are_read_only_while_the_page_is_in_front(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.live(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert looks(engine) == 1
        for _ in range(4):
            await engine.clock.advance(0.5)
            await settle(app, pilot)
        assert looks(engine) == 2  # every second or two
        await pilot.press("1")
        await engine.clock.advance(60)
        await settle(app, pilot)
        assert looks(engine) == 2


async def test_the_power_is_that_of_the_sensor_or_not_measured(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.live(), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        assert "212 W" in screen_text(app)
        assert "71 °C" in screen_text(app)
        await pilot.press("down")
        await settle(app, pilot)
        assert "not measured" in screen_text(app)


async def test_the_share_of_the_time_of_one_device_is_set_by_keys(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.live(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert "80 %" in screen_text(app)  # by duty_percent
        await pilot.press("minus", "minus", "plus")
        await settle(app, pilot)
        saved = [c.changes for c in engine.asked if isinstance(c, commands.SetSettings)]
        assert saved[-1] == {"device_duty": {scenes.GPU.id: 70}}
        await pilot.press(*["minus"] * 9)
        await settle(app, pilot)
        assert "5 %" in screen_text(app)
        saved = [c.changes for c in engine.asked if isinstance(c, commands.SetSettings)]
        assert saved[-1] == {"device_duty": {scenes.GPU.id: 5}}


async def test_a_device_says_which_part_of_a_run_of_games_it_plays(engine: FakeEngine) -> None:
    played = [
        events.Claimed(
            task=number,
            attempt=1,
            run=scenes.RUN.name,
            workload="gomoku",
            device="cpu",
            steps=30,
            samples=30,
            price_micro=1,
            finish_by=scenes.NOW + 999,
            kind="selfplay",
            counted="games",
        )
        for number in (1, 2)
    ]
    ended = [
        events.Trained(
            at=scenes.NOW + 60.0 * number,
            task=number,
            run=scenes.RUN.name,
            steps=30,
            samples=30,
            loss_first=None,
            loss_last=None,
            train_s=60.0,
        )
        for number in (1, 2)
    ]
    told = [*scenes.live(), events.DevicesFound(devices=(scenes.CPU,)), *played, *ended]
    async with opened(prepared(engine), told, look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        text = " ".join(line[60:].strip(" │") for line in screen_text(app).splitlines())
        assert "This device plays games and matches and learns from them." in text
        assert "1,800 of 5,300 games an hour by all machines." in text
        beat = next(beat for beat in app.view.status.beats if beat.run == scenes.RUN.name)
        await engine.play(
            [events.RunProgress(beat=replace(beat, episodes_per_hour=600.0), message="")]
        )
        app.redraw()
        await settle(app, pilot)
        text = " ".join(line[60:].strip(" │") for line in screen_text(app).splitlines())
        assert "1,800 of 1,800 games an hour by all machines." in text


async def test_machines_of_equal_names_are_told_apart_and_this_one_is_marked(
    engine: FakeEngine,
) -> None:
    one = WorkerInfo(
        worker_id="aaaa1", hostname="vm", state="training", device="cpu", last_seen=scenes.NOW,
        task=7, run="stdlib-gpt", rate=12.5, celsius=71.4, day_micro=620_000_000,
    )  # fmt: skip
    other = replace(one, worker_id="bbbb2", state="offline", last_seen=scenes.NOW - 300,
                    day_micro=None)  # fmt: skip
    prepared(engine).answers[endpoints.ME] = replace(scenes.ME, workers=(other, one))
    here = (replace(event, worker_id="aaaa1") if isinstance(event, events.Started) else event
            for event in scenes.filled())  # fmt: skip
    async with opened(engine, here, look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("m")
        await settle(app, pilot)
        rows = [line for line in screen_text(app).splitlines() if "vm " in line]
        assert "vm bbbb " in rows[0]  # the order of the coordinator, whoever was heard of last
        assert "vm aaaa, this one" in rows[1]
        assert "stdlib-gpt" in rows[1]
        assert [word in rows[1] for word in ("12.5 ", "71 °C ", " 620")] == [True] * 3
        assert "°C" not in rows[0]  # heat of five minutes ago
        assert "12.5" not in rows[0]
        assert "now ago" not in screen_text(app)
        await pilot.press("down", "p")
        await settle(app, pilot)
        assert "pause sent" in screen_text(app)


async def test_every_machine_of_the_account_is_listed_and_ordered(engine: FakeEngine) -> None:
    attic = WorkerInfo(
        worker_id="attic", hostname="attic", state="training", device="cpu", last_seen=scenes.NOW
    )
    laptop = replace(attic, worker_id="laptop", hostname="laptop", state="paused")
    machines = (attic, laptop, replace(attic, worker_id="sold", hostname="sold", state="left"))
    prepared(engine).answers[endpoints.ME] = replace(scenes.ME, workers=machines)
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("m")
        await settle(app, pilot)
        text = screen_text(app)
        assert "attic" in text
        assert "laptop" in text
        assert "sold" not in text
        assert "2 machines" in text
        assert "1 training" in text
        await pilot.press("down", "o")
        await settle(app, pilot)
        (given,) = [each for each in engine.asked if isinstance(each, commands.OrderMachine)]
        assert (given.worker_id, given.order) == ("laptop", "resume")
        assert "laptop hears of it" in screen_text(app)
        await pilot.press("escape")
        await settle(app, pilot)
        assert "2 machines" not in screen_text(app)
