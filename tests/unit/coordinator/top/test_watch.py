"""The organiser's monitor: its text, and a server that is gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from coordinator.admin.command import CommandSender, OrganiserCommand, Q, R
from coordinator.admin.upkeep_commands import Top
from coordinator.rules import health
from coordinator.rules.overview import (
    ContributionWindow,
    DatabaseFigures,
    DrawCounts,
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
from coordinator.top.watch import monitor_text, pictures, typing
from shared.errors import Configuration, Unreachable, VolunteerError
from tests.support.virtual_clock import VirtualClock

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
    pushed=Flow(contributions=30, samples=41_000, episodes=960),
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
        where="https://203.0.113.7:8470", software="0.1.0", disk_free=4.1e11, disk_total=1e12,
        cpu_share=0.07, memory=3.1e8, requests=40_210, requests_a_second=2.4,
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
        queues={"tasks": 12, "verdicts": 1, "experience": 0, "evaluations": 1},
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
        refusals=(RefusalCount(reason="norm", count=9, newest=HOSTILE, at=NOW - 300),),
        recompute=DrawCounts(passed=4, open=1),
        database=DatabaseFigures(kind="sqlite", bytes=48_000_000), backup_at=NOW - 7200,
    )  # fmt: skip
    return judged(msgspec.structs.replace(seen, **changes))


def judged(seen: Overview) -> Overview:
    verdict, troubles = health.judge(seen)
    return msgspec.structs.replace(seen, verdict=verdict, troubles=troubles)


class FakeServer:
    """Answers `top` from a canned overview."""

    def __init__(self) -> None:
        self.overview = picture()
        self.asked = self.forgot = 0
        self.gone: VolunteerError | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[CommandSender]:
        async def ask(command: OrganiserCommand[Q, R], ask: Q, /) -> R:
            assert isinstance(ask, Top)
            self.asked += 1
            self.forgot += ask.forget_silent
            self.meanwhile()
            if self.gone is not None:
                raise self.gone
            return cast(R, self.overview)

        if self.gone is not None:
            raise self.gone
        yield ask

    def look(self) -> None:
        """The server counts anew."""
        self.overview = msgspec.structs.replace(self.overview, at=self.overview.at + 1e-3)


class Watched:
    """The monitor on a server of canned replies, with a clock that stands."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.clock = VirtualClock(NOW)
        self.typed: set[str] = set()
        self._pictures = pictures(self.server.connect, self.clock, self.typed)

    async def tick(self, times: int = 1, *, looks: bool = True) -> str:
        """Return the text after so many pictures; the server `looks` again before each."""
        seen, old = None, ""
        for _ in range(times):
            if looks:
                self.server.look()
            coming = asyncio.ensure_future(anext(self._pictures))
            while not coming.done():
                await self.clock.advance(1.0)
            seen, old = coming.result()
        return monitor_text(seen, old, 100).plain


# --- text ---


def test_the_text_says_what_the_overview_says() -> None:
    said = "\n".join(tables.lines(picture()))
    assert said.splitlines()[1].startswith("! stdlib-gpt: 1 task failed for good")
    for words in ("pushed 108 k samples, 960 games or problems", "120 good, 9 refused", "4 passed"):
        assert words in said
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "[red]mia[/]" in said


def test_a_verdict_is_the_worst_and_says_what_to_do() -> None:
    well = picture(runs=(msgspec.structs.replace(RUN, failed=0),))
    assert well.verdict.level == "good"
    assert tables.verdict_lines(well) == [
        "✓ all is well: 4 workers on 1 running run, a version 1:05 min ago"
    ]
    silent = msgspec.structs.replace(well.replicas[0], beat_at=NOW - 300)
    dead = picture(replicas=(silent,))
    assert dead.verdict.level == "bad"
    assert "no server is running, the last one was seen 5:00 min ago" in dead.verdict.text
    assert "coordinator serve" in dead.verdict.todo


# --- live ---


async def test_a_server_that_is_gone_leaves_its_last_picture_and_comes_back() -> None:
    watched = Watched()
    assert "asking again" not in await watched.tick()
    watched.server.gone = Unreachable("it cannot be reached: connection refused")
    said = await watched.tick(5)
    assert "stdlib-gpt" in said
    assert said.splitlines()[0].endswith(
        " s ago: it cannot be reached: connection refused; asking again"
    )
    watched.server.gone = None
    assert "asking again" not in await watched.tick()


async def test_a_picture_that_does_not_change_is_said_to_be_old() -> None:
    watched = Watched()
    await watched.tick()
    assert "asking again" not in await watched.tick(3, looks=False)
    assert " s ago: nothing newer came; asking again" in await watched.tick(8, looks=False)
    assert "asking again" not in await watched.tick()


async def test_one_query_for_each_picture() -> None:
    watched = Watched()
    await watched.tick(10)
    assert watched.server.asked == 10


async def test_a_key_forgets_servers_that_are_gone_once() -> None:
    watched = Watched()
    await watched.tick()
    watched.typed.add("f")
    await watched.tick(3)
    assert (watched.server.forgot, watched.typed) == (1, set())


async def test_a_key_that_is_pressed_during_a_request_counts_for_the_next() -> None:
    watched = Watched()
    watched.server.meanwhile = lambda: watched.typed.add("f")
    await watched.tick()
    assert (watched.server.forgot, watched.typed) == (0, {"f"})
    watched.server.meanwhile = lambda: None
    await watched.tick(2)
    assert (watched.server.forgot, watched.typed) == (1, set())


async def test_a_key_that_is_pressed_again_while_its_request_runs_counts_again() -> None:
    watched = Watched()
    watched.typed.add("f")
    watched.server.meanwhile = lambda: watched.typed.add("f")
    await watched.tick()
    watched.server.meanwhile = lambda: None
    await watched.tick(2)
    assert (watched.server.forgot, watched.typed) == (2, set())


async def test_a_key_whose_request_fails_is_sent_again() -> None:
    watched = Watched()
    await watched.tick()
    watched.typed.add("f")
    watched.server.meanwhile = lambda: setattr(watched.server, "gone", Unreachable("it is away"))
    await watched.tick()
    assert (watched.server.forgot, watched.typed) == (1, {"f"})
    watched.server.meanwhile, watched.server.gone = lambda: None, None
    await watched.tick(2)
    assert (watched.server.forgot, watched.typed) == (2, set())


async def test_the_end_of_the_terminal_ends_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, keyboard = pytest.importorskip("pty").openpty()

    async def watched() -> None:
        with typing(set()):
            os.close(terminal)
            await asyncio.Event().wait()

    with open(keyboard, encoding="ascii") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(watched(), 10)


async def test_a_wrong_place_ends_the_monitor_with_its_error() -> None:
    watched = Watched()
    watched.server.gone = Configuration("there is no coordinator in /nowhere")
    with pytest.raises(Configuration, match="no coordinator in /nowhere"):
        await anext(pictures(watched.server.connect, watched.clock, set()))
    watched.server.gone = Unreachable("it cannot be reached")  # it may come up
    assert "asking again" in await watched.tick()


@pytest.mark.parametrize("width", [1, 60, 80, 120, 300])
def test_any_width_is_drawn(width: int) -> None:
    said = monitor_text(picture(), "", width).plain
    assert "stdlib-gpt" in said
    assert ("MADE/H" in said) == (width >= 130)


def test_80_columns_show_who_is_at_work_and_what_waits_whatever_a_run_is_called() -> None:
    longest = msgspec.structs.replace(
        RUN, name="a-very-long-name-of-a-run-that-goes-on-and-on-for-sixty-four-cells",
        todo=12_345, doing=4_321, accepted=1_234, failed=9_876, head_at=NOW - 86_000,
    )  # fmt: skip
    lines = monitor_text(picture(runs=(longest,)), "", 80, 24).plain.splitlines()
    (head,) = (line for line in lines if "WORKERS" in line and "TODO" in line)
    row = lines[lines.index(head) + 1]
    for name in ("WORKERS", "TODO", "DOING", "MERGING", "FAILED", "NEWEST"):
        assert head.index(name) + len(name) <= 80
    for figure in ("3", "12.3 k", "4,321", "1,234", "9,876", "23:53 h"):
        assert figure in row[:80]
    assert len(lines) == 24
    assert lines[-1] == "f forget servers that are gone   q quit"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_refusals_failures_and_remedies_are_on_the_first_screen(width: int) -> None:
    (replica,) = picture().replicas
    silent = msgspec.structs.replace(replica, beat_at=NOW - 300)
    many = tuple(msgspec.structs.replace(picture().merges[1], version=n) for n in range(16))
    seen = picture(merges=many, replicas=(silent,))
    screen = monitor_text(seen, "", width, 24).plain.splitlines()
    text = " ".join(" ".join(line[:width] for line in screen).split())
    for words in ("`coordinator serve`", "Refusals", "norm", "Failed tasks", "977"):
        assert words in text, words
    named = [line for line in screen if HOSTILE[:9] not in line]  # of a stranger's length
    assert all(len(line) <= width for line in named), max(named, key=len)


def test_a_single_trouble_is_told_once_on_a_narrow_screen() -> None:
    text = monitor_text(picture(), "", 80).plain
    assert text.count("task failed for good") == 1


@pytest.mark.parametrize(
    ("left_s", "words"),
    [(6.9 * 86_400, "ends in 6 d"), (86_400, "ends in 24:00 h"), (0.0, "has ended")],
)
def test_the_end_of_a_certificate_is_told_as_the_alert_tells_it(left_s: float, words: str) -> None:
    (replica,) = picture().replicas
    figures = msgspec.structs.replace(replica.figures, certificate_ends_at=NOW + left_s)
    seen = picture(replicas=(msgspec.structs.replace(replica, figures=figures),))
    (line,) = (line for line in tables.lines(seen) if "certificate" in line)
    assert line.split("certificate")[1].strip() == words
