"""List of settings changed in place: toggled, switched to the next choice, or typed and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input
from typing_extensions import override

from shared.errors import Configuration
from shared.settings import SettingRow
from volunteer.i18n.catalogue import N_, _
from volunteer.settings import settings
from volunteer.tui.setting_labels import (
    as_text,
    choices,
    complaint,
    grouped,
    label,
    parsed,
    value_words,
)
from volunteer.tui.text import Line, wrap
from volunteer.tui.widgets.panel import FunctionPanel, Scene, panels
from volunteer.tui.widgets.search_box import Field
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

COLUMNS = (
    Column(title=N_("setting"), cells=28),
    Column(title=N_("value")),
    Column(title=N_("set by"), cells=12, least=60),
)


class Editor(Field):
    """Text input for a value."""

    brief = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    class Left(Message):
        """Message: typing was cancelled."""

    def action_leave(self) -> None:
        self.post_message(self.Left())


class SettingList(Vertical):
    """List of settings that can be changed in place.

    `rows` returns the settings; `names` are the settings to show, in their order (empty: all
    settings, under headings). A second click changes a setting; so does enter, if `by_enter`, and
    the method `change`.
    """

    DEFAULT_CSS = """
    SettingList { height: 1fr; }
    SettingList #editing {
        height: 6;
        display: none;
        border: round $primary;
        border-title-color: $primary;
        padding: 0 1;
    }
    SettingList Editor { border: none; height: 1; padding: 0; background: $surface; }
    SettingList Editor:focus { border: none; }
    SettingList #verdict { height: 2; margin-top: 1; }
    .-short SettingList #verdict { margin-top: 0; }
    .-short SettingList #editing { height: 5; }
    """

    class Changed(Message):
        """Message: the user set another value."""

        def __init__(self, row: SettingRow, value: object) -> None:
            super().__init__()
            self.row = row
            self.value = value

    class Moved(Message):
        """Message: the cursor moved to another setting."""

    def __init__(
        self,
        rows: Callable[[], Sequence[SettingRow]],
        *,
        names: Sequence[str] = (),
        title: str = N_("Settings"),
        empty: Callable[[], str] = lambda: _("reading the settings"),
        by_enter: bool = True,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self._by_enter = by_enter
        self._rows = rows
        self._names = tuple(names)
        self._title = title
        self._empty = empty
        self._trouble = ""
        self.needle = ""  # only settings with this text are listed

    @override
    def compose(self) -> ComposeResult:
        yield Listing(COLUMNS, self._filling, id="list", by_enter=self._by_enter)
        with Vertical(id="editing"):
            yield Editor(id="field", select_on_focus=False)
            yield FunctionPanel(self._verdict, id="verdict")

    @property
    def editing(self) -> bool:
        return bool(self.query_one("#editing").display)

    @property
    def chosen(self) -> SettingRow | None:
        """Return the setting under the cursor; None if no setting is listed."""
        key = self.query_one(Listing).key
        return next((row for row in self._rows() if row.name == key), None)

    def take_focus(self) -> None:
        self.query_one(Listing).focus()

    def refill(self) -> None:
        """Draw the settings anew."""
        for panel in panels(self):
            panel.draw()

    def _filling(self, scene: Scene) -> Filling:
        matching = [row for row in self._rows() if matches(row, self.needle)]
        rows: list[Row] = []
        if self._names:
            by_name = {row.name: row for row in matching}
            rows = [setting_line(by_name[name]) for name in self._names if name in by_name]
        else:
            for title, members in grouped(matching):
                rows.append(Row(key=f"# {title}", cells=(((title, "title"),),), heading=True))
                rows += [setting_line(row, indent="  ") for row in members]
        title, empty = _(self._title), self._empty()
        if self.needle:
            title = _('{title} with "{needle}"', title=title, needle=self.needle)
            empty = _("no setting has this text; esc shows all")
        return Filling(rows=tuple(rows), empty=empty, title=title)

    def _verdict(self, scene: Scene, width: int, height: int) -> list[Line]:
        glyphs = scene.glyphs
        if self._trouble:
            signs = [f"{glyphs.cross} ", "  ", "  "]
            lines = wrap(self._trouble, width - 2, height)
            return [
                ((sign, "bad"), (text, "bad")) for sign, text in zip(signs, lines, strict=False)
            ]
        return [((f"{glyphs.check} ", "good"), (_("enter saves, esc cancels"), "dim"))]

    @on(Listing.Moved)
    def _moved(self, event: Listing.Moved) -> None:
        event.stop()
        if not isinstance(event, Listing.Chosen | Listing.Ended):
            self.post_message(self.Moved())

    @on(Listing.Chosen)
    def change(self, event: Listing.Chosen | None = None) -> None:
        """Toggle the setting under the cursor, take its next choice, or open the text input."""
        if event is not None:
            event.stop()
        row = self.chosen
        if row is None:
            return
        options = choices(row)
        if options:
            now = as_text(row.value)
            at = options.index(now) if now in options else -1
            self.post_message(self.Changed(row, parsed(row, options[(at + 1) % len(options)])))
            return
        self._trouble = ""
        box = self.query_one("#editing")
        box.border_title = (
            _("{setting} in {unit}", setting=label(row), unit=row.unit) if row.unit else label(row)
        )
        box.display = True
        field = self.query_one(Editor)
        field.value = as_text(row.value)
        field.cursor_position = len(field.value)
        field.focus()
        if row.type in ("int", "float"):
            field.select_all()  # typing replaces a number

    def reset(self) -> None:
        """Reset the setting under the cursor to its default, if config.toml sets it."""
        row = self.chosen
        if row is not None and row.source == "config.toml":
            self.post_message(self.Changed(row, settings.TABLE.default(row.name)))

    @on(Input.Changed, "#field")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        row = self.chosen
        self._trouble = ""
        if row is not None:
            try:
                parsed(row, event.value)
            except Configuration as error:
                self._trouble = complaint(error)
        self.query_one("#verdict", FunctionPanel).draw()

    @on(Input.Submitted, "#field")
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        row = self.chosen
        if row is not None and not self._trouble:
            self.post_message(self.Changed(row, parsed(row, event.value)))
            self._close()

    @on(Editor.Left)
    def _close(self) -> None:
        self.query_one("#editing").display = False
        self.take_focus()


def matches(row: SettingRow, needle: str) -> bool:
    """Return True if a setting has this text in its name, label, value or help."""
    text = f"{row.name} {label(row)} {value_words(row)} {_(row.help)}"
    return needle.casefold() in text.casefold()


def setting_line(row: SettingRow, indent: str = "") -> Row:
    """Return a setting as a row of the table."""
    changed = row.source != "default"
    return Row(
        key=row.name,
        cells=(
            ((f"{indent}{label(row)}", "text"),),
            ((value_words(row), "value" if changed else "text"),),
            ((_(row.source) if changed else "", "dim"),),
        ),
    )
