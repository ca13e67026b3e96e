"""Second step: a nickname, and the list of the data that the volunteer sends."""

from __future__ import annotations

from unicodedata import normalize

from textual import on
from textual.app import ComposeResult
from textual.widgets import Input
from typing_extensions import override

from shared.errors import VolunteerError
from shared.protocol.limits import NICKNAME_MAX, NICKNAME_MIN, fits_nickname
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _
from volunteer.tui.onboarding.onboarding_step import BACK, NEXT, OnboardingChoice, Step, text_lines
from volunteer.tui.text import Line
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.search_box import Field

SENT = (
    N_("your nickname, and the name of this machine"),
    N_("processor, memory, GPUs, system, Python and torch"),
    N_("how fast your devices are"),
    N_("the result of training; never a file of yours"),
)


class NameStep(Step):
    """Step that asks for a nickname."""

    NAME = "Name"
    TITLE = N_("Name")
    HEADING = N_("What shall we call you?")
    KEYS = (*NEXT, *BACK, ("^o", N_("hide/show"), "hide"))

    def __init__(self, choice: OnboardingChoice) -> None:
        super().__init__(choice)
        self._trouble = ""

    @override
    def compose(self) -> ComposeResult:
        yield Field(
            placeholder=_("a nickname; else your invitation's, or a made-up one"),
            max_length=NICKNAME_MAX,
            id="nickname",
        )
        yield FunctionPanel(self._verdict, id="verdict-name")
        yield FunctionPanel(self._sent, title=N_("What is sent"), id="sent", classes="card")

    @override
    def begin(self, why: str = "") -> None:
        self._trouble = why
        field = self.query_one("#nickname", Input)
        field.focus()
        self.query_one("#verdict-name", FunctionPanel).draw()

    @override
    def proceed(self) -> None:
        self._trouble = name_problem(self.choice.name)
        self.query_one("#verdict-name", FunctionPanel).draw()
        if not self._trouble:
            self.finish()

    @on(Input.Changed, "#nickname")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.choice.name = event.value.strip()
        self._trouble = ""
        self.query_one("#verdict-name", FunctionPanel).draw()

    @on(Input.Submitted, "#nickname")
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        self.proceed()

    def _verdict(self, scene: Scene, width: int, height: int) -> list[Line]:
        if self._trouble:
            return text_lines(self._trouble, width, height, "bad", scene.glyphs.cross)
        return text_lines(
            _(
                "{least} to {most} letters, digits, blanks and - _ . '",
                least=NICKNAME_MIN,
                most=NICKNAME_MAX,
            ),
            width,
            height,
            "dim",
        )[:height]

    def _sent(self, scene: Scene, width: int, height: int) -> list[Line]:
        lines: list[Line] = []
        for text in SENT:
            lines += text_lines(_(text), width, 2, "dim", scene.glyphs.dot)
        hidden = any(r.name == "public" and r.value is False for r in self.choice.settings)
        word = (
            _("hidden from others (ctrl+o shows it)")
            if hidden
            else _("shown to others (ctrl+o hides it)")
        )
        between: list[Line] = [()] if height > len(lines) + 1 else []
        return [*lines, *between, ((_("your nickname is") + " ", "dim"), (word, "text"))][:height]

    def hide(self) -> None:
        """Toggle whether other volunteers see the nickname."""
        self.run_worker(self._hide(), group="hide", exclusive=True)

    async def _hide(self) -> None:
        public = not any(r.name == "public" and r.value is False for r in self.choice.settings)
        if self.control is None:
            return
        try:
            self.choice.settings = await self.control.do(
                commands.SetSettings(changes={"public": not public})
            )
        except VolunteerError as error:
            self.volunteer.tell(error.message, "error")
        self.query_one("#sent", FunctionPanel).draw()


def name_problem(name: str) -> str:
    """Return the first fault of a nickname that this machine can find; "" if it finds no fault."""
    if not name:
        return ""
    if len(name) < NICKNAME_MIN:
        return _("At least {least} letters, please.", least=NICKNAME_MIN)
    if not name.isprintable():
        return _("A nickname cannot hold characters that are not printable.")
    wrong = next((char for char in normalize("NFKC", name) if not fits_nickname(char)), "")
    return _("A nickname cannot hold {sign}.", sign=wrong) if wrong else ""
