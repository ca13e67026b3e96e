"""Cards of the first page: contents, and layout in small terminals."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import LEADERS
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status, fold
from volunteer.tui.agent_view import AgentView
from volunteer.tui.screens.dashboard import NARROW, SHORT, arrange
from volunteer.tui.screens.ranking import leader_rows
from volunteer.tui.text import ASCII, shown_name
from volunteer.tui.widgets.brief_state import brief
from volunteer.tui.widgets.cards import CreditsCard, credit_lines, run_lines
from volunteer.tui.widgets.panel import Scene
from volunteer.tui.widgets.recent_work import sample_lines


@given(st.integers(0, 400), st.integers(0, 120), st.integers(0, 50))
def test_every_room_shows_the_state_of_the_task(width: int, height: int, turn: int) -> None:
    found = arrange(width, height, turn)
    assert found.cards & {"task", "brief"}
    assert found.turns >= 1
    if width >= NARROW and height >= SHORT:
        assert "task" in found.cards


@given(st.integers(20, 200), st.integers(8, 60))
def test_every_card_can_be_reached_with_v(width: int, height: int) -> None:
    first = arrange(width, height, 0)
    seen = {
        card.removeprefix("low-")
        for turn in range(first.turns)
        for card in arrange(width, height, turn).cards
    }
    if height >= SHORT:
        everything = {"task-curve", "model-curve", "contributions", "credits", "sample", "device"}
        assert everything | {"run"} <= seen


@pytest.mark.parametrize(("size", "rows"), [((81, 20), 11), ((200, 57), 16), ((116, 33), 8)])
def test_a_sample_has_room_for_a_picture(size: tuple[int, int], rows: int) -> None:
    """Rows are counted inside the card, without border and title."""
    width, height = size
    first = arrange(width, height, 0)
    found = next(
        a
        for a in (arrange(width, height, turn) for turn in range(first.turns))
        if "sample" in a.cards
    )
    low = height - found.task if found.low is None else found.low
    assert low - 3 >= rows


def scene_of(told: Iterable[AnyEvent]) -> Scene:
    from volunteer.tui.agent_view import reduce

    view = AgentView()
    for event in told:
        view = reduce(view, event, fold(view.status, event))
    return Scene(view=view, now=scenes.NOW)


def text_of(lines: Iterable[Iterable[tuple[str, str]]]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_the_sample_shows_the_first_and_the_newest_version() -> None:
    text = text_of(sample_lines(scene_of(scenes.filled()), 60, 8))
    assert text.index("version 0") < text.index("the the import") < text.index("version 41")
    assert "argparse.ArgumentParser" in text


def test_a_newcomer_reads_how_long_its_proof_takes_before_anything_is_at_stake() -> None:
    """The update of a first task is merged when it is proved: its pay is pending until then."""
    first = replace(scenes.ME, escrow_micro=0, proving=1, proved_in_s=10_800.0)
    told = [*scenes.claimed(), events.Credits(me=first)]
    text = " ".join(text_of(credit_lines(scene_of(told), 40, 12)).split())
    assert "being proved, about 3:00 h" in text
    assert "at stake" not in text


def test_a_run_says_when_it_will_be_done_where_that_is_known() -> None:
    for ends_at, words in ((scenes.NOW + 3 * 86_400.0, "done in about 3 d"), (None, "")):
        told = [*scenes.filled(), events.RunsListed(runs=(replace(scenes.RUN, ends_at=ends_at),))]
        text = text_of(run_lines(scene_of(told), 40, 20))
        assert "41 %" in text
        assert words in text
        assert ("done in" in text) == bool(words)


def test_credits_an_hour_are_told_as_soon_as_they_are_measured() -> None:
    told = list(scenes.filled())
    assert "an hour now" not in text_of(credit_lines(scene_of(told), 40, 9))
    for number in range(1, 4):
        at = scenes.NOW + 300.0 * number
        trained = events.Trained(
            at=at, task=number, run=scenes.RUN.name, steps=50, samples=800,
            loss_first=None, loss_last=None, train_s=250.0,
        )  # fmt: skip
        told += [*scenes.claimed(number), trained]
    assert "an hour now" in text_of(credit_lines(scene_of(told), 40, 9))
    assert "an hour now" not in text_of(credit_lines(scene_of(told), 24, 9))


def test_a_board_is_shown_as_it_is_with_its_numbers() -> None:
    board = ". . .\n. x o\n. . ."
    told = [
        *scenes.claimed(),
        events.Training(
            task=4711, run="g", device="cpu", step=1, steps=2, samples=1, loss=1.0, steps_per_s=1.0,
            tokens_per_s=0.0, eta_s=None, version=1, preview=board, metrics={"games": 12.0},
        ),
    ]  # fmt: skip
    quiet = events.Training(
        task=4711, run="g", device="cpu", step=2, steps=2, samples=2, loss=None, steps_per_s=1.0,
        tokens_per_s=0.0, eta_s=None, version=1,
    )  # fmt: skip
    text = text_of(sample_lines(scene_of([*told, quiet]), 60, 8))
    assert [row[:5] for row in text.splitlines()] == [". . .", ". x o", ". . ."]
    assert "games" in text
    assert "12" in text
    assert text_of(sample_lines(scene_of(told), 6, 8)).splitlines()[1] == ". x o"


async def test_figures_are_called_what_the_workload_calls_them(engine: FakeEngine) -> None:
    run = replace(scenes.RUN, items="images", output="image", measure="distance", dataset="")
    step = events.Training(
        task=4711, run=run.name, device="cpu", step=1, steps=2, samples=1, loss=1.0,
        steps_per_s=1.0, tokens_per_s=64.0, eta_s=None, version=1, items="images",
    )  # fmt: skip
    told = [*scenes.started(), events.RunsListed(runs=(run,)), *scenes.claimed(), step]
    async with opened(engine, told, size=(120, 36)) as (app, pilot):
        text = screen_text(app)
        assert "64.0 images/s" in text
        assert "Fréchet distance" in text
        await pilot.press("2")
        await pilot.pause()
        text = screen_text(app)
        assert f"Fréchet distance of {run.name}" in text
        assert "none: it makes its own" in text


async def test_work_without_a_loss_shows_its_board_instead(engine: FakeEngine) -> None:
    board = "\n".join(["1 . X .", "2 O x .", "3 . . ."])
    move = events.Training(
        task=4711, run="stdlib-gpt", device="cpu", step=1, steps=2, samples=1, loss=None,
        steps_per_s=1.0, tokens_per_s=0.0, eta_s=None, version=1, preview=board,
        metrics={"games_per_hour": 1320.0}, counted="games",
    )  # fmt: skip
    told = [*scenes.started(), *scenes.claimed(), move]
    async with opened(engine, told, size=(120, 36)) as (app, _):
        text = screen_text(app)
        assert "This task now" in text
        assert "2 O x ." in text
        assert "1.32 k games per hour" in text  # in the place of the loss
        assert "1 of 50 games" in text
        assert "steps/s" not in text
        assert "tokens/s" not in text


async def test_a_task_of_games_is_told_in_games_before_its_first(engine: FakeEngine) -> None:
    (claimed,) = scenes.claimed()
    assert isinstance(claimed, events.Claimed)
    told = [
        *scenes.started(),
        replace(claimed, steps=16, samples=16, kind="selfplay", counted="games"),
    ]
    async with opened(engine, told, size=(120, 36)) as (app, pilot):
        assert "0 of 16 games" in screen_text(app)
        await pilot.press("3")
        await pilot.pause()
        assert "Tasks for this device" in screen_text(app)
        assert "16 steps" not in screen_text(app)


def test_drawn_samples_stand_side_by_side_where_there_is_room() -> None:
    told = [
        *scenes.started(),
        events.LossMeasured(run="stdlib-gpt", version=0, loss=9.0, mine=0, sample="ab\ncd\nef"),
        events.LossMeasured(run="stdlib-gpt", version=7, loss=1.0, mine=0, sample="gh\nij\nkl"),
    ]
    wide = text_of(sample_lines(scene_of(told), 40, 8)).splitlines()
    assert wide[0].split() == ["version", "0", "version", "7"]
    assert wide[1].split() == ["ab", "gh"]
    assert text_of(sample_lines(scene_of(told), 6, 8)).splitlines()[1:] == ["gh", "ij", "kl"]


@given(st.integers(1, 80), st.integers(1, 20))
def test_the_shortest_form_fits_and_never_loses_the_sign(width: int, height: int) -> None:
    lines = brief(scene_of(scenes.filled()), width, height)
    assert len(lines) <= height
    rows = text_of(lines).splitlines()
    assert rows[0].startswith("●")
    assert all(len(row) <= width for row in rows)


def test_a_view_of_nothing_can_be_drawn() -> None:
    assert brief(Scene(view=AgentView(status=Status())), 40, 5)


def test_plain_characters_show_the_number_of_an_account_whose_name_has_none_of_them() -> None:
    told = [
        replace(e, nickname="李小龙") if isinstance(e, events.Started) else e
        for e in scenes.filled()
    ]
    scene = scene_of(told)
    assert "李小龙" in CreditsCard().heading(scene)[0]
    plain = replace(scene, glyphs=ASCII)
    assert CreditsCard().heading(plain)[0] == "Credits - account v-1"
    rows = leader_rows([replace(LEADERS[0], nickname="李小龙"), LEADERS[1]], plain, old=False)
    names = ["".join(text for text, _ in row.cells[1]).strip() for row in rows]
    assert names == ["volunteer 1", "linus"]
    assert shown_name("José", "account 1", ASCII) == "José"  # drawn without its accent
