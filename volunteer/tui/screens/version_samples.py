"""Viewer of samples: texts, pictures or games, by version, next to an earlier version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.events import Resize
from typing_extensions import override

from shared.errors import VolunteerError
from shared.protocol.versions import VersionInfo
from shared.text import printable
from shared.workloads.declaration import Measure
from volunteer.i18n.catalogue import N_, _, ngettext, translated
from volunteer.text import loss, measure_word
from volunteer.tui import keys
from volunteer.tui.page import Page
from volunteer.tui.sample_history import SampleHistory
from volunteer.tui.text import Line, clock_time, fit
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.sample import SampleView

BOTH_CELLS = 74  # narrower screens show one version
NEWS_S = 3.0  # least time between two queries for newer versions


class SamplesPage(Page):
    """Page of samples, opened over Home or Runs; escape closes it."""

    NAME = "samples"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="left_square_bracket,left",
            action="step(-1)",
            short=N_("older"),
            help=N_("The version before that has a sample."),
            rank=31,
        ),
        keys.KeyCommand(
            key="right_square_bracket,right",
            action="step(1)",
            short=N_("newer"),
            help=N_("The next version that has a sample."),
            rank=31,
        ),
        keys.KeyCommand(
            key="left_curly_bracket,pageup",
            action="step(-10)",
            short=N_("10 older"),
            help=N_("Ten versions back."),
        ),
        keys.KeyCommand(
            key="right_curly_bracket,pagedown",
            action="step(10)",
            short=N_("10 newer"),
            help=N_("Ten versions on."),
        ),
        keys.KeyCommand(
            key="home",
            action="end(-1)",
            short=N_("first"),
            help=N_("The first version with a sample."),
        ),
        keys.KeyCommand(
            key="end",
            action="end(1)",
            short=N_("newest"),
            help=N_("The newest version, and each new one while you look."),
            rank=36,
        ),
        keys.KeyCommand(
            key="b",
            action="beside",
            short=N_("before"),
            help=N_("Show an earlier version next to it, or hide it."),
            rank=33,
        ),
        keys.KeyCommand(
            key="full_stop,enter",
            action="pin",
            short=N_("compare"),
            help=N_("Take this version as the earlier one, to compare others with."),
            rank=37,
        ),
        keys.KeyCommand(
            key="up,k",
            action="scroll(-1)",
            short=N_("up"),
            help=N_("Scroll the text up."),
        ),
        keys.KeyCommand(
            key="down,j",
            action="scroll(1)",
            short=N_("down"),
            help=N_("Scroll the text down."),
        ),
        keys.KeyCommand(
            key="escape,m",
            action="close",
            short=N_("back"),
            help=N_("Back to the page before."),
            rank=12,
        ),
    )
    CSS = """
    SamplesPage #slider { height: 1; padding: 0 1; background: $surface; }
    SamplesPage #both { height: 1fr; }
    SamplesPage SampleView { width: 1fr; height: 1fr; }
    """

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run
        self.history = SampleHistory(run)
        self.at: int | None = None  # shown version
        self.base: int | None = None  # version for comparison
        self._both: bool | None = None  # both versions are shown; None: if there is room
        self._follows_newest = True
        self._loaded_at = float("-inf")
        self._loading = False
        self._error = ""

    @override
    def body(self) -> ComposeResult:
        yield FunctionPanel(self._slider, id="slider")
        with Horizontal(id="both"):
            yield SampleView(id="before")
            yield SampleView(id="after")

    @override
    def on_mount(self) -> None:
        super().on_mount()
        self._arrange(self.app.size.width)
        self.run_worker(self._load_versions(), group="news")

    def on_resize(self, event: Resize) -> None:
        self._arrange(event.size.width)

    def _arrange(self, width: int) -> None:
        self.query_one("#before").display = self._shows_both(width) and self.base != self.at

    def _shows_both(self, width: int) -> bool:
        return width >= BOTH_CELLS if self._both is None else self._both

    # Versions.

    async def _load_versions(self) -> None:
        """Load new versions; show the newest version while the page follows the newest."""
        control = self.volunteer.control
        if control is None or self._loading:
            return
        self._loading = True
        self._loaded_at = self.volunteer.clock.now()
        try:
            await self.history.begin(control, self._head())
        except VolunteerError as error:
            self._error = translated(error.message)
        else:
            self._error = ""
        finally:
            self._loading = False
        if self.base is None:
            self.base = self.history.first()
        if self._follows_newest:
            self.at = self.history.last()
        self._show_versions()

    def _head(self) -> int:
        """Return the newest known version."""
        view = self.volunteer.latest
        beat, info = view.beat(self.run), view.info(self.run)
        versions = (beat.version if beat else 0, info.version if info else 0)
        return max(*versions, self.history.head)

    @override
    def update_from(self, scene: Scene) -> None:
        """Load newer versions while the page shows the newest version, or no version."""
        newest = self.history.rows.get(self.history.head)
        awaited = newest is not None and newest.evaluation in ("waiting", "running")
        newer = self._follows_newest and (awaited or self._head() > self.history.head)
        if (newer or self.at is None) and scene.now - self._loaded_at >= NEWS_S:
            self.run_worker(self._load_versions(), group="news")

    async def _step(self, by: int) -> None:
        if self.at is None:
            return
        control = self.volunteer.control
        version: int | None = None
        if control is not None:
            try:
                version = await self.history.step(control, self.at, by)
            except VolunteerError as error:
                self._error = translated(error.message)
        if version is not None:
            self.at = version
        self._follows_newest = self.at == self.history.last()
        self._show_versions()

    def _show_versions(self) -> None:
        """Give the chosen versions to both views, and draw the page."""
        if not self.is_attached:
            return
        self._arrange(self.app.size.width)
        info = self.volunteer.latest.info(self.run)
        for view, version in (("#before", self.base), ("#after", self.at)):
            row = self.history.rows.get(version) if version is not None else None
            self.query_one(view, SampleView).look_at(
                self.run, row, info.measure if info else "loss"
            )
        self.show(self.volunteer.scene(), at_once=True)

    # Drawing.

    def _slider(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        if self.at is None:
            sentence = f"{self.run}: {self._error}" if self._error else self._empty()
            return [((fit(printable(sentence, 200), width, scene.glyphs.ellipsis), "dim"),)]
        info = scene.view.info(self.run)
        row = self.history.rows[self.at]
        text = (
            _(
                "{run}  version {at} of {head}",
                run=printable(self.run, 30),
                at=self.at,
                head=self.history.head,
            )
            + "  "
        )
        facts = f"  {version_words(row, info.measure if info else 'loss')}"
        room = width - len(text)
        if room - len(facts) >= 12:
            room -= len(facts)
        else:
            facts = ""
        return [
            (
                (fit(text, width), "title"),
                *slider(self.at, self.base, self.history.head, room, scene),
                (facts, "dim"),
            )
        ]

    def _empty(self) -> str:
        if self.history.head < 0:
            return _("asking the coordinator")
        return _("{run}: a sample appears here when the next version is evaluated", run=self.run)

    # Keys.

    def action_step(self, by: int) -> None:
        """Show an older or newer version."""
        self.run_worker(self._step(by), group="versions", exclusive=True)

    def action_end(self, side: int) -> None:
        """Show the first or the newest version with a sample."""
        version = self.history.first() if side < 0 else self.history.last()
        if version is not None:
            self.at = version
            self._follows_newest = side > 0
            self._show_versions()

    def action_beside(self) -> None:
        """Show or hide the earlier version."""
        self._both = not self._shows_both(self.app.size.width)
        self._show_versions()

    def action_pin(self) -> None:
        """Keep this version for comparison with others."""
        self.base, self._both = self.at, True
        self._show_versions()

    def action_scroll(self, by: int) -> None:
        """Scroll both texts."""
        for view in self.query(SampleView):
            view.scroll_text(by)

    def action_close(self) -> None:
        """Return to the previous page."""
        self.dismiss()


def version_words(row: VersionInfo, measure: Measure) -> str:
    """Return the measure of a version, its contributions and its time."""
    parts = []
    if row.loss is not None:
        parts.append(f"{measure_word(measure)} {loss(row.loss, measure)}")
    if row.contributions:
        share = (
            _(", {mine} of them yours", mine=row.mine) if row.mine and row.contributions > 1 else ""
        )
        share = _(", yours") if row.mine and row.contributions == 1 else share
        count_words = ngettext("{n} contribution", "{n} contributions", row.contributions)
        parts.append(f"{count_words}{share}")
    parts.append(clock_time(row.created_at))
    return ", ".join(parts)


def slider(at: int, base: int | None, head: int, cells: int, scene: Scene) -> Line:
    """Return a slider of exactly `cells` with the shown version `at` and the compared `base`."""
    if cells <= 0:
        return ()
    glyphs = scene.glyphs

    def place(version: int) -> int:
        return round(version / max(1, head) * (cells - 1))

    signs = [(glyphs.empty, "track")] * cells
    if base is not None:
        signs[place(base)] = (glyphs.off, "dim")
    signs[place(at)] = (glyphs.on, "mark")
    return tuple(signs)
