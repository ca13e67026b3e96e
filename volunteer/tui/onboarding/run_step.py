"""Fifth step: the run to help, or any run."""

from __future__ import annotations

from collections.abc import Mapping

from textual import on
from textual.app import ComposeResult
from typing_extensions import override

from shared.text import printable
from shared.workloads.base import installed
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _, ngettext
from volunteer.text import origin_of
from volunteer.tui.onboarding.onboarding_step import BACK, NEXT, Step, text_lines
from volunteer.tui.run_estimate import RunEstimate, estimate
from volunteer.tui.text import Line, short_number
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

ANY = "*"
COLUMNS = (
    Column(title=N_("run"), cells=24),
    Column(title=N_("credits (estimate)"), cells=18, align="right", least=60),
    Column(title=N_("for this machine")),
)


class RunStep(Step):
    """Step that chooses a run."""

    NAME = "Run"
    TITLE = N_("Run")
    HEADING = N_("Which run do you want to help?")
    KEYS = (*NEXT, *BACK)

    @override
    def compose(self) -> ComposeResult:
        yield Listing(COLUMNS, self._filling, id="choices", classes="card")
        yield FunctionPanel(self._about, id="about-run")

    @override
    def begin(self, why: str = "") -> None:
        listing = self.query_one("#choices", Listing)
        listing.focus()
        listing.draw()

    @override
    def proceed(self) -> None:
        self.query_one("#choices", Listing).action_choose()

    @override
    def update_from(self, scene: Scene) -> None:
        self.query_one("#about-run", FunctionPanel).draw()

    def _filling(self, scene: Scene) -> Filling:
        rows = [
            Row(
                key=ANY,
                cells=(((_("any run"), "value"),), (), ((_("where most needed"), "dim"),)),
            )
        ]
        for info in scene.view.status.runs:
            run_estimate = self._estimate(scene, info.name)
            earns = (
                _("{credits} an hour", credits=short_number(run_estimate.credits_per_hour))
                if run_estimate.credits_per_hour is not None
                else ""
            )
            rows.append(
                Row(
                    key=info.name,
                    cells=(
                        ((printable(info.name, 60), "text"),),
                        ((earns, "text"),),
                        ((run_estimate.sentence, "text" if run_estimate.fits else "dim"),),
                    ),
                    dim=not run_estimate.fits,
                )
            )
        return Filling(rows=tuple(rows), title="", subtitle=_("up and down choose"))

    def _estimate(self, scene: Scene, name: str) -> RunEstimate:
        status = scene.view.status
        info = next(run for run in status.runs if run.name == name)
        return estimate(info, status, tuple(installed()))

    def _about(self, scene: Scene, width: int, height: int) -> list[Line]:
        key = self.query_one("#choices", Listing).key
        info = next((run for run in scene.view.status.runs if run.name == key), None)
        if info is None:
            if not scene.view.status.runs:
                return text_lines(
                    _("This coordinator has no run yet. Your machine begins when it starts one."),
                    width,
                    height,
                    "dim",
                )
            return text_lines(
                _(
                    "The coordinator gives you the run that suits this machine best. You can "
                    "choose another one at any time."
                ),
                width,
                height,
                "dim",
            )
        licence = _(
            "The model is published under {licence}.",
            licence=info.licence or _("no licence stated"),
        )
        if info.members is not None:
            licence += " " + own_files(info.name, scene.view.status.own_samples)
        elif info.dataset_licence:
            licence = _(
                "The model is published under {licence}; the data is under {data}.",
                licence=info.licence,
                data=info.dataset_licence,
            )
        elif info.dataset:
            licence += " " + _("No licence of the data is stated.")
        if info.origin:
            licence += " " + _("It begins from {origin}.", origin=origin_of(info))
        return [*text_lines(info.description, width, 2), *text_lines(licence, width, 2, "dim")][
            :height
        ]

    @on(Listing.Chosen)
    def _chosen(self, event: Listing.Chosen) -> None:
        event.stop()
        if self.control is None:
            return
        runs = () if event.key == ANY else (event.key,)
        self.volunteer.command(self.control.do(commands.ChooseRuns(runs=runs)), self.finish)

    @on(Listing.Moved)
    def _moved(self, event: Listing.Moved) -> None:
        event.stop()
        if not isinstance(event, Listing.Chosen):
            self.query_one("#about-run", FunctionPanel).draw()


def own_files(run: str, samples: Mapping[str, int]) -> str:
    """Return, for a run that learns from the volunteer's own files, how many pieces are prepared,
    or the command that adds files.
    """
    if pieces := samples.get(run, 0):
        return ngettext(
            "It learns from your own files: {n} piece is prepared.",
            "It learns from your own files: {n} pieces are prepared.",
            pieces,
        )
    return _("It learns from your own files: `volunteer data add {run} PATH`.", run=run)
