"""Dialog before quitting with a running task: finish it, save it, or release it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Click
from textual.screen import ModalScreen
from typing_extensions import override

from volunteer.control.commands import How
from volunteer.control.status import TaskStatus
from volunteer.i18n.catalogue import N_, _, ngettext
from volunteer.i18n.formats import credit
from volunteer.tui.agent_view import AgentView
from volunteer.tui.text import Glyphs, Line, countdown, fit, left, percent
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.task_card import stage_share

TITLE_CELLS = 10
CHOICES: tuple[tuple[How, str, str], ...] = (
    ("finish", "f", N_("Finish")),
    ("save", "s", N_("Save")),
    ("release", "g", N_("Give back")),
)


def in_hand(view: AgentView) -> tuple[TaskStatus, ...]:
    """Return the tasks that the dialog asks about; prefetched tasks are released in any case."""
    working = tuple(t for t in view.status.tasks if t.phase not in ("claimed", "fetch"))
    return working or view.status.tasks


def consequences(view: AgentView) -> dict[How, str]:
    """Return a sentence for each way to quit: its effect on the running tasks."""
    tasks = in_hand(view)
    paid = sum(task.price_micro for task in tasks)
    longest = max((t.eta_s for t in tasks if t.eta_s is not None), default=None)
    time = (
        _("in about {time}", time=countdown(longest))
        if longest is not None
        else _("when it is done")
    )
    return {
        "finish": ngettext(
            "complete it, quit {time}, earn {paid} credits",
            "complete them, quit {time}, earn {paid} credits",
            len(tasks),
            time=time,
            paid=credit(paid),
        ),
        "save": _("quit now; resume at the next start if still reserved"),
        "release": _("quit now; another worker redoes it, your part is lost"),
    }


class LeaveChoices(Panel):
    """List of the ways to quit, with one marked."""

    def __init__(self) -> None:
        super().__init__(id="choices")
        self.at = 0

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return choice_lines(scene.view, self.at, width, scene.glyphs)

    def on_click(self, event: Click) -> None:
        if 0 <= event.y - 2 < 3 * len(CHOICES):
            cast("Quit", self.screen).action_leave(CHOICES[(event.y - 2) // 3][0])


def choice_lines(view: AgentView, at: int, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return the lines of the dialog: the running tasks, three rows for each way to quit, and the
    key to stay.
    """
    tasks = in_hand(view)
    if len(tasks) == 1:
        sentence = _(
            "Task {task} of {run} is {share} done.",
            task=tasks[0].task,
            run=tasks[0].run,
            share=percent(stage_share(tasks[0])),
        )
    else:
        sentence = ngettext("{n} task is in hand.", "{n} tasks are in hand.", len(tasks))
    lines: list[Line] = [((fit(sentence, cells, glyphs.ellipsis), "text"),), ()]
    effects = consequences(view)
    for number, (how, key, title) in enumerate(CHOICES):
        current = number == at
        pointer = f"{glyphs.run} " if current else "  "
        role = "here" if current else "value"
        lines.append(
            ((pointer, "info"), (f" {key} ", "key"), (f" {left(_(title), TITLE_CELLS)}", role))
        )
        lines.append(((fit(f"      {effects[how]}", cells, glyphs.ellipsis), "dim"),))
        lines.append(())
    lines.append((("   " + _("esc") + " ", "key"), (_("stay"), "dim")))
    return lines


class Quit(ModalScreen[How | None]):
    """Dialog that is dismissed with the way to quit, or None to stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,q", "stay", "stay", show=False),
        Binding("up,k,shift+tab", "move(-1)", "up", show=False),
        Binding("down,j,tab", "move(1)", "down", show=False),
        Binding("enter,space", "choose", "choose", show=False),
        *(Binding(key, f"leave('{how}')", title, show=False) for how, key, title in CHOICES),
    ]

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._scene = scene

    @override
    def compose(self) -> ComposeResult:
        with Vertical(id="quit", classes="card dialog") as dialog:
            dialog.border_title = _("Leave?")
            yield LeaveChoices()

    def on_mount(self) -> None:
        self.call_after_refresh(lambda: self._choices.show(self._scene, at_once=True))

    @property
    def _choices(self) -> LeaveChoices:
        return self.query_one(LeaveChoices)

    def action_move(self, by: int) -> None:
        self._choices.at = (self._choices.at + by) % len(CHOICES)
        self._choices.draw()

    def action_choose(self) -> None:
        self.action_leave(CHOICES[self._choices.at][0])

    def action_leave(self, how: How) -> None:
        self.dismiss(how)

    def action_stay(self) -> None:
        self.dismiss(None)
