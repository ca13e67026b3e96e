"""Screens of one run, one volunteer, one task, with the actions on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Static

from coordinator.top.dialogs import Confirm, Confirmation
from coordinator.top.table_view import TableView
from coordinator.top.tables import Kind, MonitorRow, MonitorTable, age, count, loss
from shared.clock import Clock
from shared.text import credit, left, printable

ROWS_MAX = 200

Facts = Sequence[tuple[str, str]]


def facts_text(facts: Facts) -> Text:
    """Return facts as lines, names in one column; values are text of others, never markup."""
    shown = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in shown), default=0)
    text = Text()
    for name, value in shown:
        text.append(left(name, width) + "  ", style="dim")
        text.append(value + "\n")
    text.rstrip()
    return text


class Detail(Screen[None]):
    """Screen of one subject: facts above a table. `command` is repeated while it is open."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back")]
    DEFAULT_CSS = """
    Detail .facts { height: auto; margin: 0 0 1 0; }
    Detail .heading { text-style: bold; color: $primary; height: 1; }
    """

    class Act(Message):
        """Message: an action was confirmed; run this command."""

        def __init__(self, command: str, request: dict[str, Any], done: str) -> None:
            super().__init__()
            self.command = command
            self.request = request
            self.done = done

    def __init__(self, key: str, clock: Clock) -> None:
        super().__init__()
        self.key = key
        self._clock = clock
        self._found: Any = None

    @property
    @abstractmethod
    def asks(self) -> tuple[str, dict[str, Any]]:
        """Return the command that reads the subject, and its request."""

    def compose(self) -> ComposeResult:
        yield Static(printable(self.key, 80), classes="heading", markup=False)
        yield Static("", id="old", markup=False)
        with VerticalScroll(id="page"):
            yield Static("asking ...", classes="facts", markup=False)
            yield TableView(id="history")
        yield Footer()

    def show(self, found: Any) -> None:
        """Paint the details that were read."""
        first, self._found = self._found is None, found
        facts, table = self.described(found, self._clock.now())
        self.query_one(".facts", Static).update(facts_text(facts))
        view = self.query_one(TableView)
        view.show(table)
        if first:
            view.take_focus()

    @abstractmethod
    def described(self, found: Any, now: float) -> tuple[Facts, MonitorTable]:
        """Return its facts and its table."""

    def _confirm(self, question: str, command: str, done: str, **request: Any) -> None:
        def confirmed(answer: Confirmation | None) -> None:
            if answer is not None:
                asked = request | {"reason": answer.reason}
                if "to" in request:
                    asked["to"] = int(answer.value)
                self.post_message(self.Act(command, asked, done))

        to = str(request["to"]) if "to" in request else ""
        self.app.push_screen(Confirm(question, "To version:" if to else "", to), confirmed)


def _table(
    title: str, names: str, rows: Sequence[MonitorRow], empty: str, numbers: str
) -> MonitorTable:
    """Return a table whose columns are named in one string; the columns in `numbers` are aligned
    right.
    """
    columns = tuple(names.split(","))
    right = {*numbers.split(",")}
    return MonitorTable(title, columns, tuple(n in right for n in columns), tuple(rows), empty)


class RunDetail(Detail):
    """A run with its newest versions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "pause/resume"),
        Binding("b", "back_to", "roll back"),
    ]

    @property
    def asks(self) -> tuple[str, dict[str, Any]]:
        return "run.show", {"name": self.key}

    def described(self, found: Any, now: float) -> tuple[Facts, MonitorTable]:
        run = found.run
        facts = [
            ("state", f"{run.state}, {run.workload}, {count(run.parameters)} parameters"),
            ("about", printable(run.description, 200)),
            ("dataset", printable(run.dataset, 80)),
            ("version", "-" if run.version < 0 else f"{run.version}, {count(run.steps)} steps"),
            ("loss", f"{loss(run.loss_first)} at first, {loss(run.loss)} now"),
            ("workers", count(run.workers)),
            ("merge", f"{found.rule}, {found.codec} up, {found.downlink} down"),
            ("rollback", f"proposed: {found.heal.command}" if found.heal else ""),
        ]
        rows = [
            MonitorRow(
                (
                    str(v.version),
                    v.kind,
                    age(v.created_at, now),
                    str(v.contributions),
                    loss(v.loss),
                    v.evaluation + (", best" if v.best else ""),
                )
            )
            for v in reversed(found.versions)
        ]
        names = "version,kind,ago,updates,loss,evaluation"
        numbers = "version,ago,updates,loss"
        return facts, _table("Newest versions", names, rows, "It was not started yet", numbers)

    def action_pause(self) -> None:
        if self._found is None:
            return
        run = self._found.run
        if run.state == "paused":
            question, command, done = f'Resume "{run.name}"?', "run.resume", "is running"
        else:
            question = f'Pause "{run.name}"? Tasks in work are finished and merged.'
            command, done = "run.pause", "is paused"
        self._confirm(question, command, f"{run.name} {done}", name=run.name)

    def action_back_to(self) -> None:
        if self._found is None or self._found.run.version < 1:
            return
        run = self._found.run
        chosen = self.query_one(TableView).chosen
        to = int(chosen.cells[0]) if chosen is not None else run.version
        self._confirm(
            f'Roll "{run.name}" back? An old version becomes the newest; credits stay.',
            "run.rollback",
            f"{run.name} was rolled back",
            name=run.name,
            to=min(to, run.version - 1),
        )


class VolunteerDetail(Detail):
    """A volunteer with its machines."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("x", "ban", "ban/let in")]

    @property
    def asks(self) -> tuple[str, dict[str, Any]]:
        return "volunteer.show", {"name": self.key}

    def described(self, found: Any, now: float) -> tuple[Facts, MonitorTable]:
        person, work = found.person, found.person.work
        refused = ", ".join(f"{n} {printable(why, 24)}" for why, n in work.rejected.items())
        facts = [
            ("state", ", ".join(t for t in (person.state, person.standing) if t)),
            ("label", printable(person.label, 80)),
            ("trust", f"{person.trust:.2f}, {count(person.proofs)} draws passed"),
            ("suspended", printable(person.reason, 200)),
            ("seen", f"first {age(person.first_seen, now)} ago, last {age(person.last_seen, now)}"),
            ("work", f"{count(work.accepted)} good, {count(work.merged)} merged"),
            ("refused", refused or "none"),
            ("credits", f"{credit(person.earned_micro)}, {credit(person.escrow_micro)} in escrow"),
        ]
        rows = [
            MonitorRow(
                (
                    printable(m.hostname, 32) or m.worker_id[:8],
                    m.state,
                    age(m.last_seen, now),
                    printable(m.device, 16) or "-",
                    "-" if m.task is None else str(m.task),
                ),
                "" if m.task is None else "task",
                "" if m.task is None else str(m.task),
            )
            for m in found.machines[:ROWS_MAX]
        ]
        return facts, _table(
            "Machines", "machine,state,seen,device,task", rows, "None", "seen,task"
        )

    def action_ban(self) -> None:
        if self._found is None:
            return
        person = self._found.person
        name = printable(person.nickname, 64)
        if person.state == "banned":
            self._confirm(
                f"Let {name} in again?", "volunteer.unban", f"{name} is in", name=person.nickname
            )
        else:
            self._confirm(
                f"Ban {name}? It gets no work from now on; its credits stay.",
                "volunteer.ban",
                f"{name} is banned",
                name=person.nickname,
            )


class TaskDetail(Detail):
    """A task with its history."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("u", "requeue", "queue again")]

    @property
    def asks(self) -> tuple[str, dict[str, Any]]:
        return "task.show", {"id": int(self.key)}

    def described(self, found: Any, now: float) -> tuple[Facts, MonitorTable]:
        at = " on ".join(t for t in (found.volunteer, found.worker) if t)
        facts = [
            ("task", f"{found.id} of {printable(found.run, 64)}: {found.kind}, {found.state}"),
            ("samples", f"{found.start}-{found.stop} of pass {found.pass_no}, {found.steps} steps"),
            ("attempt", f"{found.attempt}, {found.failures} failures, {found.timeouts} timeouts"),
            ("with", printable(at, 100)),
            ("base", "" if found.base_version is None else f"version {found.base_version}"),
        ]
        rows = [
            MonitorRow(
                (
                    age(e.at, now),
                    e.what,
                    "-" if e.attempt is None else str(e.attempt),
                    printable(e.volunteer, 32),
                    printable(e.text, 120),
                )
            )
            for e in reversed(found.events[-ROWS_MAX:])
        ]
        names = "ago,what,attempt,volunteer,detail"
        return facts, _table("History", names, rows, "Nothing happened yet", "ago,attempt")

    def action_requeue(self) -> None:
        if self._found is None:
            return
        if self._found.state != "discarded":
            self.notify("only a task that failed for good is queued again", markup=False)
            return
        number = self._found.id
        self._confirm(
            f"Queue task {number} again, with no failures counted?",
            "task.requeue",
            f"task {number} waits again",
            ids=(number,),
        )


KINDS: dict[Kind, type[Detail]] = {
    "run": RunDetail,
    "volunteer": VolunteerDetail,
    "task": TaskDetail,
}
