"""Settings page: every setting with its help, source, and the time from which a change applies."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Input
from typing_extensions import override

from shared.errors import VolunteerError
from shared.settings import SettingRow
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _
from volunteer.settings import settings
from volunteer.tui import keys
from volunteer.tui.query_page import PageQuery, QueryPage, QueryReply
from volunteer.tui.setting_labels import SOURCES, applies_from, choices, label, value_words
from volunteer.tui.text import Line, left, paragraph
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.search_box import Finder
from volunteer.tui.widgets.setting_list import SettingList

NAME_CELLS = 8
UNDO_MAX = 50
DISPLAY_SETTINGS = frozenset({"theme", "language", "ascii"})  # fields of `Look`
# Sources that win over config.toml.
OVERRULED = {"flag": N_("the command line"), "environment": N_("the environment")}


class SettingsPage(QueryPage):
    """Settings page: the list of settings, and the help of the setting under the cursor."""

    NAME = "settings"
    AUTO_FOCUS = "Listing"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="enter",
            action="change",
            short=N_("change"),
            help=N_("Change the setting under the cursor."),
            rank=33,
        ),
        keys.KeyCommand(
            key="delete,backspace",
            action="default",
            short=N_("reset"),
            help=N_("Reset the setting under the cursor to its default."),
            rank=36,
        ),
        keys.KeyCommand(
            key="u",
            action="undo",
            short=N_("undo"),
            help=N_("Take back the last change made on this page; again: the one before."),
            rank=34,
        ),
        keys.KeyCommand(
            key="slash",
            action="search",
            short=N_("search"),
            help=N_("Show only settings that hold a text."),
            rank=35,
        ),
    )
    CSS = """
    SettingsPage {
        #columns { height: 1fr; }
        #about { width: 46; }
        &.-normal, &.-narrow, &.-tiny {
            #columns { layout: vertical; }
            #about { width: 1fr; height: 9; }
        }
        &.-short #about { height: 5; }
        &.-low #about, &.-flat #about { display: none; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._undo: deque[dict[str, object]] = deque(maxlen=UNDO_MAX)

    @override
    def body(self) -> ComposeResult:
        with Vertical():
            yield Finder(id="finder")
            with Horizontal(id="columns"):
                yield SettingList(self.rows, empty=self._empty)
                yield FunctionPanel(self._about, title=self._title, id="about", classes="card")

    @override
    def queries(self) -> dict[str, PageQuery]:
        return {"settings": lambda control: control.do(commands.GetSettings())}

    def rows(self) -> tuple[SettingRow, ...]:
        reply: QueryReply[tuple[SettingRow, ...]] = self.reply("settings")
        return reply.value or ()

    def _empty(self) -> str:
        return self.reply("settings").error or _("reading the settings")

    @property
    def _list(self) -> SettingList:
        return self.query_one(SettingList)

    def _title(self, scene: Scene) -> tuple[str, str]:
        row = self._list.chosen
        return (label(row), row.name) if row else (_("About"), "")

    def _about(self, scene: Scene, width: int, height: int) -> list[Line]:
        row = self._list.chosen
        if row is None:
            sentence = _("enter changes the setting under the cursor; del resets it")
            return paragraph(sentence, width, height, "dim")
        return about_lines(row, width, height)

    @on(SettingList.Moved)
    def _moved(self) -> None:
        self.query_one("#about", FunctionPanel).draw()

    def action_change(self) -> None:
        self._list.change()

    def action_default(self) -> None:
        self._list.reset()

    @on(Input.Changed, "#finder")
    def _searched(self) -> None:
        self._list.needle = self.needle

    def _values(self) -> dict[str, object]:
        return {row.name: row.value for row in self.rows()}

    def action_undo(self) -> None:
        if not self._undo:
            self.volunteer.tell(_("nothing was changed on this page since it was opened"))
            return
        self.run_worker(self._take_back(self._undo.pop()), group="save")

    async def _take_back(self, old_values: dict[str, object]) -> None:
        if not await self._save(old_values):
            self._undo.append(old_values)
            return
        names = ", ".join(label(row) for row in self.rows() if row.name in old_values)
        self.volunteer.tell(_("taken back: {said}", said=names))

    async def _change(self, changes: dict[str, object]) -> None:
        """Save settings, and keep the old values for `action_undo`."""
        values = self._values()
        old_values = {name: values[name] for name in changes if name in values}
        if await self._save(changes) and old_values:
            self._undo.append(old_values)

    @on(SettingList.Changed)
    def _changed(self, event: SettingList.Changed) -> None:
        self.run_worker(self._change({event.row.name: event.value}), group="save")

    async def _save(self, changes: dict[str, Any]) -> bool:
        """Save settings; return False if that fails."""
        control = self.volunteer.control
        if control is None:
            return False
        try:
            if "runs" in changes:
                await control.do(commands.ChooseRuns(runs=tuple(changes["runs"])))
            else:
                await control.do(commands.SetSettings(changes=changes))
        except VolunteerError as error:
            self.volunteer.tell(error.message, "error")
            return False
        for name, value in changes.items():
            self._apply(name, value)
        sources = {row.source for row in self.rows() if row.name in changes}
        for source in sources & OVERRULED.keys():
            sentence = _(
                "saved, but {source} sets another value and wins", source=_(OVERRULED[source])
            )
            self.volunteer.tell(sentence, "warning")
        self.query_again()
        return True

    def _apply(self, name: str, value: Any) -> None:
        """Apply a display setting at once."""
        if name in DISPLAY_SETTINGS:
            self.volunteer.appearance.change(name, value)


def about_lines(row: SettingRow, cells: int, height: int) -> list[Line]:
    """Return the details of one setting."""
    lines: list[Line] = paragraph(_(row.help), cells, 4)
    lines.append(_fact(_("value"), value_words(row), "value"))
    options = choices(row)
    if options and row.type != "bool":
        lines.append(_fact(_("choose"), ", ".join(options)))
    listed = row.name in settings.TABLE.names  # False for a setting of a newer agent
    standard = msgspec.structs.replace(
        row, value=settings.TABLE.default(row.name) if listed else row.value
    )
    lines.append(_fact(_("default"), value_words(standard)))
    lines.append(_fact(_("set by"), _(SOURCES.get(row.source, row.source))))
    lines.append(_fact(_("applies"), applies_from(row)))
    if height > len(lines) + 2:
        lines += [(), _fact(_("also"), f"--set {row.name}=...")]
        lines.append(_fact("", f"VOLUNTEER_{row.name.upper()}"))
    return lines[:height]


def _fact(name: str, text: str, role: str = "text") -> Line:
    return ((left(name, NAME_CELLS), "dim"), (text, role))
