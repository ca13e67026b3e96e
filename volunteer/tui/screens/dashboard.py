"""Dashboard: the current work of this machine and its results.

The size of the terminal, in cells, decides which cards are visible. From 116 x 35 on, all cards; at
80 x 24, the task, the curves and one group of other cards; at 60 x 16, the task and one card.
Smaller screens show one block of lines, with one card from 14 rows on; below six rows the block
stands alone, without tabs and keys.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from typing_extensions import override

from volunteer.i18n.catalogue import N_
from volunteer.tui import keys
from volunteer.tui.page import Page
from volunteer.tui.screens import run_keys
from volunteer.tui.widgets.brief_state import Brief
from volunteer.tui.widgets.cards import CreditsCard, DeviceCard, RunCard
from volunteer.tui.widgets.loss_plots import ModelPlot, TaskPlot
from volunteer.tui.widgets.panel import panels
from volunteer.tui.widgets.recent_work import Contributions, SampleCard
from volunteer.tui.widgets.task_card import TaskCard

# Least sizes for more cards. Heights are the body's: three rows less than the terminal's.
WIDE, TALL = 116, 32
NORMAL, MIDDLE = 80, 19
NARROW, SHORT = 60, 11
RUN_CARD_TOO = 23  # least height for the run below the credits
BRIEF_ROWS = 8


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Visible cards, and the rows of the task and of the lowest cards (None: all remaining
    rows).
    """

    cards: frozenset[str]
    task: int = 6
    low: int | None = 7
    turns: int = 1  # number of groups that `v` goes through


# Cards shown in turn where only one fits next to the task.
IN_TURN: tuple[tuple[str, ...], ...] = (
    ("task-curve",),
    ("model-curve",),
    ("contributions",),
    ("low-credits",),
    ("sample",),
    ("low-device",),
    ("low-run",),
)


def arrange(width: int, height: int, turn: int) -> Arrangement:
    """Return the arrangement for a body of this size after `turn` presses of `v`."""
    if height < SHORT:
        return Arrangement(cards=frozenset({"brief"}), low=None)
    if width < NARROW:
        return _turned(("brief",), IN_TURN, turn, low=None)
    if height < MIDDLE:
        screens = (("task-curve", "model-curve"), *IN_TURN[2:]) if width >= NORMAL else IN_TURN
        return _turned(("task",), screens, turn, low=None)
    curves = ("task", "task-curve", "model-curve")
    if width < NORMAL:
        groups = (*IN_TURN[2:3], *IN_TURN[1:2], *IN_TURN[3:])
        return _turned(curves[:2], groups, turn, low=7 if height < 24 else 10)
    if width < WIDE:
        groups = (("contributions", "low-credits"), ("sample",), ("low-device", "low-run"))
        return _turned(curves, groups, turn, low=6 if height < 24 else 10)
    if height < TALL:
        left = ("device", "credits", "run") if height >= RUN_CARD_TOO else ("device", "credits")
        groups = (("contributions",), ("sample",), ("low-run",))[: 2 if "run" in left else 3]
        return _turned((*curves, *left), groups, turn, low=7)
    names = (*curves, "device", "credits", "run", "contributions", "sample")
    # the lowest row takes a third of a screen taller than usual: two pictures need the height
    return Arrangement(cards=frozenset(names), task=8, low=max(10, height // 3))


def _turned(
    top: tuple[str, ...], groups: tuple[tuple[str, ...], ...], turn: int, *, low: int | None
) -> Arrangement:
    """Return the cards of `top` and the group whose turn it is.

    A sample replaces the curves too, because four rows hold no picture, and of a text only one
    line.
    """
    group = groups[turn % len(groups)]
    if group == ("sample",):
        top, low = tuple(card for card in top if not card.endswith("-curve")), None
    return Arrangement(cards=frozenset((*top, *group)), low=low, turns=len(groups))


class Dashboard(Page):
    """Page with the device, the task, the credits, the run and the curves."""

    NAME = "dashboard"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="v",
            action="turn",
            short=N_("view"),
            help=N_("Show the next cards where there is no room for all."),
            rank=25,
        ),
        keys.KeyCommand(
            key="d",
            action="device",
            short=N_("next device"),
            help=N_("Show the task of the next device."),
        ),
        *run_keys.SHARED,
    )

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self._turns = 1

    @override
    def body(self) -> ComposeResult:
        yield Brief(id="brief")
        with Horizontal(id="cards"):
            with Vertical(id="left"):
                yield DeviceCard(id="device", classes="card")
                yield CreditsCard(id="credits", classes="card")
                yield RunCard(id="run", classes="card")
            with Vertical(id="main"):
                yield TaskCard(id="task", classes="card")
                with Horizontal(id="curves"):
                    yield TaskPlot(id="task-curve", classes="card curve")
                    yield ModelPlot(id="model-curve", classes="card curve")
                with Horizontal(id="low"):
                    yield Contributions(id="contributions", classes="card")
                    yield SampleCard(id="sample", classes="card")
                    yield DeviceCard(id="low-device", classes="card")
                    yield CreditsCard(id="low-credits", classes="card")
                    yield RunCard(id="low-run", classes="card")

    @override
    def on_mount(self) -> None:
        self._arrange(self.app.size.width, self.app.size.height)
        super().on_mount()

    def on_resize(self, event: Resize) -> None:
        self._arrange(event.size.width, event.size.height)

    def _arrange(self, width: int, height: int) -> None:
        arrangement = arrange(width, height - 3, self.turn)
        self._turns = arrangement.turns
        for panel in panels(self.query_one("#body")):
            panel.display = panel.id in arrangement.cards
        self.set_class("brief" in arrangement.cards, "brief")
        for name in ("left", "curves", "low", "main", "cards"):
            box = self.query_one(f"#{name}")
            box.display = any(child.display for child in box.children)
        alone = arrangement.cards == {"brief"}
        self.query_one("#brief").styles.height = "1fr" if alone else BRIEF_ROWS
        self.query_one("#task").styles.height = arrangement.task
        self.query_one("#low").styles.height = "1fr" if arrangement.low is None else arrangement.low
        credits_last = "run" not in arrangement.cards
        self.query_one("#credits").styles.height = "1fr" if credits_last else 9

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return True if an action would have an effect now."""
        if action == "turn":
            return self._turns > 1
        if action == "device":
            return len(self.volunteer.view.devices()) > 1
        return super().check_action(action, parameters)

    def action_turn(self) -> None:
        """Show the next group of cards."""
        self.turn += 1
        self._arrange(self.app.size.width, self.app.size.height)
        self.call_after_refresh(lambda: self.show(self.volunteer.scene(), at_once=True))

    def action_device(self) -> None:
        self.volunteer.next_device()

    def action_samples(self) -> None:
        run_keys.show_samples(self.volunteer, self.volunteer.view.run())

    def action_model(self) -> None:
        view = self.volunteer.view
        run_keys.open_model(self.volunteer, view.info(view.run()))

    def action_web(self) -> None:
        run_keys.show_page(self.volunteer, self.volunteer.view.run())
