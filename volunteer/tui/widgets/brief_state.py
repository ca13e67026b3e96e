"""State of this machine in a block of lines, for screens without room for cards."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from volunteer.i18n.catalogue import _
from volunteer.i18n.formats import credit
from volunteer.text import loss
from volunteer.tui.status_line import activity, connection, merge_sentence, why_paused
from volunteer.tui.text import Line, bar, countdown, fit, percent
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.task_card import stage_share


class Brief(Panel):
    """Panel with the most important facts first."""

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return brief(scene, width, height)


def brief(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return state, task, credits, connection and run as lines, the most important first."""
    view, glyphs = scene.view, scene.glyphs
    state = activity(view, scene.now, glyphs, scene.device)
    link = connection(view, scene.now, glyphs)
    task = view.task(scene.device)
    rest = cells - len(state.word) - 2
    head: Line = ((f"{state.sign} {state.word}", state.role),)
    if cells < len(state.word) + 2:
        head = ((state.sign, state.role),)
    elif height == 1 and task is not None and rest > 6:
        head = (*head, (f" {percent(stage_share(task))}", "value"))
        if task.loss is not None and rest > 18:
            head = (*head, (" " + _("loss {loss}", loss=loss(task.loss)), "text"))
    lines = [head]
    if task is not None:
        tail = fit(f" {percent(stage_share(task))}", cells, glyphs.ellipsis)
        lines.append((*bar(stage_share(task), cells - len(tail), glyphs), (tail, "text")))
        if paused := view.status.paused(task.device):
            lines.append(((fit(why_paused(paused), cells, glyphs.ellipsis), "warn"),))
        eta = (
            f" {glyphs.dot} {_('{time} left', time=countdown(task.eta_s))}"
            if task.eta_s is not None
            else ""
        )
        lines.append(
            (
                (
                    fit(_("loss {loss}", loss=loss(task.loss)) + eta, cells, glyphs.ellipsis),
                    "text",
                ),
            )
        )
    elif state.sentence:
        lines.append(((fit(state.sentence, cells, glyphs.ellipsis), "text"),))
    if view.status.me is not None:
        total = view.status.me.balance_micro
        lines.append(
            (
                (
                    fit(_("{credits} credits", credits=credit(total)), cells, glyphs.ellipsis),
                    "accent",
                ),
            )
        )
    lines.append(
        ((fit(f"{link.sign} {link.word} {link.sentence}", cells, glyphs.ellipsis), link.role),)
    )
    run = view.run()
    if run:
        sentence = merge_sentence(view, run, scene.now)
        lines.append(((fit(run, cells, glyphs.ellipsis), "title"),))
        lines.append(((fit(sentence, cells, glyphs.ellipsis), "dim"),))
    return lines[:height]
