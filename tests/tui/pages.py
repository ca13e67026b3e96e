"""Replies of a coordinator to the pages of the screen, and pictures of the pages in every state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from syrupy.assertion import SnapshotAssertion
from textual.pilot import Pilot

from shared.errors import Unreachable
from shared.protocol import endpoints
from shared.protocol.accounts import ServerInfo, WorkerInfo
from shared.protocol.contributions import Verdict
from shared.protocol.listings import LeaderRow, LedgerRow
from tests.tui import scenes
from tests.tui.engine import FakeEngine, Paged, open_app, screen_text
from volunteer.control import commands
from volunteer.control.commands import Joined
from volunteer.settings import settings
from volunteer.tui.app import VolunteerApp
from volunteer.tui.appearance import Look

Snapshot = Callable[..., bool]
SIZES = {"80x24": (80, 24), "120x36": (120, 36)}
SMALL = (60, 16)
EVERY_SIZE = {"60x16": SMALL, **SIZES, "200x60": (200, 60)}
REFUSED = Unreachable("https://train.example.org did not answer in time")

NAMES = [
    "grace",
    "linus",
    "ada",
    "katherine",
    "alan",
    "edsger",
    "margaret",
    "donald",
    "barbara",
    "dennis",
    "ken",
    "radia",
]
LEADERS = tuple(
    LeaderRow(
        rank=place,
        nickname=name,
        earned_micro=3_200_000_000 // place,
        accepted=400 // place,
        device_s=900_000 / place,
        workers=1 + place % 3,
        me=name == "ada",
    )
    for place, name in enumerate(NAMES, start=1)
)
LEDGER = tuple(
    LedgerRow(
        id=900 - n,
        at=scenes.NOW - 9000 * n,
        run="stdlib-gpt",
        kind="earned" if n % 2 else "pending",
        amount_micro=50_000_000,
        contribution=900 - n,
        memo="",
    )
    for n in range(100)
)
OLDER = tuple(
    Verdict(
        contribution=800 - n,
        task=4600 - n,
        run="stdlib-gpt",
        state="merged",
        version=30 - n,
        credits_micro=50_000_000,
        at=scenes.NOW - 8000 - 7000 * n,
    )
    for n in range(20)
)
RUNS = (
    scenes.RUN,
    replace(
        scenes.RUN,
        name="five-in-a-row",
        workload="gomoku",
        description="Learns five in a row by playing against itself.",
        loss=1.2,
        loss_first=3.3,
        workers=31,
        progress=0.8,
    ),
    replace(scenes.RUN, name="digits", state="paused", workers=0, progress=0.1),
    replace(scenes.RUN, name="large-gpt", memory_bytes=90_000_000_000, loss=None, workers=3),
)
WORKERS = tuple(
    WorkerInfo(
        worker_id=str(n),
        hostname="",
        state="training",
        device="cpu",
        last_seen=scenes.NOW,
        rate=20.0 + 12 * n,
    )
    for n in range(7)
)
SETTINGS = settings.load(
    {"threads": 2}, environ={"VOLUNTEER_DUTY_PERCENT": "80"}, path=Path("/nowhere/config.toml")
).rows
LINK = "https://train.example.org:8765/join#key=tm5x-k45y-fjjq-fpqj-runy-bxd5"
SERVER = ServerInfo(
    name="Little Lab",
    software="0.1.0",
    protocol=1,
    protocol_min=1,
    protocol_min_next=1,
    public_key="00" * 32,
    fingerprint="tm5x-k45y-fjjq-fpqj-runy-bxd5",
    invite_only=False,
    contact="lab@example.org",
    now=scenes.NOW,
    runs=(scenes.RUN,),
)
ANSWERS: dict[Any, Any] = {
    endpoints.LEADERBOARD: LEADERS,
    endpoints.LEDGER: LEDGER,
    endpoints.ME: scenes.ME,
    endpoints.CONTRIBUTIONS: Paged(OLDER, "780"),
    endpoints.RUNS: RUNS,
    endpoints.WORKERS: WORKERS,
    endpoints.VERSIONS: (),
    commands.GetSettings: SETTINGS,
    commands.SetSettings: SETTINGS,
    commands.GetInvitation: LINK,
    commands.Probe: SERVER,
    commands.Join: Joined(
        server="Little Lab", url=LINK, fingerprint="", nickname="ada", created=True
    ),
}
NOTHING: dict[Any, Any] = {
    **ANSWERS,
    endpoints.LEADERBOARD: (),
    endpoints.LEDGER: (),
    endpoints.ME: replace(
        scenes.ME,
        earned_micro=0,
        pending_micro=0,
        today_micro=0,
        accepted=0,
        merged=0,
        device_s=0.0,
        rank=None,
    ),
    endpoints.CONTRIBUTIONS: Paged((), ""),
    endpoints.RUNS: (),
    endpoints.WORKERS: (),
}


def prepared(engine: FakeEngine, state: str = "filled") -> FakeEngine:
    """Give the engine the replies of a coordinator in this state."""
    engine.answers = dict(NOTHING if state == "empty" else ANSWERS)
    engine.refuses = REFUSED if state == "error" else None
    return engine


async def settle(app: VolunteerApp, pilot: Pilot[Any]) -> None:
    """Wait until queries are answered and drawn."""
    for _ in range(3):
        app.redraw()
        await pilot.pause()


async def shows(
    app: VolunteerApp,
    pilot: Pilot[Any],
    stored: SnapshotAssertion,
    name: str,
    sizes: Iterable[str],
) -> None:
    """Compare what is on the screen at each of these sizes with the text stored under the name."""
    for size in sizes:
        await pilot.resize_terminal(*EVERY_SIZE[size])
        await settle(app, pilot)
        assert screen_text(app) == stored(name=f"{name}-{size}")


def picture(
    engine: FakeEngine,
    compare: Snapshot,
    page: str,
    *keys: str,
    state: str = "filled",
    size: tuple[int, int] = (80, 24),
    look: Look | None = None,
) -> bool:
    """Return True if a page in this state looks as in its snapshot."""
    prepared(engine, state)

    async def before(pilot: Pilot[Any]) -> None:
        app = pilot.app
        assert isinstance(app, VolunteerApp)
        await pilot.pause()
        await engine.play(scenes.SCENES[state]())
        await settle(app, pilot)
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        await settle(app, pilot)

    app = open_app(engine, replace(look or Look(), page=page))
    return compare(app, terminal_size=size, run_before=before)
