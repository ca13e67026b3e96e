"""The program that a volunteer keeps open: pages around one `AgentView`, which is folded from the
control's events.

Nothing here trains, waits for the network or imports torch. Numbers are drawn at most twice a
second and curves once, less often while the terminal has no focus, and only on the page that can be
seen.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.notifications import SeverityLevel
from textual.reactive import Reactive, reactive
from textual.screen import Screen
from textual.theme import Theme

from shared.clock import Clock, SystemClock
from shared.errors import VolunteerError
from volunteer.control.commands import How
from volunteer.control.control import Control
from volunteer.control.sentences import words
from volunteer.tui import keys, palette, themes
from volunteer.tui.event_feed import Feed, Listener
from volunteer.tui.page import Page
from volunteer.tui.terminal.ascii import AsciiFilter
from volunteer.tui.terminal.driver import lasting_driver
from volunteer.tui.text import ASCII, UNICODE, Glyphs
from volunteer.tui.themes import SteadyStylesheet
from volunteer.tui.view import AgentView
from volunteer.tui.widgets.panel import Scene

TICK_S = 0.5
# How long a thread of pure Python (self-play) keeps the interpreter while a key waits; Python's 5
# ms, several times a key, made half of the latency that was measured.
SWITCH_S = 0.001
BLURRED_TICKS = 4  # without focus every fourth tick is drawn
# Classes that a screen of at least this size has.
WIDTHS = [(0, "-tiny"), (60, "-narrow"), (80, "-normal"), (116, "-wide")]
HEIGHTS = [(0, "-flat"), (6, "-low"), (14, "-short"), (22, "-middle"), (34, "-tall")]


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Display settings."""

    theme: str = themes.DEFAULT
    ascii: bool = False
    animations: bool = False
    keys: dict[str, str] = {}  # action id -> key
    page: str = "dashboard"  # the first one
    power_price: float = 0.0  # of a kilowatt-hour


class VolunteerApp(App[int]):
    """The terminal application: pages, keys, theme and the event feed.

    `control` may come later, through `attach`; the exit value is the program's.
    """

    TITLE = "volunteer"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.bindings(),
        Binding("ctrl+q,ctrl+c", "leave", "quit", show=False, priority=False),
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
    ) -> None:
        look = look or Look()
        # Textual reads both from the instance; a page's module is imported when it is first opened.
        self.DEFAULT_MODE = look.page  # type: ignore[misc]
        self.MODES = {p.name: functools.partial(_new, p) for p in _pages()}  # type: ignore[misc]
        super().__init__(driver_class=lasting_driver())
        self.stylesheet = SteadyStylesheet(variables=self.get_css_variables())
        self.look = look
        self.clock = clock or SystemClock()
        self.glyphs: Glyphs = ASCII if look.ascii else UNICODE
        self.device = ""
        self.leaving: How | None = None  # set once the volunteer was asked to end
        self.painted = asyncio.Event()  # once something can be read
        self.at_once = False  # asked a second time: nobody waits for the volunteer
        self._tick_s = tick_s
        self._ticks = 0
        self._hurried = False
        self._switch_s = sys.getswitchinterval()
        self._feed: Feed | None = None
        self._ascii = AsciiFilter(enabled=look.ascii)
        for theme in themes.THEMES:
            self.register_theme(theme)
        self.theme = look.theme if look.theme in self.available_themes else themes.DEFAULT
        if not look.animations:
            self.animation_level = "none"
        if look.keys:
            self.set_keymap(look.keys)
        self._waiting_control = control

    # ------------------------------------------------------------------------------ life

    def on_mount(self) -> None:
        self.set_class(self.look.ascii, "-ascii")
        if self._waiting_control is not None:
            self.attach(self._waiting_control)
        if self._tick_s is not None:
            self.set_interval(self._tick_s, self._tick)
        self._catch_signals()
        sys.setswitchinterval(SWITCH_S)
        self.theme_changed_signal.subscribe(self, self._keep_theme)
        self.call_after_refresh(self.call_after_refresh, self.painted.set)

    def _keep_theme(self, theme: Theme) -> None:
        """A theme that was chosen here is the one of the next start."""
        if self.control is not None and theme.name != self.look.theme:
            self.look = msgspec.structs.replace(self.look, theme=theme.name)
            self.command(self.control.set_settings({"theme": theme.name}))

    def change_look(self, name: str, value: Any) -> None:
        """Show things in another way from now on; it is saved already."""
        if name == "theme" and value not in self.available_themes:
            return
        self.look = msgspec.structs.replace(self.look, **{name: value})
        match name:
            case "theme":
                self.theme = value
            case "keys":
                self.set_keymap(value)
            case "animations":
                self.animation_level = "full" if value else "none"
            case "ascii":
                self.glyphs = ASCII if value else UNICODE
                self._ascii.enabled = value
                self.set_class(value, "-ascii")
                self.refresh(layout=True)
        self.redraw()

    def _catch_signals(self) -> None:
        """The system's wish to end is a wish to leave in good order, with the terminal as it was;
        the second is at once.
        """
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP", "SIGINT"):
            try:
                loop.add_signal_handler(getattr(signal, name), self._asked_to_end)
            except (AttributeError, NotImplementedError, RuntimeError, ValueError):
                continue  # not on this system, or not in the main thread

    def _asked_to_end(self) -> None:
        if self.leaving is not None or self.control is None or self.control.remote:
            self.at_once = self.leaving is not None and not self.ended
            self.exit(self.exit_code)
        else:
            self.stop("release")

    def attach(self, control: Control) -> None:
        """Show another volunteer: its snapshot now, its events from now on."""
        if self._feed is not None:
            self._feed.close()
        listener = Listener(
            urgent=self._urgent,
            tell=self.tell,
            ring=self.bell,
            ended=self._over,
            failed=self._failed,
        )
        self._feed = Feed(control, self.clock, listener)
        self.publish()

    @property
    def control(self) -> Control | None:
        """The volunteer that is shown."""
        return self._feed.control if self._feed is not None else None

    @property
    def _latest(self) -> AgentView:
        return self._feed.view if self._feed is not None else self.view

    def _over(self) -> None:
        self.publish()
        if self.leaving is not None:
            self.exit(self.exit_code)

    def _failed(self, error: BaseException) -> None:
        """A fault of ours ends the program with its trace; it must not leave a screen that stands
        still.
        """
        self.call_later(_raise, error)

    def _urgent(self) -> None:
        if not self._hurried:
            self._hurried = True
            self.call_later(self._hurry)

    def _hurry(self) -> None:
        """Draw what a person waits for; events that come together are drawn together, curves when
        they are due.
        """
        self._hurried = False
        self._show(hurried=True)

    def tell(self, message: str, level: str = "info") -> None:
        """A sentence at the corner of the screen, for a few seconds."""
        levels: dict[str, SeverityLevel] = {"warning": "warning", "error": "error"}
        self.notify(message, severity=levels.get(level, "information"), markup=False)

    async def on_unmount(self) -> None:
        if self._feed is not None:
            self._feed.close()
        sys.setswitchinterval(self._switch_s)

    # --------------------------------------------------------------------------- drawing

    def scene(self) -> Scene:
        """Return what is to be seen now."""
        return Scene(
            view=self.view,
            now=self.clock.now(),
            glyphs=self.glyphs,
            device=self.device,
            keys=self.look.keys,
            power_price=self.look.power_price,
            leaving=self.leaving,
        )

    def publish(self) -> None:
        """Make the newest state the one that is seen, and draw it."""
        if self.view is not self._latest:
            self.view = self._latest
        page = self._page
        if page is not None and page.is_mounted:
            page.show(self.scene())

    @property
    def _page(self) -> Page | None:
        """The page that can be seen, also behind the palette or a question."""
        stack = self.screen_stack if self._running else []
        return next((s for s in reversed(stack) if isinstance(s, Page) and s.is_current), None)

    def redraw(self) -> None:
        """Draw all panels of this page anew."""
        self._show(at_once=True)

    def _show(self, *, at_once: bool = False, hurried: bool = False) -> None:
        self.view = self._latest
        page = self._page
        if page is not None:
            page.show(self.scene(), at_once=at_once, hurried=hurried)

    def _tick(self) -> None:
        self._ticks += 1
        if self.app_focus or self._ticks % BLURRED_TICKS == 0:
            self.publish()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.DARK if self.current_theme.dark else themes.LIGHT

    def get_line_filters(self) -> Sequence[LineFilter]:
        found = super().get_line_filters()
        return [*found, self._ascii] if self._ascii.enabled else found

    # --------------------------------------------------------------------------- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action would do anything now."""
        if action in ("pause", "finish"):
            return self.control is not None and not self.ended and self.leaving is None
        if action == "retry":
            status = self._latest.status
            return not status.online and bool(status.connection) and not self.ended
        return super().check_action(action, parameters)

    def action_page(self, name: str) -> None:
        """Go to a page."""
        if name in self.MODES and name != self.current_mode:
            self.switch_mode(name)

    def action_pause(self) -> None:
        """Pause, or go on."""
        if self.control is None:
            return
        paused = self._latest.status.paused(self.device) is not None
        self.command(self.control.resume() if paused else self.control.pause())

    def action_finish(self) -> None:
        """Complete the task in hand and take no more; again: go on."""
        if self.control is not None:
            going = not self._latest.status.finishing
            self.command(self.control.finish() if going else self.control.resume())

    def action_retry(self) -> None:
        """Try to reach the coordinator now."""
        if self.control is not None:
            self.command(self.control.retry())

    def next_device(self) -> None:
        """Look at the task of another device."""
        devices = ("", *self._latest.devices())
        at = devices.index(self.device) if self.device in devices else 0
        self.device = devices[(at + 1) % len(devices)]
        self.redraw()

    def action_help(self) -> None:
        """All keys and words."""
        from volunteer.tui.screens.help import Help

        if not isinstance(self.screen, Help):
            self.redraw()
            self.push_screen(Help(self.scene(), keys.page_commands(self.screen)))

    def action_leave(self) -> None:
        """Leave.

        A volunteer of this process is ended, after a question when a task is in hand; a second
        time: at once.
        """
        if self.leaving or self.control is None or self.control.remote or self.ended:
            self.at_once = self.leaving is not None and not self.ended
            self.exit(self.exit_code)
        else:
            self.action_stop()

    def action_stop(self) -> None:
        """End the volunteer, wherever it runs; asks first what to do with a task in hand."""
        from volunteer.tui.screens.confirm_quit import Quit

        if not self._latest.status.tasks:
            self.stop("release")
        elif not isinstance(self.screen, Quit):
            self.redraw()
            self.push_screen(Quit(self.scene()), self._leave_as)

    def _leave_as(self, how: How | None) -> None:
        if how is not None:
            self.stop(how)

    def stop(self, how: How) -> None:
        """Ask the volunteer to end; the program ends when it has."""
        if self.control is None or self.ended:
            self.exit(self.exit_code)
            return
        self.leaving = how
        if self._feed is not None:
            self._feed.expected = True
        self.command(self.control.stop(how))
        self.redraw()

    @property
    def ended(self) -> bool:
        """Return True if the volunteer has come to its end."""
        return self._feed is not None and self._feed.ended

    @property
    def exit_code(self) -> int:
        """Return what the volunteer ended with; 0 while it goes on elsewhere."""
        return self._latest.ended.code if self._latest.ended is not None else 0

    @property
    def farewell(self) -> str:
        """Return what stays in the terminal when the screen is gone: how the volunteer ended; empty
        while it goes on.
        """
        ended = self._latest.ended
        return (words(ended) or "") if ended is not None else ""

    def command(
        self, work: Coroutine[Any, Any, Any], done: Callable[[], None] | None = None
    ) -> None:
        """Run a command of the control; what it refuses is shown as a sentence."""

        async def running() -> None:
            try:
                await work
            except VolunteerError as error:
                self.tell(str(error), "error")
            else:
                if done is not None:
                    done()

        self.run_worker(running(), group="commands", exit_on_error=True)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every page and every action, for the palette."""
        return palette.entries(self, screen, _pages())


def _raise(error: BaseException) -> None:
    raise error


def _pages() -> tuple[keys.PageInfo, ...]:
    return (*keys.PAGES, keys.ONBOARDING)


def _new(info: keys.PageInfo) -> Page:
    return keys.load(info)()
