"""Base of the steps of the first start."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from textual.containers import Vertical
from textual.message import Message

from shared.protocol.accounts import ServerInfo
from shared.settings import SettingRow
from volunteer.i18n.catalogue import N_
from volunteer.tui.text import Line, wrap
from volunteer.tui.widgets.panel import Scene

if TYPE_CHECKING:
    from volunteer.control.control import Control
    from volunteer.tui.app import VolunteerApp


class OnboardingChoice(msgspec.Struct, kw_only=True):
    """Answers of the user so far."""

    link: str = ""
    server: ServerInfo | None = None
    name: str = ""
    joined: bool = False
    settings: tuple[SettingRow, ...] = ()


Key = tuple[str, str, str]  # key, word in the footer, action of the page
NEXT: tuple[Key, ...] = ((N_("enter"), N_("next"), "next"),)
BACK: tuple[Key, ...] = ((N_("esc"), N_("back"), "back"),)


class Step(Vertical):
    """Step of the first start. The screen calls `begin` when the step appears, then `update_from`
    with each new scene.
    """

    NAME: ClassVar[str]
    TITLE: ClassVar[str]  # the step's name in the row of steps
    HEADING: ClassVar[str]
    KEYS: ClassVar[tuple[Key, ...]] = NEXT

    class Done(Message):
        """Message: the step has its answer; go to the next step."""

    class Back(Message):
        """Message: go back to `step` ("": the previous step), which shows `why`."""

        def __init__(self, step: str = "", why: str = "") -> None:
            super().__init__()
            self.step = step
            self.why = why

    def __init__(self, choice: OnboardingChoice) -> None:
        super().__init__(id=self.NAME.lower())
        self.choice = choice

    @property
    def volunteer(self) -> VolunteerApp:
        return cast("VolunteerApp", self.app)

    @property
    def control(self) -> Control | None:
        return self.volunteer.control

    def begin(self, why: str = "") -> None:
        """Take the focus, and show `why` the last answer was refused."""

    def leave(self) -> None:
        """End the work of this step, since the user goes back to another."""

    def update_from(self, scene: Scene) -> None:
        """Draw the changing parts."""

    def finish(self) -> None:
        """Report that this step has its answer."""
        self.post_message(self.Done())

    def proceed(self) -> None:
        """Handle enter: finish this step if it has its answer."""
        self.finish()

    def press_space(self) -> None:
        """Handle space; unused in most steps."""


def text_lines(text: str, cells: int, rows: int, role: str = "text", sign: str = "") -> list[Line]:
    """Return a text as lines of at most `cells`, with a sign before the first line."""
    indent = " " * (len(sign) + 1) if sign else ""
    lines = wrap(text, cells - len(indent), rows)
    return [
        ((f"{sign} " if n == 0 and sign else indent, role), (line, role if not sign else "text"))
        for n, line in enumerate(lines)
    ]
