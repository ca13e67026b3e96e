"""Keys for programs: a list, a form for a new one, which is shown once, and revoking with a
question.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from shared.protocol import endpoints
from shared.protocol.inference import KEYS_MAX, KeyInfo, KeyRequest, NewKey
from shared.text import MICRO, printable
from shared.units import DAY_S
from volunteer.i18n.catalogue import N_, _, number
from volunteer.i18n.formats import credit
from volunteer.text import key_state
from volunteer.tui import keys
from volunteer.tui.query_page import AccountPage, PageQuery, QueryReply
from volunteer.tui.screens.copy_text import CopyText
from volunteer.tui.text import ago
from volunteer.tui.widgets.panel import Scene
from volunteer.tui.widgets.search_box import Field
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

CREDITS_MAX = 1e9
DAYS_MAX = 36_500.0
COLUMNS = (
    Column(title="key", cells=14),
    Column(title=N_("name"), least=56),
    Column(title=N_("state"), cells=9),
    Column(title=N_("spent"), cells=12, align="right"),
    Column(title=N_("cap"), cells=10, align="right", least=66),
    Column(title=N_("ends"), cells=9, align="right", least=78),
    Column(title=N_("runs"), cells=20, least=104),
)
EMPTY = N_(
    "No key yet. With one, any program that speaks OpenAI's interface asks the "
    "models on your credits: press n."
)
ONCE = N_("Keep it: the coordinator stores only its hash, so it is shown this once. Base URL: /v1")


class ApiKeysPage(AccountPage):
    """Page of the account's keys."""

    AUTO_FOCUS = "#keys-list"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        *AccountPage.ACTIONS,
        keys.KeyCommand(
            id="new_key",
            key="n",
            action="new",
            short=N_("new key"),
            help=N_("Make a key; it is shown once."),
            place="footer",
            rank=2,
        ),
        keys.KeyCommand(
            id="revoke_key",
            key="delete,d",
            action="revoke",
            short=N_("revoke"),
            help=N_("Make the key under the cursor worthless."),
            place="footer",
            rank=3,
        ),
    )

    def body(self) -> ComposeResult:
        yield Listing(COLUMNS, self._filling, id="keys-list")

    def queries(self) -> dict[str, PageQuery]:
        return {"keys": lambda control: control.query(endpoints.KEYS)}

    def _keys(self) -> tuple[KeyInfo, ...]:
        return self.answer("keys").value or ()

    def _filling(self, scene: Scene) -> Filling:
        answer: QueryReply[tuple[KeyInfo, ...]] = self.answer("keys")
        found = sorted(self._keys(), key=lambda each: (each.state != "active", -each.id))
        working = sum(each.state == "active" for each in found)
        count = (
            _("{working} of at most {most} work", working=working, most=KEYS_MAX) if found else ""
        )
        waiting = answer.asking and answer.value is None
        return Filling(
            rows=tuple(key_row(each, scene, old=answer.old(scene)) for each in found),
            empty=answer.error or (_("asking the coordinator") if waiting else _(EMPTY)),
            title=_("Keys for programs"),
            subtitle=" ".join(part for part in (count, answer.note(scene)) if part),
        )

    def action_new(self) -> None:
        self.app.push_screen(NewKeyForm(), self._make)

    def _make(self, request: KeyRequest | None) -> None:
        control = self.volunteer.control
        if request is None or control is None:
            return

        async def make() -> None:
            made: NewKey = await control.create_key(request)
            self.app.push_screen(CopyText(_("New key"), _(ONCE), made.key, code=False))

        self._do(make())

    def action_revoke(self) -> None:
        chosen = self.query_one(Listing).key
        found = next((each for each in self._keys() if str(each.id) == chosen), None)
        if found is None or found.state != "active":
            return
        control = self.volunteer.control

        def answered(yes: bool | None) -> None:
            if yes and control is not None:
                self._do(control.revoke_key(found.id), lambda: self._told(found))

        name = f' "{printable(found.name, 40)}"' if found.name else ""
        said = _(
            "Programs that use {prefix}...{name} are refused from their next request on.",
            prefix=found.prefix,
            name=name,
        )
        self.app.push_screen(Sure(_("Revoke this key?"), said), answered)

    def _told(self, found: KeyInfo) -> None:
        self.volunteer.tell(_("{prefix}... is revoked", prefix=found.prefix))

    def _do(self, work: Coroutine[Any, Any, Any], then: Callable[[], None] | None = None) -> None:
        def done() -> None:
            if then is not None:
                then()
            self.again()

        self.volunteer.command(work, done)


def key_row(found: KeyInfo, scene: Scene, *, old: bool) -> Row:
    """Return a key as a row of the table."""
    working = found.state == "active"
    sign = scene.glyphs.check if working else scene.glyphs.cross
    left_s = None if found.expires_at is None else found.expires_at - scene.now
    ends = _("never") if left_s is None else _("in {time}", time=ago(left_s)) if left_s > 0 else "-"
    return Row(
        key=str(found.id),
        cells=(
            ((f"{found.prefix}...", "text"),),
            ((printable(found.name, 64), "value" if working else "dim"),),
            (
                (
                    f"{sign} {_('works') if working else key_state(found.state)}",
                    "good" if working else "dim",
                ),
            ),
            ((credit(found.spent_micro, 4), "value" if working else "dim"),),
            ((_("none") if found.cap_micro is None else credit(found.cap_micro), "dim"),),
            ((ends if working else "-", "dim"),),
            ((printable(", ".join(found.runs) or _("every run"), 200), "dim"),),
        ),
        dim=old,
    )


class NewKeyForm(ModalScreen[KeyRequest | None]):
    """Form for a key: enter makes it, escape closes; every field may stay empty."""

    CSS = """
    NewKeyForm #form { width: 64; max-width: 100%; height: 13; max-height: 100%; padding: 0 2; }
    NewKeyForm Static { width: 100%; height: 1; color: $dim; }
    NewKeyForm Field { height: 1; border: none; padding: 0; color: $accent; background: $panel; }
    NewKeyForm #wrong { color: $error; height: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "close", show=False)]
    FIELDS: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("name", N_("name"), N_("for you to tell keys apart")),
        ("cap", N_("most credits it may ever spend"), N_("no cap")),
        ("days", N_("days until it ends"), N_("never")),
        ("runs", N_("runs it may ask"), N_("every run; several with commas")),
    )

    def compose(self) -> ComposeResult:
        with Vertical(id="form", classes="card dialog") as form:
            form.border_title = _("New key")
            for name, title, empty in self.FIELDS:
                yield Static(_(title), markup=False)
                yield Field("", placeholder=_(empty), id=name, compact=True)
            yield Static("", id="wrong", markup=False)
            yield Static(_("enter make it  tab next field  esc cancel"), markup=False)

    @on(Input.Submitted)
    def _enter(self) -> None:
        try:
            request = self.request()
        except ValueError as error:
            self.query_one("#wrong", Static).update(printable(str(error), 120))
        else:
            self.dismiss(request)

    def request(self) -> KeyRequest:
        """Return the typed request. Raises ValueError with a sentence."""
        typed = {
            name: self.query_one(f"#{name}", Input).value.strip() for name, _, _ in self.FIELDS
        }
        cap = _number(_("credits"), typed["cap"], CREDITS_MAX)
        days = _number(_("days"), typed["days"], DAYS_MAX)
        runs = tuple(part for each in typed["runs"].split(",") if (part := each.strip()))
        now = self.app.clock.now()  # type: ignore[attr-defined] # it is the volunteer's
        return KeyRequest(
            name=typed["name"],
            cap_micro=None if cap is None else round(cap * MICRO),
            expires_at=None if days is None else now + days * DAY_S,
            runs=runs,
        )

    def action_leave(self) -> None:
        self.dismiss(None)


def _number(what: str, text: str, most: float) -> float | None:
    """Return a number that was typed; None for nothing. Raises ValueError with a sentence."""
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        raise ValueError(_("{what}: {text} is no number", what=what, text=text)) from None
    if not 0 < found <= most:
        raise ValueError(
            _("{what}: more than 0 and at most {most}", what=what, most=number(most, ",.0f"))
        )
    return found


class Sure(ModalScreen[bool]):
    """Question that is dismissed with True for yes."""

    CSS = """
    Sure #sure { width: 60; max-width: 100%; height: auto; max-height: 100%; }
    Sure Static { width: 100%; height: auto; }
    Sure #hint { color: $dim; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes", show=False),
        Binding("escape,n,q", "answer(False)", "no", show=False),
    ]

    def __init__(self, title: str, said: str) -> None:
        super().__init__()
        self._title, self._said = title, said

    def compose(self) -> ComposeResult:
        with Vertical(id="sure", classes="card dialog") as dialog:
            dialog.border_title = self._title
            yield Static(self._said, markup=False)
            yield Static(_("y yes   esc no"), id="hint", markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
