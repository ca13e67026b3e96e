"""Help: all keys, and the meaning of the signs and words on the screens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from typing_extensions import override

from volunteer.i18n.catalogue import N_, _
from volunteer.tui import keys
from volunteer.tui.text import Glyphs, Line, left, wrap
from volunteer.tui.widgets.panel import Panel, Scene

KEY_CELLS, NAME_CELLS = 7, 13
WORDS = (
    (N_("run"), N_("one effort to train one model, started by the organiser of the coordinator")),
    (N_("task"), N_("a piece of work of a run, reserved for your machine by a lease")),
    (N_("lease"), N_("the time you have for a task; this program renews it, also while paused")),
    (
        N_("contribution"),
        N_("the result of a task: only the change of the model, never a file of yours"),
    ),
    (N_("version"), N_("a state of the model; a merge of contributions makes the next one")),
    (N_("credit"), N_("the pay for accepted work: pending when accepted, earned when merged")),
    (N_("pause"), N_("frees the device within two seconds and keeps the task")),
    (N_("finish"), N_("completes the task in hand and takes no more")),
    ("--no-ui", N_("volunteer --no-ui tells all this in lines, for a screen reader")),
)


def signs(glyphs: Glyphs) -> tuple[tuple[str, str, str], ...]:
    """Return the signs with their roles and meanings."""
    return (
        (glyphs.on, "good", _("at work, or online")),
        (glyphs.off, "dim", _("not yet, stopped, or offline")),
        (glyphs.paused, "warn", _("paused, with the reason and what ends it")),
        (glyphs.wait, "info", _("waiting for the coordinator")),
        (glyphs.check, "good", _("accepted or done")),
        (glyphs.cross, "bad", _("rejected, with the check that failed")),
        (glyphs.mark, "mark", _("a version that holds a contribution of yours")),
    )


def help_lines(
    actions: Sequence[keys.KeyCommand], scene: Scene, cells: int, *, first: bool = False
) -> list[Line]:
    """Return the whole help text for this width; at the `first` start without the later topics."""
    lines: list[Line] = []
    if actions:
        lines += _section(_("This page"), [_command(c) for c in actions], cells)
    common = [c for c in keys.COMMANDS if not (first and c.action in keys.HIDDEN_AT_FIRST_START)]
    lines += _section(_("Everywhere"), [_command(c) for c in common], cells)
    if not first:
        pages = [(p.key, "key", _(p.title), _(p.help)) for p in keys.PAGES]
        lines += _section(_("Pages"), pages, cells)
    sign_lines = [(sign, role, "", text) for sign, role, text in signs(scene.glyphs)]
    lines += _section(_("Signs"), sign_lines, cells)
    return (
        lines
        + _section(_("Words"), [("", "dim", _(word), _(text)) for word, text in WORDS], cells)[:-1]
    )


def _command(command: keys.KeyCommand) -> tuple[str, str, str, str]:
    return keys.key_name(command.key), "key", _(command.short), _(command.help)


def _section(title: str, rows: Sequence[tuple[str, str, str, str]], cells: int) -> list[Line]:
    lines: list[Line] = [((title, "title"),)]
    key_cells = max(KEY_CELLS, *(cell_len(sign) + 2 for sign, *_rest in rows))
    name_cells = max(NAME_CELLS, *(cell_len(name) + 1 for _sign, _role, name, _text in rows))
    for sign, role, name, text in rows:
        names = name_cells if name or title == _("Words") else 0
        used = key_cells + names
        for row, part in enumerate(wrap(text, max(8, cells - used), 9)):
            start: Line = (
                (left(f" {sign}", key_cells), role),
                (left(name, names), "value"),
            )
            lines.append((*start, (part, "text")) if row == 0 else ((" " * used + part, "text"),))
    return [*lines, ()]


class HelpText(Panel):
    """Panel as high as its text."""

    def __init__(self, actions: Sequence[keys.KeyCommand], *, first: bool) -> None:
        super().__init__(id="help-text")
        self._page_keys = actions
        self._first = first

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return help_lines(self._page_keys, scene, width, first=self._first)

    def fit_height(self, width: int) -> None:
        self.styles.height = len(self.lines(self.scene, width, 0))


class Help(ModalScreen[None]):
    """Help dialog; escape, enter, space, q, ? and f1 close it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter,space", "close", "close", show=False),
        Binding("j", "scroll(1)", "down", show=False),
        Binding("k", "scroll(-1)", "up", show=False),
    ]

    def __init__(
        self, scene: Scene, actions: Sequence[keys.KeyCommand] = (), *, first: bool = False
    ) -> None:
        super().__init__()
        self._scene = scene
        self._page_keys = actions
        self._first = first

    @override
    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="card dialog") as box:
            box.border_title = _("Help")
            box.border_subtitle = _("esc closes")
            yield HelpText(self._page_keys, first=self._first)

    def on_mount(self) -> None:
        self.query_one(HelpText).scene = self._scene
        self.call_after_refresh(self._fit)

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        text = self.query_one(HelpText)
        text.fit_height(text.content_size.width)
        text.draw()

    def action_scroll(self, by: int) -> None:
        self.query_one("#help").scroll_relative(y=by, animate=False)

    def action_close(self) -> None:
        self.dismiss(None)
