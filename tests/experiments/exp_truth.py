"""Truth of the screen: a real coordinator, two real volunteers, three workloads at once; each
second the screen of one is read and held against the coordinator's HTTP interface.

    make experiments EXPERIMENT=truth EXPERIMENT_ARGS='--minutes 60'       needs tmux

A value on the screen is true if the coordinator's was the same at some moment of its window: 2 s
for the work of this machine, 32 s (a heartbeat) for what others do. In between two readings of the
coordinator a value may be anything between them. Each contradiction is a line; the last line counts
them. The first forecast of each run is held against the credits an hour that came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from coordinator.demo.demo import prepare
from coordinator.demo.runs import demo_run
from shared.protocol.accounts import Me, RunInfo
from shared.protocol.contributions import Verdict
from shared.protocol.limits import API
from shared.protocol.listings import LeaderRow
from shared.protocol.versions import VersionInfo
from shared.text import MICRO
from tests.support.server_process import Process
from tests.support.tmux_screen import TmuxScreen
from volunteer.account.profile_directory import Profile
from volunteer.control.status import is_news
from volunteer.settings.settings import directories
from volunteer.text import loss, measure_word
from volunteer.tui.text import big_digits

T = TypeVar("T")
ROOT = str(Path(__file__).resolve().parents[2])
VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
OWN_S, OTHERS_S = 2.0, 32.0
HALTED_S = 10.0
FRAME_TRIES, HALF_FRAME_S = 5, 0.1
BETWEEN_S = 2.0  # readings of one page that may disagree with themselves
WORKLOADS = ("gpt", "dcgan", "gomoku")
PAGES = (("1", 12), ("4", 4), ("5", 4), ("2", 5))  # key, and readings before the next
HEADINGS = {"1": "╭─ Device ─", "4": "w  all  waiting", "5": "╭─ Ranks ─", "2": "╭─ Runs ─"}
LEFT = 38  # columns of the cards on Home
GOOD = ("accepted", "merged", "superseded")
WORDS = {"paid": "accepted", "not needed": "superseded"}  # words on the screen for a state


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Replies of the coordinator at a moment."""

    at: float
    me: Me
    runs: dict[str, RunInfo]
    leaders: tuple[LeaderRow, ...]
    verdicts: dict[int, Verdict]  # all so far by contribution, newest state
    losses: dict[str, set[str]]  # by run, as they are shown: measured since the truth before
    settled_micro: int = 0  # since the truth before: it may have been pending in between


class Api:
    """The coordinator's interface, with the token of the volunteer whose screen is read."""

    def __init__(self, home: Path) -> None:
        identity = Profile(directories({"VOLUNTEER_HOME": str(home)}).profile).current()
        assert identity is not None
        headers = {"Authorization": f"Bearer {identity.token}"}
        self._http = httpx.Client(base_url=identity.url + API, headers=headers, timeout=30)
        self._verdicts: dict[int, Verdict] = {}
        self._measured: dict[str, int] = {}  # newest version by run

    def truth(self) -> Truth:
        me = self._get("/workers/me", Me)
        runs = self._get("/runs", tuple[RunInfo, ...])
        leaders = self._get("/leaderboard?days=7", tuple[LeaderRow, ...])
        news = self._get("/contributions", tuple[Verdict, ...])  # all words, newest first
        known, settled = dict(self._verdicts), 0
        for verdict in reversed(news):
            before = known.get(verdict.contribution)
            if is_news(verdict, before):
                known[verdict.contribution] = verdict
                if verdict.state != "accepted":
                    settled += verdict.credits_micro
        self._verdicts = known
        return Truth(
            at=time.time(),
            me=me,
            runs={run.name: run for run in runs},
            leaders=leaders,
            verdicts=known,
            losses={run.name: self._losses(run) | {loss(run.loss)} for run in runs},
            settled_micro=settled,
        )

    def _losses(self, run: RunInfo) -> set[str]:
        """Several versions of a small model may be measured within a second."""
        known = self._measured.setdefault(run.name, 0)
        rows = self._get(f"/runs/{run.name}/versions?cursor={known}", tuple[VersionInfo, ...])
        measured = [row for row in rows if row.loss is not None]
        self._measured[run.name] = max([known, *(row.version for row in measured)])
        return {loss(row.loss) for row in measured}

    def _get(self, path: str, kind: type[T]) -> T:
        return msgspec.json.decode(self._http.get(path).raise_for_status().content, type=kind)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Text of the screen at a moment."""

    at: float
    rows: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    @property
    def page(self) -> str:
        """Return the key of the page; "" of one that is not compared."""
        return next((key for key, words in HEADINGS.items() if words in self.text), "")

    def left(self) -> str:
        """Return the cards on the left of Home."""
        return "\n".join(row[:LEFT] for row in self.rows)


@dataclass
class Judge:
    """Holds readings against the truth, and notes what contradicts it."""

    nickname: str
    history: deque[Truth] = field(default_factory=lambda: deque(maxlen=120))
    found: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    _apart_since: dict[str, float] = field(default_factory=dict)
    _resumes_at: float = 0.0

    def window(self, reading: Reading, seconds: float) -> list[Truth]:
        """Return the truths from `seconds` before a reading until the first after it."""
        first = reading.at - seconds
        before = [truth for truth in self.history if truth.at <= first][-1:]
        within = [t for t in self.history if first < t.at <= reading.at]
        after = [t for t in self.history if t.at > reading.at][:1]
        return before + within + after

    def holds(self, reading: Reading, what: str, true: bool, said: object, truth: object) -> None:
        """Note a comparison, and what was wrong with it."""
        self.compared[what] += 1
        if not true:
            clock = time.strftime("%H:%M:%S", time.gmtime(reading.at))
            line = f"CONTRADICTION {clock} page {reading.page}: {what} is {said}, truth {truth}"
            self.found.append(line)
            print(line, *reading.rows, sep="\n", flush=True)

    def between(
        self,
        reading: Reading,
        what: str,
        said: float,
        of: Callable[[Truth], float],
        seconds: float,
        slack: float = 0.0,
    ) -> None:
        """Hold a number against the least and the most that it was in its window."""
        values = [of(truth) for truth in self.window(reading, seconds)]
        true = min(values) - slack <= said <= max(values) + slack
        self.holds(reading, what, true, said, f"{min(values)} to {max(values)}")

    def one_of(self, reading: Reading, what: str, said: str, of: set[str]) -> None:
        self.holds(reading, what, said in of, said, sorted(of))

    def agree(self, reading: Reading, what: str, values: Sequence[float]) -> None:
        """Hold the numbers of one page against each other: not apart for longer than it takes to
        ask again.
        """
        self.compared[what] += 1
        if max(values) - min(values) < 0.011:
            self._apart_since.pop(what, None)
            return
        since = self._apart_since.setdefault(what, reading.at)
        if reading.at - since > BETWEEN_S:
            self.holds(reading, what, False, values, "one number")

    def halted(self, now: float) -> None:
        """Forget all replies after a gap, in which anything may have changed."""
        self.history.clear()
        self._apart_since.clear()
        self._resumes_at = now + OTHERS_S + OWN_S

    def judge(self, reading: Reading) -> None:
        """Compare all of a page that can be compared."""
        if reading.at < self._resumes_at:
            self.compared["before the first window"] += 1
            return
        if " as of " in reading.text or "● online" not in reading.text:
            self.compared["drawn with its age"] += 1
            return
        pages = {"1": self.home, "4": self.credits, "5": self.ranks, "2": self.listing}
        if reading.page:
            pages[reading.page](reading)

    def home(self, reading: Reading) -> None:
        left = reading.left()
        self._account(reading, left)
        work = re.search(r"work +(\d+) merged(?: of (\d+) accepted)?", left)
        if work:
            self.between(reading, "merged", int(work[1]), lambda t: t.me.merged, OTHERS_S)
            if work[2]:
                self.between(reading, "accepted", int(work[2]), lambda t: t.me.accepted, OWN_S)
        if rank := re.search(r"rank +(\d+)", left):
            self._rank(reading, int(rank[1]))
        self._big(reading)
        self._run_card(reading, left)
        self._task(reading)
        for task, word, paid in re.findall(
            r"#(\d+) +[✓◌✗] (\w+(?: needed)?) +(\+[\d.,]+)?", reading.text
        ):
            self._verdict(reading, int(task), word, paid)

    def _rank(self, reading: Reading, said: int) -> None:
        """Hold a rank against those it had, or may have had for a moment between two truths."""
        near = self.window(reading, OTHERS_S)
        could = {t.me.rank or 0 for t in near}.union(*map(possible_ranks, near, near[1:]))
        self.holds(reading, "rank", said in could, said, sorted(could))

    def _account(self, reading: Reading, text: str) -> None:
        names = {
            "balance": lambda t: t.me.balance_micro / MICRO,
            "today": lambda t: t.me.today_micro / MICRO,
            "earned": lambda t: t.me.earned_micro / MICRO,
        }
        for name, of in names.items():
            if said := re.search(rf"[│ ] {name} +\+?([\d,]+\.\d\d)", text):
                self.between(reading, name, _number(said[1]), of, OTHERS_S, 0.006)
        if said := re.search(r"[│ ] pending +([\d,]+\.\d\d)", text):
            near = self.window(reading, OTHERS_S)
            most = max(t.me.pending_micro for t in near) + sum(t.settled_micro for t in near)
            least = min(t.me.pending_micro for t in near)
            true = least / MICRO - 0.006 <= _number(said[1]) <= most / MICRO + 0.006
            self.holds(reading, "pending", true, said[1], f"{least} to {most}")

    def _big(self, reading: Reading) -> None:
        """Check the large number, which must be one that the coordinator had in the window."""
        left = reading.left()
        totals = {t.me.balance_micro for t in self.window(reading, OTHERS_S)}
        today = re.search(r"today +\+([\d,]+\.\d\d)", left)
        if today is None:
            return
        totals.add(round(_number(today[1]) * MICRO))  # nothing is spent here
        drawn = [big_digits(f"{micro / MICRO:,.2f}") for micro in totals]
        true = any(rows and all(row.rstrip() in left for row in rows) for rows in drawn)
        self.holds(reading, "large total", true, "other digits", sorted(totals))

    def _run_card(self, reading: Reading, left: str) -> None:
        titles = [name for name in self.history[-1].runs if f"╭─ {name} ─" in left]
        if not titles:
            return
        name = titles[0]
        card = left.partition(f"╭─ {name} ─")[2].partition("╰")[0]
        near = self.window(reading, OTHERS_S)
        if said := re.search(r"version +(\d+)", card):
            self.between(reading, "version", int(said[1]), lambda t: t.runs[name].version, OTHERS_S)
        word = measure_word(near[-1].runs[name].measure)
        if said := re.search(rf"{word[:8]} +(?:[\d.]+ → )?([\d.]+)", card):
            self.one_of(reading, "loss", said[1], losses(near, name))
            headed = re.search(
                r"Loss of the model ([\d.]+)|(?<=─ )Fréchet\D*([\d.]+)", reading.text
            )
            if headed and headed[1]:
                self.one_of(reading, "loss above the curve", headed[1], {said[1]})
        if said := re.search(r"helpers +(\d+) online", card):
            self.between(reading, "helpers", int(said[1]), helpers(name), OTHERS_S, 1)
        if said := re.search(r"in (\d+) version", card):
            mine = {v.version for v in near[-1].verdicts.values() if v.run == name} - {None}
            then = {v.version for v in near[0].verdicts.values() if v.run == name} - {None}
            true = len(then) <= int(said[1]) <= len(mine)
            self.holds(reading, "versions of mine", true, said[1], (len(then), len(mine)))

    def _task(self, reading: Reading) -> None:
        """A task that the coordinator has judged is in work no more."""
        said = re.search(r"● training +(\S+) · task (\d+)", reading.rows[1])
        if said:
            before = {v.task for v in self.window(reading, OWN_S)[0].verdicts.values()}
            true = int(said[2]) not in before
            self.holds(reading, "task in work", true, said[2], "judged before")

    def _verdict(self, reading: Reading, task: int, word: str, paid: str) -> None:
        state = WORDS.get(word, word)
        near = self.window(reading, OTHERS_S)
        known = [v for t in near for v in t.verdicts.values() if v.task == task]
        if not known:
            self.holds(reading, "verdict", False, f"task {task} {word}", "no such contribution")
            return
        if any(v.state == "merged" for v in known):  # accepted, and merged before we asked
            known = [*known, msgspec.structs.replace(known[-1], state="accepted")]
        self.one_of(reading, "verdict", state, {v.state for v in known})
        if paid:
            worth = {f"+{v.credits_micro / MICRO:,.2f}" for v in known}
            self.one_of(reading, "pay", paid, worth)

    def credits(self, reading: Reading) -> None:
        side = "\n".join(row[165:] for row in reading.rows)
        self._account(reading, side)
        if said := re.search(r"accepted +(\d+) of (\d+)", side):
            self.between(reading, "accepted", int(said[1]), lambda t: t.me.accepted, OWN_S)
        values = [re.search(rf"{name} +\+?([\d,]+\.\d\d)", side) for name in ("balance", "earned")]
        if all(values):
            self.agree(reading, "balance and earned", [_number(v[1]) for v in values if v])
        for task, word, paid in re.findall(
            r" (\d+)  [✓◌✗] (\w+(?: needed)?) +([\d.,]+|-) ", reading.text
        ):
            self._verdict(reading, int(task), word, "" if paid == "-" else f"+{paid}")

    def ranks(self, reading: Reading) -> None:
        row = re.search(
            rf"(\d+) +◆ {self.nickname} \(you\) +([\d,]+\.\d\d) .* (\d+) ", reading.text
        )
        if row:
            said = _number(row[2])
            self.between(
                reading, "earned", said, lambda t: t.me.earned_micro / MICRO, OTHERS_S, 0.006
            )
            self._rank(reading, int(row[1]))

    def listing(self, reading: Reading) -> None:
        near = self.window(reading, OTHERS_S)
        for name in near[-1].runs:
            row = next((r for r in reading.rows if re.match(rf"│ .{{3,8}}{name} ", r)), "")
            said = re.search(rf"{name} +\w+ +(\d+) +(?:\S+ )?([\d.]+|-) ", row)
            if said is None:
                continue
            self.between(reading, "helpers", int(said[1]), helpers(name), OTHERS_S, 1)
            self.one_of(reading, "loss", said[2], losses(near, name))


def helpers(run: str) -> Callable[[Truth], float]:
    """Return what reads the workers of a run from a truth."""
    return lambda truth: truth.runs[run].workers


def losses(near: Sequence[Truth], run: str) -> set[str]:
    """Return the losses of a run that were the newest at some moment of a window."""
    return set().union(*(truth.losses.get(run, set()) for truth in near))


def possible_ranks(before: Truth, after: Truth) -> range:
    """Return the ranks that an account may have had between two truths: credits only grow, and
    may have passed each other's in any order.
    """
    then = {row.nickname: row.earned_micro for row in before.leaders if not row.me}
    now = {row.nickname: row.earned_micro for row in after.leaders if not row.me}
    ahead = sum(then.get(name, 0) > after.me.earned_micro for name in now)
    perhaps = sum(micro > before.me.earned_micro for micro in now.values())
    return range(1 + ahead, 2 + perhaps)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


@dataclass
class Forecasts:
    """The credits an hour that the page of runs promised first, and those that came."""

    promised: dict[str, tuple[int, float]] = field(default_factory=dict)  # run -> tasks, an hour
    _seen: dict[int, tuple[str, float, float]] = field(default_factory=dict)  # run, credits, s
    _last_at: float = 0.0

    def hear(self, truth: Truth) -> None:
        """Note how long each new task of this machine took, waits included."""
        for number, verdict in sorted(truth.verdicts.items()):
            if number in self._seen:
                continue
            took = verdict.at - self._last_at if self._last_at else 0.0
            self._last_at = max(self._last_at, verdict.at)
            self._seen[number] = (verdict.run, verdict.credits_micro / MICRO, took)

    def read(self, reading: Reading, runs: Sequence[str]) -> None:
        """Note the first forecast that was measured."""
        for name in runs:
            said = re.search(rf"{name} .* ([\d.]+)( k)? credits/h", reading.text)
            if said and name not in self.promised and "~" not in said[0]:
                known = sum(run == name for run, _, _ in self._seen.values())
                self.promised[name] = (known, float(said[1]) * (1000 if said[2] else 1))

    def lines(self) -> Iterator[str]:
        for name, (known, promised) in sorted(self.promised.items()):
            mine = [(paid, took) for run, paid, took in list(self._seen.values()) if run == name]
            after = mine[known:]
            seconds = sum(took for _, took in after)
            if seconds:
                came = 3600 * sum(paid for paid, _ in after) / seconds
                yield (
                    f"forecast of {name}: {promised:.0f} credits an hour after {known} tasks, "
                    f"{came:.0f} came in {len(after)} tasks of {seconds:.0f} s: "
                    f"{promised / came - 1:+.0%}"
                )


@contextmanager
def at_work(directory: Path) -> Iterator[tuple[TmuxScreen, Api, str]]:
    """Start a coordinator, three runs, a volunteer without and one with a screen."""
    data = directory / "coordinator"
    for workload in WORKLOADS:
        asyncio.run(prepare(data, demo_run(workload, 2)))
    homes = {name: directory / name for name in ("ada", "ben")}
    log = (directory / "ben.log").open("w")
    with ExitStack() as stack:
        server = stack.enter_context(
            Process(data, "--port", "0", PYTHONPATH=ROOT, COORDINATOR_RATE_WORKER="off")
        )
        here = os.environ | {"PYTHONPATH": ROOT}
        for name, home in homes.items():
            here["VOLUNTEER_HOME"] = str(home)
            joining = [*VOLUNTEER, "join", server.link, "--name", name]
            subprocess.run(joining, env=here, check=True, capture_output=True)
        api = Api(homes["ada"])
        ben = subprocess.Popen([*VOLUNTEER, "--no-ui"], env=here, stdout=log, stderr=log)
        stack.callback(ben.wait)
        stack.callback(ben.kill)
        screen = stack.enter_context(
            TmuxScreen(VOLUNTEER, 200, 60, VOLUNTEER_HOME=str(homes["ada"]), PYTHONPATH=ROOT)
        )
        for words in ("What may volunteer use", "enter: next", "Which run do", "ENTER  to start"):
            screen.see(words, 120)
            screen.press("Enter")
        screen.see("1 Home")
        yield screen, api, "ada"


def watch(directory: Path, minutes: float) -> int:
    """Read and compare for so many minutes. Return the number of contradictions."""
    with at_work(directory) as (screen, api, nickname):
        judge, forecasts = Judge(nickname), Forecasts()
        waiting: list[Reading] = []
        until, page, left = time.monotonic() + 60 * minutes, 0, PAGES[0][1]
        while time.monotonic() < until:
            began = time.monotonic()
            truth = api.truth()
            if not judge.history or truth.at - judge.history[-1].at > HALTED_S:
                judge.halted(truth.at)  # the whole machine stood still for somebody's measurement
                waiting = []
            judge.history.append(truth)
            forecasts.hear(judge.history[-1])
            for reading in waiting:
                judge.judge(reading)
                if reading.page == "2":
                    forecasts.read(reading, list(judge.history[-1].runs))
            rows = _whole(screen)
            waiting = [Reading(at=time.time(), rows=rows)]
            left -= 1
            if left == 0:
                page = (page + 1) % len(PAGES)
                left = PAGES[page][1]
                screen.press(PAGES[page][0])
            time.sleep(max(0.05, 1.0 - (time.monotonic() - began)))
        _report(judge, forecasts, directory)
    return len(judge.found)


def _whole(screen: TmuxScreen) -> tuple[str, ...]:
    """Read a frame that is not being drawn: two readings in a row that are the same. A writer that
    waits for a core leaves half a frame for some hundredths of a second.
    """
    rows = screen.rows()
    for _ in range(FRAME_TRIES):
        time.sleep(HALF_FRAME_S)
        again = screen.rows()
        if again == rows:
            break
        rows = again
    return tuple(rows)


def _report(judge: Judge, forecasts: Forecasts, directory: Path) -> None:
    last = judge.history[-1]
    for line in forecasts.lines():
        print(line)
    print(f"runs: { ({name: info.version for name, info in last.runs.items()}) }")
    print(f"account: {last.me.accepted} accepted, {last.me.merged} merged")
    print(f"compared: {json.dumps(dict(judge.compared.most_common()))}")
    total = sum(judge.compared.values())
    print(f"{len(judge.found)} contradictions in {total} comparisons", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a folder to keep; else a temporary one")
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.out or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        return 1 if watch(directory, options.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
