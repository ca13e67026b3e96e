"""The organiser's monitor: pictures, drill-down, actions, and a server that is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input

from coordinator.accounts.accounts import Shown
from coordinator.admin.runs import RunShown
from coordinator.database.monitoring.task_history import TaskEvent, TaskShown
from coordinator.database.statistics import VolunteerSummary
from coordinator.rules import health
from coordinator.rules.overview import (
    CheckCounts,
    ContributionWindow,
    DatabaseFigures,
    FailedLine,
    Flow,
    MergeLine,
    Overview,
    RefusalCount,
    ReplicaFigures,
    ReplicaLine,
    RunLine,
    TaskCount,
    WorkerLine,
)
from coordinator.top import tables
from coordinator.top.app import LIGHT, PAGES, Monitor
from coordinator.top.feed import CommandSender
from shared.errors import Configuration, NotFound, Unreachable, VolunteerError
from shared.protocol.accounts import RunInfo, WorkerInfo
from shared.protocol.versions import VersionInfo
from tests.support.virtual_clock import VirtualClock
from tests.tui.pages import Snapshot

NOW = 1_800_000_000.0
HOSTILE = "[red]mia[/] \x1b[2J\u202eevil"  # markup, a control sequence, a mark of direction
SIZES = {"60x16": (60, 16), "80x24": (80, 24), "120x36": (120, 36), "200x60": (200, 60)}

RUN = RunLine(
    name="stdlib-gpt", state="running", workload="gpt", version=41, versions_an_hour=28.0,
    loss=3.4123, started_at=NOW - 7200, head_at=NOW - 65, workers=3, todo=12, doing=3, failed=1,
    accepted=2, pushed=Flow(contributions=84, samples=67_200), pulled=Flow(samples=61_000),
)  # fmt: skip
PLAY = msgspec.structs.replace(
    RUN, name="gomoku", workload="gomoku", version=7, loss=2.06, failed=0,
    pushed=Flow(contributions=30, samples=41_000, games=960),
)  # fmt: skip


def picture(**changes: Any) -> Overview:
    """Return an overview of a coordinator at work, judged."""
    worker = WorkerLine(
        id="w1", volunteer="ada", hostname="kestrel", state="training", last_seen=NOW - 4,
        step_flops=3.1e11, task=1041, run="stdlib-gpt", good=44,
    )  # fmt: skip
    hostile = WorkerLine(
        id="w2", volunteer=HOSTILE, hostname=HOSTILE, state="online", last_seen=NOW - 12,
        step_flops=4e9, good=1, refused=5, failures=2,
    )  # fmt: skip
    figures = ReplicaFigures(
        url="https://203.0.113.7:8470", software="0.1.0", disk_free=4.1e11, disk_total=1e12,
        disk_floor=1e9, cpu_share=0.07, memory=3.1e8, requests=40_210, requests_a_second=2.4,
        in_a_second=120_000, out_a_second=2.2e6, claims_waiting=1, answers="builtin",
        answers_waiting=1, answer_tokens=9_300, first_token_s=0.41,
        certificate_ends_at=NOW + 3000 * 86_400,
    )  # fmt: skip
    seen = Overview(
        at=NOW, server="Ada's coordinator", runs=(RUN, PLAY), runs_total=2,
        tasks=(
            TaskCount(kind="play", state="doing", count=1),
            TaskCount(kind="train", state="doing", count=2),
            TaskCount(kind="train", state="todo", count=12),
        ),
        failed=(
            FailedLine(
                id=977, run="stdlib-gpt", kind="train", failures=3, timeouts=1, message=HOSTILE
            ),
        ),
        queues={"tasks": 12, "verdicts": 1, "games": 0, "evaluations": 1},
        merges=(
            MergeLine(
                run="stdlib-gpt", version=42, state="leased", at=NOW - 1, seconds=1.2,
                contributions=3,
            ),
            MergeLine(
                run="stdlib-gpt", version=41, state="committed", at=NOW - 65, seconds=2.31,
                contributions=3, staleness=0.67, staleness_max=2,
            ),
        ),
        replicas=(
            ReplicaLine(id="r1", started_at=NOW - 7200, beat_at=NOW - 3, figures=figures),
        ),
        workers={"training": 3, "online": 1, "offline": 2},
        machines=(hostile, worker),
        volunteers={"vetted": 4, "probation": 2},
        window=ContributionWindow(
            since=NOW - 3590, contributions=130, good=120, refused=9, undecided=1
        ),
        newest_refused=9, newest_decided=129,
        refusals=(RefusalCount(reason="norm", count=9, newest=HOSTILE, at=NOW - 300),),
        recompute=CheckCounts(passed=4, open=1),
        database=DatabaseFigures(kind="sqlite", bytes=48_000_000), backup_at=NOW - 7200,
    )  # fmt: skip
    return judged(msgspec.structs.replace(seen, **changes))


def judged(seen: Overview) -> Overview:
    verdict, troubles = health.judge(seen)
    return msgspec.structs.replace(seen, verdict=verdict, troubles=troubles)


INFO = RunInfo(
    name="stdlib-gpt", state="running", workload="gpt", workload_version=1, description=HOSTILE,
    licence="CC0-1.0", contact="", dataset="stdlib", dataset_licence="", parameters=3_200_000,
    version=41, loss=3.4123, loss_first=8.3, workers=3, progress=None, credits_per_step=1.0,
    step_flops=1e9, memory_bytes=1, steps=9_000,
)  # fmt: skip
VERSIONS = tuple(
    VersionInfo(
        version=n, kind="merge", created_at=NOW - 60 * (42 - n), contributions=3, global_step=n,
        tokens=n, published_sha256="", loss=5 - n / 30, evaluation="done",
    )
    for n in (39, 40, 41)
)  # fmt: skip
PERSON = VolunteerSummary(
    volunteer_id="v2", nickname=HOSTILE, label="", state="active", public=True, trust=0.5,
    machines=1, first_seen=NOW - 9000, last_seen=NOW - 12, standing="probation",
)  # fmt: skip
MACHINE = WorkerInfo(
    worker_id="w2", hostname="host", state="training", device="cpu", last_seen=NOW, task=977
)
TASK = TaskShown(
    id=977, run="stdlib-gpt", kind="train", state="discarded", pass_no=1, start=0, stop=800,
    steps=50, attempt=4, failures=3, timeouts=1, volunteer="", worker="", device="",
    base_version=None, renew_by=None, finish_by=None,
    events=(
        TaskEvent(at=NOW - 900, what="created"),
        TaskEvent(at=NOW - 500, what="failure", attempt=3, volunteer=HOSTILE, text="no memory"),
    ),
)  # fmt: skip


class FakeServer:
    """Answers commands from canned replies, and notes them."""

    def __init__(self) -> None:
        self.replies: dict[str, Any] = {
            "top": picture(),
            "run.show": RunShown(run=INFO, versions=VERSIONS, codec="int8", downlink="chain"),
            "volunteer.show": Shown(person=PERSON, machines=(MACHINE,)),
            "task.show": TASK,
        }
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.gone: VolunteerError | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[CommandSender]:
        async def ask(command: str, /, **request: Any) -> Any:
            self.asked.append((command, request))
            if self.gone is not None:
                raise self.gone
            reply = self.replies.get(command)
            if isinstance(reply, VolunteerError):
                raise reply
            return reply

        if self.gone is not None:
            raise self.gone
        yield ask

    def did(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what was asked for that changes something."""
        return [one for one in self.asked if one[0] not in ("top", *self.replies)]


class Watched:
    """The monitor on a server of canned replies, with a clock that stands."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.clock = VirtualClock(NOW)
        self.app = Monitor(self.server.connect, self.clock)

    async def tick(self, pilot: Pilot[int], times: int = 1, *, looks: bool = True) -> None:
        """A second passes, so many times, and all is painted; the server `looks` again each."""
        for _ in range(times):
            await pilot.pause()
            if looks:
                seen = self.server.replies["top"]
                self.server.replies["top"] = msgspec.structs.replace(seen, at=seen.at + 1e-3)
            await self.clock.advance(1.0)
            await pilot.pause()
        self.app._date()
        await pilot.pause()

    @property
    def text(self) -> str:
        return screen_text(self.app)


def screen_text(app: App[Any]) -> str:
    """Return what is on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


@pytest.fixture
def watched() -> Watched:
    return Watched()


# --- pictures ---


@pytest.mark.parametrize("size", SIZES)
def test_picture(watched: Watched, snap_compare: Snapshot, size: str) -> None:
    assert snap_compare(watched.app, terminal_size=SIZES[size], run_before=seen(watched))


@pytest.mark.parametrize("page", PAGES[1:])
def test_picture_of_a_page(watched: Watched, snap_compare: Snapshot, page: str) -> None:
    keys = str(PAGES.index(page) + 1)
    before = seen(watched, keys)
    assert snap_compare(watched.app, terminal_size=(80, 24), run_before=before)


def test_picture_without_colour(
    watched: Watched, snap_compare: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = Monitor(watched.server.connect, watched.clock)
    assert snap_compare(app, terminal_size=(80, 24), run_before=seen(watched, "2"))


def test_picture_in_light(watched: Watched, snap_compare: Snapshot) -> None:
    assert snap_compare(watched.app, terminal_size=(80, 24), run_before=seen(watched, "t"))


def test_picture_of_a_server_that_is_gone(watched: Watched, snap_compare: Snapshot) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await watched.tick(pilot)
        watched.server.gone = Unreachable("https://203.0.113.7:8470 cannot be reached")
        await watched.tick(pilot, 12)

    assert snap_compare(watched.app, terminal_size=(80, 24), run_before=before)


def seen(watched: Watched, *keys: str) -> Any:
    async def before(pilot: Pilot[int]) -> None:
        await watched.tick(pilot)
        await pilot.press(*keys)
        await watched.tick(pilot)

    return before


# --- text ---


def test_once_says_what_the_screen_says() -> None:
    said = "\n".join(tables.lines(picture()))
    assert said.splitlines()[1].startswith("! stdlib-gpt: 1 task failed for good")
    for words in ("pushed 108 k samples, 960 games", "120 good, 9 refused", "4 passed"):
        assert words in said
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "[red]mia[/]" in said


def test_a_verdict_is_the_worst_and_says_what_to_do() -> None:
    well = picture(runs=(msgspec.structs.replace(RUN, failed=0),))
    assert well.verdict.level == "good"
    assert tables.verdict_line(well) == (
        "✓ all is well: 4 workers on 1 running run, a version 1:05 min ago"
    )
    silent = msgspec.structs.replace(well.replicas[0], beat_at=NOW - 300)
    dead = picture(replicas=(silent,))
    assert dead.verdict.level == "bad"
    assert "no server is running, the last was heard of 5:00 min ago" in dead.verdict.text
    assert "coordinator serve" in dead.verdict.todo
    stalled = msgspec.structs.replace(RUN, failed=0, head_at=NOW - 4000)
    assert picture(runs=(stalled,)).verdict.level == "bad"
    seldom = msgspec.structs.replace(stalled, versions_an_hour=1.0)
    assert picture(runs=(seldom,)).verdict.level == "good"
    assert "no new version for 1:06 h" in picture(runs=(stalled,)).verdict.text
    refusing = picture(newest_refused=80, newest_decided=200)
    assert "80 of the newest 200" in refusing.verdict.text
    old = picture(runs=well.runs, backup_at=NOW - 20 * 86_400)
    assert (old.verdict.level, old.verdict.text) == (
        "watch", "backup: the last backup is 20 days old",
    )  # fmt: skip
    ends = msgspec.structs.replace(well.replicas[0].figures, certificate_ends_at=NOW + 86_400)
    near = msgspec.structs.replace(well.replicas[0], figures=ends)
    assert "ends in 1 days" in picture(runs=well.runs, replicas=(near,)).verdict.text


# --- the screen ---


async def test_enter_opens_what_the_row_is_about_and_esc_goes_back(watched: Watched) -> None:
    async with watched.app.run_test(size=(100, 30)) as pilot:
        await watched.tick(pilot)
        await pilot.press("enter")
        await watched.tick(pilot, 2)
        assert ("run.show", {"name": "stdlib-gpt"}) in watched.server.asked
        assert "Newest versions" in watched.text
        assert "[red]mia[/]" in watched.text
        await pilot.press("escape", "2", "enter")
        await watched.tick(pilot, 2)
        assert ("volunteer.show", {"name": HOSTILE}) in watched.server.asked
        await pilot.press("enter")  # the task of its machine
        await watched.tick(pilot, 2)
        assert "no memory" in watched.text
        await pilot.press("escape", "escape")
        await watched.tick(pilot)
        assert "workers" in watched.text
        assert watched.app._beside() is None


@pytest.mark.parametrize(
    ("goes_to", "key", "value", "command", "request_"),
    [
        ("stdlib-gpt", "p", "", "run.pause", {"name": "stdlib-gpt"}),
        ("stdlib-gpt", "b", "3", "run.rollback", {"name": "stdlib-gpt", "to": 3}),
        ("mia", "x", "", "volunteer.ban", {"name": HOSTILE}),
        ("977", "u", "", "task.requeue", {"ids": (977,)}),
    ],
)
async def test_an_action_is_confirmed_with_a_reason(
    watched: Watched, goes_to: str, key: str, value: str, command: str, request_: dict[str, Any]
) -> None:
    async with watched.app.run_test(size=(80, 24)) as pilot:
        await watched.tick(pilot)
        await pilot.press("g", *goes_to, "enter")
        await watched.tick(pilot, 2)
        await pilot.press(key)
        await pilot.pause()
        await pilot.press("escape")  # thought better of it
        await pilot.press(key)
        await pilot.pause()
        if value:
            watched.app.screen.query_one("#value", Input).value = value
        await pilot.press("enter")
        await pilot.pause()
        assert "say why" in watched.text  # no reason, no action
        assert not watched.server.did()
        await pilot.press(*"too hot", "enter")
        await watched.tick(pilot)
        assert watched.server.did() == [(command, request_ | {"reason": "too hot"})]


async def test_a_refused_action_is_told(watched: Watched) -> None:
    watched.server.replies["run.pause"] = NotFound("there is no [b]such[/b] run")
    async with watched.app.run_test(size=(80, 24), notifications=True) as pilot:
        await watched.tick(pilot)
        await pilot.press("enter")
        await watched.tick(pilot, 2)
        await pilot.press("p", *"why", "enter")
        await watched.tick(pilot)
        assert "there is no [b]such[/b] run" in watched.text


async def test_a_name_that_is_nobodys_is_told_and_left(watched: Watched) -> None:
    watched.server.replies["volunteer.show"] = NotFound('there is no volunteer "nobody"')
    async with watched.app.run_test(size=(80, 24), notifications=True) as pilot:
        await watched.tick(pilot)
        await pilot.press("g", *"nobody", "enter")
        await watched.tick(pilot, 3)
        assert 'there is no volunteer "nobody"' in watched.text
        assert "stdlib-gpt" in watched.text
        assert not watched.app.feed.stale


async def test_a_server_that_is_gone_leaves_its_last_picture_and_comes_back(
    watched: Watched,
) -> None:
    async with watched.app.run_test(size=(100, 30)) as pilot:
        await watched.tick(pilot)
        watched.server.gone = Unreachable("it cannot be reached: connection refused")
        await watched.tick(pilot, 20)
        assert "stdlib-gpt" in watched.text
        assert "ago: it cannot be reached: connection refused; asking again" in watched.text
        assert watched.app.screen.has_class("-old")
        watched.server.gone = None
        await watched.tick(pilot, 3)
        assert not watched.app.screen.has_class("-old")
        assert "asking again" not in watched.text


async def test_a_picture_that_does_not_change_is_said_to_be_old(watched: Watched) -> None:
    async with watched.app.run_test(size=(100, 30)) as pilot:
        await watched.tick(pilot)
        await watched.tick(pilot, 10, looks=False)
        assert "ago: nothing newer came; asking again" in watched.text
        await watched.tick(pilot, 2)
        assert "asking again" not in watched.text


async def test_one_query_a_second_at_most(watched: Watched) -> None:
    async with watched.app.run_test(size=(80, 24)) as pilot:
        await watched.tick(pilot)
        await pilot.press("enter")
        await watched.tick(pilot, 2)
        before = len(watched.server.asked)
        await watched.tick(pilot, 10)
        assert len(watched.server.asked) - before <= 10
        assert {command for command, _ in watched.server.asked[before:]} == {"top", "run.show"}


async def test_a_wrong_place_ends_the_monitor_with_its_error() -> None:
    watched = Watched()
    watched.server.gone = Configuration("there is no coordinator in /nowhere")
    async with watched.app.run_test() as pilot:
        await pilot.pause()
    assert watched.app.failed is watched.server.gone
    assert watched.app.return_value == Configuration.exit_code


@pytest.mark.parametrize("size", [(1, 1), (20, 5), (300, 80)])
async def test_any_size_is_drawn(watched: Watched, size: tuple[int, int]) -> None:
    async with watched.app.run_test(size=size) as pilot:
        await watched.tick(pilot)
        for page in range(1, 6):
            await pilot.press(str(page))
        await pilot.press("question_mark", "escape")
        await pilot.resize_terminal(80, 24)
        await pilot.press("1")
        await watched.tick(pilot)
        assert "stdlib-gpt" in watched.text


async def test_the_light_theme_and_back(watched: Watched) -> None:
    async with watched.app.run_test() as pilot:
        await pilot.press("t")
        assert watched.app.theme == LIGHT
        await pilot.press("t")
        assert watched.app.theme != LIGHT
