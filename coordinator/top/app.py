"""The monitor as a screen of the terminal: five pages, and a screen for each thing they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer, Static

from coordinator.rules.overview import Level, Overview
from coordinator.top import tables
from coordinator.top.details import KINDS, Detail, facts_text
from coordinator.top.dialogs import Confirmation, GoTo, HelpDialog
from coordinator.top.feed import Asked, Connect, MonitorFeed
from coordinator.top.table_view import TableView
from coordinator.top.tables import Kind, MonitorTable
from shared.clock import Clock, SystemClock
from shared.errors import VolunteerError
from shared.text import cells, duration, printable

PAGES = ("now", "workers", "work", "tasks", "servers")
TABLES: dict[str, tuple[Callable[[Overview, int], MonitorTable], ...]] = {
    "now": (tables.runs,),
    "workers": (tables.workers,),
    "work": (tables.merges, tables.refusals),
    "tasks": (tables.task_counts, tables.failed_tasks),
    "servers": (tables.troubles, tables.replicas),
}
LEVELS: tuple[Level, ...] = ("good", "watch", "bad")
DARK, LIGHT = "textual-dark", "textual-light"


class MonitorHome(Screen[None]):
    """Screen with the pages."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"page('{name}')", name) for n, name in enumerate(PAGES, 1)),
        Binding("tab", "next(1)", show=False, priority=True),
        Binding("shift+tab", "next(-1)", show=False, priority=True),
        Binding("g", "app.go_to", "go to"),
        Binding("question_mark", "app.keys", "keys"),
        Binding("q", "app.quit", "quit"),
    ]

    def compose(self) -> ComposeResult:
        yield Static("", id="heading", markup=False)
        yield Static("asking ...", id="verdict", markup=False)
        yield Static("", id="old", markup=False)
        with ContentSwitcher(initial=PAGES[0], id="page"):
            for name in PAGES:
                with VerticalScroll(id=name):
                    for number, _ in enumerate(TABLES[name]):
                        yield TableView(id=f"{name}-{number}")
                    if name == "now":
                        yield Static("", id="facts", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self._head("")

    def action_page(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name
        self._head(self._server)
        self.refill()

    def action_next(self, step: int) -> None:
        at = PAGES.index(self.page)
        self.action_page(PAGES[(at + step) % len(PAGES)])

    @property
    def page(self) -> str:
        """The page in front."""
        return self.query_one(ContentSwitcher).current or PAGES[0]

    _server = ""
    _seen: Overview | None = None

    def show(self, seen: Overview) -> None:
        """Paint a picture: the verdict, and the page in front."""
        self._seen = seen
        self._head(printable(seen.server, 60))
        verdict = self.query_one("#verdict", Static)
        verdict.update(tables.verdict_line(seen))
        for level in LEVELS:
            verdict.set_class(level == seen.verdict.level, level)
        self.refill()

    def refill(self) -> None:
        """Paint the front page again, at the present width."""
        if self._seen is None:
            return
        width = self.app.size.width
        for number, table in enumerate(self._tables):
            self.query_one(f"#{self.page}-{number}", TableView).show(table(self._seen, width))
        if self.page == "now":
            self.query_one("#facts", Static).update(facts_text([*tables.facts(self._seen)]))
        self._focus()

    def _focus(self) -> None:
        """Focus a table of the front page."""
        views = [self.query_one(f"#{self.page}-{n}", TableView) for n in range(len(self._tables))]
        if not any(view.has_focus_within for view in views):
            next((view for view in views if view.take_focus()), None)

    @property
    def _tables(self) -> tuple[Callable[[Overview, int], MonitorTable], ...]:
        return TABLES[self.page]

    def on_resize(self) -> None:
        self._head(self._server)
        self.refill()

    def _head(self, server: str) -> None:
        """Return the name of the server, and the pages with the front one in brackets."""
        self._server = server
        shown = " ".join(f"[{name}]" if name == self.page else f" {name} " for name in PAGES)
        room = self.app.size.width - len(shown) - 1
        name = server if cells(server) <= room else server[: max(0, room - 1)] + "…"
        self.query_one("#heading", Static).update(f"{shown} {name}")


class Monitor(App[int]):
    """Terminal screen that shows the replies of the feed."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #heading { height: 1; text-style: bold; color: $primary; }
    #verdict { height: auto; max-height: 3; margin-bottom: 1; }
    #verdict.good { color: $success; }
    #verdict.watch { color: $warning; text-style: bold; }
    #verdict.bad { color: $error; text-style: bold; }
    #old { height: auto; max-height: 2; display: none; text-style: reverse; }
    .-old #old { display: block; }
    .-old #page, .-old #verdict { opacity: 55%; }
    #page { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "theme", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, connect: Connect, clock: Clock | None = None) -> None:
        super().__init__()
        self._clock = clock or SystemClock()
        self.feed = MonitorFeed(connect, self._clock, self._beside)
        self.failed: VolunteerError | None = None

    def on_mount(self) -> None:
        self.theme = DARK if self.theme not in (DARK, LIGHT) else self.theme
        self.push_screen(MonitorHome(id="home"))
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        self.run_worker(self._follow(), exclusive=True, exit_on_error=True)
        self.set_interval(1.0, self._date)

    async def _follow(self) -> None:
        async for news in self.feed.news():
            if news.fatal is not None:
                self.failed = news.fatal
                self.exit(news.fatal.exit_code)
                return
            if news.of is not None:
                self._told(news.reply, news.of)
            elif news.reply is not None:
                self._home().show(news.reply)
            elif news.missing:
                self._missing(news.missing)
            self._date()

    def _told(self, reply: Any, of: Asked) -> None:
        """Accept an answer about the open detail, unless another one was opened meanwhile."""
        front = self._front()
        if isinstance(front, Detail) and front.asks == of:
            front.show(reply)

    def _missing(self, why: str) -> None:
        """Tell that the requested thing does not exist, or no longer."""
        self.notify(printable(why, 300), severity="warning", markup=False)
        front = self._front()
        if front is self.screen and isinstance(front, Detail):
            self.pop_screen()

    def _home(self) -> MonitorHome:
        return next(s for s in self.screen_stack if isinstance(s, MonitorHome))

    def _front(self) -> Screen[Any]:
        """Return the front screen, dialogs left out."""
        pages = [s for s in self.screen_stack if isinstance(s, MonitorHome | Detail)]
        return pages[-1]

    def _date(self) -> None:
        """Show the age of an old picture, and dim it."""
        for screen in self.screen_stack:
            if not isinstance(screen, MonitorHome | Detail):
                continue
            old = self.feed.stale
            screen.set_class(old, "-old")
            if old:
                screen.query_one("#old", Static).update(self._age())

    def _age(self) -> str:
        why = printable(self.feed.error, 120) or "nothing newer came"
        when = "nothing was seen yet"
        if self.feed.at is not None:
            when = f"this is of {duration(self.feed.age_s)} ago"
        return f"{when}: {why}; asking again"

    # --- what is opened and done ---

    def on_table_view_opened(self, event: TableView.Opened) -> None:
        self._open(event.kind, event.key)

    def _open(self, kind: Kind, key: str) -> None:
        self.push_screen(KINDS[kind](key, self._clock))
        self.feed.hurry()

    def _beside(self) -> Asked | None:
        """Return the query for the thing in front; None on the pages."""
        front = self._front()
        return front.asks if isinstance(front, Detail) else None

    def on_detail_act(self, event: Detail.Act) -> None:
        self.run_worker(self._act(event), exit_on_error=False)

    async def _act(self, event: Detail.Act) -> None:
        try:
            await self.feed.run(event.command, **event.request)
        except VolunteerError as error:
            self.notify(printable(error.message, 300), severity="error", markup=False)
        else:
            self.notify(event.done, markup=False)
        self.feed.hurry()

    def action_go_to(self) -> None:
        def chosen(answer: Confirmation | None) -> None:
            if answer is None:
                return
            seen = self._home()._seen
            names = {run.name for run in seen.runs} if seen is not None else set()
            name = answer.value
            kind: Kind = "task" if name.isdecimal() and name not in names else "volunteer"
            self._open("run" if name in names else kind, name)

        self.push_screen(GoTo(), chosen)

    def action_keys(self) -> None:
        self.push_screen(HelpDialog())

    def action_theme(self) -> None:
        self.theme = LIGHT if self.theme == DARK else DARK

    async def action_quit(self) -> None:
        self.exit(0)


def watch(connect: Connect) -> int:
    """Watch until `q`; return the exit code. Raises the errors of a failed start."""
    app = Monitor(connect)
    code = app.run()
    if app.failed is not None:
        raise app.failed
    return code or 0
