"""Log page: the newest events; searchable, followed live, exported as diagnostics."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

from textual import on
from textual.app import ComposeResult
from typing_extensions import override

from shared.errors import VolunteerError, why
from shared.settings import SettingRow
from shared.text import printable
from volunteer.control import commands, events
from volunteer.control.diagnostics import diagnostics
from volunteer.control.event_sentences import words
from volunteer.control.events import AnyEvent
from volunteer.files import export, exports
from volunteer.i18n.catalogue import N_, _, ngettext
from volunteer.machine import memory_limit, sandbox
from volunteer.machine.devices import hardware
from volunteer.tui import keys
from volunteer.tui.agent_view import LogEntry
from volunteer.tui.page import SEARCH, Page
from volunteer.tui.text import Line, paragraph
from volunteer.tui.widgets.choice_row import ChoiceRow
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.search_box import Finder
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

Level: TypeAlias = Literal["info", "warning", "error"]
_RANK: dict[str, int] = {"info": 0, "warning": 1, "error": 2}
_SIGNS = {
    "info": ("dot", "info", "dim"),
    "warning": ("warn", "warning", "warn"),
    "error": ("cross", "error", "bad"),
}
COLUMNS = (
    Column(title=N_("time"), cells=8),
    Column(title=N_("level"), cells=9, least=56),
    Column(title=N_("what happened")),
)


class Tail(Listing):
    """Table whose cursor stays on the newest row until a key moves it away."""

    following = True

    @override
    def go(self, number: int) -> None:
        self.following = number >= len(self.rows) - 1
        super().go(number)

    @override
    def place(self, rows: Sequence[Row]) -> int | None:
        return len(rows) - 1 if self.following else None


class LogPage(Page):
    """Log page: a filtered table of events, and the event under the cursor in full."""

    NAME = "log"
    AUTO_FOCUS = "#entries"
    CHOICES = (("info", N_("everything")), ("warning", N_("warnings")), ("error", N_("errors")))
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="w",
            action="choose",
            short=N_("filter"),
            help=N_("Show everything, or only warnings and errors."),
            rank=35,
        ),
        SEARCH,
        keys.KeyCommand(
            key="end",
            action="follow",
            short=N_("follow"),
            help=N_("Stay with the newest line."),
        ),
        keys.KeyCommand(
            key="c",
            action="diagnostics",
            short=N_("diagnostics"),
            help=N_(
                "Copy versions, settings and the last events, without secrets, and write "
                "them to a file."
            ),
            rank=38,
        ),
    )
    CSS = """
    LogPage {
        #span { height: 1; }
        #entry { height: 5; }
        &.-short #entry { display: none; }
        &.-low, &.-flat { #entry, #span { display: none; } }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: tuple[Row, ...] = ()
        self._rows_of: tuple[int, str, str, str] = (-1, "", "", "")

    @override
    def body(self) -> ComposeResult:
        yield ChoiceRow(self.CHOICES, lambda: self.active_choice, id="span")
        yield Finder(id="finder")
        yield Tail(COLUMNS, self._filling, id="entries")
        yield FunctionPanel(self._entry, title=N_("In full"), id="entry", classes="card")

    def _filling(self, scene: Scene) -> Filling:
        entries = scene.view.entries
        newest = entries[-1].id if entries else 0
        rows_of = (newest, self.active_choice, self.needle, scene.glyphs.dot)
        if rows_of != self._rows_of:
            self._rows = entry_rows(entries, scene, self.active_choice, self.needle)
            self._rows_of = rows_of
        following = self.query_one("#entries", Tail).following
        suffix = _('with "{needle}"', needle=self.needle) if self.needle else ""
        return Filling(
            rows=self._rows,
            empty=_("nothing of this kind has happened")
            if entries
            else _("events appear here, from the first connection on"),
            title=f"{_('Log')} {suffix}".rstrip(),
            subtitle=ngettext("{n} line", "{n} lines", len(self._rows))
            + ", "
            + (_("following") if following else _("end: follow")),
        )

    def _entry(self, scene: Scene, width: int, height: int) -> list[Line]:
        key = self.query_one("#entries", Listing).key
        entry = next((e for e in scene.view.entries if str(e.id) == key), None)
        sentence = words(entry.event) if entry is not None else None
        return paragraph(sentence or "", width, height)

    def action_follow(self) -> None:
        tail = self.query_one("#entries", Tail)
        tail.go(len(tail.rows) - 1)

    @on(Listing.Moved)
    def _moved(self) -> None:
        self.query_one("#entry", FunctionPanel).draw()

    def action_diagnostics(self) -> None:
        self.run_worker(self._diagnose(), group="diagnostics", exclusive=True)

    async def _diagnose(self) -> None:
        view, control = self.volunteer.view, self.volunteer.control
        rows: tuple[SettingRow, ...] = ()
        try:
            rows = await control.do(commands.GetSettings()) if control is not None else ()
        except VolunteerError:
            pass  # diagnostics without settings help too
        try:
            version = importlib.metadata.version("volunteer")
        except importlib.metadata.PackageNotFoundError:
            version = "of a checkout"
        text = diagnostics(
            view.status,
            hardware(view.status.devices),
            version=version,
            sandbox=(sandbox.support_sentence(), memory_limit.limit_sentence()),
            settings=rows or (),
            events=[entry.event for entry in view.entries],
        )
        self.app.copy_to_clipboard(text)
        path = exports() / "volunteer-diagnostics.txt"
        try:
            export(path, text.encode())
        except OSError as error:
            self.volunteer.tell(
                _(
                    "copied; {path} cannot be written: {why}",
                    path=path,
                    why=why(error),
                ),
                "warning",
            )
        else:
            self.volunteer.tell(
                _("copied, and written to {path}: read it before you send it", path=path)
            )


def level_of(event: AnyEvent) -> Level:
    """Return the severity of an event: "info", "warning" or "error"."""
    match event:
        case events.Notice(level="error"):
            return "error"
        case events.Notice(level="warning"):
            return "warning"
        case events.Judged(verdict=verdict) if verdict.state == "rejected":
            return "error"
        case events.TaskEnded(how="failed"):
            return "error"
        case events.Stopped(code=code) if code != 0:
            return "error"
        case events.Paused(by="you"):
            return "info"
        case events.Connection(online=False) | events.Paused() | events.Halved():
            return "warning"
        case _:
            return "info"


def entry_rows(
    entries: Sequence[LogEntry], scene: Scene, level: str, needle: str
) -> tuple[Row, ...]:
    """Return the rows of at least `level` whose sentence contains `needle`, oldest first."""
    rows = []
    pattern = needle.casefold()
    for entry in entries:
        kind = level_of(entry.event)
        sentence = words(entry.event)
        if sentence is None or _RANK[kind] < _RANK[level] or pattern not in sentence.casefold():
            continue
        sign, word, role = _SIGNS[kind]
        rows.append(
            Row(
                key=str(entry.id),
                cells=(
                    ((clock_seconds(entry.event.at), "dim"),),
                    ((f"{getattr(scene.glyphs, sign)} {_(word)}", role),),
                    ((printable(sentence), "text"),),
                ),
            )
        )
    return tuple(rows)


def clock_seconds(at: float) -> str:
    """Return the time of day on this machine, with seconds."""
    return time.strftime("%H:%M:%S", time.localtime(at)) if 0 < at < 4e9 else "--:--:--"
