"""Third step: the few settings that limit the work; all others are on the settings page."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from typing_extensions import override

from shared.errors import VolunteerError
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _
from volunteer.tui.onboarding.onboarding_step import BACK, NEXT, Step, text_lines
from volunteer.tui.text import Line
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.setting_list import SettingList
from volunteer.tui.widgets.table import Listing

LIMITS = (
    "device",
    "threads",
    "duty_percent",
    "in_use",
    "on_battery",
    "schedule",
    "roles",
    "memory_gb",
    "cache_gb",
    "upload_mbit",
    "download_mbit",
)


class LimitsStep(Step):
    """Step that sets the limits: space changes a setting, enter continues."""

    NAME = "Limits"
    TITLE = N_("Limits")
    HEADING = N_("What may volunteer use?")
    KEYS = (*NEXT, (N_("space"), N_("change"), "start"), *BACK)

    @override
    def compose(self) -> ComposeResult:
        yield SettingList(
            lambda: self.choice.settings, names=LIMITS, title="", id="asked", by_enter=False
        )
        yield FunctionPanel(self._help, id="setting-help")

    @override
    def begin(self, why: str = "") -> None:
        self.run_worker(self._read(), group="limits")

    async def _read(self) -> None:
        if self.control is not None:
            try:
                self.choice.settings = await self.control.do(commands.GetSettings()) or ()
            except VolunteerError as error:
                self.volunteer.tell(error.message, "error")
        self._list.refill()
        self._list.take_focus()
        listing = self._list.query_one(Listing)
        if not listing.key:
            listing.go(0)

    @override
    def proceed(self) -> None:
        if not self._list.editing:
            self.finish()

    @override
    def press_space(self) -> None:
        self._list.change()

    @property
    def _list(self) -> SettingList:
        return self.query_one(SettingList)

    @on(SettingList.Moved)
    def _moved(self) -> None:
        self.query_one("#setting-help", FunctionPanel).draw()

    @on(SettingList.Changed)
    def _changed(self, event: SettingList.Changed) -> None:
        self.run_worker(self._save({event.row.name: event.value}), group="limits")

    async def _save(self, changes: dict[str, object]) -> None:
        if self.control is None:
            return
        try:
            self.choice.settings = await self.control.do(commands.SetSettings(changes=changes))
        except VolunteerError as error:
            self.volunteer.tell(error.message, "error")
        self._list.refill()
        self.query_one("#setting-help", FunctionPanel).draw()

    def _help(self, scene: Scene, width: int, height: int) -> list[Line]:
        row = self._list.chosen
        text = (
            _(row.help)
            if row is not None
            else _("The defaults are careful: low priority, and one core stays free.")
        )
        lines = text_lines(text, width, height)
        more = _("You can change all of this later, and more, on the Settings page.")
        return [*lines, *text_lines(more, width, 1, "dim")][:height]
