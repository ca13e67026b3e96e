"""First step: a join link or an address, checked while it is typed."""

from __future__ import annotations

from urllib.parse import urlsplit

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.events import Paste
from textual.widgets import Input
from typing_extensions import override

from shared.errors import BadRequest, Unreachable, VolunteerError
from shared.network.links import is_loopback, parse_link, tidy_link
from shared.proofs.proof_of_work import search_time_text
from shared.protocol.accounts import ServerInfo
from shared.text import printable
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _, translated
from volunteer.text import clock_words
from volunteer.tui.onboarding.onboarding_step import OnboardingChoice, Step, text_lines
from volunteer.tui.text import Line, fit, left, wrap
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.search_box import Field

SETTLE_S = 0.4  # time from the last key to the probe of the coordinator
STEPS_OF_A_TASK = (
    N_("Your machine gets the newest model and a small piece of work: a task."),
    N_("It trains at low priority; space pauses it within two seconds."),
    N_("Its result is checked, merged with the results of others, and paid."),
    N_("No training starts before you say so, on the last of these pages."),
)
NO_LINK = N_("Without a link `coordinator demo` shows a whole run on this machine.")

NAME_CELLS = 9  # least width of the labels of a coordinator's facts


class LinkField(Field):
    """Text input that takes a pasted link whole, even if a mail broke it into lines."""

    @override
    def _on_paste(self, event: Paste) -> None:
        event.stop()
        event.prevent_default()  # Input would keep the first line only
        if pasted := tidy_link(event.text):
            start, end = self.selection
            self.replace(pasted, min(start, end), max(start, end))


class JoinStep(Step):
    """Step that probes the coordinator of a link or an address."""

    NAME = "Join"
    TITLE = N_("Join")
    HEADING = N_("Which coordinator do you want to help?")

    def __init__(self, choice: OnboardingChoice) -> None:
        super().__init__(choice)
        self._trouble = ""
        self._busy = ""

    @override
    def compose(self) -> ComposeResult:
        yield LinkField(
            placeholder=_("paste your join link, or the address of a coordinator"), id="link"
        )
        yield FunctionPanel(self._verdict, id="answer")
        yield FunctionPanel(self._how, title=N_("How it works"), id="how", classes="card")

    @override
    def begin(self, why: str = "") -> None:
        self._trouble = why
        field = self.query_one("#link", Input)
        field.focus()
        if field.value and not why and self.choice.server is None:
            self._check(field.value)  # typed before a control was attached

    @override
    def proceed(self) -> None:
        if self.choice.server is not None:
            self.finish()
        elif not self._busy:
            text = self.query_one("#link", Input).value
            self._check(text)

    # The link.

    @on(Input.Changed, "#link")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._check(event.value)

    @on(Input.Submitted, "#link")
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        self.proceed()

    def _check(self, text: str) -> None:
        self.choice.server, self._trouble, self._busy = None, "", ""
        if text.strip():
            self.run_worker(self._probe(text), group="probe", exclusive=True)
        self._draw()

    async def _probe(self, text: str) -> None:
        await self.volunteer.clock.sleep(SETTLE_S)  # the next key cancels this probe
        try:
            link = parse_link(text)
        except BadRequest as error:
            self._show_trouble(translated(error.message))
            return
        self._busy = _("asking {url}", url=link.url)
        self._draw()
        if self.control is None:
            return
        try:
            server = await self.control.do(commands.Probe(link=text))
        except VolunteerError as error:
            self._show_trouble(advice(error, text))
        else:
            self.choice.link, self.choice.server = text, server
            self._busy = ""
            self._draw()

    def _show_trouble(self, trouble: str) -> None:
        self._busy, self._trouble = "", trouble
        self._draw()

    def _draw(self) -> None:
        self.query_one("#answer", FunctionPanel).draw()

    def _how(self, scene: Scene, width: int, height: int) -> list[Line]:
        lines: list[Line] = []
        for number, text in enumerate(STEPS_OF_A_TASK, start=1):
            lines += text_lines(_(text), width, 2, "info", str(number))
        return lines[:height]

    def _verdict(self, scene: Scene, width: int, height: int) -> list[Line]:
        glyphs = scene.glyphs
        if self._trouble:
            return text_lines(self._trouble, width, height, "bad", glyphs.cross)
        if self._busy:
            return text_lines(self._busy, width, height, "info", glyphs.wait)
        if self.choice.server is not None:
            return server_lines(self.choice.server, self.choice.link, scene, width)[:height]
        text = _(
            "Your organiser gives you a join link. It also proves that the right "
            "coordinator answers."
        )
        return [*text_lines(text, width, 4, "dim"), *text_lines(_(NO_LINK), width, 2, "dim")][
            :height
        ]


def server_lines(server: ServerInfo, link: str, scene: Scene, cells: int) -> list[Line]:
    """Return the facts of the coordinator that answered: name, key, version, runs, contact."""
    parsed = parse_link(link)
    linked = parsed.fingerprint
    key = printable(server.fingerprint, 64)
    proof = _("as your link says") if linked else _("compare it with your organiser")
    if cell_len(key) + len(proof) + 13 > cells:
        proof = _("as linked") if linked else _("compare it")
    runs = [run.name for run in server.runs if run.state == "running"]
    clock_warning = clock_words(server.now - scene.now)
    lines: list[Line] = [
        ((f"{scene.glyphs.check} ", "good"), (printable(server.name, 60), "value")),
        _fact(_("key"), f"{key}, {proof}", cells),
        _fact(
            _("version"),
            _(
                "{software}, protocol {protocol}",
                software=printable(server.software, 20),
                protocol=server.protocol,
            ),
            cells,
        ),
        _fact(_("runs"), printable(", ".join(runs), 100) or _("none at the moment"), cells),
    ]
    if door := entry_terms(server, parsed.code):
        lines.insert(
            1,
            (
                ((f"  {left(_('joining'), _name_cells())}"), "dim"),
                (fit(door, cells - 2 - _name_cells()), "text"),
            ),
        )
    if server.contact:
        lines.append(_fact(_("contact"), printable(server.contact, 100), cells))
    if clock_warning:  # above the facts, which a short screen cuts off
        warning: list[Line] = [
            (("  " + text, "warn"),) for text in wrap(clock_warning, cells - 2, 3)
        ]
        return [lines[0], *warning, *lines[1:]]
    return [*lines, (("  " + _("enter: next"), "dim"),)]


def entry_terms(server: ServerInfo, code: str) -> str:
    """Return the terms on which this coordinator admits newcomers; "" if it sets no terms."""
    if code:
        return _("by invitation: your link carries the code") if server.invite_only else ""
    if server.invite_only:
        return _("by invitation only; ask for a link with a code")
    if not server.open:
        return ""
    bits = server.proof_of_work_bits
    return _("open to everybody") + (
        _("; about {time} of computing first", time=search_time_text(bits)) if bits else ""
    )


def _fact(name: str, text: str, cells: int) -> Line:
    names = _name_cells()
    return ((f"  {left(name, names)}", "dim"), (fit(text, cells - 2 - names), "text"))


def _name_cells() -> int:
    """Return the width of the names column: the longest name and a space."""
    names = (_("key"), _("version"), _("runs"), _("contact"), _("joining"))
    return max(NAME_CELLS, *(cell_len(name) + 1 for name in names))


def advice(error: VolunteerError, text: str) -> str:
    """Return an error as a sentence; for an unreachable coordinator, with the next thing to try."""
    if not isinstance(error, Unreachable) or is_loopback(_host(text)):
        return translated(error.message)
    return _(
        "{error}. Is the machine online, and is the coordinator running? Enter tries again.",
        error=translated(error.message).rstrip("."),
    )


def _host(text: str) -> str:
    return urlsplit(parse_link(text).url).hostname or ""
