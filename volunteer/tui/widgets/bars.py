"""Rows of every page: tabs and connection above, the state below, keys at the bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rich.cells import cell_len
from textual.dom import DOMNode
from textual.events import Click
from typing_extensions import override

from volunteer.i18n.catalogue import _
from volunteer.tui import keys
from volunteer.tui.status_line import (
    LEAVING,
    Activity,
    activity,
    connection,
    merge_sentence,
    outage_line,
)
from volunteer.tui.text import Line, Span, fit, spread
from volunteer.tui.text import width as wide
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.search_box import Field

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp
    from volunteer.tui.page import Page

NAME_CELLS_MIN = 8  # a coordinator's name is not cut to fewer cells
Hit = tuple[int, int, str]  # first cell, end, action


class Bar(Panel):
    """Row of one line, parts of which can be clicked."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.hits: tuple[Hit, ...] = ()

    async def on_click(self, event: Click) -> None:
        for start, end, action in self.hits:
            if start <= event.x < end:
                await self.app.run_action(action)


class TabBar(Bar):
    """Header: pages by their keys, the connection at the right."""

    def __init__(self, here: str) -> None:
        super().__init__(id="tabs")
        self.here = here

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        link = connection(scene.view, scene.now, scene.glyphs)
        end: Line = ((f"{link.sign} {link.word} ", link.role),)
        room = width - sum(cell_len(text) for text, _ in end) - 1
        line, self.hits = tabs(self.here, room)
        return (spread(line, _named(link, scene, width - wide(line)) or end, width),)


def _named(link: Activity, scene: Scene, room: int) -> Line:
    """Return the connection after the coordinator's name, which is shortened if both do not fit; ()
    without a name, or if less than `NAME_CELLS_MIN` of the name would be left.
    """
    text = f"{link.sign} {link.word} "
    room -= cell_len(text) + 2  # a space on either side of the name
    name = scene.view.status.server
    if not name or room < min(NAME_CELLS_MIN, cell_len(name)):
        return ()
    return ((f"{fit(name, room, scene.glyphs.ellipsis)} ", "dim"), (text, link.role))


def tabs(here: str, room: int) -> tuple[Line, tuple[Hit, ...]]:
    """Return the tabs in `room` cells: all names if they fit, else this page's name only."""
    for titles, gap in ((True, " "), (True, "")):
        full = _tabs(here, titles, gap)
        if wide(full[0]) <= room:
            return full
    return _tabs(here, False, " ")


def _tabs(here: str, titles: bool, gap: str) -> tuple[Line, tuple[Hit, ...]]:
    """Return the tabs, each after a gap and before a space."""
    spans: list[Span] = []
    hits: list[Hit] = []
    at = 0
    for page in keys.PAGES:
        current = page.name == here
        title = f"{_(page.title)} " if titles or current else ""
        key = f"{gap}{page.key} "
        spans += [(key + title, "here")] if current else [(key, "key"), (title, "tab")]
        size = cell_len(key + title)
        hits.append((at, at + size, f"app.page('{page.name}')"))
        at += size
    return tuple(span for span in spans if span[0]), tuple(hits)


class StateBar(Bar):
    """Status bar: state and reason; during an outage, the functions that still work."""

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        control = cast("VolunteerApp", self.app).control
        return (state_line(scene, width, background=control is not None and control.remote),)


def state_line(scene: Scene, cells: int, *, background: bool = False) -> Line:
    """Return sign, word and sentence, and the time of the run's next merge; `background` marks the
    view of a volunteer in another process.
    """
    state = activity(scene.view, scene.now, scene.glyphs, scene.device)
    start: Line = ((f" {state.sign} {state.word}", state.role),)
    if background:
        start = (*start, (" " + _("(background)"), "dim"))
    if scene.leaving is not None and scene.view.ended is None:
        text = _("{what}; q again ends at once", what=_(LEAVING[scene.leaving]))
        room = cells - wide(start) - 10
        ending = fit(text, room, scene.glyphs.ellipsis)
        return (
            (f" {scene.glyphs.wait} {_('ending')}", "warn"),
            ("  ", "text"),
            (ending, "text"),
        )
    room = cells - wide(start) - 3
    trouble = outage_line(scene.view, scene.now, room, scene.glyphs.ellipsis)
    if trouble:
        return (*start, ("  ", "text"), (trouble, "bad"))
    run = scene.view.run()
    end: Line = ((f"{merge_sentence(scene.view, run, scene.now)} ", "dim"),) if run else ()
    sentence = fit(state.sentence, room, scene.glyphs.ellipsis)
    return spread((*start, ("  ", "text"), (sentence, "text")), end, cells)


class NewsBar(Bar):
    """Announcement of the organiser until it is read; no row without an announcement."""

    @override
    def show(self, scene: Scene, *, at_once: bool = False) -> None:
        self.display = bool(scene.view.status.announcements)
        super().show(scene, at_once=at_once)

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        announcements = scene.view.status.announcements
        if not announcements:
            return ()
        key = keys.key_name(keys.READ.key)
        more = " " + _("(1 of {found})", found=len(announcements)) if len(announcements) > 1 else ""
        end: Line = ((f" {key} ", "key"), (f"{_(keys.READ.short)} ", "dim"))
        sentence = f" {scene.view.status.server}: {announcements[0].text}{more}"
        room = width - wide(end)
        return (spread(((fit(sentence, room, scene.glyphs.ellipsis), "warn"),), end, width),)


class KeyBar(Bar):
    """Footer with the keys that have an effect now."""

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        field = self.screen.focused
        if isinstance(field, Field) and field.brief:  # other keys type letters into the field
            self.hits = ()
            hints = (("enter", _("ok")), ("esc", _("cancel")), ("f1", _("help")), ("^q", _("quit")))
            spans = [((f" {key} ", "key"), (f"{word} ", "dim")) for key, word in hints]
            return (tuple(span for pair in spans for span in pair),)
        core = [c for c in keys.COMMANDS if self._useful(c, self.app)]
        page = cast("Page", self.screen)
        actions = [c for c in page.ACTIONS if self._useful(c, page)]
        line, self.hits = key_line(scene, width, core, actions)
        return (line,)

    def _useful(self, command: keys.KeyCommand, target: DOMNode) -> bool:
        return command.rank is not None and bool(target.check_action(command.action, ()))


def key_line(
    scene: Scene,
    cells: int,
    core: Sequence[keys.KeyCommand],
    page_keys: Sequence[keys.KeyCommand] = (),
) -> tuple[Line, tuple[Hit, ...]]:
    """Return the key bar: pause and finish, this page's keys, then the other common keys. The least
    important keys are left out if the width is short.
    """
    chosen_keys: list[keys.KeyCommand] = []
    room = cells
    for command in sorted([*core, *page_keys], key=lambda c: c.rank or 0):
        need = len(keys.key_name(command.key)) + cell_len(_word(command, scene)) + 3
        if need <= room:
            chosen_keys.append(command)
            room -= need
    spans: list[Span] = []
    hits: list[Hit] = []
    at = 0
    first = [c for c in core if c.action in ("pause", "finish")]
    for command in [*first, *page_keys, *(c for c in core if c not in first)]:
        if command in chosen_keys:
            text = (f" {keys.key_name(command.key)} ", f"{_word(command, scene)} ")
            spans += [(text[0], "key"), (text[1], "dim")]
            where = "screen." if command in page_keys else ""
            hits.append((at, at + cell_len(text[0]) + cell_len(text[1]), where + command.action))
            at += cell_len(text[0]) + cell_len(text[1])
    return tuple(spans), tuple(hits)


def _word(command: keys.KeyCommand, scene: Scene) -> str:
    """Return the word for a key's effect: "resume" for pause while paused."""
    if command.action == "pause" and scene.view.status.paused(scene.device):
        return _("resume")
    if command.action == "finish" and scene.view.status.finishing:
        return _("keep going")
    return _(command.short)
