"""Runs: needs and pay of each, joining, leaving, passing the link on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from syrupy.assertion import SnapshotAssertion

from shared.network.links import parse_link
from shared.protocol import endpoints
from shared.protocol.accounts import RunInfo
from shared.protocol.listings import LossPoint
from shared.protocol.members import MembersData
from shared.protocol.versions import SuiteCourse, SuiteScore
from shared.workloads.base import TrainSettings
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, queries, screen_text
from tests.tui.pages import (
    LINK,
    RUNS,
    SETTINGS,
    SIZES,
    Snapshot,
    picture,
    prepared,
    settle,
    shows,
)
from volunteer.control import commands, events
from volunteer.control.status import Status
from volunteer.i18n.formats import duration_words
from volunteer.tui.appearance import Look
from volunteer.tui.run_estimate import estimate
from volunteer.tui.screens.runs import RunsPage

PAGE = Look(page="runs")
CPU_ONLY = (scenes.CPU,)


def test_picture(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "runs", size=SIZES["120x36"])


async def test_screen_of_the_link_to_share(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("s")
        await shows(app, pilot, stored, "link", ["80x24", "120x36", "60x16"])


async def test_a_link_stands_alone_on_its_rows(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("s")
        await settle(app, pilot)
        rows = screen_text(app).splitlines()
        at = next(y for y, row in enumerate(rows) if row.startswith("https://"))
        link = engine.answers[commands.GetInvitation]
        selected = "\n".join(rows[at : at + 1 + len(link) // app.size.width])
        assert parse_link(selected) == parse_link(link)


async def test_a_link_that_works_here_only_says_so(engine: FakeEngine) -> None:
    prepared(engine)
    engine.answers[commands.GetInvitation] = "http://127.0.0.1:8765/join#key=AB-CD"
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("s")
        await settle(app, pilot)
        assert "works on this machine only" in " ".join(screen_text(app).split())


async def test_a_run_is_chosen_and_left_again(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert "helping: any run" in screen_text(app)
        await pilot.press("enter")
        await settle(app, pilot)
        chosen = [c.runs for c in engine.asked if isinstance(c, commands.ChooseRuns)]
        assert chosen == [("stdlib-gpt",)]
        engine.answers[commands.GetSettings] = tuple(
            replace(row, value=("stdlib-gpt",)) if row.name == "runs" else row for row in SETTINGS
        )
        await pilot.press("r")
        await settle(app, pilot)
        assert "helping: stdlib-gpt" in screen_text(app)
        await pilot.press("enter")
        await settle(app, pilot)
        chosen = [c.runs for c in engine.asked if isinstance(c, commands.ChooseRuns)]
        assert chosen[-1] == ()


async def test_what_enter_does_is_told_beside_the_run(engine: FakeEngine) -> None:
    prepared(engine)

    def chosen(*names: str) -> None:
        engine.answers[commands.GetSettings] = tuple(
            replace(row, value=names) if row.name == "runs" else row for row in SETTINGS
        )

    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert "as any run (enter: only this one)" in screen_text(app)
        chosen("stdlib-gpt")
        await pilot.press("r")
        await settle(app, pilot)
        assert "yes (enter: stop helping)" in screen_text(app)
        chosen("another")
        await pilot.press("r")
        await settle(app, pilot)
        assert "no (enter: help)" in screen_text(app)


async def test_own_data_are_counted_once_they_are_there(engine: FakeEngine) -> None:
    members = MembersData(
        dataset="example",
        kind="tokens",
        heldout_share=0.1,
        train=TrainSettings(),
        batch_size=16,
        quorum=3,
    )
    prepared(engine)
    runs = engine.answers[endpoints.RUNS] = (replace(scenes.RUN, members=members),)
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await engine.play([events.RunsListed(runs=runs)])
        await settle(app, pilot)
        assert "`volunteer data add stdlib-gpt" in " ".join(screen_text(app).split())
        await engine.play([events.OwnDataCounted(samples={"stdlib-gpt": 1234})])
        await settle(app, pilot)
        assert "your own files: 1,234 pieces" in screen_text(app)
        assert "data add" not in screen_text(app)


async def test_what_does_not_fit_is_refused_with_the_reason(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("end", "enter")
        await settle(app, pilot)
        assert not [c for c in engine.asked if isinstance(c, commands.ChooseRuns)]
        assert "needs 150 GB of memory" in screen_text(app)


async def test_what_is_measured_of_a_run_is_named_where_runs_stand_side_by_side(
    engine: FakeEngine,
) -> None:
    prepared(engine)
    drawing = replace(RUNS[1], name="digits", measure="distance", loss=337.19, loss_first=402.5)
    engine.answers[endpoints.RUNS] = (RUNS[0], drawing)
    async with opened(engine, scenes.filled(), size=(120, 36), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        text = screen_text(app)
        assert "loss 3.412" in text
        assert "Fréchet 337.2" in text
        assert "8.318 → 3.412" in text
        await pilot.press("down")
        await settle(app, pilot)
        assert "402.5 → 337.2 (Fréchet distance)" in screen_text(app)


async def test_the_curve_of_the_run_under_the_cursor_is_asked_for(engine: FakeEngine) -> None:
    prepared(engine)
    engine.answers[endpoints.LOSS] = tuple(
        LossPoint(version=n, loss=3.0 - n / 100, at=scenes.NOW) for n in range(120)
    )
    async with opened(engine, scenes.filled(), size=(120, 36), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert "Loss of stdlib-gpt" in screen_text(app)
        await pilot.press("down")
        await settle(app, pilot)
        text = screen_text(app)
        assert "Loss of five-in-a-row" in text
        assert "119" in text  # the newest version, at the end of its axis
    asked = [args.get("run") for args in queries(engine, endpoints.LOSS)]
    assert asked == ["stdlib-gpt", "five-in-a-row"]


async def test_where_there_is_no_room_for_the_curve_nobody_asks_for_it(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
    assert not queries(engine, endpoints.LOSS)


async def test_an_answer_from_before_the_page_was_left_is_drawn_with_its_age(
    engine: FakeEngine,
) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        page = app.screen
        assert isinstance(page, RunsPage)
        await pilot.press("1")
        await engine.clock.advance(27)
        assert not page.reply("runs").old(app.scene())
        await engine.clock.advance(13)
        assert page.reply("runs").note(app.scene()) == "as of 40 s ago"


async def test_no_new_tasks_and_the_licence(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("y", "n")
        await settle(app, pilot)
        assert "● finishing" in screen_text(app)
    assert [c.run for c in engine.asked if isinstance(c, commands.Consent)] == ["stdlib-gpt"]


async def test_the_link_is_shown_and_closed(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("s")
        await pilot.pause()
        assert LINK in "".join(screen_text(app).split())
        await pilot.press("escape")
        await pilot.pause()
        assert LINK not in "".join(screen_text(app).split())


def test_a_prospect_in_words() -> None:
    here = Status(devices=CPU_ONLY, benchmarks=(scenes.BENCHMARK,))
    good = estimate(RUNS[0], here, ("gpt",))
    assert good.fits
    assert good.sentence == "fits cpu, 18 ms per step"
    assert good.credits_per_hour == pytest.approx(3600 / good.step_s) if good.step_s else False
    slow = replace(RUNS[0], step_flops=118e9 * 300)
    assert "tasks will be short" in estimate(slow, here, ("gpt",)).sentence
    assert "not measured yet" in estimate(RUNS[0], replace(here, benchmarks=()), ("gpt",)).sentence
    assert "needs 150 GB" in estimate(RUNS[3], here, ("gpt",)).sentence
    assert "not installed" in estimate(RUNS[1], here, ("gpt",)).sentence
    prepared = replace(RUNS[2], state="draft")
    assert estimate(prepared, here, ("gpt",)).sentence == "the run is being prepared"
    assert "paused" in estimate(RUNS[2], here, ("gpt",)).sentence
    broken = replace(scenes.CPU, usable=False)
    assert not estimate(RUNS[0], replace(here, devices=(broken,)), ("gpt",)).fits


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0021, "2.1 ms"), (0.35, "0.35 s"), (12.4, "12 s"), (200, "3.3 min")],
)
def test_short_times(seconds: float, words: str) -> None:
    assert duration_words(seconds) == words


async def test_scores_before_and_after_stand_beside_the_loss(engine: FakeEngine) -> None:
    prepared(engine)
    before, after = (
        SuiteScore(version=v, share=s, error=0.03, examples=200)
        for v, s in ((0, 0.24), (41, 0.515))
    )
    sums = SuiteCourse(name="sums", chance=0.25, total=200, first=before, newest=after)
    words = SuiteCourse(name="words", chance=0.0, total=50)
    measured = replace(RUNS[0], bits_first=2.5, bits=1.25, suites=(sums, words))
    engine.answers[endpoints.RUNS] = (measured,)
    async with opened(engine, scenes.filled(), size=(120, 40), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        shown = " ".join(screen_text(app).split())
        assert "24.0 % ± 3.0" in shown
        assert "51.5 % ± 3.0" in shown
        assert "words suite of tasks, not measured yet" in shown
        assert "bits 2.500 → 1.250 a byte" in shown


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (scenes.RUN, "volunteer chat stdlib-gpt"),
        (replace(scenes.RUN, dataset="", items="answers"), "volunteer chat stdlib-gpt"),
        (replace(scenes.RUN, output="moves"), "volunteer play stdlib-gpt"),
        (replace(scenes.RUN, output="image"), "draws"),
        (replace(scenes.RUN, output="none"), "answers nobody"),
    ],
)
async def test_the_model_of_a_run_is_met_by_a_command(
    engine: FakeEngine, run: RunInfo, said: str
) -> None:
    prepared(engine).answers[endpoints.RUNS] = (run,)
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await app.workers.wait_for_complete()
        await settle(app, pilot)
        assert said in screen_text(app)
