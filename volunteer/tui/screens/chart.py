"""The curve of a run on the whole screen: a cursor that reads it, zoom and pan, and another run's
curve beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult

from shared.errors import VolunteerError
from shared.protocol import endpoints
from shared.protocol.accounts import RunInfo
from shared.protocol.listings import LossPoint
from shared.text import printable
from volunteer.i18n.catalogue import N_, _
from volunteer.text import loss, measured
from volunteer.tui import keys
from volunteer.tui.query_page import PageQuery, QueryPage, QueryReply
from volunteer.tui.sample_history import SampleHistory
from volunteer.tui.screens.sample_viewer import version_words
from volunteer.tui.text import Line, fit, spread, width
from volunteer.tui.view import Point
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.plot import Chart, Picked, Readable, Series, fitted, nearest
from volunteer.tui.widgets.raster import finite

ZOOM = 0.5  # of the width at each step
PAN = 0.25  # of the width at each step
LEAST = 4.0  # versions across, at least


class CurvePage(QueryPage):
    """Page of one curve, opened over Home or Runs; escape closes it."""

    NAME = "chart"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            id="cursor_left", key="left,h", action="move(-1)", short=N_("cursor"),
            help=N_("Read the version before."), place="footer", rank=31,
        ),
        keys.KeyCommand(
            id="cursor_right", key="right,l", action="move(1)", short=N_("cursor"),
            help=N_("Read the next version."), place="footer", rank=31,
        ),
        keys.KeyCommand(
            id="zoom_in", key="plus,equals_sign,up", action="zoom(1)", short=N_("zoom"),
            help=N_("Show fewer versions, around the cursor."), place="footer", rank=32,
        ),
        keys.KeyCommand(
            id="zoom_out", key="minus,down", action="zoom(-1)", short=N_("zoom out"),
            help=N_("Show more versions."), place="footer", rank=32,
        ),
        keys.KeyCommand(
            id="pan_left", key="shift+left,comma", action="pan(-1)", short=N_("pan left"),
            help=N_("Look at earlier versions."),
        ),
        keys.KeyCommand(
            id="pan_right", key="shift+right,full_stop", action="pan(1)", short=N_("pan right"),
            help=N_("Look at later versions."),
        ),
        keys.KeyCommand(
            id="whole", key="0", action="whole", short=N_("all"), help=N_("Show the whole curve."),
            place="footer", rank=38,
        ),
        keys.KeyCommand(
            id="log_scale", key="y", action="log_scale", short=N_("log scale"),
            help=N_("Draw the losses on a logarithmic scale, and back."), place="footer", rank=34,
        ),
        keys.KeyCommand(
            id="overlay", key="n", action="overlay", short=N_("other run"),
            help=N_("Draw the next run's curve beside this one, and at last none."),
            place="footer", rank=35,
        ),
        keys.KeyCommand(
            id="first",
            key="home",
            action="end(-1)",
            short=N_("first"),
            help=N_("Read the first version."),
        ),
        keys.KeyCommand(
            id="newest", key="end", action="end(1)", short=N_("newest"),
            help=N_("Read the newest version, and each that comes."),
        ),
        keys.KeyCommand(
            id="close", key="escape,c", action="close", short=N_("back"),
            help=N_("Back to the page before."), place="footer", rank=12,
        ),
    )  # fmt: skip
    CSS = """
    CurvePage #curve { height: 1fr; }
    CurvePage #read { height: 2; padding: 0 1; background: $surface; }
    CurvePage.-short #read { height: 1; }
    """

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run
        self.other = ""
        self.at: float | None = None  # None: the newest
        self.span: tuple[float, float] | None = None  # None: all versions
        self.logarithmic = False
        self._history = SampleHistory(run)
        self._learning = False
        self._tried: set[int] = set()  # each version is asked for once

    def body(self) -> ComposeResult:
        yield Readable(self._chart, self._title, id="curve", classes="card curve")
        yield FunctionPanel(self._read, id="read")

    def queries(self) -> dict[str, PageQuery]:
        return {f"loss {run}": _losses(run) for run in (self.run, self.other) if run}

    # Data.

    def points(self, scene: Scene, run: str) -> list[Point]:
        """Return the curve of a run: the coordinator's points, and the newer ones from events."""
        answer: QueryReply[Sequence[LossPoint]] = self.answer(f"loss {run}")
        found = {float(p.version): p.loss for p in answer.value or ()}
        model = scene.view.models.get(run)
        for version, value in model.points if model else ():
            found.setdefault(version, value)
        return finite(sorted(found.items()))

    def _here(self, points: Sequence[Point]) -> Point | None:
        """Return the point under the cursor."""
        return nearest(points, points[-1][0] if self.at is None else self.at) if points else None

    def _info(self, scene: Scene, run: str) -> RunInfo | None:
        return scene.view.info(run)

    # Drawing.

    def _title(self, scene: Scene) -> tuple[str, str]:
        info = self._info(scene, self.run)
        what = measured(info.measure if info else "")
        beside = " " + _("beside {other}", other=printable(self.other, 30)) if self.other else ""
        notes = [
            self.answer(f"loss {self.run}").note(scene),
            _("log") if self.logarithmic else "",
            f"{scene.glyphs.mark} {_('mine')}" if self._mine(scene) else "",
        ]
        return _(
            "{what} of {run}{beside}", what=what, run=printable(self.run, 30), beside=beside
        ), " ".join(filter(None, notes))

    def _mine(self, scene: Scene) -> frozenset[int]:
        """Return the known versions with work of this volunteer."""
        model = scene.view.models.get(self.run)
        told = {version for version, row in self._history.rows.items() if row.mine}
        return (model.mine if model else frozenset()) | told

    def _chart(self, scene: Scene) -> Chart:
        points = self.points(scene, self.run)
        here = self._here(points)
        series = [Series(points=points, role="model")]
        if self.other:
            beside = self.points(scene, self.other)
            if not self._comparable(scene):
                beside = fitted(beside, points)
            series.insert(0, Series(points=beside, role="mean"))
        asking = self.answer(f"loss {self.run}").asking
        return Chart(
            series=tuple(series),
            marks=tuple(float(version) for version in sorted(self._mine(scene))),
            x_name=_("version"),
            log=self.logarithmic,
            span=self.span,
            cursor=here[0] if here else None,
            empty=_("asking the coordinator")
            if asking
            else _("the loss of each version appears here"),
        )

    def _comparable(self, scene: Scene) -> bool:
        """Return True if both runs measure the same, so that one scale fits."""
        own, other = self._info(scene, self.run), self._info(scene, self.other)
        return own is not None and other is not None and own.measure == other.measure

    def _read(self, scene: Scene, cells: int, height: int) -> list[Line]:
        points = self.points(scene, self.run)
        here = self._here(points)
        if here is None:
            return []
        lines: list[Line] = [self._words(scene, points, here, cells)]
        if self.other:
            beside = nearest(self.points(scene, self.other), here[0])
            scale = "" if self._comparable(scene) else " " + _("(on a scale of its own)")
            said = (
                f"{_('version {version}', version=int(beside[0]))}, {loss(beside[1])}{scale}"
                if beside
                else _("no curve")
            )
            name = f"{printable(self.other, 30)} "
            lines.append(((name, "mean"), (fit(said, cells - len(name)), "text")))
        return lines[:height]

    def shown(self, scene: Scene) -> None:
        super().shown(scene)
        here = self._here(self.points(scene, self.run))
        if here is None or self._learning or not scene.view.status.online:
            return
        version = int(here[0])
        if version not in self._history.rows and version not in self._tried:
            self._learning = True
            self._tried.add(version)
            self.run_worker(self._learn(version), group="versions")

    def _words(self, scene: Scene, points: Sequence[Point], here: Point, cells: int) -> Line:
        """Return all about the version under the cursor."""
        version = int(here[0])
        info = self._info(scene, self.run)
        row = self._history.rows.get(version)
        at = bisect_left(points, here)
        change = here[1] - points[at - 1][1] if at else None
        spans: Line = (
            (f"{printable(self.run, 30)} ", "model"),
            (_("version {version}", version=version) + " ", "title"),
            (loss(here[1]), "value"),
            (f" ({change:+.3f})" if change is not None else "", "dim"),
        )
        if version in self._mine(scene):
            spans = (*spans, (" " + f"{scene.glyphs.mark} {_('mine')}", "mark"))
        if row is None:
            return spans
        said = version_words(row, info.measure if info else "").partition(", ")[2]
        return spread(spans, ((fit(said, max(0, cells - width(spans) - 2)), "dim"),), cells)

    async def _learn(self, version: int) -> None:
        """Load the contributors of the versions around the cursor."""
        control = self.volunteer.control
        if control is None:
            return
        try:
            await self._history.around(control, version)
        except VolunteerError:
            return  # the curve says what is known
        finally:
            self._learning = False
        if self.is_current:
            self._redraw()

    # Keys.

    def _redraw(self) -> None:
        self.show(self.volunteer.scene(), at_once=True)

    def _window(self, points: Sequence[Point]) -> tuple[float, float]:
        """Return the visible versions."""
        return self.span or (points[0][0], points[-1][0])

    def _turn_to(self, points: Sequence[Point], left: float, right: float) -> None:
        """Show these versions, within the existing ones."""
        first, last = points[0][0], points[-1][0]
        across = max(LEAST, right - left)
        if across >= last - first:
            self.span = None
            return
        across = float(round(across))
        left = float(round(min(max(left, first), last - across)))
        self.span = (left, left + across)

    def _go(self, version: float) -> None:
        """Put the cursor on the nearest measured version, and keep it in sight."""
        points = self.points(self.volunteer.scene(), self.run)
        found = nearest(points, version)
        if found is None:
            return
        self.at = None if found == points[-1] else found[0]
        if self.span is not None and not self.span[0] <= found[0] <= self.span[1]:
            half = (self.span[1] - self.span[0]) / 2
            self._turn_to(points, found[0] - half, found[0] + half)
        self._redraw()

    def action_move(self, by: int) -> None:
        """Move the cursor by `by` versions."""
        points = self.points(self.volunteer.scene(), self.run)
        here = self._here(points)
        if here is not None:
            at = bisect_left(points, here) + by
            self._go(points[min(max(at, 0), len(points) - 1)][0])

    def action_end(self, side: int) -> None:
        """Read the first or the newest version."""
        points = self.points(self.volunteer.scene(), self.run)
        if points:
            self._go(points[0 if side < 0 else -1][0])

    def action_zoom(self, by: int) -> None:
        """Show fewer or more versions around the cursor."""
        points = self.points(self.volunteer.scene(), self.run)
        here = self._here(points)
        if here is None:
            return
        left, right = self._window(points)
        across = max(LEAST, (right - left) * (ZOOM if by > 0 else 1 / ZOOM))
        share = (here[0] - left) / (right - left) if right > left else 0.5
        left = here[0] - share * across
        self._turn_to(points, left, left + across)
        self._redraw()

    def action_pan(self, by: int) -> None:
        """Show earlier or later versions."""
        points = self.points(self.volunteer.scene(), self.run)
        if points and self.span is not None:
            step = by * PAN * (self.span[1] - self.span[0])
            self._turn_to(points, self.span[0] + step, self.span[1] + step)
            assert self.span is not None  # a part stays a part
            self._go(min(max(self.at or points[-1][0], self.span[0]), self.span[1]))

    def action_whole(self) -> None:
        """Show the whole curve."""
        self.span = None
        self._redraw()

    def action_log_scale(self) -> None:
        """Draw the height as a logarithm, or not."""
        self.logarithmic = not self.logarithmic
        self._redraw()

    def action_overlay(self) -> None:
        """Draw the next run as a second curve, or none after the last."""
        names = [info.name for info in self.volunteer.latest.status.runs if info.name != self.run]
        chosen = ["", *names]
        at = chosen.index(self.other) if self.other in chosen else 0
        self.other = chosen[(at + 1) % len(chosen)]
        if len(chosen) == 1:
            self.volunteer.tell(_("this coordinator has no other run"))
        self._redraw()

    def action_close(self) -> None:
        """Return to the page before."""
        self.dismiss()

    @on(Picked)
    def _picked(self, picked: Picked) -> None:
        if picked.zoom:
            self.action_zoom(picked.zoom)
        else:
            self._go(picked.x)


def _losses(run: str) -> PageQuery:
    return lambda control: control.query(endpoints.LOSS, run=run)
