"""Screen of the first start: six steps from a join link to a machine that is ready to work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.widgets import ContentSwitcher, Input
from typing_extensions import override

from volunteer.i18n.catalogue import N_, _
from volunteer.tui import keys
from volunteer.tui.onboarding.benchmark_step import BenchmarkStep
from volunteer.tui.onboarding.join_step import JoinStep
from volunteer.tui.onboarding.limits_step import LimitsStep
from volunteer.tui.onboarding.name_step import NameStep
from volunteer.tui.onboarding.onboarding_step import OnboardingChoice, Step
from volunteer.tui.onboarding.ready_step import ReadyStep
from volunteer.tui.onboarding.run_step import RunStep
from volunteer.tui.page import Page
from volunteer.tui.text import Line, Span
from volunteer.tui.widgets.bars import Bar
from volunteer.tui.widgets.panel import FunctionPanel, Scene

STEPS: tuple[type[Step], ...] = (
    JoinStep,
    NameStep,
    LimitsStep,
    BenchmarkStep,
    RunStep,
    ReadyStep,
)


class StepKeys(Bar):
    """Footer with the keys of the present step, help and quit."""

    def __init__(self, step: Callable[[], Step], *, id: str) -> None:
        super().__init__(id=id)
        self._step = step

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        typing = isinstance(self.screen.focused, Input)
        spans: list[Span] = []
        hits = []
        at = 0
        for key, word, action in (
            *self._step().KEYS,
            ("f1" if typing else "?", N_("help"), "app.help"),
            ("^q" if typing else "q", N_("quit"), "app.leave"),
        ):
            text = (f" {_(key)} ", f"{_(word)} ")
            spans += [(text[0], "key"), (text[1], "dim")]
            end = at + len(text[0]) + len(text[1])
            if action:
                hits.append((at, end, action if "." in action else f"screen.{action}"))
            at = end
        self.hits = tuple(hits)
        return (tuple(spans),)


class Onboarding(Page):
    """Screen of the first start: one step after the other; enter goes to the next."""

    NAME = "onboarding"
    AUTO_FOCUS = ""
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="enter",
            action="next",
            short=N_("next"),
            help=N_("Go to the next step."),
            rank=1,
        ),
        keys.KeyCommand(
            key="n",
            action="go_on",
            short=N_("go on"),
            help=N_("Go to the next step, as enter does."),
        ),
        keys.KeyCommand(
            key="escape",
            action="back",
            short=N_("back"),
            help=N_("Back to the step before."),
            rank=2,
        ),
        keys.KeyCommand(
            key="s",
            action="skip",
            short=N_("skip the benchmark"),
            help=N_("Skip measuring for now."),
        ),
        keys.KeyCommand(
            key="ctrl+o",
            action="hide",
            short=N_("hide my name"),
            help=N_("Hide the nickname on the leaderboard, or show it."),
        ),
        keys.KeyCommand(
            key="space",
            action="start",
            short=N_("start"),
            help=N_("Start working (last page), or change the setting under the cursor (Limits)."),
            rank=3,
        ),
    )
    CSS = """
    Onboarding {
        align: center top;
        #body { align: center top; }
        #frame { width: 84; max-width: 100%; height: 1fr; padding: 1 2 0 2; }
        #steps { height: 1; }
        #heading { height: 3; padding: 1 0; }
        #title { height: 1; background: $panel; }
        ContentSwitcher { height: 1fr; }
        Step { height: 1fr; }
        Step > Input { border: round $line; background: $background; padding: 0 1; }
        Step > Input:focus {
            border: round $primary;
            background: $background;
            background-tint: $background 0%;
        }
        #answer { height: 8; padding: 0 1; }
        #how { height: 6; display: none; }
        &.-tall #how { display: block; }
        #verdict-name { height: 3; padding: 0 1; }
        #sent { height: 10; }
        #setting-help { height: 4; padding: 0 1; }
        #machine { height: 14; }
        #choices { height: 1fr; max-height: 14; }
        #about-run { height: 5; padding: 0 1; }
        #ready { height: 1fr; }
        &.-middle #frame { padding: 0 2; }
        &.-middle #answer { height: 7; }
        &.-short #frame, &.-low #frame, &.-flat #frame { padding: 0 1; }
        &.-short #heading, &.-low #heading, &.-flat #heading { height: 1; padding: 0; }
        &.-short #answer, &.-low #answer, &.-flat #answer { height: 4; }
        &.-short #verdict-name, &.-low #verdict-name { height: 2; }
        &.-short #sent, &.-low #sent { height: 1fr; }
        &.-short #setting-help, &.-low #setting-help { height: 2; }
        &.-short #machine, &.-low #machine { height: 1fr; }
        &.-short #about-run, &.-low #about-run { height: 2; }
        &.-low #steps, &.-flat #steps { display: none; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.choice = OnboardingChoice()
        self.at = 0
        self._control_seen = False

    @override
    def compose(self) -> ComposeResult:
        yield FunctionPanel(self._title, id="title")
        with Container(id="body"), Vertical(id="frame"):
            yield FunctionPanel(self._steps, id="steps")
            yield FunctionPanel(self._heading, id="heading")
            with ContentSwitcher(initial=STEPS[0].NAME.lower()):
                for step in STEPS:
                    yield step(self.choice)
        yield StepKeys(lambda: self.step, id="keys")

    @override
    def on_mount(self) -> None:
        super().on_mount()
        self._go(0)

    def _begin_unanswered(self) -> None:
        """Go to the first unanswered step when a control is attached."""
        control = self.volunteer.control
        if self._control_seen or control is None:
            return
        self._control_seen = True
        self.choice.joined = control.status.joined
        self._go(self._first_reachable)

    @override
    def useful(self, command: keys.KeyCommand) -> bool:
        """Return True if a key has an effect on the present step."""
        match command.action:
            case "back":
                return self.at > self._first_reachable
            case "skip":
                return isinstance(self.step, BenchmarkStep)
            case "hide":
                return isinstance(self.step, NameStep)
            case "start":
                return isinstance(self.step, LimitsStep | ReadyStep)
        return True

    # The present step.

    @property
    def step(self) -> Step:
        return self.query_one(f"#{STEPS[self.at].NAME.lower()}", Step)

    def _go(self, number: int, why: str = "") -> None:
        self.at = number
        self.query_one(ContentSwitcher).current = STEPS[number].NAME.lower()
        self.call_after_refresh(self._begin, why)

    def _begin(self, why: str) -> None:
        self.show(self.volunteer.scene(), at_once=True)
        self.step.begin(why)
        self.call_after_refresh(lambda: self.show(self.volunteer.scene(), at_once=True))

    @override
    def update_from(self, scene: Scene) -> None:
        self._begin_unanswered()
        self.step.update_from(scene)

    @on(Step.Done)
    def _done(self) -> None:
        if self.at == len(STEPS) - 1:
            self.volunteer.action_page("dashboard")
            return
        self._go(self.at + 1)

    @on(Step.Back)
    def _back_to(self, event: Step.Back) -> None:
        names = [step.NAME for step in STEPS]
        self._go(names.index(event.step) if event.step in names else max(0, self.at - 1), event.why)

    # Keys.

    def action_next(self) -> None:
        self.step.proceed()

    def action_go_on(self) -> None:
        self.step.proceed()

    def action_back(self) -> None:
        """Go one step back, but not to the steps that made the account."""
        if self.at > self._first_reachable:
            self.step.leave()
            self._go(self.at - 1)

    @property
    def _first_reachable(self) -> int:
        """Return the index of the first step that can be reached: the limits step once the account
        is made, else 0.
        """
        return STEPS.index(LimitsStep) if self.choice.joined else 0

    def action_skip(self) -> None:
        if isinstance(self.step, BenchmarkStep):
            self.step.skip()

    def action_hide(self) -> None:
        if isinstance(self.step, NameStep):
            self.step.hide()

    def action_start(self) -> None:
        self.step.press_space()

    # Drawing.

    def _title(self, scene: Scene, width: int, height: int) -> list[Line]:
        words = "  " + _("Lend your machine. Train a model together.")
        return [((" volunteer", "title"), (words if width > 60 else "", "dim"))]

    def _steps(self, scene: Scene, width: int, height: int) -> list[Line]:
        return [step_line(self.at, scene, width)]

    def _heading(self, scene: Scene, width: int, height: int) -> list[Line]:
        return [((_(STEPS[self.at].HEADING), "value"),)]


def step_line(at: int, scene: Scene, cells: int) -> Line:
    """Return the row of steps with their names, or only the present step's name if room is
    short.
    """
    glyphs = scene.glyphs
    spans: list[Span] = []
    names = [_(step.TITLE) for step in STEPS]
    all_fit = sum(cell_len(name) for name in names) + 5 * len(names) - 1 <= cells
    for number, name in enumerate(names):
        if number:
            spans.append((f" {glyphs.axis} ", "faint"))
        if number == at:
            spans.append((f" {number + 1} {name} ", "here"))
        elif number < at:
            spans += [(f"{glyphs.check} ", "good"), (name if all_fit else "", "dim")]
        else:
            spans += [(f"{number + 1} ", "dim"), (name if all_fit else "", "dim")]
    return tuple(spans)
