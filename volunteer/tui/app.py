"""Terminal application of a volunteer: pages around one `AgentView`, which is folded from the
control's events.

The application never trains, waits for the network or imports torch. Only the visible page is
redrawn: numbers at most twice a second, curves once, all less often in an unfocused terminal.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import DimFilter, LineFilter, Monochrome
from textual.notifications import SeverityLevel
from textual.reactive import Reactive, reactive
from textual.screen import Screen
from textual.timer import Timer
from typing_extensions import override

from shared.clock import Clock, SystemClock
from shared.errors import VolunteerError, why
from volunteer.control import commands
from volunteer.control.control import Control
from volunteer.files import export, exports
from volunteer.i18n.catalogue import _, translated
from volunteer.tui import keys, status_line, themes
from volunteer.tui.absence_digest import Visits
from volunteer.tui.agent_view import AgentView
from volunteer.tui.app_exit import AppExit
from volunteer.tui.appearance import Appearance, Look, apply_theme
from volunteer.tui.event_feed import EventFeed, Listener
from volunteer.tui.page import Page
from volunteer.tui.terminal.colourless import Colourless
from volunteer.tui.terminal.driver import lasting_driver
from volunteer.tui.themes import SteadyStylesheet
from volunteer.tui.widgets.panel import Scene

COLOURLESS = Colourless()
TICK_S = 0.5
# Longest time in which a thread of pure Python (self-play) holds the interpreter while a key waits.
# Python's default is 5 ms; with it, several waits for each key were half of the measured latency.
SWITCH_S = 0.001
# The digest of the owner's absence stays longer than other sentences: it is shown only once.
DIGEST_S = 30.0
BLURRED_TICKS = 4  # a terminal without focus is redrawn at every fourth tick
# Style classes by the least size of the screen.
WIDTHS = [(0, "-tiny"), (60, "-narrow"), (80, "-normal"), (116, "-wide")]
HEIGHTS = [(0, "-flat"), (6, "-low"), (14, "-short"), (22, "-middle"), (34, "-tall")]


class VolunteerApp(App[int]):
    """Terminal application: pages, keys, event feed; `attach` sets a `control` made later."""

    TITLE = "volunteer"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.bindings(),
        Binding("ctrl+q,ctrl+c", "leave", "quit", show=False, priority=False),
        Binding("ctrl+l", "repaint", "repaint", show=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]
    view: Reactive[AgentView] = reactive(
        AgentView(), init=False, repaint=False, always_update=False
    )

    def __init__(
        self,
        control: Control | None = None,
        *,
        look: Look | None = None,
        clock: Clock | None = None,
        tick_s: float | None = TICK_S,
        opener: Callable[[str], Awaitable[bool]] | None = None,
        visits: Visits | None = None,
    ) -> None:
        look = look or Look()
        # Textual reads both from the instance; a page's module is imported when the page is first
        # opened.
        self.DEFAULT_MODE = look.page  # type: ignore[misc]
        self.MODES = {p.name: functools.partial(_page, p) for p in _pages()}  # type: ignore[misc]
        super().__init__(driver_class=lasting_driver())
        self.stylesheet = SteadyStylesheet(variables=self.get_css_variables())
        self.appearance = Appearance(self, look)
        self.app_exit = AppExit(self)
        self.visits = visits or Visits(None)
        self.clock = clock or SystemClock()
        self.device = ""
        self.opener = opener  # opens addresses; None = the browser of this machine
        self.painted = asyncio.Event()  # set once the first page is on the screen
        self._tick_s = tick_s
        self._ticks = 0
        self._hurry_requested = False
        self._opened = {look.page}
        self._opened_before = False  # whether the page being switched to was opened before
        self._switch_s = sys.getswitchinterval()
        self._feed: EventFeed | None = None
        apply_theme(self, look)
        self._waiting_control = control

    # ------------------------------------------------------------------------------ life

    def on_mount(self) -> None:
        self.appearance.set_classes()
        if self._waiting_control is not None:
            self.attach(self._waiting_control)
        if self._tick_s is not None:
            self.set_interval(self._tick_s, self._tick)
        self.app_exit.catch_signals()
        if self.appearance.look.notice:
            self.tell(self.appearance.look.notice, "warning")
        sys.setswitchinterval(SWITCH_S)
        self.call_after_refresh(self.call_after_refresh, self.painted.set)

    def action_repaint(self) -> None:
        """Draw the whole screen anew, over the output of other programs."""
        self.refresh(layout=True)

    def attach(self, control: Control) -> None:
        """Show the volunteer behind `control`: its snapshot, then its events."""
        if self._feed is not None:
            self._feed.close()
        listener = Listener(
            urgent=self._request_hurry,
            tell=self.tell,
            ended=self._feed_ended,
            failed=self._feed_failed,
        )
        self._feed = EventFeed(control, self.clock, listener)
        self.publish()

    @property
    def control(self) -> Control | None:
        """Return the control of the volunteer that is shown; None before `attach`."""
        return self._feed.control if self._feed is not None else None

    @property
    def latest(self) -> AgentView:
        """Return the newest state, perhaps not drawn yet."""
        return self._feed.view if self._feed is not None else self.view

    @override
    def set_timer(self, *args: Any, **named: Any) -> Timer:
        """Set a timer that always fires, however late.

        Textual skips ticks that a busy machine has missed, even the only tick of a one-shot timer.
        The timer that lets a new page be drawn was skipped once, which froze the screen until the
        end (seen after 40 minutes on a machine with 20 busy processes).
        """
        timer = super().set_timer(*args, **named)
        timer._skip = False
        return timer

    def _feed_ended(self) -> None:
        self.publish()
        self.app_exit.volunteer_ended()

    def _feed_failed(self, error: BaseException) -> None:
        """End the program with the traceback of our bug, which a frozen screen would hide."""
        self.call_later(_raise, error)

    def _request_hurry(self) -> None:
        if not self._hurry_requested:
            self._hurry_requested = True
            self.call_later(self._hurry)

    def _hurry(self) -> None:
        """Draw the panels that a person waits for, once for simultaneous events."""
        self._hurry_requested = False
        self._show(hurried=True)

    def tell(self, message: str, level: str = "info", seconds: float | None = None) -> None:
        """Show a sentence in the corner of the screen for `seconds`; None: a few seconds."""
        levels: dict[str, SeverityLevel] = {"warning": "warning", "error": "error"}
        severity = levels.get(level, "information")
        self.notify(translated(message), severity=severity, timeout=seconds, markup=False)

    def on_app_blur(self, event: events.AppBlur) -> None:
        """Store the figures that the owner saw last, since the terminal has lost the focus."""
        self.visits.end(self.latest.status, self.clock.now())

    async def on_unmount(self) -> None:
        self.visits.end(self.latest.status, self.clock.now())
        if self._feed is not None:
            self._feed.close()
        sys.setswitchinterval(self._switch_s)

    # --------------------------------------------------------------------------- drawing

    def scene(self) -> Scene:
        """Return the scene to draw now."""
        return Scene(
            view=self.view,
            now=self.clock.now(),
            glyphs=self.appearance.glyphs,
            device=self.device,
            leaving=self.app_exit.how,
        )

    def publish(self) -> None:
        """Make the newest state the visible one, and draw it."""
        if self.view is not self.latest:
            self.view = self.latest
        if self.app_focus and (news := self.visits.start(self.view.status, self.clock.now())):
            self.tell(news, seconds=DIGEST_S)
        page = self._page
        if page is not None and page.is_mounted:
            page.show(self.scene())

    @property
    def _page(self) -> Page | None:
        """Return the visible page, even behind the palette or a dialog; None until it has its
        widgets.
        """
        stack = self.screen_stack if self._running else []
        page = next((s for s in reversed(stack) if isinstance(s, Page) and s.is_current), None)
        return page if page is not None and page.is_mounted else None

    def redraw(self) -> None:
        """Draw all panels of this page anew."""
        self._show(at_once=True)

    def _show(self, *, at_once: bool = False, hurried: bool = False) -> None:
        self.view = self.latest
        page = self._page
        if page is not None:
            page.show(self.scene(), at_once=at_once, hurried=hurried)

    def _tick(self) -> None:
        self._ticks += 1
        if (entitle := getattr(self._driver, "entitle", None)) is not None:
            entitle(status_line.window_title(self.latest, self.clock.now()))
        if self.app_focus or self._ticks % BLURRED_TICKS == 0:
            self.publish()

    @override
    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.DARK if self.current_theme.dark else themes.LIGHT

    @override
    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        if self.no_color:
            others = [
                filter_ for filter_ in filters if not isinstance(filter_, Monochrome | DimFilter)
            ]
            filters = [*others, COLOURLESS]
        ascii_only = self.appearance.filter
        return [*filters, ascii_only] if ascii_only.enabled else filters

    # --------------------------------------------------------------------------- actions

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return True if an action would have an effect now; the footer and the palette hide
        others.
        """
        if action in keys.HIDDEN_AT_FIRST_START and self._first_start:
            return False
        if action in ("pause", "pause_for", "finish"):
            return self.control is not None and not self.ended and self.app_exit.how is None
        if action == "retry":
            status = self.latest.status
            return not status.online and bool(status.connection) and not self.ended
        return super().check_action(action, parameters)

    @property
    def _first_start(self) -> bool:
        return self.current_mode == keys.ONBOARDING.name

    def action_page(self, name: str) -> None:
        """Go to a page; overlaid pages close."""
        while len(self.screen_stack) > 1 and isinstance(self.screen, Page):
            self.pop_screen()
        if name in self.MODES and name != self.current_mode:
            self._opened_before = name in self._opened
            self._opened.add(name)
            self.switch_mode(name)
            self._opened_before = False

    @override
    def delay_update(self, delay: float = 0.05) -> None:
        """Suspend drawing for `delay` seconds, but not for a page that was opened before: the
        suspension took half of the time of a page change.
        """
        super().delay_update(0.0 if self._opened_before else delay)

    def action_pause(self) -> None:
        """Pause; resume if paused."""
        if self.control is not None:
            paused = self.latest.status.paused(self.device) is not None
            self.command(self.control.do(commands.Resume() if paused else commands.Pause()))

    def action_pause_for(self) -> None:
        """Open the list of ends of a pause."""
        from volunteer.tui.screens.pause_picker import PausePicker

        self.push_screen(PausePicker())

    def action_finish(self) -> None:
        """Complete the current task and take no more tasks; a second call takes tasks again."""
        if self.control is not None:
            finishing = self.latest.status.finishing
            self.command(self.control.do(commands.Resume() if finishing else commands.Finish()))

    def action_read(self) -> None:
        """Hide the announcements as read."""
        if self.control is not None and self.latest.status.announcements:
            self.command(self.control.do(commands.ReadAnnouncements()))

    def action_retry(self) -> None:
        """Try to reach the coordinator now."""
        if self.control is not None:
            self.command(self.control.do(commands.Retry()))

    def next_device(self) -> None:
        """Show the task of the next device; after the last device, the most advanced task."""
        devices = ("", *self.latest.devices())
        at = devices.index(self.device) if self.device in devices else 0
        self.device = devices[(at + 1) % len(devices)]
        self.redraw()

    def action_theme(self) -> None:
        """Switch to the next theme."""
        self.appearance.take_next("theme")

    def action_language(self) -> None:
        """Switch to the next language."""
        self.appearance.take_next("language")

    def action_help(self) -> None:
        """Show all keys and words."""
        from volunteer.tui.screens.help import Help

        if not isinstance(self.screen, Help):
            self.redraw()
            page = self.screen if isinstance(self.screen, Page) else None
            page_keys = [c for c in page.ACTIONS if page.useful(c)] if page else []
            self.push_screen(Help(self.scene(), page_keys, first=self._first_start))

    def action_leave(self) -> None:
        """Leave the program; a volunteer of this process ends with it."""
        self.app_exit.leave()

    def action_stop(self) -> None:
        """End the volunteer, here or in the background."""
        self.app_exit.confirm()

    def expect_end(self) -> None:
        """Expect the end of the events, so that it is not reported as a fault."""
        if self._feed is not None:
            self._feed.end_expected = True

    @property
    def ended(self) -> bool:
        """Return True if the volunteer has ended."""
        return self._feed is not None and self._feed.ended

    def command(
        self, work: Coroutine[Any, Any, Any], done: Callable[[], None] | None = None
    ) -> None:
        """Run a command of the control, then `done`; an error is shown as a sentence instead."""

        async def run_and_report() -> None:
            try:
                await work
            except VolunteerError as error:
                self.tell(error.message, "error")
            else:
                if done is not None:
                    done()

        self.run_worker(run_and_report(), group="commands", exit_on_error=True)

    @override
    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Return every page and every action, for the palette."""
        return palette_entries(self, screen, _pages())


def _raise(error: BaseException) -> None:
    raise error


def _pages() -> tuple[keys.PageInfo, ...]:
    return (*keys.PAGES, keys.ONBOARDING)


def _page(info: keys.PageInfo) -> Page:
    return keys.load_page(info)()


def palette_entries(
    app: VolunteerApp, screen: Screen[Any], pages: Sequence[keys.PageInfo]
) -> Iterator[SystemCommand]:
    """Yield the entries of the palette for this screen."""
    for page in pages:
        open_page = functools.partial(app.action_page, page.name)
        yield SystemCommand(_(page.title), _(page.help), open_page)
    for command in screen.ACTIONS if isinstance(screen, Page) else ():
        yield _palette_entry(app, command, screen)
    for command in keys.COMMANDS:
        if command.action != "command_palette":
            yield _palette_entry(app, command, app)
    colours = _("Colours: dark, light, colour-blind, high contrast.")
    yield SystemCommand(_("Theme"), colours, app.action_theme)
    language = _("The language of all screens.")
    yield SystemCommand(_("Language"), language, app.action_language)
    save = functools.partial(app.call_after_refresh, save_screenshot, app)
    yield SystemCommand(_("Screenshot"), _("Save this screen as an SVG in ~/volunteer."), save)


def save_screenshot(app: VolunteerApp) -> None:
    """Write the screen as an SVG into the folder of exports, and show the path or the error."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(app.clock.now()))
    path = exports() / f"volunteer-screen-{stamp}.svg"
    try:
        export(path, app.export_screenshot().encode())
    except OSError as error:
        app.tell(_("{path} cannot be written: {why}", path=path, why=why(error)), "error")
    else:
        app.tell(_("written to {path}", path=path))


def _palette_entry(
    app: VolunteerApp, command: keys.KeyCommand, target: App[Any] | Screen[Any]
) -> SystemCommand:
    def run() -> None:
        app.run_worker(target.run_action(command.action), group="palette")

    return SystemCommand(_capitalised(_(command.short)), _(command.help), run)


def _capitalised(short: str) -> str:
    """Return a key's word with a capital letter; names such as CSV stay unchanged."""
    return short[:1].upper() + short[1:]
