"""Runs page: progress, helpers and credits of all runs, and the choice for this machine."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from typing_extensions import override

from shared.protocol import endpoints
from shared.protocol.accounts import RunInfo
from shared.protocol.listings import LossPoint
from shared.protocol.versions import SuiteCourse
from shared.settings import SettingRow
from shared.text import printable
from shared.workloads.base import installed
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, NP_, _, ngettext, number, pgettext
from volunteer.i18n.formats import size
from volunteer.text import loss, measure_heading, measure_name, measure_word, origin_of
from volunteer.tui import keys
from volunteer.tui.query_page import RELOAD, PageQuery, QueryPage, QueryReply
from volunteer.tui.run_estimate import STATES, STATES_SHORT, RunEstimate, estimate
from volunteer.tui.screens import run_keys
from volunteer.tui.screens.copy_text import CopyText, for_others
from volunteer.tui.status_line import next_merge
from volunteer.tui.text import Glyphs, Line, bar, left, paragraph, percent, short_number, wrap
from volunteer.tui.widgets.panel import FunctionPanel, Scene, aged
from volunteer.tui.widgets.plot import Chart, FunctionPlot, Series, as_drawn
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

NAME_CELLS = 10
BAR_CELLS = 10
COLUMNS = (
    Column(title="", cells=1),
    Column(title=N_("run")),
    Column(title=N_("workload"), cells=9, least=62),
    Column(title=N_("helpers"), cells=7, align="right", least=50),
    Column(title=NP_("column", "measure"), context="column", cells=14, align="right", least=42),
    Column(title=N_("progress"), cells=BAR_CELLS + 5, least=68),
    Column(title=N_("for you"), cells=18, least=92),
)


class RunsPage(QueryPage):
    """Runs page: a table of runs, and the details and the curve of the run under the cursor."""

    NAME = "runs"
    AUTO_FOCUS = "#list"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="enter",
            action="help_run",
            short=N_("help/leave"),
            help=N_("Help the run under the cursor, or stop helping it."),
            rank=33,
        ),
        keys.KeyCommand(
            key="a",
            action="any_run",
            short=N_("any"),
            help=N_("Help any run that fits this machine."),
            rank=35,
        ),
        keys.KeyCommand(
            key="n",
            action="no_new_tasks",
            short=N_("no new tasks"),
            help=N_("Complete the task in hand and take no more; again: keep going."),
            rank=37,
        ),
        keys.KeyCommand(
            key="s",
            action="share",
            short=N_("share"),
            help=N_("Show a link with which others can join this coordinator."),
            rank=36,
        ),
        *run_keys.SHARED,
        keys.KeyCommand(
            key="y",
            action="licence",
            short=N_("accept licence"),
            help=N_("Accept the licence of the run under the cursor."),
        ),
        RELOAD,
    )
    CSS = """
    RunsPage {
        #about { width: 46; }
        #curve { height: 16; display: none; }
        &.-wide.-tall #curve { display: block; }
        &.-normal, &.-narrow, &.-tiny {
            #columns { layout: vertical; }
            #about { width: 1fr; height: 10; }
        }
        &.-short #about { height: 6; }
        &.-low #about, &.-flat #about { display: none; }
    }
    """

    @override
    def body(self) -> ComposeResult:
        with Horizontal(id="columns"):
            with Vertical(id="all"):
                yield Listing(COLUMNS, self._filling, id="list")
                yield FunctionPlot(self._chart, self._chart_title, id="curve", classes="card curve")
            with Vertical(id="about"):
                yield FunctionPanel(self._detail, title=self._title, id="detail", classes="card")

    @override
    def queries(self) -> dict[str, PageQuery]:
        queries: dict[str, PageQuery] = {
            "runs": lambda control: control.query(endpoints.RUNS),
            "settings": lambda control: control.do(commands.GetSettings()),
        }
        name = self.query_one("#list", Listing).key
        if name and self.query_one("#curve").display:
            queries[f"loss {name}"] = lambda control: control.query(endpoints.LOSS, run=name)
        return queries

    # Data.

    def infos(self) -> tuple[RunInfo, ...]:
        """Return the runs of the newest reply, or of the status if the reply has no run."""
        reply: QueryReply[tuple[RunInfo, ...]] = self.reply("runs")
        return reply.value or self.volunteer.view.status.runs

    def _setting(self, name: str) -> tuple[str, ...]:
        reply: QueryReply[Sequence[SettingRow]] = self.reply("settings")
        value = next((row.value for row in reply.value or () if row.name == name), ())
        return tuple(value)

    def chosen(self) -> tuple[str, ...]:
        """Return the chosen runs; () = any run."""
        return self._setting("runs")

    def estimate(self, info: RunInfo) -> RunEstimate:
        status = self.volunteer.view.status
        allowed = self._setting("workloads") or tuple(installed())
        here = [name for name in installed() if name in allowed]
        return estimate(info, status, here)

    def _under_cursor(self) -> RunInfo | None:
        key = self.query_one("#list", Listing).key
        return next((info for info in self.infos() if info.name == key), None)

    # Drawing.

    def _filling(self, scene: Scene) -> Filling:
        infos, helped_runs = self.infos(), self.chosen()
        reply = self.reply("runs")
        old = not scene.view.status.online
        subtitle = reply.note(scene) or (_("as last reported") if old and infos else "")
        helping = _("helping: {runs}", runs=", ".join(helped_runs) or _("any run"))
        return Filling(
            rows=tuple(
                run_row(info, self.estimate(info), scene, helped=helped(info, helped_runs), old=old)
                for info in infos
            ),
            empty=reply.empty_sentence(
                _("this coordinator has no run yet: its organiser starts one, and it appears here")
            ),
            title=_("Runs"),
            subtitle=subtitle or (helping if infos else ""),
        )

    def _title(self, scene: Scene) -> tuple[str, str]:
        info = self._under_cursor()
        return (info.name if info else _("Run")), (_(STATES[info.state]) if info else "")

    def _detail(self, scene: Scene, width: int, height: int) -> list[Line]:
        info = self._under_cursor()
        if info is None:
            sentence = _("what a run trains, its licence and its data appear here")
            return paragraph(sentence, width, height, "dim")
        lines = run_detail(info, self.estimate(info), scene, self.chosen(), width)
        return aged(lines[:height], scene)

    def _chart_title(self, scene: Scene) -> tuple[str, str]:
        info = self._under_cursor()
        if info is None:
            return _("Loss"), ""
        count_of_mine = len(self._mine(scene, info.name))
        marks = (
            f"{scene.glyphs.mark} {_('mine {n}', n=short_number(count_of_mine))}"
            if count_of_mine
            else ""
        )
        return _(
            "{measure} of {name} {loss}",
            measure=measure_heading(info.measure),
            name=info.name,
            loss=loss(info.loss, info.measure),
        ), marks

    def _chart(self, scene: Scene) -> Chart:
        info = self._under_cursor()
        name = info.name if info else ""
        reply: QueryReply[Sequence[LossPoint]] = self.reply(f"loss {name}")
        model = scene.view.models.get(name)
        points = [(float(p.version), p.loss) for p in reply.value or ()]
        if model is not None and len(model.points) > len(points):
            points = list(model.points)
        return Chart(
            series=(
                Series(points=as_drawn(points, info.measure if info else "loss"), role="model"),
            ),
            marks=tuple(float(version) for version in sorted(self._mine(scene, name))),
            x_name=_("version"),
            empty=_("asking the coordinator")
            if reply.pending
            else _("the measure of each version appears here"),
        )

    def _mine(self, scene: Scene, name: str) -> frozenset[int]:
        """Return the versions of a run that contain work of this volunteer."""
        model = scene.view.models.get(name)
        return model.mine if model is not None else frozenset()

    @on(Listing.Moved)
    def _moved(self) -> None:
        self.query_one("#detail", FunctionPanel).draw()
        self.query_one("#curve", FunctionPlot).draw()

    # Actions.

    @on(Listing.Chosen)
    def action_help_run(self) -> None:
        info, control = self._under_cursor(), self.volunteer.control
        if info is None or control is None:
            return
        run_names = self.chosen()
        if info.name in run_names:
            left_over = tuple(name for name in run_names if name != info.name)
            sentence = _(
                "left {name}; helping {runs}",
                name=info.name,
                runs=", ".join(left_over) or _("any run"),
            )
            self._choose(left_over, sentence)
            return
        run_estimate = self.estimate(info)
        if not run_estimate.fits:
            self.volunteer.tell(
                _(
                    "this machine cannot help {name} now: {sentence}",
                    name=info.name,
                    sentence=run_estimate.sentence,
                ),
                "warning",
            )
            return
        self._choose(
            (*run_names, info.name), _("helping {name} from the next task", name=info.name)
        )

    def action_any_run(self) -> None:
        self._choose((), _("helping any run from the next task"))

    def _choose(self, runs: tuple[str, ...], sentence: str) -> None:
        control = self.volunteer.control
        if control is not None:
            self._run_command(control.do(commands.ChooseRuns(runs=runs)), sentence)

    def _run_command(self, work: Coroutine[Any, Any, Any], sentence: str) -> None:
        def done() -> None:
            self.volunteer.tell(sentence)
            self.query_again()

        self.volunteer.command(work, done)

    def action_no_new_tasks(self) -> None:
        self.volunteer.action_finish()

    def action_licence(self) -> None:
        info, control = self._under_cursor(), self.volunteer.control
        if info is not None and control is not None:
            self._run_command(
                control.do(commands.Consent(run=info.name)),
                _("you accepted {licence} for {name}", licence=info.licence, name=info.name),
            )

    def _named(self) -> str:
        return self.query_one("#list", Listing).key

    def action_samples(self) -> None:
        run_keys.show_samples(self.volunteer, self._named())

    def action_model(self) -> None:
        run_keys.open_model(self.volunteer, self._under_cursor())

    def action_web(self) -> None:
        run_keys.show_page(self.volunteer, self._named())

    def action_share(self) -> None:
        control = self.volunteer.control
        if control is None:
            return

        async def tell() -> None:
            link = await control.do(commands.GetInvitation())
            text = for_others(link, _("Invite others: volunteer join '<link>' with this link:"))
            self.app.push_screen(CopyText(_("Share"), text, link))

        self.volunteer.command(tell())


def helped(info: RunInfo, run_names: Sequence[str]) -> bool:
    """Return True if the chosen runs include a run; an empty choice includes all."""
    return not run_names or info.name in run_names


def run_row(
    info: RunInfo, run_estimate: RunEstimate, scene: Scene, *, helped: bool, old: bool
) -> Row:
    """Return a run as a row of the table."""
    glyphs = scene.glyphs
    if helped and run_estimate.fits:
        sign = (glyphs.on, "good")
    else:
        sign = (
            (glyphs.cross, "bad")
            if not run_estimate.fits and info.state == "running"
            else (glyphs.off, "dim")
        )
    # Losses of different workloads are not comparable, so each has its measure's name.
    measure = f"{measure_word(info.measure)} " if info.loss is not None else ""
    done = info.progress
    progress: Line = ((_(STATES_SHORT[info.state]), "dim"),)
    if done is not None and info.state == "running":
        progress = (*bar(done, BAR_CELLS, glyphs), (f" {percent(done)}", "text"))
    if run_estimate.credits_per_hour is not None:
        about = "" if run_estimate.tasks else "~"
        fit_word = _(
            "{sign}{credits} credits/h",
            sign=about,
            credits=short_number(run_estimate.credits_per_hour),
        )
    else:
        fit_word = _("fits") if run_estimate.fits else _("does not fit")
    return Row(
        key=info.name,
        cells=(
            (sign,),
            ((printable(info.name, 64), "value" if helped and run_estimate.fits else "text"),),
            ((info.workload, "dim"),),
            ((str(info.workers), "text"),),
            ((measure, "dim"), (loss(info.loss, info.measure), "value")),
            progress,
            ((fit_word, "text" if run_estimate.fits else "dim"),),
        ),
        dim=old,
    )


def _fit_lines(run_estimate: RunEstimate, glyphs: Glyphs, room: int) -> list[Line]:
    """Return the lines that say if a run fits this machine."""
    sign, role = (glyphs.check, "good") if run_estimate.fits else (glyphs.cross, "bad")
    first, *rest = wrap(run_estimate.sentence, room - 2, 2)
    margin = " " * (NAME_CELLS + 2)
    return [
        ((left(_("for you"), NAME_CELLS), "dim"), (f"{sign} ", role), (first, "text")),
        *(((margin, "dim"), (text, "text")) for text in rest),
    ]


def run_detail(
    info: RunInfo, run_estimate: RunEstimate, scene: Scene, run_names: Sequence[str], cells: int
) -> list[Line]:
    """Return the facts of a run that are known, each with its name."""
    glyphs = scene.glyphs
    room = cells - NAME_CELLS
    lines: list[Line] = []
    if info.description:
        lines += paragraph(info.description, cells, 3)
    lines += _fit_lines(run_estimate, glyphs, room)
    helping = _helping(info, run_names) if run_estimate.fits else _("not from this machine")
    earns = run_estimate.credits_per_hour
    when = next_merge(scene.view, info.name, scene.now)
    facts = (
        (
            _("earns"),
            _("{earns} credits/h ({basis})", earns=short_number(earns), basis=run_estimate.basis)
            if earns is not None
            else "",
        ),
        (_("helped"), helping),
        (_("licence"), _("{licence} (model)", licence=info.licence)),
        (_("base"), origin_of(info) if info.origin else ""),
        (_("data"), _data(info, scene.view.status.own_samples)),
        (
            _("model"),
            _(
                "{weights} weights, needs {memory}",
                weights=short_number(info.parameters),
                memory=size(info.memory_bytes),
            ),
        ),
        (
            _("so far"),
            _(
                "version {version}, {steps} steps, {tokens} {items}",
                version=info.version,
                steps=short_number(info.steps),
                tokens=short_number(info.tokens),
                items=_(info.items),
            ),
        ),
        (measure_word(info.measure), _course(info, glyphs)),
        (_("bits"), _bits(info, glyphs)),
        *(
            (printable(suite.name, NAME_CELLS - 1), _suite(suite, glyphs))
            for suite in info.suites[:8]
        ),
        (pgettext("version", "next"), when),
        (_("contact"), printable(info.contact, 100)),
    )
    for name, text in facts:
        lines += _fact(name, text, room)
    return lines


def _data(info: RunInfo, own_samples: Mapping[str, int]) -> str:
    """Return the data of a run, or how many pieces of own data there are."""
    if info.members is None:
        licence = info.dataset_licence or _("no licence stated")
        return f"{info.dataset}, {licence}" if info.dataset else _("none: it makes its own")
    if samples := own_samples.get(info.name, 0):
        return ngettext("your own files: {n} piece", "your own files: {n} pieces", samples)
    return _("your own files: `volunteer data add {run} PATH`", run=info.name)


def _helping(info: RunInfo, run_names: Sequence[str]) -> str:
    """Return whether this machine helps a run, by name or as any run, and the effect of enter."""
    if info.name in run_names:
        return _("yes (enter: stop helping)")
    return _("no (enter: help)") if run_names else _("as any run (enter: only this one)")


def _course(info: RunInfo, glyphs: Glyphs) -> str:
    """Return the measure of version 0 and of the newest version; "" before the first evaluation."""
    if info.loss is None:
        return ""
    measure = info.measure
    first = loss(info.loss_first, measure)
    first = "" if info.loss_first in (None, info.loss) else f"{first} {glyphs.right} "
    named = "" if measure in ("loss", "share solved") else f" ({measure_name(measure)})"
    return f"{first}{loss(info.loss, measure)}{named}"


def _bits(info: RunInfo, glyphs: Glyphs) -> str:
    """Return the bits for each byte of held-out text, first and newest; "" if unknown."""
    if info.bits is None:
        return ""
    same = info.bits_first in (None, info.bits)
    first = "" if same else f"{loss(info.bits_first)} {glyphs.right} "
    return _("{bits} a byte", bits=f"{first}{loss(info.bits)}")


def _suite(course: SuiteCourse, glyphs: Glyphs) -> str:
    """Return the scores on a task suite, first and newest, and the score of guessing."""
    if course.first is None:
        return _("suite of tasks, not measured yet")
    now = "" if course.newest is None else f" {glyphs.right} {course.newest.text}"
    sentence = f"{course.first.text}{now}"
    if not course.chance:
        return sentence
    return f"{sentence} ({_('by chance {percent} %', percent=number(100 * course.chance, '.0f'))})"


def _fact(name: str, text: str, room: int) -> list[Line]:
    """Return a name and its text on one line, or on two if necessary; nothing for an empty text."""
    lines = wrap(text, room, 2) if text else []
    return [
        ((left(name if row == 0 else "", NAME_CELLS), "dim"), (line, "text"))
        for row, line in enumerate(lines)
    ]
