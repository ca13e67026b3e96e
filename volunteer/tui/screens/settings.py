"""Settings page: every setting with its help, source, and the time from which a change applies."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal

from shared.errors import VolunteerError
from volunteer.control.commands import SettingRow
from volunteer.settings import settings
from volunteer.tui import keys
from volunteer.tui.query_page import Answer, PageQuery, QueryPage
from volunteer.tui.setting_labels import SOURCES, choices, holds, label, shown
from volunteer.tui.text import Line, left, wrap
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.setting_list import SettingList

NAME_CELLS = 8
LOOKS = frozenset({"theme", "ascii", "animations", "keys", "power_price"})  # fields of `Look`
OVERRULED = {"flag": "the command line", "environment": "the environment"}


class SettingsPage(QueryPage):
    """Page of the settings."""

    NAME = "settings"
    AUTO_FOCUS = "Listing"
    ACTIONS: ClassVar[tuple[keys.Command, ...]] = (
        keys.Command(
            id="change",
            key="enter",
            action="change",
            short="change",
            help="Change the setting under the cursor.",
            place="footer",
            rank=33,
        ),
        keys.Command(
            id="default",
            key="delete,backspace",
            action="default",
            short="reset",
            help="Reset the setting under the cursor to its default.",
            place="footer",
            rank=36,
        ),
    )
    CSS = """
    SettingsPage {
        #about { width: 46; }
        &.-normal, &.-narrow, &.-tiny {
            #columns { layout: vertical; }
            #about { width: 1fr; height: 9; }
        }
        &.-short #about { height: 5; }
        &.-flat #about { display: none; }
    }
    """

    def body(self) -> ComposeResult:
        with Horizontal(id="columns"):
            yield SettingList(self.rows, empty=self._empty)
            yield FunctionPanel(self._about, title=self._title, id="about", classes="card")

    def queries(self) -> dict[str, PageQuery]:
        return {"settings": lambda control: control.settings()}

    def rows(self) -> tuple[SettingRow, ...]:
        answer: Answer[tuple[SettingRow, ...]] = self.answer("settings")
        return answer.value or ()

    def _empty(self) -> str:
        return self.answer("settings").error or "reading the settings"

    @property
    def _list(self) -> SettingList:
        return self.query_one(SettingList)

    def _title(self, scene: Scene) -> tuple[str, str]:
        row = self._list.chosen
        return (label(row), row.name) if row else ("About", "")

    def _about(self, scene: Scene, width: int, height: int) -> list[Line]:
        row = self._list.chosen
        if row is None:
            said = "enter changes the setting under the cursor; del resets it"
            return [((text, "dim"),) for text in wrap(said, width, height)]
        return about_lines(row, width, height)

    @on(SettingList.Moved)
    def _moved(self) -> None:
        self.query_one("#about", FunctionPanel).draw()

    def action_change(self) -> None:
        self._list.change()

    def action_default(self) -> None:
        self._list.set_back()

    @on(SettingList.Changed)
    def _changed(self, event: SettingList.Changed) -> None:
        self.run_worker(self._save(event.row, event.value), group="save")

    async def _save(self, row: SettingRow, value: Any) -> None:
        control = self.volunteer.control
        if control is None:
            return
        try:
            if row.name == "runs":
                await control.choose_runs(tuple(value))
            else:
                await control.set_settings({row.name: value})
        except VolunteerError as error:
            self.volunteer.tell(error.message, "error")
            return
        self._apply(row.name, value)
        if row.source in OVERRULED:
            said = f"saved, but {OVERRULED[row.source]} sets another value and wins"
            self.volunteer.tell(said, "warning")
        self.again()

    def _apply(self, name: str, value: Any) -> None:
        """Apply a display setting at once."""
        if name in LOOKS:
            self.volunteer.appearance.change(name, value)


def about_lines(row: SettingRow, cells: int, height: int) -> list[Line]:
    """Return all about one setting."""
    lines: list[Line] = [((text, "text"),) for text in wrap(row.help, cells, 4)]
    lines.append(_fact("value", shown(row), "value"))
    options = choices(row)
    if options and row.type != "bool":
        lines.append(_fact("choose", ", ".join(options)))
    known = row.name in settings.names()  # not one of a newer agent
    standard = msgspec.structs.replace(
        row, value=settings.default(row.name) if known else row.value
    )
    lines.append(_fact("default", shown(standard)))
    lines.append(_fact("set by", SOURCES.get(row.source, row.source)))
    lines.append(_fact("applies", holds(row)))
    if height > len(lines) + 2:
        lines += [(), _fact("also", f"--set {row.name}=...")]
        lines.append(_fact("", f"VOLUNTEER_{row.name.upper()}"))
    return lines[:height]


def _fact(name: str, text: str, role: str = "text") -> Line:
    return ((left(name, NAME_CELLS), "dim"), (text, role))
