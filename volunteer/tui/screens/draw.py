"""Draw page: pictures of an image run, of the newest version or also of the first, and their
price.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Input, Static

from shared.errors import VolunteerError, why
from shared.protocol.accounts import RunInfo
from shared.protocol.inference import ModelCard
from shared.text import printable
from volunteer.control.control import Control
from volunteer.files import export, exports
from volunteer.i18n.catalogue import _, shown
from volunteer.i18n.formats import credit
from volunteer.tui.widgets.picture_view import PictureView
from volunteer.tui.widgets.search_box import Field

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp

FIRST = "@0"  # the version before any training


class DrawingView(Vertical):
    """The pictures of one version."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="card")
        self.png = b""

    def compose(self) -> ComposeResult:
        yield PictureView()

    async def show(self, model: str, png: bytes) -> None:
        """Show a sheet of pictures. Raises BadRequest for an unreadable one."""
        await self.query_one(PictureView).show(png)
        self.png = png
        self.border_title = printable(model, 80)


class Draw(Screen[None]):
    """Screen that lets one run draw; escape closes it."""

    CSS = """
    Draw { layout: vertical; background: $background; }
    Draw #knobs { height: 1; padding: 0 1; }
    Draw #knobs Static { width: auto; color: $dim; }
    Draw #knobs Field {
        height: 1; border: none; padding: 0; margin: 0 2 0 1; width: 10;
        color: $accent; background: $panel;
    }
    Draw #drawings { height: 1fr; }
    Draw DrawingView { width: 1fr; height: 1fr; }
    Draw #before { display: none; }
    Draw.-both #before { display: block; }
    Draw #said { height: auto; min-height: 1; max-height: 3; padding: 0 1; color: $foreground; }
    Draw #hint { height: 1; padding: 0 1; color: $dim; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "close", show=False),
        Binding("ctrl+b", "both", "before and after", show=False),
        Binding("ctrl+s", "save", "save", show=False),
    ]

    def __init__(self, info: RunInfo) -> None:
        super().__init__()
        self._info = info
        self._card: ModelCard | None = None

    @property
    def volunteer(self) -> VolunteerApp:
        return cast("VolunteerApp", self.app)

    def compose(self) -> ComposeResult:
        with Horizontal(id="knobs"):
            yield Static(_("seed"), markup=False)
            yield Field("", placeholder=_("any"), id="seed", compact=True)
            yield Static(_("version"), markup=False)
            yield Field("", placeholder=_("newest"), id="version", compact=True)
        with Horizontal(id="drawings"):
            yield DrawingView("before")
            yield DrawingView("after")
        yield Static("", id="said", markup=False)
        yield Static(
            _("enter draw  tab options  ^b before, after  ^s save  esc close"),
            id="hint",
            markup=False,
        )

    def on_mount(self) -> None:
        name = printable(self._info.name, 64)
        self.query_one("#after").border_title = _("Draw {name}", name=name)
        self.query_one("#before").border_title = _("Version 0")
        self.query_one("#seed").focus()
        self.run_worker(self._learn(), group="learn")

    async def _learn(self) -> None:
        control = self.volunteer.control
        if control is None:
            return
        try:
            self._card = await control.model(self._info.name)
        except VolunteerError as error:
            self._say(shown(error.message))
        else:
            self._say(self._price())

    def _price(self) -> str:
        if self._card is None:
            return ""
        sheets = 2 if self.has_class("-both") else 1
        me = self.volunteer.latest.status.me
        have = _("; you have {balance}", balance=credit(me.balance_micro, 3)) if me else ""
        return _(
            "{credits} credits a drawing{have}",
            credits=credit(self._card.price_micro * sheets, 6),
            have=have,
        )

    def _say(self, text: str) -> None:
        self.query_one("#said", Static).update(printable(text, 400))

    @on(Input.Submitted)
    def _draw(self) -> None:
        control = self.volunteer.control
        if control is None:
            return
        seed, version = (
            self.query_one(f"#{name}", Input).value.strip() for name in ("seed", "version")
        )
        try:
            number = int(seed) if seed else None
        except ValueError:
            self._say(_("seed: {seed} is no number", seed=seed))
            return
        chosen = f"{self._info.name}@{version}" if version else self._info.name
        asked = {"after": chosen}
        if self.has_class("-both"):
            asked["before"] = self._info.name + FIRST
        self._say(_("drawing"))
        self.run_worker(self._drawn(control, asked, number), group="draw", exclusive=True)

    async def _drawn(self, control: Control, asked: dict[str, str], seed: int | None) -> None:
        """Draw with each model, and show the price."""
        cost = 0
        try:
            for pane, model in asked.items():
                found = await control.draw(model, seed)
                cost += found.cost_micro
                if found.images:
                    await self.query_one(f"#{pane}", DrawingView).show(model, found.images[0])
        except VolunteerError as error:
            self._say(shown(error.message))
        else:
            self._say(_("cost {credits} credits", credits=credit(cost, 6)))

    # Keys.

    def action_leave(self) -> None:
        self.dismiss()

    def action_both(self) -> None:
        """Show or hide version 0's pictures."""
        self.toggle_class("-both")
        self._say(self._price())

    def action_save(self) -> None:
        """Write the drawing into the folder of exports."""
        png = self.query_one("#after", DrawingView).png
        if not png:
            self._say(_("nothing is drawn yet: press enter"))
            return
        stamp = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(self.volunteer.clock.now()))
        path = exports() / f"volunteer-drawing-{stamp}.png"
        try:
            export(path, png)
        except OSError as error:
            self._say(_("{path} cannot be written: {why}", path=path, why=why(error)))
        else:
            self._say(_("written to {path}", path=path))


def draws(info: RunInfo) -> bool:
    """Return True if a run's model draws pictures."""
    return info.items == "images"
