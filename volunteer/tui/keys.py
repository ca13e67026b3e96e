"""Table of the program's pages and actions, the source of keys, tabs, footer, palette and help."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
from textual.binding import Binding

from volunteer.i18n.catalogue import N_, _

if TYPE_CHECKING:
    from volunteer.tui.page import Page


class PageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Page in the table: `name` is its mode, `source` the module and class to load when opened."""

    name: str
    key: str
    title: str
    source: str
    help: str


PAGES = (
    PageInfo(
        name="dashboard",
        key="1",
        title=N_("Home"),
        source="volunteer.tui.screens.dashboard:Dashboard",
        help=N_("The work of this machine now, and its results."),
    ),
    PageInfo(
        name="runs",
        key="2",
        title=N_("Runs"),
        source="volunteer.tui.screens.runs:RunsPage",
        help=N_("All runs: help one, stop helping, share."),
    ),
    PageInfo(
        name="device",
        key="3",
        title=N_("Device"),
        source="volunteer.tui.screens.device:DevicePage",
        help=N_("Your devices as they work: load, heat, power, their share of the time."),
    ),
    PageInfo(
        name="history",
        key="4",
        title=N_("Credits"),
        source="volunteer.tui.screens.history:History",
        help=N_("Every contribution and what it earned."),
    ),
    PageInfo(
        name="leaderboard",
        key="5",
        title=N_("Ranks"),
        source="volunteer.tui.screens.ranking:LeaderboardPage",
        help=N_("The leaderboard, and your place in it."),
    ),
    PageInfo(
        name="settings",
        key="6",
        title=N_("Settings"),
        source="volunteer.tui.screens.settings:SettingsPage",
        help=N_("When and how hard this machine may work."),
    ),
    PageInfo(
        name="log",
        key="7",
        title=N_("Log"),
        source="volunteer.tui.screens.event_log:LogPage",
        help=N_("Everything that happened, and diagnostics to share."),
    ),
)
ONBOARDING = PageInfo(
    name="onboarding",
    key="",
    title=N_("Welcome"),
    source="volunteer.tui.onboarding.screen:Onboarding",
    help=N_("The first steps: join, name, limits, benchmark."),
)


class KeyCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Action in the table, with its keys (comma-separated) and its word in the footer (`short`)."""

    key: str
    action: str
    short: str
    help: str
    # A narrow footer shows the keys of lowest rank; None = not in the footer, only in the palette.
    rank: int | None = None


READ = KeyCommand(
    key="x",
    action="read",
    short=N_("read"),
    help=N_("Hide the organiser's announcements: they are read."),
)
COMMANDS = (
    READ,
    KeyCommand(
        key="space",
        action="pause",
        short=N_("pause"),
        help=N_("Free the device within two seconds and keep the task; again: resume."),
        rank=0,
    ),
    KeyCommand(
        key="P",
        action="pause_for",
        short=N_("pause for …"),
        help=N_("Pause for half an hour, two hours, until tonight, or the next login."),
    ),
    KeyCommand(
        key="f",
        action="finish",
        short=N_("finish"),
        help=N_("Complete the task in hand, then take no more."),
        rank=30,
    ),
    KeyCommand(
        key="r",
        action="retry",
        short=N_("retry"),
        help=N_("Try to reach the coordinator now."),
        rank=5,
    ),
    KeyCommand(
        key="question_mark,f1",
        action="help",
        short=N_("help"),
        help=N_("All keys, and the meaning of signs and words."),
        rank=20,
    ),
    KeyCommand(
        key="ctrl+p",
        action="command_palette",
        short=N_("all actions"),
        help=N_("Find any action by its name."),
        rank=60,
    ),
    KeyCommand(
        key="q",
        action="leave",
        short=N_("quit"),
        help=N_(
            "Quit; asks what to do with a task in hand. A volunteer in the background "
            "keeps running."
        ),
        rank=10,
    ),
    KeyCommand(
        key="",
        action="stop",
        short=N_("stop"),
        help=N_("End the volunteer, also one in the background."),
    ),
)


# Actions hidden during the first start, because no key would lead back to it.
HIDDEN_AT_FIRST_START = frozenset({"page", "pause", "pause_for", "finish", "read"})


def bindings() -> list[Binding]:
    """Return the bindings of the app: pages by digit, actions by letter."""
    pages = [Binding(page.key, f"page('{page.name}')", page.title, show=False) for page in PAGES]
    actions = [
        Binding(c.key, c.action, c.short, show=False, tooltip=c.help) for c in COMMANDS if c.key
    ]
    return [*pages, *actions]


_NAMES = {
    "question_mark": "?",
    "slash": "/",
    "full_stop": ".",
    "comma": ",",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "escape": N_("esc"),
    "delete": N_("del"),
    "minus": "-",
    "plus": "+",
    "left": "←",
    "right": "→",
}


def key_name(key: str) -> str:
    """Return the name of the first of `key`'s keys for the footer: `?` for "question_mark"."""
    modifiers, plus, name = key.split(",")[0].strip().rpartition("+")
    return (modifiers + plus).replace("ctrl+", "^") + _(_NAMES.get(name, name))


def load_page(info: PageInfo) -> type[Page]:
    """Import the module of a page and return its class."""
    module, _, name = info.source.partition(":")
    page_class: Any = getattr(import_module(module), name)
    page: type[Page] = page_class
    return page
