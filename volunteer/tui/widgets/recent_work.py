"""Recent submissions with their verdicts, and samples of the model before and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

from rich.cells import cell_len
from typing_extensions import override

from shared.protocol.contributions import Verdict
from shared.protocol.listings import LedgerRow
from volunteer.i18n.catalogue import N_, _, translated
from volunteer.i18n.coordinator import verdict_reason
from volunteer.i18n.formats import credit
from volunteer.tui.agent_view import Curve
from volunteer.tui.text import (
    ASCII,
    Glyphs,
    Line,
    centred,
    clock_time,
    fit,
    left,
    printable_lines,
    right,
    width,
    wrap,
)
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.pictures import before_and_after, is_drawing, preview_lines

WORD_CELLS = 11  # width of a verdict
ROOMY = 60  # width from which run and task number fit
VERDICTS = {
    "received": ("wait", N_("received"), "dim"),
    "checking": ("wait", N_("checking"), "info"),
    "accepted": ("check", N_("accepted"), "info"),
    "merged": ("check", N_("merged"), "good"),
    "paid": ("check", N_("paid"), "good"),  # games: paid at once, never merged
    "superseded": ("check", N_("not needed"), "dim"),
    "rejected": ("cross", N_("rejected"), "bad"),
    "unpaid": ("cross", N_("not paid"), "bad"),
    "reversed": ("cross", N_("taken back"), "bad"),
}
DECIDING = ("earned", "reversed")  # steps of the ledger that decide the pay of a contribution
NO_STEPS: Mapping[int, str] = MappingProxyType({})


class Contributions(Panel):
    """Card of the verdicts, newest first."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        status = scene.view.status
        waiting = 0 if status.online else status.queued  # counted only when an outage begins
        runs = {verdict.run for verdict in status.verdicts}
        of = next(iter(runs)) if len(runs) == 1 else ""  # otherwise each line names its run
        return _("Contributions"), _("{n} waiting to be sent", n=waiting) if waiting else of

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        verdicts = scene.view.status.verdicts
        if not verdicts:
            text = _("your contributions appear here with their verdicts and reasons")
            return centred(text, width, height)
        lines: list[Line] = []
        several = len({verdict.run for verdict in verdicts}) > 1
        for verdict in reversed(verdicts[-height:]):
            lines += verdict_lines(verdict, width, scene.glyphs, named=several)
        return lines[:height]


def verdict_lines(
    verdict: Verdict, cells: int, glyphs: Glyphs, *, named: bool = False
) -> list[Line]:
    """Return a verdict in one line, with its run if `named`; a refusal's long reason in a
    second.
    """
    why = reason_of(verdict)
    line = verdict_line(verdict, why, cells, glyphs, named=named)
    if outcome(verdict) not in ("rejected", "unpaid") or why in "".join(text for text, _ in line):
        return [line]
    reason = fit(why, cells - 8, glyphs.ellipsis)
    return [
        verdict_line(verdict, "", cells, glyphs, named=named),
        ((" " * 6, "text"), (f"{glyphs.corner} ", "faint"), (reason, "text")),
    ]


def outcome(verdict: Verdict, steps: Mapping[int, str] = NO_STEPS) -> str:
    """Return the state of a contribution: "paid" for accepted work that the ledger has paid (games,
    which no version merges), "reversed" for pay that was taken back, "unpaid" for decided work
    whose pay was refused. `steps` are the last `DECIDING` steps of the ledger by contribution.
    """
    step = steps.get(verdict.contribution)
    if step == "reversed":
        return step
    if verdict.state == "accepted" and step == "earned":
        return "paid"
    decided = verdict.state in ("merged", "superseded") and not verdict.credits_micro
    # Work of price 0 has no credits either; only the sentence of a refused pay has the word "paid".
    return "unpaid" if decided and "paid" in verdict.message else verdict.state


def deciding_steps(rows: Sequence[LedgerRow]) -> dict[int, str]:
    """Return the last of the `DECIDING` steps of each contribution; `rows` are newest first."""
    return {
        row.contribution: row.kind
        for row in reversed(rows)
        if row.contribution is not None and row.kind in DECIDING
    }


def reason_of(verdict: Verdict, *, paid: bool = False) -> str:
    """Return a verdict's reason; "" if the verdict has no reason, or the reason says that the
    `paid` work waits.
    """
    if paid and verdict.message == verdict.state:
        return ""
    return translated(verdict_reason(verdict))


def verdict_line(verdict: Verdict, reason: str, cells: int, glyphs: Glyphs, *, named: bool) -> Line:
    """Return time, run or task or both, verdict, credits and reason, as far as there is room."""
    name, word, role = VERDICTS[outcome(verdict)]
    sign: str = getattr(glyphs, name)
    paid = f"+{credit(verdict.credits_micro)}" if verdict.credits_micro else ""
    spans: list[tuple[str, str]] = []
    if cells >= 40:
        spans.append((f"{clock_time(verdict.at)} ", "dim"))
    if cells >= 30 and named:
        run = 14 if cells >= ROOMY else 9
        spans.append((f"{left(verdict.run, run, glyphs.ellipsis)} ", "text"))
    if cells >= (ROOMY if named else 30):
        spans.append((left(f"#{verdict.task}", 7), "dim"))
    spans.append((f"{sign} {left(_(word), WORD_CELLS)}", role))
    spans.append((right(paid, 6), "value"))
    room = cells - width(spans) - 2
    if not reason and verdict.state == "merged" and verdict.version is not None:
        whole = _("version {version}", version=verdict.version)
        reason = whole if len(whole) <= room else f"v{verdict.version}"
    if room >= len("v1000") and reason:
        spans += [("  ", "text"), (fit(reason, room, glyphs.ellipsis), "text")]
    return tuple(spans)


class SampleCard(Panel):
    """Card with samples of the first and newest version; until then, the picture of the task."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        model = scene.view.models.get(scene.view.run())
        sampled = model is not None and model.last_sample is not None
        if not sampled and _drawn_curve(scene) is not None:
            return _("This task now"), ""
        text = model.last_sample[1] if model and model.last_sample else ""
        drawing = is_drawing(text) or (model is not None and model.last_picture is not None)
        return _("What the model draws") if drawing else _("What the model writes"), ""

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return sample_lines(scene, width, height)


def _drawn_curve(scene: Scene) -> Curve | None:
    """Return the curve of the running task if its preview is a drawing. Return None also for a
    curve without points, whose preview the plot of the loss shows.
    """
    task = scene.view.task(scene.device)
    curve = scene.view.curve(task.task) if task is not None else None
    return curve if curve and curve.points and is_drawing(curve.preview) else None


def sample_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return both samples, or the picture of the task, or a sentence if there is neither."""
    model = scene.view.models.get(scene.view.run())
    coloured = scene.glyphs.curve != ASCII.curve
    if model is not None and model.last_picture is not None and coloured:
        return before_and_after(model.first_picture, model.last_picture, cells, height)
    first = model.first_sample if model else None
    last = model.last_sample if model else None
    if last is None:
        if curve := _drawn_curve(scene):
            return preview_lines(curve.preview, curve.metrics, cells, height)
        text = _("a sample of the model appears here when the next version is evaluated")
        return centred(text, cells, height)
    if first is not None and first[0] == last[0]:
        first = None
    if is_drawing(last[1]):
        return _pictures(first, last, cells, height)
    lines: list[Line] = []
    if first is not None and height >= 4:
        lines += _sample_lines(first, cells, max(1, (height - 2) // 2), "dim")
    return lines + _sample_lines(last, cells, height - len(lines) - 1, "text")


def _sample_lines(sample: tuple[int, str], cells: int, rows: int, role: str) -> list[Line]:
    version, text = sample
    body = wrap(" ".join(text.split()), cells, rows)
    return [
        ((_("version {version}", version=version), "title"),),
        *(((line, role),) for line in body),
    ]


def _pictures(
    first: tuple[int, str] | None, last: tuple[int, str], cells: int, height: int
) -> list[Line]:
    """Return two pictures side by side, or only the newest if there is no room for both."""
    old = printable_lines(first[1])[-(height - 1) :] if first is not None else []
    new = printable_lines(last[1])[-max(1, height - 1) :]
    title = _("version {version}", version=first[0]) if first is not None else ""
    wide = max((cell_len(row) for row in (title, *old)), default=0)
    if first is None or wide + 3 + max(cell_len(row) for row in new) > cells:
        alone: list[Line] = [((_("version {version}", version=last[0]), "title"),)]
        return [*alone, *(((row, "text"),) for row in new)][:height]
    gap = wide + 3
    lines: list[Line] = [
        ((left(title, gap), "title"), (_("version {version}", version=last[0]), "title"))
    ]
    for before, after in zip_longest(old, new, fillvalue=""):
        lines.append(((left(before, gap), "dim"), (after, "text")))
    return lines[:height]
