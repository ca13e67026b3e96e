"""Dialogs of the monitor: confirm an action with its reason, go to a thing by name, the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

REASON_CHARS_MAX = 300
NAME_CHARS_MAX = 128

KEYS = """\
1 2 3 4 5     pages: now, workers, work, tasks, servers; tab goes on
up down       choose a row; enter opens a run, a volunteer, a task
g             go to a run, a volunteer or the number of a task
p             on a run: pause it, or resume it
b             on a run: roll back to a version
x             on a volunteer: ban it, or let it in again
u             on a task that failed for good: queue it again
t             light or dark
esc           back
q             quit; nothing stops but this monitor

Every action asks for a reason, which stands in the record.

pushed        samples an hour that volunteers handed in
pulled        samples an hour that went into versions
merging       updates that wait for the next merge
stale         versions that came between the base of an update and its merge
gflop/s       speed of a machine's best device, measured by itself
good, refused, failed   of the newest 2,000 contributions of the last hour
! look   ✗ bad          the verdict names the worst, with what to do"""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A confirmed action: the reason, and the value that was asked for."""

    reason: str
    value: str = ""


class _Dialog(ModalScreen[Confirmation | None]):
    """Dialog in the middle; esc closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "back")]
    DEFAULT_CSS = """
    _Dialog { align: center middle; }
    _Dialog > Vertical, _Dialog > VerticalScroll {
        width: 76; max-width: 96%; height: auto; max-height: 90%;
        border: round $primary; padding: 0 1; background: $surface;
    }
    _Dialog .question { text-style: bold; height: auto; }
    _Dialog .wrong { color: $error; height: auto; }
    _Dialog Input, _Dialog Input:focus {
        border: none; height: 1; background: $boost; margin: 0; padding: 0;
    }
    """

    def action_leave(self) -> None:
        self.dismiss(None)


class Confirm(_Dialog):
    """Confirmation of an action; it needs a reason, and a value where `asks` names one."""

    def __init__(self, question: str, asks: str = "", value: str = "") -> None:
        super().__init__()
        self._question = question
        self._asks = asks
        self._value = value

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._question, classes="question", markup=False)
            if self._asks:
                yield Static(self._asks, markup=False)
                yield Input(self._value, id="value", max_length=NAME_CHARS_MAX)
            yield Static("Reason, for the record:", markup=False)
            yield Input(id="reason", max_length=REASON_CHARS_MAX)
            yield Static("enter does it, esc goes back", markup=False)
            yield Static("", classes="wrong", markup=False)

    def on_mount(self) -> None:
        self.query_one("#value" if self._asks else "#reason", Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        value = self.query_one("#value", Input).value.strip() if self._asks else ""
        reason = self.query_one("#reason", Input).value.strip()
        if self._asks and not value.isdecimal():
            self._refuse("this needs a number", "#value")
        elif not reason:
            self._refuse("say why: the record keeps it", "#reason")
        else:
            self.dismiss(Confirmation(reason, value))

    def _refuse(self, why: str, field: str) -> None:
        self.query_one(".wrong", Static).update(why)
        self.query_one(field, Input).focus()


class GoTo(_Dialog):
    """Dialog for the name of a run or a volunteer, or the number of a task."""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("Run, volunteer, or number of a task:", classes="question", markup=False)
            yield Input(id="value", max_length=NAME_CHARS_MAX)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(Confirmation("", event.value.strip()) if event.value.strip() else None)


class HelpDialog(_Dialog):
    """All keys, and the words of the tables."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "leave", "back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(KEYS, markup=False)
