"""The first screen: from a link, or none, to a machine that is ready; every mistake gets a sentence
and a way on.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from syrupy.assertion import SnapshotAssertion
from textual.events import Paste
from textual.pilot import Pilot
from textual.widgets import Input
from typing_extensions import override

from shared.errors import (
    Configuration,
    Forbidden,
    InvalidName,
    Unreachable,
    UpgradeRequired,
    VolunteerError,
)
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from tests.tui.pages import LINK, SERVER, SETTINGS, SIZES, Snapshot, prepared, settle, shows
from tests.tui.steps import MET, PAGE, STEPS, at, drawn, onward, tell, walk
from volunteer.control import commands, events
from volunteer.text import nobody_at
from volunteer.tui import keys
from volunteer.tui.app import VolunteerApp
from volunteer.tui.onboarding.benchmark_step import BenchmarkStep
from volunteer.tui.onboarding.screen import Onboarding
from volunteer.tui.screens.help import HelpText

TERMINALS = ("80x24", "120x36", "60x16")


async def test_screen(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    async with opened(prepared(engine), look=PAGE) as (app, pilot):
        for step in STEPS:
            await onward(app, pilot, engine, step)
            await shows(app, pilot, stored, step, TERMINALS)


def test_screen_in_seven_bits(engine: FakeEngine, text_compare: Snapshot) -> None:
    assert drawn(prepared(engine), text_compare, "found", look=replace(PAGE, ascii=True))


@pytest.mark.parametrize("look", ["volunteer-dark", "volunteer-high-contrast", "no colour"])
def test_picture(
    engine: FakeEngine, snap_compare: Snapshot, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    if look == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    theme = PAGE.theme if look == "no colour" else look
    assert drawn(prepared(engine), snap_compare, "found", look=replace(PAGE, theme=theme))


async def test_screen_of_trouble(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    async with opened(prepared(engine), look=PAGE) as (app, pilot):
        await tell(app, pilot, engine, "http://train.example.org")
        await shows(app, pilot, stored, "refused", ["80x24", "60x16"])
        engine.answers[commands.Probe] = replace(SERVER, now=scenes.NOW + 86_400)
        await tell(app, pilot, engine, LINK)
        await shows(app, pilot, stored, "clock", ["80x24", "60x16"])


def test_screen_where_nothing_runs(engine: FakeEngine, text_compare: Snapshot) -> None:
    prepared(engine)
    engine.answers[commands.Probe] = replace(SERVER, runs=())
    quiet = tuple(e for e in MET if not isinstance(e, events.RunsListed))

    async def before(pilot: Pilot[Any]) -> None:
        assert isinstance(pilot.app, VolunteerApp)
        await walk(pilot.app, pilot, engine, "run", quiet)

    assert text_compare(open_app(engine, PAGE), terminal_size=SIZES["80x24"], run_before=before)


async def test_a_link_that_a_mail_wrapped_is_pasted_whole(engine: FakeEngine) -> None:
    async with opened(prepared(engine), look=PAGE) as (app, pilot):
        half = len(LINK) // 2
        app.post_message(Paste(f"\n> {LINK[:half]}\r\n> {LINK[half:]}\n"))
        await settle(app, pilot)
        assert app.screen.query_one("#link", Input).value == LINK


async def test_from_a_link_to_work_in_six_steps(engine: FakeEngine) -> None:
    async with at(engine, "ready") as (app, pilot):
        assert "press  ENTER  to start" in screen_text(app)
        assert not [c for c in engine.asked if isinstance(c, commands.Resume)]
        await pilot.press("enter")
        await settle(app, pilot)
        assert app.current_mode == "dashboard"
    done = [type(c).__name__ for c in engine.asked]
    assert [n for n in done if n in ("Probe", "Join", "ChooseRuns", "Resume")] == [
        "Probe",
        "Join",
        "ChooseRuns",
        "Resume",
    ]
    (joined,) = (c for c in engine.asked if isinstance(c, commands.Join))
    assert (joined.link, joined.name) == (LINK, "ada")


async def test_the_keys_of_before_lead_on_as_well(engine: FakeEngine) -> None:
    async with at(engine, "limits") as (app, pilot):
        assert "What may volunteer use?" in screen_text(app)
        await pilot.press("n")
        await settle(app, pilot)
        assert "What may volunteer use?" not in screen_text(app)
        for step in ("measuring", "measured", "run", "ready"):
            await onward(app, pilot, engine, step)
        assert "Everything is ready." in screen_text(app)
        await pilot.press("space")
        await settle(app, pilot)
        assert "Everything is ready." not in screen_text(app)


async def test_who_answers_is_shown_before_anything_is_sent(engine: FakeEngine) -> None:
    async with at(engine, "found") as (app, _):
        text = screen_text(app)
        assert "✓ Little Lab" in text
        assert "tm5x-k45y-fjjq-fpqj-runy-bxd5, as your link says" in text
        assert "stdlib-gpt" in text
    assert not [c for c in engine.asked if isinstance(c, commands.Join)]


async def test_an_address_without_a_key_asks_to_compare_it(engine: FakeEngine) -> None:
    async with at(engine, "join") as (app, pilot):
        await tell(app, pilot, engine, "https://train.example.org:8765")
        assert "compare it with your organiser" in screen_text(app)


async def test_nobody_is_asked_before_the_typing_rests(engine: FakeEngine) -> None:
    async with at(engine, "join") as (app, pilot):
        field = app.screen.query_one("#link", Input)
        for end in range(9, len(LINK)):
            field.value = LINK[:end]
            await pilot.pause()
        await engine.clock.advance(1)
        await settle(app, pilot)
    assert len([c for c in engine.asked if isinstance(c, commands.Probe)]) == 1


LINKS: list[tuple[str, VolunteerError | None, str]] = [
    ("not a link", None, "is not a link: a join link begins"),
    ("http://train.example.org", None, "would be reached without encryption"),
    ("https://h/join#pin=12", None, "the certificate pin of the join link is damaged"),
    (
        "127.0.0.1:8765",
        Unreachable(nobody_at("http://127.0.0.1:8765")),
        "ask your organiser for a link with an address that reaches their machine",
    ),
    (LINK, Unreachable("https://h did not answer in time"), "Enter tries again."),
    (
        LINK,
        Configuration("h presents another certificate than your join link names"),
        "another certificate",
    ),
    (
        LINK,
        UpgradeRequired("the coordinator needs more: `volunteer update`"),
        "volunteer update",
    ),
]


async def test_a_link_that_does_not_work_says_why(engine: FakeEngine) -> None:
    async with at(engine, "join") as (app, pilot):
        for link, refused, says in LINKS:
            engine.refuses = refused
            await tell(app, pilot, engine, link)
            text = " ".join(screen_text(app).replace("│", " ").split())
            assert says in text
            await pilot.press("enter")
            await settle(app, pilot)
            assert "Which coordinator" in screen_text(app)
            engine.refuses = None
            await tell(app, pilot, engine, f"{LINK}+code=x")
            assert "✓ Little Lab" in screen_text(app)


async def test_a_link_typed_before_there_is_a_volunteer_is_checked_then(
    engine: FakeEngine,
) -> None:
    app = VolunteerApp(None, look=PAGE, clock=prepared(engine).clock, tick_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await tell(app, pilot, engine, LINK)
        assert not engine.asked
        app.attach(engine.control)
        await settle(app, pilot)
        await engine.clock.advance(1)
        await settle(app, pilot)
        assert "✓ Little Lab" in screen_text(app)


async def test_a_clock_that_is_wrong_by_a_day_is_told_before_joining(engine: FakeEngine) -> None:
    async with at(engine, "join") as (app, pilot):
        engine.answers[commands.Probe] = replace(SERVER, now=scenes.NOW + 86_400)
        await tell(app, pilot, engine, LINK)
        text = " ".join(screen_text(app).split())
        assert "the clock of this machine is 1 day behind the coordinator's: set it right" in text


async def test_without_a_link_a_command_that_needs_none_is_named(engine: FakeEngine) -> None:
    async with opened(prepared(engine), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("enter")
        await settle(app, pilot)
        assert "`coordinator demo` shows a whole run" in screen_text(app)


async def test_a_name_that_is_taken_leads_back_with_a_free_one(engine: FakeEngine) -> None:
    async with at(engine, "limits") as (app, pilot):
        engine.refuses = InvalidName('"ada" is taken: "ada2" is free')
        await pilot.press("n")
        await settle(app, pilot)
        assert '"ada2" is free' in screen_text(app)
        assert "What shall we call you?" in screen_text(app)
        engine.refuses = None
        await pilot.press(*"ada2", "enter")
        await settle(app, pilot)
        await pilot.press("n")
        await settle(app, pilot)
        assert "welcome, ada" in screen_text(app)


async def test_an_expired_invitation_leads_back_to_the_link(engine: FakeEngine) -> None:
    async with at(engine, "limits") as (app, pilot):
        engine.refuses = Forbidden("this invitation has expired: ask for a new one")
        await pilot.press("n")
        await settle(app, pilot)
        assert "this invitation has expired" in screen_text(app)
        assert "Which coordinator" in screen_text(app)


async def test_a_wrong_name_is_told_at_once(engine: FakeEngine) -> None:
    async with at(engine, "name") as (app, pilot):
        await pilot.press("a", "enter")
        await settle(app, pilot)
        assert "At least 2 letters" in screen_text(app)
        await pilot.press("d", "a", "!", "enter")
        await settle(app, pilot)
        assert "A nickname cannot hold !" in screen_text(app)
        assert "What shall we call you?" in screen_text(app)


async def test_the_name_can_be_kept_from_others(engine: FakeEngine) -> None:
    async with at(engine, "name") as (app, pilot):
        hidden = tuple(replace(r, value=False) if r.name == "public" else r for r in SETTINGS)
        engine.answers[commands.SetSettings] = hidden
        await pilot.press("ctrl+o")
        await settle(app, pilot)
        assert "hidden from others" in screen_text(app)
    (changed,) = (c for c in engine.asked if isinstance(c, commands.SetSettings))
    assert changed.changes == {"public": False}


async def test_limits_are_changed_where_they_stand(engine: FakeEngine) -> None:
    async with at(engine, "limits") as (app, pilot):
        await pilot.press("down", "down", "down", "space")
        await settle(app, pilot)
        await pilot.press("down", "down", "space", *"sat-sun")
        await settle(app, pilot)
        assert "│ sat-sun " in screen_text(app)  # what is typed can be seen
        await pilot.press("enter")
        await settle(app, pilot)
        assert "What may volunteer use?" in screen_text(app)
    changed = [c.changes for c in engine.asked if isinstance(c, commands.SetSettings)]
    assert changed == [{"in_use": "gentle"}, {"schedule": ("sat-sun",)}]


async def test_a_click_changes_a_limit_and_leads_nowhere(engine: FakeEngine) -> None:
    async with at(engine, "limits") as (app, pilot):
        lines = screen_text(app).splitlines()
        row = next(n for n, line in enumerate(lines) if "while you use the computer" in line)
        await pilot.click(offset=(20, row))
        await pilot.click(offset=(20, row))
        await settle(app, pilot)
        assert "What may volunteer use?" in screen_text(app)
    changed = [c.changes for c in engine.asked if isinstance(c, commands.SetSettings)]
    assert changed[0] == {"in_use": "gentle"}


async def test_the_benchmark_is_waited_for_or_skipped(engine: FakeEngine) -> None:
    async with at(engine, "measuring") as (app, pilot):
        await pilot.press("enter")
        await settle(app, pilot)
        assert "What can this machine do?" in screen_text(app)
        await pilot.press("s")
        await settle(app, pilot)
        assert isinstance(engine.asked[-1], commands.StopMeasuring)
        await engine.play([events.BenchmarkProgress(stage="cancelled", done=1.0)])
        await settle(app, pilot)
        await pilot.press("enter")
        await settle(app, pilot)
        assert "Which run do you want to help?" in screen_text(app)


async def test_one_run_or_any_is_chosen(engine: FakeEngine) -> None:
    async with at(engine, "run") as (app, pilot):
        await pilot.press("down", "enter")
        await settle(app, pilot)
        assert "Everything is ready." in screen_text(app)
    (chosen,) = (c for c in engine.asked if isinstance(c, commands.ChooseRuns))
    assert chosen.runs == ("stdlib-gpt",)


async def test_escape_goes_back_as_far_as_an_account_allows(engine: FakeEngine) -> None:
    async with at(engine, "limits") as (app, pilot):
        await pilot.press("escape", "escape")
        await settle(app, pilot)
        assert "Which coordinator" in screen_text(app)
    async with at(engine, "ready") as (app, pilot):
        for _ in range(6):
            await pilot.press("escape")
            await settle(app, pilot)
        assert "What may volunteer use?" in screen_text(app)


class Unanswered(FakeEngine):
    """A volunteer whose coordinator leaves the first request to join without an answer."""

    @override
    async def _execute(self, command: commands.Command[Any]) -> Any:
        joins = sum(isinstance(earlier, commands.Join) for earlier in self.asked)
        answer = await super()._execute(command)
        if isinstance(command, commands.Join) and not joins:
            await asyncio.Event().wait()
        return answer


async def test_who_goes_back_while_the_account_is_made_joins_with_the_new_name() -> None:
    engine = Unanswered()
    async with at(engine, "limits") as (app, pilot):
        await pilot.press("n")
        await settle(app, pilot)
        assert "making your account" in screen_text(app)
        await pilot.press("escape", "escape")
        await settle(app, pilot)
        assert "What shall we call you?" in screen_text(app)
        await pilot.press(*"bell", "enter")
        await settle(app, pilot)
        await pilot.press("n")
        await settle(app, pilot)
        assert "welcome, ada" in screen_text(app)
    assert [c.name for c in engine.asked if isinstance(c, commands.Join)] == ["ada", "bell"]


async def test_who_quits_while_the_account_is_made_sees_no_fault() -> None:
    async with at(Unanswered(), "limits") as (app, pilot):
        await pilot.press("n")
        await settle(app, pilot)
        assert "making your account" in screen_text(app)
    assert not app.is_running  # and no worker has failed


async def test_who_joined_on_the_command_line_begins_with_the_limits(engine: FakeEngine) -> None:
    prepared(engine)
    engine.hub.status = replace(engine.hub.status, joined=True)
    async with opened(engine, MET, look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert "What may volunteer use?" in screen_text(app)
        assert commands.Begin() not in engine.asked  # nothing is measured before the answer
        await pilot.press("enter")
        await settle(app, pilot)
        assert "welcome, ada" in screen_text(app)
    assert commands.Begin() in engine.asked
    assert not [c for c in engine.asked if isinstance(c, commands.Join)]


async def test_measuring_shows_what_is_done_and_what_comes(engine: FakeEngine) -> None:
    async with at(engine, "measuring") as (app, _):
        rows = [line.strip(" │") for line in screen_text(app).splitlines()]
        stages = [row for row in rows if "matrix" in row or row.endswith("steps")]
        assert stages == [
            "✓ matrix products in float32",
            "✓ matrix products in bfloat16",
            "● real training steps",
        ]
        assert "enter: next" not in screen_text(app)


TERMS: list[tuple[dict[str, Any], str, str]] = [
    ({"invite_only": True}, LINK, "by invitation only; ask for a link with a code"),
    ({"invite_only": True}, f"{LINK}+code=7K3M-Q2XP", "your link carries the code"),
    ({"open": True, "proof_of_work_bits": 22}, LINK, "about 2 s of computing first"),
    ({"open": True}, LINK, "open to everybody"),
]


async def test_the_first_step_says_on_which_terms_newcomers_come(engine: FakeEngine) -> None:
    async with at(engine, "join") as (app, pilot):
        for told, link, said in TERMS:
            engine.answers[commands.Probe] = replace(SERVER, **told)
            await tell(app, pilot, engine, "")
            await tell(app, pilot, engine, link)
            assert said in " ".join(screen_text(app).split())


async def test_the_proof_of_work_shows_how_far_it_is(engine: FakeEngine) -> None:
    async with at(engine, "measuring") as (app, pilot):
        step = app.query_one(BenchmarkStep)
        step.choice.joined = False
        await engine.play([events.Registering(done=0.4)])
        await settle(app, pilot)
        assert "making your account: proof of work 40 %" in screen_text(app)
        await engine.play([events.Registering(done=1.0)])
        await settle(app, pilot)
        assert "40 %" not in screen_text(app)


OWN = {"back", "skip", "hide", "start"}
TOLD = {
    "join": set(),
    "name": {"back", "hide"},
    "limits": {"back", "start"},
    "measuring": {"back", "skip"},
    "ready": {"back", "start"},
}


async def test_every_page_names_its_keys_and_that_enter_leads_on(engine: FakeEngine) -> None:
    async with opened(prepared(engine), look=PAGE) as (app, pilot):
        for step in STEPS:
            await onward(app, pilot, engine, step)
            if step != "measuring":
                assert screen_text(app).splitlines()[-1].startswith(" enter "), step
            if step in TOLD:
                await pilot.press("f1")
                await pilot.pause()
                lines = app.screen.query_one(HelpText).lines(app.scene(), 400, 0)
                text = "\n".join("".join(span for span, _ in line) for line in lines)
                named = {c.action for c in Onboarding.ACTIONS if c.help in text}
                assert named & OWN == TOLD[step]
                away = [c for c in keys.COMMANDS if c.action in ("pause", "finish")]
                assert not [c.action for c in away if c.help in text]
                assert keys.PAGES[0].help not in text
                await pilot.press("escape")
                await settle(app, pilot)


async def test_no_key_leads_away_from_the_first_start(engine: FakeEngine) -> None:
    async with at(engine, "limits") as (app, pilot):
        await pilot.press("1", "7", "f", "x")
        await settle(app, pilot)
        assert isinstance(app.screen, Onboarding)
        assert not [each for each in engine.asked if isinstance(each, commands.Finish)]
