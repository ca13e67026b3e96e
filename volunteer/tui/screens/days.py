"""Calendar of the days worked: credits by day, this week beside the last, the rank by day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import ClassVar

from textual.app import ComposeResult

from shared.protocol.listings import LedgerRow
from volunteer.control.control import Control
from volunteer.i18n.catalogue import N_, _
from volunteer.stats.diary import Diary, by_day, ranks
from volunteer.stats.ledger_pages import ledger
from volunteer.stats.milestones import local_day, recap_since
from volunteer.tui import keys
from volunteer.tui.query_page import RELOAD, Answer, PageQuery, QueryPage
from volunteer.tui.text import Line
from volunteer.tui.widgets.calendar import calendar_lines, rank_line, summary_lines
from volunteer.tui.widgets.panel import FunctionPanel, Scene, aged


class Days(QueryPage):
    """Page of the calendar, opened over Ranks; escape closes it."""

    NAME = "days"
    ACTIONS: ClassVar[tuple[keys.Command, ...]] = (
        keys.Command(
            id="close",
            key="escape,d",
            action="close",
            short=N_("back"),
            help=N_("Back to the ranks."),
            place="footer",
            rank=12,
        ),
        RELOAD,
    )

    def body(self) -> ComposeResult:
        yield FunctionPanel(self._lines, title=self._title, id="days", classes="card")

    def queries(self) -> dict[str, PageQuery]:
        return {"diary": lambda control: control.diary(), "ledger": self._recent}

    async def _recent(self, control: Control) -> tuple[LedgerRow, ...]:
        """Return the ledger rows of the last two weeks; only new ones are queried."""
        known: Sequence[LedgerRow] = self.answer("ledger").value or ()
        return await ledger(control, recap_since(self.volunteer.clock.now()), known)

    def _title(self, scene: Scene) -> tuple[str, str]:
        return _("Credits by day"), self.answer("ledger").note(scene)

    def _lines(self, scene: Scene, cells: int, height: int) -> list[Line]:
        found: Answer[Diary] = self.answer("diary")
        rows: Answer[Sequence[LedgerRow]] = self.answer("ledger")
        if found.value is None and rows.value is None:
            return found.instead(scene, cells, height, _("your days appear here"))
        diary = found.value or Diary()
        today = local_day(scene.now)
        amounts = by_day(diary, earned(rows.value or ()), known_since(rows.value, scene.now))
        lines = calendar_lines(amounts, today, scene, cells)
        more = [
            *summary_lines(amounts, today, scene, cells),
            rank_line(ranks(diary), scene, cells),
        ]
        gap: list[Line] = [()] if height > len(lines) + len(more) else []
        return aged([*lines, *gap, *more][:height], scene)

    def action_close(self) -> None:
        """Return to the ranks."""
        self.dismiss()


def known_since(rows: Sequence[LedgerRow] | None, now: float) -> date | None:
    """Return the first whole day that the ledger rows of a recap hold; None without an answer."""
    return None if rows is None else local_day(recap_since(now)) + timedelta(days=1)


def earned(rows: Sequence[LedgerRow]) -> dict[date, int]:
    """Return the credits of each day in a ledger."""
    found: dict[date, int] = {}
    for row in rows:
        if row.kind == "earned":
            day = local_day(row.at)
            found[day] = found.get(day, 0) + row.amount_micro
    return found
