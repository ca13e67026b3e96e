"""Alerts: what is worth one, by which way it goes, and that no way is a way in."""

from __future__ import annotations

import asyncio
import io
import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from shared.protocol.contributions import Verdict
from shared.sentences import Sentence
from tests.support.virtual_clock import VirtualClock
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.control.events import AnyEvent
from volunteer.control.owner_alerts import (
    AWAY_TOLD_S,
    CHARS_MAX,
    QUIET_S,
    AlertRules,
    OwnerAlert,
    OwnerAlerts,
    notification,
    run_quietly,
)
from volunteer.engine import Engine
from volunteer.engine import World as Lone
from volunteer.files import write_whole
from volunteer.headless import Headless
from volunteer.i18n.catalogue import LanguageChoice, choose, shown, use
from volunteer.settings.display import Display
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


# ---------------------------------------------------------------------------------- by which way


class World:
    """A hub, alerts that listen to it, and what left the program."""

    def __init__(self, trouble: str = "", **looks: object) -> None:
        self.hub = EventBus(VirtualClock())
        self.run: list[Sequence[str]] = []
        self.trouble = trouble
        settings = msgspec.convert(looks, Display)
        self.alerts = OwnerAlerts(self.hub, lambda: settings, self._run, system="linux")

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        self.run.append(command)
        return self.trouble

    async def hear(self, *told: AnyEvent) -> list[AnyEvent]:
        """Everything that was told while these events happened, the alerts' own included."""
        with self.hub.subscribe() as new:
            async with self.alerts.listening():
                for event in told:
                    self.hub.emit(event)
            new.close()
            return [event async for event in new]


async def test_without_the_setting_nothing_leaves() -> None:
    world = World()
    assert await world.hear(ended(1)) == [ended(1)]
    assert world.run == []


async def test_every_way_that_was_chosen_is_taken() -> None:
    world = World(alerts=["bell", "desktop"])
    told = await world.hear(ended(78, "banned\x1b[2J " + "x" * 900))
    (alerted,) = [event for event in told if isinstance(event, events.Alerted)]
    assert alerted.bell
    assert alerted.message.startswith("the volunteer has ended: banned [2J xxx")
    assert len(alerted.message) == CHARS_MAX
    ((program, *_, message),) = world.run
    assert (program, message) == ("notify-send", alerted.message)


async def test_only_what_leaves_the_program_is_in_the_language_of_the_owner() -> None:
    world = World(alerts=["desktop"])
    use(choose("de"))
    try:
        told = await world.hear(ended(78, Sentence("the answer broke off before its end")))
        (alerted,) = [event for event in told if isinstance(event, events.Alerted)]
        assert alerted.message == "the volunteer has ended: the answer broke off before its end"
        assert world.run[0][-1] == shown(alerted.message) != alerted.message
    finally:
        use(LanguageChoice())


async def test_a_way_that_fails_is_told_once() -> None:
    world = World("no display", alerts=["desktop"])
    told = await world.hear(ended(1), events.Notice(level="error", message="3 tasks failed"))
    said = [e.message for e in told if isinstance(e, events.Notice) and e.level == "warning"]
    assert said == ["the desktop notification failed: no display"]


async def test_without_a_screen_the_bell_rings_where_it_was_chosen_and_never_on_the_data() -> None:
    engine, out, rung = FakeEngine(), io.StringIO(), []
    front = Headless(engine.control, out, json=True, bell=lambda: rung.append("ding"))
    front.show(events.Alerted(at=NOW, message="3 tasks failed"))
    assert rung == []
    front.show(events.Alerted(at=NOW, message="3 tasks failed", bell=True))
    assert rung == ["ding"]
    assert "\a" not in out.getvalue()
    assert [json.loads(line)["type"] for line in out.getvalue().splitlines()] == ["Alerted"] * 2


async def test_on_the_screen_the_bell_rings_and_the_log_keeps_the_alert() -> None:
    engine = FakeEngine()
    async with opened(engine, scenes.filled(), look=Look(page="log")) as (app, pilot):
        rung: list[bool] = []
        app.bell = lambda: rung.append(True)  # type: ignore[method-assign]
        app.attach(engine.control)
        await pilot.pause()
        await engine.play([events.Alerted(at=scenes.NOW, message="3 tasks in a row", bell=True)])
        app.redraw()
        assert rung == [True]
        assert "alert: 3 tasks in a row" in screen_text(app)


# --------------------------------------------------------------------------- in a whole volunteer


async def test_a_new_way_is_tried_when_it_is_set(tmp_path: Path) -> None:
    shown_: list[str] = []

    def notify(command: Sequence[str], environment: Mapping[str, str]) -> str:
        shown_.append(command[-1])
        return ""

    places = directories({"VOLUNTEER_HOME": str(tmp_path)})
    engine = Engine(places, world=Lone(notify=notify, listen=False))
    running = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0)
    await engine.control.set_settings({"language": "en"})
    assert shown_ == []
    await engine.control.set_settings({"alerts": ["desktop"]})
    await engine.control.stop()
    assert await running == 0
    assert shown_ == ["alerts of this machine come here"]


async def test_a_volunteer_that_cannot_begin_tells_its_owner(tmp_path: Path) -> None:
    shown_: list[str] = []

    def notify(command: Sequence[str], environment: Mapping[str, str]) -> str:
        shown_.append(command[-1])
        return ""

    places = directories({"VOLUNTEER_HOME": str(tmp_path)})
    (places.profile / "current").write_text("abc")
    (places.profile / "abc").mkdir()
    write_whole(places.profile / "abc" / "identity.json", b"{}")
    engine = Engine(places, {"alerts": ["desktop"]}, world=Lone(notify=notify, listen=False))
    assert await engine.run() == 78
    (told,) = shown_
    assert told.startswith("the volunteer has ended")
    assert "identity.json is damaged" in told


# ------------------------------------------------------------------------- programs and addresses


def test_a_message_is_an_argument_and_never_a_script(tmp_path: Path) -> None:
    nasty = '"; rm -rf ~; $(x) <b>& --help'
    for system in ("linux", "darwin"):
        command, environment = notification(system, nasty)
        assert not environment
        assert [part for part in command[:-1] if "rm -rf" in part] == []
    command, environment = notification("win32", nasty)
    assert "rm -rf" not in " ".join(command)
    assert environment["VOLUNTEER_ALERT"] == nasty
    assert notification("linux", nasty)[0][-1] == '"; rm -rf ~; $(x) &lt;b>&amp; --help'


def test_a_program_that_is_missing_or_fails_is_told(tmp_path: Path) -> None:
    assert run_quietly(("no-such-program",), {}) == "the program no-such-program is not installed"
    program = tmp_path / "notify"
    program.write_text('#!/bin/sh\n[ "$MOOD" = good ] && exit 0\necho no display >&2\nexit 3\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert run_quietly((str(program),), {"MOOD": "good"}) == ""
    assert run_quietly((str(program),), {}) == f"{program} failed: no display"


async def test_what_is_under_way_at_the_end_is_waited_for() -> None:
    world = World(alerts=["desktop"])
    done: list[str] = []

    def slow(command: Sequence[str], environment: Mapping[str, str]) -> str:
        done.append(command[-1])
        return ""

    world.alerts._run = slow
    await world.hear(ended(1))
    assert len(done) == 1
