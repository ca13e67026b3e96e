"""Ask page: a prompt to the model of a run, its streamed answer and price, and, if wanted, the
first version's answer to the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Input, Static

from shared.errors import VolunteerError
from shared.protocol.accounts import RunInfo
from shared.protocol.inference import DEFAULT_TOKENS, ModelCard, Usage
from shared.text import printable
from volunteer.control.commands import Answer, AskModel, PastPrompt
from volunteer.control.control import Control
from volunteer.i18n.catalogue import N_, _, shown
from volunteer.i18n.formats import credit
from volunteer.tui.text import printable_lines
from volunteer.tui.widgets.search_box import Field

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp

PRIVACY = N_(
    "The organiser's machines read your prompt, and do not keep it. It is remembered here only."
)
OPEN = N_("Volunteers' machines may answer, and their owners can read your prompt: ^o forbids it.")
SHOWN_CHARS = 50_000  # of one answer
CHARS_A_TOKEN = 3  # a guess, for the price before
FIRST = "@0"  # the version before any training


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a prompt."""

    max_tokens: int | None = None  # as many as fit, up to the default
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    version: str = ""  # "" the newest, "best", or a number


class Knob(NamedTuple):
    """Field of the row below the prompt."""

    name: str
    title: str
    read: Callable[[str], Any]
    width: int


KNOBS = (
    Knob("max_tokens", N_("tokens"), int, 6),
    Knob("temperature", N_("temp"), float, 5),
    Knob("top_p", N_("top p"), float, 5),
    Knob("seed", N_("seed"), int, 8),
    Knob("version", N_("version"), str, 7),
)


class AnswerView(Vertical):
    """Streamed words of one version."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="card")
        self.text = ""

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield Static("", markup=False, classes="words")

    def begin(self, title: str, prompt: str) -> None:
        self.border_title = title
        self.border_subtitle = ""
        self.text = prompt
        self.add("")

    def add(self, words: str) -> None:
        self.text += words
        self.query_one(".words", Static).update("\n".join(printable_lines(self.text, SHOWN_CHARS)))
        self.query_one(VerticalScroll).scroll_end(animate=False)


class AskScreen(Screen[None]):
    """Screen for prompts to one run; escape stops an answer, another one closes."""

    CSS = """
    AskScreen { layout: vertical; background: $background; }
    AskScreen #about { height: auto; padding: 0 1; color: $dim; }
    AskScreen #prompt { height: 3; border: round $primary; background: $background; }
    AskScreen.-ascii #prompt, .-ascii AskScreen #prompt { border: ascii $primary; }
    AskScreen #knobs { height: 1; padding: 0 1; }
    AskScreen #knobs Static { width: auto; color: $dim; }
    AskScreen #knobs Field { height: 1; border: none; padding: 0; margin: 0 2 0 1; }
    AskScreen #knobs Field { color: $accent; background: $panel; }
    AskScreen #answers { height: 1fr; }
    AskScreen AnswerView { width: 1fr; height: 1fr; }
    AskScreen #before { display: none; }
    AskScreen.-both #before { display: block; }
    AskScreen .words { width: 100%; height: auto; }
    AskScreen #said { height: auto; min-height: 1; max-height: 3; padding: 0 1; }
    AskScreen #said { color: $foreground; }
    AskScreen #hint { height: 1; padding: 0 1; color: $dim; background: $panel; }
    AskScreen.-low #about { display: none; }
    AskScreen.-slim #top_p, AskScreen.-slim #top_p-title { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "close", show=False),
        Binding("ctrl+b", "both", "before and after", show=False),
        Binding("ctrl+o", "private", "the organiser's machines only", show=False),
        Binding("ctrl+r", "erase", "erase history", show=False),
        Binding("up", "past(-1)", "earlier prompt", show=False),
        Binding("down", "past(1)", "later prompt", show=False),
    ]

    def __init__(self, info: RunInfo) -> None:
        super().__init__()
        self._info = info
        self._card: ModelCard | None = None
        self._past: tuple[PastPrompt, ...] = ()
        self._at = 0  # which of them is shown; their number: none
        self._asked: list[int] = []  # answers on their way
        self._stopping = False  # they were told to end
        self._used: list[Usage] = []  # of this prompt

    @property
    def volunteer(self) -> VolunteerApp:
        return cast("VolunteerApp", self.app)

    def compose(self) -> ComposeResult:
        yield Static("", id="about", markup=False)
        yield Field(placeholder=_("a text to continue"), id="prompt")
        with Horizontal(id="knobs"):
            for knob in KNOBS:
                yield Static(knob.title, id=f"{knob.name}-title", markup=False)
                field = Field(_shown(knob), placeholder=_empty(knob), id=knob.name, compact=True)
                field.styles.width = knob.width
                yield field
        with Horizontal(id="answers"):
            yield AnswerView("before")
            yield AnswerView("after")
        yield Static("", id="said", markup=False)
        yield Static(
            _("enter ask  tab options  ↑ earlier  ^b before, after  ^r erase  esc close"),
            id="hint",
            markup=False,
        )

    def on_mount(self) -> None:
        name = printable(self._info.name, 64)
        self.query_one("#prompt").border_title = _("Ask {name}", name=name)
        self.query_one("#after").border_title = _("Answer")
        self.query_one("#about", Static).update(PRIVACY)
        self.query_one("#prompt").focus()
        self.run_worker(self._learn(), group="learn")

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.height < 14, "-low")
        self.set_class(event.size.width < 74, "-slim")

    # What is known before a prompt.

    async def _learn(self) -> None:
        control = self.volunteer.control
        if control is None:
            return
        try:
            self._past = await control.prompts()
            self._at = len(self._past)
            self._card = await control.model(self._info.name)
            self._tell_who_reads()
        except VolunteerError as error:
            self._say(shown(error.message))
        else:
            self._say(self._price())

    def _tell_who_reads(self) -> None:
        strangers = self._card is not None and self._card.answered_by == "volunteers"
        said = OPEN if strangers and not self.has_class("-private") else PRIVACY
        self.query_one("#about", Static).update(said)

    def _price(self) -> str:
        """Return the sentence about the prompt's possible price and the balance."""
        me = self.volunteer.latest.status.me
        have = _("; you have {balance}", balance=credit(me.balance_micro, 3)) if me else ""
        try:
            knobs = self._knobs()
        except ValueError as error:
            return str(error)
        if self._card is None:
            return ""
        prompt = self.query_one("#prompt", Input).value
        tokens = (knobs.max_tokens or DEFAULT_TOKENS) + len(prompt) // CHARS_A_TOKEN
        micro = -(-tokens * self._card.price_micro // 1000) * (2 if self.has_class("-both") else 1)
        return _("at most about {credits} credits{have}", credits=credit(micro, 6), have=have)

    def _knobs(self) -> Knobs:
        """Return the options. Raises ValueError with a sentence."""
        found: dict[str, Any] = {}
        for knob in KNOBS:
            text = self.query_one(f"#{knob.name}", Input).value.strip()
            if not text:
                continue
            try:
                found[knob.name] = knob.read(text)
            except ValueError:
                raise ValueError(
                    _("{title}: {text} is no number", title=_(knob.title), text=text)
                ) from None
        return Knobs(**found)

    @on(Input.Changed)
    def _weigh(self) -> None:
        if not self._asked and self._card is not None:
            self._say(self._price())

    def _say(self, text: str) -> None:
        self.query_one("#said", Static).update(printable(text, 400))

    # Asking.

    @on(Input.Submitted)
    def _ask(self) -> None:
        control, prompt = self.volunteer.control, self.query_one("#prompt", Input).value
        if control is None or self._asked:
            return
        try:
            knobs = self._knobs()
        except ValueError as error:
            self._say(str(error))
            return
        chosen = f"{self._info.name}@{knobs.version}" if knobs.version else self._info.name
        asked = [(self.query_one("#after", AnswerView), chosen)]
        if self.has_class("-both"):
            asked.append((self.query_one("#before", AnswerView), self._info.name + FIRST))
        self._used, self._stopping = [], False
        self._say(_("asking"))
        for pane, model in asked:
            pane.begin(printable(model, 80), prompt)
            command = AskModel(
                model=model,
                prompt=prompt,
                max_tokens=knobs.max_tokens,
                temperature=knobs.temperature,
                top_p=knobs.top_p,
                seed=knobs.seed,
                private=self.has_class("-private"),
            )
            self.run_worker(self._follow(control, pane, command), group=pane.id or "")

    async def _follow(self, control: Control, pane: AnswerView, command: AskModel) -> None:
        """Draw an answer until its end."""
        seen = 0
        try:
            number = await control.ask(command)
            self._asked.append(number)
            try:
                answer = Answer()
                while not answer.done:
                    answer = await control.answer(number, seen)
                    seen += len(answer.text)
                    pane.add(answer.text)
            finally:
                self._asked.remove(number)
        except VolunteerError as error:
            self._say(shown(error.message))
            return
        if answer.used is not None:
            self._ended(pane, answer.used)
        if answer.error:
            self._say(shown(answer.error))
        if seen:
            self._past = await control.prompts()
            self._at = len(self._past)

    def _ended(self, pane: AnswerView, used: Usage) -> None:
        self._used.append(used)
        pane.border_subtitle = _("{n} tokens", n=used.completion_tokens)
        self._say(
            _(
                "{tokens_in} tokens in, {tokens_out} out: {credits} credits",
                tokens_in=sum(each.prompt_tokens for each in self._used),
                tokens_out=sum(each.completion_tokens for each in self._used),
                credits=credit(sum(each.cost_micro for each in self._used), 6),
            )
        )

    # Keys.

    def action_leave(self) -> None:
        """Stop the answers that are on their way; without any, or again, close."""
        control = self.volunteer.control
        if not self._asked or self._stopping or control is None:
            self.dismiss()
            return
        self._stopping = True
        for number in self._asked:
            self.volunteer.command(control.stop_answer(number))

    def action_both(self) -> None:
        """Show or hide version 0's answer."""
        self.toggle_class("-both")
        self.query_one("#before").border_title = _("Version 0")
        self._weigh()

    def action_private(self) -> None:
        """Ask the organiser's machines only, or volunteers' too."""
        self.toggle_class("-private")
        self._tell_who_reads()

    def action_past(self, step: int) -> None:
        """Show an earlier or later prompt of this machine, with its answer."""
        self._at = max(0, min(len(self._past), self._at + step))
        field, pane = self.query_one("#prompt", Input), self.query_one("#after", AnswerView)
        if self._asked or not self._past:
            return
        if self._at == len(self._past):
            field.value = ""
            return
        row = self._past[self._at]
        field.value = row.prompt
        pane.begin(printable(row.model, 80), row.prompt)
        pane.add(row.text)

    def action_erase(self) -> None:
        """Erase the remembered prompts."""
        control = self.volunteer.control
        if control is None:
            return

        def done() -> None:
            self._past, self._at = (), 0
            self._say(_("the prompts that this machine remembered are erased"))

        self.volunteer.command(control.forget_prompts(), done)


def _shown(knob: Knob) -> str:
    value = getattr(Knobs(), knob.name)
    return "" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)


def _empty(knob: Knob) -> str:
    return {"max_tokens": _("auto"), "seed": _("any"), "version": _("newest")}.get(knob.name, "")


def answers(info: RunInfo) -> bool:
    """Return True if a run's model continues texts."""
    return info.items == "tokens"
