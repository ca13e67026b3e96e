"""Command palette: every page and every action by name, also those without a key."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from textual.app import App, SystemCommand
from textual.screen import Screen

from shared.errors import why
from volunteer.files import export, exports
from volunteer.i18n.catalogue import _
from volunteer.tui import keys

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp


def entries(
    app: VolunteerApp, screen: Screen[Any], pages: Sequence[keys.PageInfo]
) -> Iterator[SystemCommand]:
    """Yield the entries of the palette for this screen."""
    for page in pages:
        go = functools.partial(app.action_page, page.name)
        yield SystemCommand(_(page.title), _(page.help), go)
    for command in keys.page_commands(screen):
        yield _entry(app, command, screen)
    for command in keys.COMMANDS:
        if command.id != "palette":
            yield _entry(app, command, app)
    colours = _("Colours: dark, light, colour-blind, high contrast.")
    yield SystemCommand(_("Theme"), colours, app.action_theme)
    speak = _("The language of all screens.")
    yield SystemCommand(_("Language"), speak, app.action_language)
    take = functools.partial(app.call_after_refresh, screenshot, app)
    yield SystemCommand(_("Screenshot"), _("Save this screen as an SVG in ~/volunteer."), take)


def screenshot(app: VolunteerApp) -> None:
    """Write the screen into the folder of exports, beside the card and the ledger, and report the
    path.
    """
    stamp = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(app.clock.now()))
    path = exports() / f"volunteer-screen-{stamp}.svg"
    try:
        export(path, app.export_screenshot().encode())
    except OSError as error:
        app.tell(_("{path} cannot be written: {why}", path=path, why=why(error)), "error")
    else:
        app.tell(_("written to {path}", path=path))


def _entry(
    app: VolunteerApp, command: keys.KeyCommand, target: App[Any] | Screen[Any]
) -> SystemCommand:
    def run() -> None:
        app.run_worker(target.run_action(command.action), group="palette")

    return SystemCommand(_titled(_(command.short)), _(command.help), run)


def _titled(short: str) -> str:
    """Return the word of a key with a capital letter, names such as CSV unchanged."""
    return short[:1].upper() + short[1:]
