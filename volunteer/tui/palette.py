"""Command palette: every page and every action by name, also those without a key."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from textual.app import App, SystemCommand
from textual.screen import Screen

from volunteer.tui import keys

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp


def entries(
    app: VolunteerApp, screen: Screen[Any], pages: Sequence[keys.PageInfo]
) -> Iterator[SystemCommand]:
    """All of them, as they are on this screen."""
    for page in pages:
        go = functools.partial(app.action_page, page.name)
        yield SystemCommand(page.title, page.help, go)
    for command in keys.page_commands(screen):
        yield _entry(app, command, screen)
    for command in keys.COMMANDS:
        if command.id != "palette":
            yield _entry(app, command, app)
    colours = "Colours: dark, light, colour-blind, high contrast."
    yield SystemCommand("Theme", colours, app.action_change_theme)
    yield SystemCommand("Screenshot", "Save this screen as an SVG.", app.action_screenshot)


def _entry(
    app: VolunteerApp, command: keys.Command, target: App[Any] | Screen[Any]
) -> SystemCommand:
    def run() -> None:
        app.run_worker(target.run_action(command.action), group="palette")

    return SystemCommand(_titled(command.short), command.help, run)


def _titled(short: str) -> str:
    """The word of a key with a capital letter, names such as CSV as they are."""
    return short[:1].upper() + short[1:]
