"""Ranks page: the leaderboard, and this volunteer's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from typing_extensions import override

from shared.protocol import endpoints
from shared.protocol.listings import LeaderRow
from shared.text import duration, printable
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _
from volunteer.i18n.formats import credit, ordinal
from volunteer.tui import keys
from volunteer.tui.query_page import RELOAD, PageQuery, QueryPage, QueryReply
from volunteer.tui.run_estimate import time_to
from volunteer.tui.text import Line, bar, fit, short_number, shown_name
from volunteer.tui.widgets.choice_row import ChoiceRow
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

BAR_CELLS = 14
COLUMNS = (
    Column(title="#", cells=4, align="right"),
    Column(title=N_("volunteer")),
    Column(title=N_("credits"), cells=12, align="right"),
    Column(title="", cells=BAR_CELLS, least=64),
    Column(title=N_("accepted"), cells=8, align="right", least=52),
    Column(title=N_("device time"), cells=11, align="right", least=76),
    Column(title=N_("machines"), cells=8, align="right", least=88),
)


class LeaderboardPage(QueryPage):
    """Ranks page: the leaderboard of 7 days, 30 days or all time, and this volunteer's place."""

    NAME = "leaderboard"
    AUTO_FOCUS = "#ranks"
    CHOICES = (("7", N_("7 days")), ("30", N_("30 days")), ("0", N_("all time")))
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="w",
            action="choose",
            short=N_("7/30/all"),
            help=N_("Count the last 7 days, the last 30, or all time."),
            rank=35,
        ),
        keys.KeyCommand(
            key="h",
            action="hide",
            short=N_("hide/show me"),
            help=N_("Hide your nickname from others, or show it. Your credits stay the same."),
            rank=36,
        ),
        RELOAD,
    )
    CSS = """
    LeaderboardPage {
        #span { height: 1; }
        #place { height: 1; padding: 0 1; background: $surface; }
        &.-tiny #place { display: none; }
        &.-low, &.-flat { #place, #span { display: none; } }
    }
    """

    @override
    def body(self) -> ComposeResult:
        yield ChoiceRow(self.CHOICES, lambda: self.active_choice, id="span")
        yield Listing(COLUMNS, self._filling, id="ranks")
        yield FunctionPanel(self._place, id="place")

    @override
    def queries(self) -> dict[str, PageQuery]:
        days = int(self.active_choice)
        return {f"ranks {days}": lambda control: control.query(endpoints.LEADERBOARD, days=days)}

    def action_hide(self) -> None:
        """Toggle whether others see the nickname."""
        control, me = self.volunteer.control, self.volunteer.view.status.me
        if control is None or me is None:
            self.volunteer.tell(_("your account is not known before the coordinator answers"))
            return
        sentence = (
            _("your name is hidden from others") if me.public else _("others can see your name")
        )

        def done() -> None:
            self.volunteer.tell(_("{said}, as soon as the coordinator knows it", said=sentence))

        self.volunteer.command(
            control.do(commands.SetSettings(changes={"public": not me.public})), done
        )

    def _ranks(self) -> QueryReply[Sequence[LeaderRow]]:
        return self.reply(f"ranks {self.active_choice}")

    def _filling(self, scene: Scene) -> Filling:
        reply = self._ranks()
        return Filling(
            rows=leader_rows(reply.value or (), scene, old=reply.old(scene)),
            empty=reply.empty_sentence(
                _(
                    "no credits were earned in this time; the first accepted contribution opens "
                    "the list"
                )
            ),
            title=_("Ranks"),
            subtitle=reply.note(scene),
        )

    def _place(self, scene: Scene, width: int, height: int) -> list[Line]:
        return [place_line(self._ranks().value or (), scene, width)]


def leader_rows(leaders: Sequence[LeaderRow], scene: Scene, *, old: bool) -> tuple[Row, ...]:
    """Return the rows of the leaderboard, with this volunteer's row marked."""
    top = max((row.earned_micro for row in leaders), default=0)
    rows = []
    for row in leaders:
        role = "mark" if row.me else "text"
        name = shown_name(
            printable(row.nickname, 40), _("volunteer {rank}", rank=row.rank), scene.glyphs
        )
        label = f"{scene.glyphs.mark} {_('{name} (you)', name=name)}" if row.me else f"  {name}"
        rows.append(
            Row(
                key=str(row.rank) + row.nickname,
                cells=(
                    ((str(row.rank), "value" if row.rank <= 3 else "dim"),),
                    ((label, role),),
                    ((credit(row.earned_micro), "value" if row.me else "text"),),
                    bar(row.earned_micro / top if top else 0.0, BAR_CELLS, scene.glyphs),
                    ((short_number(row.accepted), "text"),),
                    ((duration(row.device_s), "dim"),),
                    ((str(row.workers), "dim"),),
                ),
                dim=old,
            )
        )
    return tuple(rows)


def place_line(leaders: Sequence[LeaderRow], scene: Scene, cells: int) -> Line:
    """Return the line below the list with the place of this volunteer, or why the volunteer has no
    place; () for an empty list.
    """
    place = next((row for row in leaders if row.me), None)
    me = scene.view.status.me
    if place is None:
        if me is not None and not me.public:
            return ((fit(_("your name is hidden from others; h shows it"), cells), "dim"),)
        return ((fit(_("you are not in this list yet"), cells), "dim"),) if leaders else ()
    above = [row for row in leaders if row.earned_micro > place.earned_micro]
    gap = min((row.earned_micro for row in above), default=0) - place.earned_micro
    text = _(
        "{rank} of {leaders}, {credits} credits",
        rank=ordinal(place.rank),
        leaders=len(leaders),
        credits=credit(place.earned_micro),
    )
    if me is not None and not me.public:
        text = _("hidden from others (h shows it); {text}", text=text)
    when = time_to(gap, scene.view.status)
    pace = f" ({when})" if when else ""
    more = (
        _(", {gap} to the next place{pace}", gap=credit(gap), pace=pace)
        if gap > 0
        else " " + _("- you lead")
    )
    room = cells - 2
    return (
        (f"{scene.glyphs.mark} ", "mark"),
        (fit(text + more, room, scene.glyphs.ellipsis), "text"),
    )
