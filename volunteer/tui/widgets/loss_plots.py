"""The two loss curves: of the task on this machine, and of the run's model."""

from __future__ import annotations

from collections.abc import Sequence

from volunteer.i18n.catalogue import _
from volunteer.text import loss, measured
from volunteer.tui.text import Line, count
from volunteer.tui.view import Curve
from volunteer.tui.widgets.panel import Scene
from volunteer.tui.widgets.pictures import drawn, picture
from volunteer.tui.widgets.plot import Chart, Plot, Series, last_value, recent
from volunteer.tui.widgets.raster import average

RECENT = 500  # points of the shorter window


class LossPlot(Plot):
    """Plot with an optional logarithmic height and an optional cut to the newest points."""

    logarithmic = False
    window = 0  # points; 0 = all


class TaskPlot(LossPlot):
    """Loss of the shown task, or of the last one: every step dim, their mean bold."""

    def heading(self, scene: Scene) -> tuple[str, str]:
        curve = self._curve(scene)
        if curve is None:
            return _("Loss of this task"), _axes(self)
        if not curve.points and drawn(curve.preview):
            return _("This task now"), ""
        both = f"{_('generator')} {scene.glyphs.dot} {_('critic')}" if curve.second else ""
        subtitle = " ".join(part for part in (both, _axes(self)) if part)
        task = scene.view.task(scene.device)
        if task is not None and task.task == curve.task:
            return _("Loss of this task"), subtitle  # its value stands in the card of the task
        newest = last_value(curve.points)
        value = f" {loss(newest)}" if newest is not None else ""
        return _("Loss of task {task}", task=curve.task) + value, subtitle

    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        curve = self._picture(scene)
        if curve is None:
            return super().lines(scene, width, height)
        rows = picture(curve.preview, curve.metrics, width - 2, height)
        return [((" ", "text"), *row) for row in rows]

    def _curve(self, scene: Scene) -> Curve | None:
        task = scene.view.task(scene.device)
        shown = task.task if task is not None and task.phase in ("train", "upload") else None
        return scene.view.curve(shown)

    def _picture(self, scene: Scene) -> Curve | None:
        """Return work without a loss but with a picture, such as self-play."""
        curve = self._curve(scene)
        return curve if curve and not curve.points and drawn(curve.preview) else None

    def chart(self, scene: Scene) -> Chart:
        curve = self._curve(scene)
        if curve is None:
            me = scene.view.status.me
            worked = bool(scene.view.status.verdicts or (me is not None and me.accepted))
            return Chart(
                empty=_("the loss of your next task appears here while it trains")
                if worked
                else _("the loss of your first task appears here while it trains")
            )
        if not curve.points:
            begun = any(t.task == curve.task and t.step == 0 for t in scene.view.status.tasks)
            return Chart(
                empty=_("its loss appears here") if begun else _("this task measures no loss")
            )
        points = recent(curve.points, self.window)
        series = [Series(points=points, role="raw")]
        if curve.second:
            series.append(Series(points=recent(curve.second, self.window), role="model"))
        else:
            series.append(Series(points=average(points), role="mean"))
        end = None if self.window else float(curve.steps)
        return Chart(series=tuple(series), x_name=_("step"), x_end=end, log=self.logarithmic)


class ModelPlot(LossPlot):
    """Loss of the run's model by version, marked at the contributions of this volunteer."""

    def heading(self, scene: Scene) -> tuple[str, str]:
        model = scene.view.models.get(scene.view.run())
        newest = last_value(model.points) if model else None
        value = f" {loss(newest)}" if newest is not None else ""
        mine = (
            f"{scene.glyphs.mark} {_('mine {n}', n=count(len(model.mine)))}"
            if model and model.mine
            else ""
        )
        info = scene.view.info(scene.view.run())
        what = measured(info.measure if info else "")
        of = "" if " " in what else " " + _("of the model")  # a long name needs the room
        return f"{what}{of}{value}", " ".join(part for part in (mine, _axes(self)) if part)

    def chart(self, scene: Scene) -> Chart:
        model = scene.view.models.get(scene.view.run())
        if model is None or not model.points:
            return Chart(empty=_("the loss of each new version appears here"))
        points = recent(model.points, self.window)
        return Chart(
            series=(Series(points=points, role="model"),),
            marks=tuple(float(version) for version in sorted(model.mine)),
            x_name=_("version"),
            log=self.logarithmic,
        )


def _axes(plot: LossPlot) -> str:
    """Return the settings of the axes that differ from the defaults."""
    return " ".join(
        [
            *([_("log")] if plot.logarithmic else []),
            *([_("last {n}", n=plot.window)] if plot.window else []),
        ]
    )
