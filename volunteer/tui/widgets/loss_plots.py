"""Plots of the two losses: of the task on this machine, and of the run's model."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from volunteer.i18n.catalogue import _
from volunteer.text import loss, measure_heading
from volunteer.tui.agent_view import Curve
from volunteer.tui.text import Line, short_number
from volunteer.tui.widgets.panel import Scene
from volunteer.tui.widgets.pictures import preview_lines
from volunteer.tui.widgets.plot import Chart, Plot, Series, as_drawn, last_value
from volunteer.tui.widgets.raster import average


class TaskPlot(Plot):
    """Loss of the shown task, or else of the last task: every step dim, the mean bold."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        curve = self._curve(scene)
        if curve is None:
            return _("This task now") if _solves(scene) else _("Loss of this task"), ""
        if not curve.points and curve.preview:
            return _("This task now"), ""
        subtitle = f"{_('generator')} {scene.glyphs.dot} {_('critic')}" if curve.second else ""
        task = scene.view.task(scene.device)
        if task is not None and task.task == curve.task:
            return _("Loss of this task"), subtitle  # the task's card shows the value
        newest = last_value(curve.points)
        value = f" {loss(newest)}" if newest is not None else ""
        return _("Loss of task {task}", task=curve.task) + value, subtitle

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        curve = self._curve(scene)
        if curve is None or curve.points or not curve.preview:
            return super().lines(scene, width, height)
        # work without a loss: a game, or answers
        rows = preview_lines(curve.preview, curve.metrics, width - 2, height)
        return [((" ", "text"), *row) for row in rows]

    @override
    def subject(self, scene: Scene) -> object:
        curve = self._curve(scene)
        return None if curve is None else curve.task

    def _curve(self, scene: Scene) -> Curve | None:
        task = scene.view.task(scene.device)
        number = task.task if task is not None and task.phase in ("train", "upload") else None
        return scene.view.curve(number)

    @override
    def chart(self, scene: Scene) -> Chart:
        curve = self._curve(scene)
        if curve is None and _solves(scene):
            return Chart(empty=_("the answers of your next task appear here"))
        if curve is None:
            me = scene.view.status.me
            worked = bool(scene.view.status.verdicts or (me is not None and me.accepted))
            return Chart(
                empty=_("the loss of your next task appears here while it trains")
                if worked
                else _("the loss of your first task appears here while it trains")
            )
        if not curve.points:
            starting = any(t.task == curve.task and t.step == 0 for t in scene.view.status.tasks)
            return Chart(
                empty=_("its loss appears here") if starting else _("this task measures no loss")
            )
        series = [Series(points=curve.points, role="raw")]
        if curve.second:
            series.append(Series(points=curve.second, role="model"))
        else:
            series.append(Series(points=average(curve.points), role="mean"))
        return Chart(series=tuple(series), x_name=_("step"), x_end=float(curve.steps))


def _solves(scene: Scene) -> bool:
    """Return True if the tasks of the shown run answer problems."""
    info = scene.view.info(scene.view.run())
    return info is not None and info.measure == "share solved"


class ModelPlot(Plot):
    """Loss of the run's model by version, with marks at this volunteer's contributions."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        model = scene.view.models.get(scene.view.run())
        newest = last_value(model.points) if model else None
        info = scene.view.info(scene.view.run())
        measure = info.measure if info else "loss"
        value = f" {loss(newest, measure)}" if newest is not None else ""
        share = (
            f"{scene.glyphs.mark} {_('mine {n}', n=short_number(len(model.mine)))}"
            if model and model.mine
            else ""
        )
        measure_name = measure_heading(measure)
        of = "" if " " in measure_name else " " + _("of the model")  # a long name needs the room
        return f"{measure_name}{of}{value}", share

    @override
    def chart(self, scene: Scene) -> Chart:
        model = scene.view.models.get(scene.view.run())
        if model is None or not model.points:
            return Chart(empty=_("the measure of each version appears here"))
        info = scene.view.info(scene.view.run())
        points = as_drawn(model.points, info.measure if info else "loss")
        return Chart(
            series=(Series(points=points, role="model"),),
            marks=tuple(float(version) for version in sorted(model.mine)),
            x_name=_("version"),
        )
