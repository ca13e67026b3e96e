"""Spending of credits: keys for programs, the log of requests, pictures of image runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from textual.pilot import Pilot

from shared.errors import InsufficientQuota
from shared.protocol import endpoints
from shared.protocol.inference import KeyInfo, ModelCard, NewKey, UsageRow
from shared.workloads.data.image_files import write_png
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from tests.tui.pages import SIZES, SMALL, Snapshot, prepared, settle
from volunteer.control import commands, events
from volunteer.control.commands import Drawn
from volunteer.tui.app import VolunteerApp
from volunteer.tui.look import Look
from volunteer.tui.widgets.pictures import UPPER

CREDITS = Look(page="history")
RUNS = Look(page="runs")
ALL_SIZES = {**SIZES, "60x16": SMALL}
LAPTOP = KeyInfo(
    id=2,
    name="laptop",
    prefix="vk-7gk2m4q",
    state="active",
    spent_micro=1_204_500,
    cap_micro=100_000_000,
    runs=("stdlib-gpt",),
    created_at=scenes.NOW - 86_400,
    expires_at=scenes.NOW + 29 * 86_400,
)
KEYS = (
    msgspec.structs.replace(LAPTOP, id=1, name="old", prefix="vk-a1b2c3d", state="revoked"),
    LAPTOP,
    msgspec.structs.replace(
        LAPTOP,
        id=3,
        name="\x1b[2Jbot",
        prefix="vk-zz9y8x7",
        cap_micro=None,
        expires_at=None,
        runs=(),
    ),
)
USAGE = tuple(
    UsageRow(
        id=str(number),
        at=scenes.NOW - 700 * number,
        model=("stdlib-gpt", "stdlib-gpt@best", "digits")[number % 3],
        kind="image" if number % 3 == 2 else "completion",
        key="vk-7gk2m4q" if number % 2 else "",
        tokens_in=0 if number % 3 == 2 else 64 + number,
        tokens_out=1 if number % 3 == 2 else 128 - number,
        cost_micro=1920 + 7 * number,
        free=number == 4,
        latency_s=None if number == 0 else 1.5 + number,
        first_token_s=None if number == 0 else 0.12,
    )
    for number in range(30)
)
ME = msgspec.structs.replace(scenes.ME, spent_micro=1_204_500, held_micro=192_000)
SHEET = write_png(np.full((64, 64, 3), (250, 10, 20), np.uint8))
DIGITS = msgspec.structs.replace(scenes.RUN, name="digits", workload="dcgan", items="images")
CARD = ModelCard(id="digits", created=0, owned_by="volunteers", price_micro=40)


@pytest.fixture
def rich(engine: FakeEngine) -> FakeEngine:
    prepared(engine)
    engine.answers |= {endpoints.KEYS: KEYS, endpoints.USAGE: USAGE}
    return engine


async def begun(pilot: Pilot[Any], engine: FakeEngine, *pressed: str) -> VolunteerApp:
    assert isinstance(pilot.app, VolunteerApp)
    await pilot.pause()
    await engine.play(scenes.filled())
    await engine.play([events.Credits(me=ME)])
    await settle(pilot.app, pilot)
    for key in pressed:
        await pilot.press(key)
        await settle(pilot.app, pilot)
    return pilot.app


@pytest.mark.parametrize("size", ALL_SIZES)
@pytest.mark.parametrize("key", ["a", "u"])
def test_pictures(rich: FakeEngine, snap_compare: Snapshot, size: str, key: str) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        await begun(pilot, rich, key)

    app = open_app(rich, CREDITS)
    assert snap_compare(app, terminal_size=ALL_SIZES[size], run_before=before)


@pytest.mark.parametrize("size", ALL_SIZES)
def test_a_new_key_is_a_form(rich: FakeEngine, snap_compare: Snapshot, size: str) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        await begun(pilot, rich, "a", "n", *"desk", "tab", *"12")

    app = open_app(rich, CREDITS)
    assert snap_compare(app, terminal_size=ALL_SIZES[size], run_before=before)


async def test_a_key_is_made_with_what_was_typed_and_shown_once(rich: FakeEngine) -> None:
    secret = "vk-7gk2m4q-the-whole-of-it"
    rich.answers[commands.CreateKey] = NewKey(key=secret, info=LAPTOP)
    async with opened(rich, scenes.filled(), look=CREDITS) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("a", "n", *"desk", "tab", "x", "enter")
        await settle(app, pilot)
        assert "credits: x is no number" in screen_text(app)
        await pilot.press("backspace", *"12.5", "tab", *"30", "tab", *"a, b", "enter")
        await settle(app, pilot)
        assert secret in screen_text(app)
        await pilot.press("escape")
        await settle(app, pilot)
        assert secret not in screen_text(app)
        assert "vk-7gk2m4q" in screen_text(app)
    (sent,) = (c.request for c in rich.asked if isinstance(c, commands.CreateKey))
    assert (sent.name, sent.cap_micro, sent.runs) == ("desk", 12_500_000, ("a", "b"))
    assert sent.expires_at == pytest.approx(rich.clock.now() + 30 * 86_400, abs=60)


async def test_a_key_is_revoked_only_after_a_yes(rich: FakeEngine) -> None:
    rich.answers[commands.RevokeKey] = LAPTOP
    async with opened(rich, scenes.filled(), look=CREDITS) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("a")
        await settle(app, pilot)
        await pilot.press("d")
        await settle(app, pilot)
        assert "Revoke this key?" in screen_text(app)
        await pilot.press("escape")
        assert not [c for c in rich.asked if isinstance(c, commands.RevokeKey)]
        await pilot.press("d", "y")
        await settle(app, pilot)
        assert "is revoked" in screen_text(app)
        await pilot.press("end", "d")  # one that works no longer is not asked about
        await settle(app, pilot)
        assert "Revoke this key?" not in screen_text(app)
    assert [c.key for c in rich.asked if isinstance(c, commands.RevokeKey)] == [3]


async def test_what_is_held_is_no_part_of_the_balance(rich: FakeEngine) -> None:
    async with opened(rich, scenes.filled(), look=CREDITS, size=SIZES["120x36"]) as (app, pilot):
        await begun(pilot, rich)
        seen = screen_text(app)
        assert "1,239.10" in seen  # 1,240.5 earned, 1.2045 spent, 0.192 held
        assert "held     0.192000" in seen
        await pilot.press("u")
        await settle(app, pilot)
        assert "under way" in screen_text(app)


async def test_an_image_run_draws_and_says_what_it_cost(
    rich: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    rich.answers |= {
        endpoints.RUNS: (DIGITS,),
        commands.GetModel: CARD,
        commands.DrawImage: Drawn(images=(SHEET,), cost_micro=40),
    }
    async with opened(rich, scenes.filled(), look=RUNS) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await settle(app, pilot)
        assert "0.000040 credits a drawing" in screen_text(app)
        await pilot.press("ctrl+s")
        await settle(app, pilot)
        assert "nothing is drawn yet" in screen_text(app)
        await pilot.press(*"7", "ctrl+b", "enter")
        await app.workers.wait_for_complete()
        await settle(app, pilot)
        assert "cost 0.000080 credits" in screen_text(app)
        assert UPPER in screen_text(app)
        await pilot.press("ctrl+s")
        await settle(app, pilot)
    asked = [(c.model, c.seed) for c in rich.asked if isinstance(c, commands.DrawImage)]
    assert asked == [("digits", 7), ("digits@0", 7)]
    (written,) = (tmp_path / "volunteer").iterdir()
    assert written.read_bytes() == SHEET


async def test_a_drawing_that_is_refused_says_why(rich: FakeEngine) -> None:
    rich.answers |= {endpoints.RUNS: (DIGITS,), commands.GetModel: CARD}
    async with opened(rich, scenes.filled(), look=RUNS) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await settle(app, pilot)
        rich.refuses = InsufficientQuota("this may cost 2 credits, and 1 is missing")
        await pilot.press("enter")
        await settle(app, pilot)
        assert "1 is missing" in screen_text(app)
