"""Appearance of the screens: theme, language and plain characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from textual.app import App

from volunteer.control import commands
from volunteer.i18n.catalogue import AUTO, choose, use
from volunteer.settings.display import Display
from volunteer.tui import themes
from volunteer.tui.setting_labels import named_choices
from volunteer.tui.terminal.ascii import AsciiFilter
from volunteer.tui.text import ASCII, UNICODE, Glyphs

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Display settings in effect, with the first page."""

    theme: str = themes.DEFAULT
    language: str = AUTO
    notice: str = ""  # sentence to show at the start
    ascii: bool = False
    page: str = "dashboard"  # first page


def look_of(display: Display, environment: Mapping[str, str], page: str) -> Look:
    """Return the look that the owner's settings ask for, in ASCII on the kernel's console
    (TERM=linux), whose fonts have no other signs.
    """
    return Look(
        theme=display.theme,
        language=display.language,
        notice=choose(display.language).problem,
        ascii=display.ascii or environment.get("TERM") == "linux",
        page=page,
    )


def apply_theme(app: App[Any], look: Look) -> None:
    """Register our themes and set the theme of `look`, before the application is mounted."""
    for theme in themes.THEMES:
        app.register_theme(theme)
    app.theme = look.theme if look.theme in app.available_themes else themes.DEFAULT
    app.animation_level = "none"  # no animation


class Appearance:
    """Applies display settings to the application while it runs."""

    def __init__(self, app: VolunteerApp, look: Look) -> None:
        self._app = app
        self.look = look
        self.filter = AsciiFilter(enabled=look.ascii)

    @property
    def glyphs(self) -> Glyphs:
        return ASCII if self.look.ascii else UNICODE

    def set_classes(self) -> None:
        """Set the style class of plain characters."""
        self._app.set_class(self.look.ascii, "-ascii")

    def take_next(self, name: str) -> None:
        """Switch to the next theme or language, and save it for the next start."""
        values = named_choices(name)
        now = getattr(self.look, name)
        value = values[(values.index(now) + 1) % len(values)] if now in values else values[0]
        self.change(name, value)
        if self._app.control is not None:
            self._app.command(self._app.control.do(commands.SetSettings(changes={name: value})))

    def change(self, name: str, value: Any) -> None:
        """Apply one setting that is already saved."""
        app = self._app
        if name == "theme" and value not in app.available_themes:
            return
        self.look = msgspec.structs.replace(self.look, **{name: value})
        match name:
            case "theme":
                app.theme = value
            case "language":
                use(choose(value))
            case "ascii":
                self.filter.enabled = value
                app.set_class(value, "-ascii")
                app.refresh(layout=True)
        app.redraw()
