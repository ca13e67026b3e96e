"""Alerts: what is worth one, by which way it goes, and that no way is a way in."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable
from pathlib import Path

from shared.protocol.contributions import Verdict
from tests.support.virtual_clock import VirtualClock
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from volunteer.control import commands, events
from volunteer.control.event_bus import EventBus
from volunteer.control.events import AnyEvent
from volunteer.control.owner_alerts import (
    AWAY_TOLD_S,
    CHARS_MAX,
    QUIET_S,
    AlertRules,
    OwnerAlert,
    alerting,
)
from volunteer.engine import Engine
from volunteer.engine import World as Lone
from volunteer.files import write_whole
from volunteer.headless import Headless
from volunteer.settings.settings import directories
from volunteer.tui.look import Look

NOW = 1_700_000_000.0


def heard(told: Iterable[AnyEvent], watch: AlertRules | None = None) -> list[OwnerAlert]:
    watch = watch or AlertRules()
    return [alert for event in told if (alert := watch.hear(event)) is not None]


def verdict(state: str, message: str = "", at: float = NOW) -> events.Judged:
    return events.Judged(
        at=at,
        verdict=Verdict(
            contribution=1,
            task=1,
            run="r",
            state=state,  # type: ignore[arg-type]
            message=message,
        ),
    )


def ended(code: int, message: str = "you were banned") -> events.Stopped:
    return events.Stopped(
        at=NOW,
        code=code,
        message=message,
        tasks=0,
        credits_micro=0,
        sent_bytes=0,
        received_bytes=0,
        seconds=1.0,
    )


# ------------------------------------------------------------------------------ what is worth one


def test_an_ordinary_day_gives_none() -> None:
    day = [*scenes.filled(), *scenes.paused(), *scenes.offline(), *scenes.empty(), ended(0)]
    assert heard(day) == []


def test_an_end_that_was_not_asked_for_is_told() -> None:
    (alert,) = heard([ended(78)])
    assert (alert.kind, alert.message) == ("ended", "the volunteer has ended: you were banned")


def test_failures_in_a_row_are_told_once_an_hour() -> None:
    notice = [
        events.Notice(at=NOW + s, level="error", message=f"3 tasks failed, {s}")
        for s in (0.0, 60.0, QUIET_S - 1, QUIET_S, QUIET_S + 5)
    ]
    assert [a.message for a in heard(notice)] == [
        "3 tasks failed, 0.0",
        f"3 tasks failed, {QUIET_S}",
    ]
    assert heard([events.Notice(at=NOW, level="warning", message="hot")]) == []


def test_three_rejections_in_a_row_are_told_with_the_reason_of_the_last() -> None:
    bad, good = verdict("rejected", "too large"), verdict("accepted")
    assert heard([bad, bad, good, bad, bad, verdict("checking")]) == []
    (alert,) = heard([bad, bad, verdict("checking"), bad])
    assert alert.message == "3 results in a row were rejected: too large"


def test_half_an_hour_without_an_answer_is_told() -> None:
    def away(after_s: float, online: bool = False) -> events.Connection:
        return events.Connection(at=NOW + after_s, online=online, message="connection refused")

    assert (
        heard([away(0), away(AWAY_TOLD_S - 1), away(AWAY_TOLD_S, True), away(AWAY_TOLD_S + 1)])
        == []
    )
    (alert,) = heard([away(0), away(60), away(AWAY_TOLD_S + 65)])
    assert alert.message == "the coordinator has not answered for 31:05 min: connection refused"


# ------------------------------------------------------------------------------------- how it goes


async def told(*day: AnyEvent, bell: bool) -> list[AnyEvent]:
    """Everything that was told while these events happened, the alerts included."""
    hub = EventBus(VirtualClock())
    with hub.subscribe() as new:
        async with alerting(hub, lambda: bell):
            for event in day:
                hub.emit(event)
        new.close()
        return [event async for event in new]


async def test_without_the_setting_nothing_is_told() -> None:
    assert await told(ended(1), bell=False) == [ended(1)]


async def test_an_alert_is_printable_and_short() -> None:
    _, alerted = await told(ended(78, "banned\x1b[2J " + "x" * 900), bell=True)
    assert isinstance(alerted, events.Alerted)
    assert alerted.message.startswith("the volunteer has ended: banned [2J xxx")
    assert len(alerted.message) == CHARS_MAX


async def test_without_a_screen_the_bell_rings_and_never_on_the_data() -> None:
    engine, out, rung = FakeEngine(), io.StringIO(), []
    front = Headless(engine.control, out, json=True, bell=lambda: rung.append("ding"))
    front.show(events.Alerted(at=NOW, message="3 tasks failed"))
    assert rung == ["ding"]
    assert "\a" not in out.getvalue()
    assert [json.loads(line)["type"] for line in out.getvalue().splitlines()] == ["Alerted"]


async def test_on_the_screen_the_bell_rings_and_the_log_keeps_the_alert() -> None:
    engine = FakeEngine()
    async with opened(engine, scenes.filled(), look=Look(page="log")) as (app, pilot):
        rung: list[bool] = []
        app.bell = lambda: rung.append(True)  # type: ignore[method-assign]
        app.attach(engine.control)
        await pilot.pause()
        await engine.play([events.Alerted(at=scenes.NOW, message="3 tasks in a row")])
        app.redraw()
        assert rung == [True]
        assert "alert: 3 tasks in a row" in screen_text(app)


# --------------------------------------------------------------------------- in a whole volunteer


async def test_the_bell_is_tried_when_it_is_set(tmp_path: Path) -> None:
    engine = Engine(directories({"VOLUNTEER_HOME": str(tmp_path)}), world=Lone(listen=False))
    with engine.control.subscribe() as new:
        running = asyncio.ensure_future(engine.run())
        await asyncio.sleep(0)
        await engine.control.do(commands.SetSettings(changes={"language": "en"}))
        await engine.control.do(commands.SetSettings(changes={"bell": True}))
        await engine.control.do(commands.Stop())
        assert await running == 0
        said = [event.message async for event in new if isinstance(event, events.Alerted)]
    assert said == ["alerts of this machine ring here"]


async def test_a_volunteer_that_cannot_begin_tells_its_owner(tmp_path: Path) -> None:
    places = directories({"VOLUNTEER_HOME": str(tmp_path)})
    (places.profile / "current").write_text("abc")
    (places.profile / "abc").mkdir()
    write_whole(places.profile / "abc" / "identity.json", b"{}")
    engine = Engine(places, {"bell": True}, world=Lone(listen=False))
    with engine.control.subscribe() as new:
        assert await engine.run() == 78
        (said,) = [event.message async for event in new if isinstance(event, events.Alerted)]
    assert said.startswith("the volunteer has ended")
    assert "identity.json is damaged" in said
