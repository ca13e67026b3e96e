"""Ranks page: the week and the milestones of this volunteer, then the leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import ClassVar, NamedTuple

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from shared.protocol import endpoints
from shared.protocol.accounts import Me
from shared.protocol.listings import LeaderRow, LedgerRow
from shared.text import MICRO, duration, printable
from volunteer.control.control import Control
from volunteer.i18n.catalogue import N_, _, ngettext, number
from volunteer.i18n.formats import credit, day_initials, ordinal
from volunteer.stats.ledger_pages import ledger
from volunteer.stats.milestones import CREDITS, Milestone, Week, milestones, recap_since, week
from volunteer.tui import keys
from volunteer.tui.query_page import RELOAD, PageQuery, QueryPage, QueryReply
from volunteer.tui.run_estimate import time_to
from volunteer.tui.text import Line, bar, count, fit, left, shown_name, spark, spread, wrap
from volunteer.tui.widgets.choice_row import ChoiceRow
from volunteer.tui.widgets.panel import FunctionPanel, Scene, aged
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

WINDOWS = (("7", N_("7 days")), ("30", N_("30 days")), ("0", N_("all time")))
NAME_CELLS = 11
MARK_CELLS = 7
BAR_CELLS = 14
READINGS_MAX = 5  # of a page whose account earns meanwhile
COLUMNS = (
    Column(title="#", cells=4, align="right"),
    Column(title=N_("volunteer")),
    Column(title=N_("credits"), cells=12, align="right"),
    Column(title="", cells=BAR_CELLS, least=64),
    Column(title=N_("accepted"), cells=8, align="right", least=52),
    Column(title=N_("device time"), cells=11, align="right", least=76),
    Column(title=N_("machines"), cells=8, align="right", least=88),
)


class Moment(NamedTuple):
    """Account, its ledger rows and its place, at one moment."""

    me: Me
    leaders: Sequence[LeaderRow]
    rows: Sequence[LedgerRow]  # of the last two weeks


class LeaderboardPage(QueryPage):
    """Page of the leaderboard."""

    NAME = "leaderboard"
    AUTO_FOCUS = "#ranks"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            id="window",
            key="w",
            action="window",
            short=N_("7/30/all"),
            help=N_("Count the last 7 days, the last 30, or all time."),
            place="footer",
            rank=35,
        ),
        keys.KeyCommand(
            id="hide",
            key="h",
            action="hide",
            short=N_("hide/show me"),
            help=N_(
                "Keep your nickname from others, or let them see it. Your credits stay the same."
            ),
            place="footer",
            rank=36,
        ),
        RELOAD,
    )
    CSS = """
    LeaderboardPage {
        #mine { width: 40; }
        #week { height: 11; }
        #goals { height: 11; }
        #span { height: 1; }
        #place { height: 1; padding: 0 1; background: $surface; }
        &.-normal, &.-narrow {
            #sides { layout: vertical; }
            #mine { width: 1fr; height: 8; layout: horizontal; }
            #week, #goals { height: 1fr; }
        }
        &.-narrow { #goals { display: none; } #mine { height: 5; } }
        &.-short { #mine { height: 4; } }
        &.-tiny { #mine, #place { display: none; } }
        &.-flat { #mine, #place, #span { display: none; } }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.window = "7"

    def body(self) -> ComposeResult:
        with Horizontal(id="sides"):
            with Vertical(id="mine"):
                yield FunctionPanel(self._week, title=N_("My week"), id="week", classes="card")
                yield FunctionPanel(self._goals, title=N_("Milestones"), id="goals", classes="card")
            with Vertical(id="board"):
                yield ChoiceRow(WINDOWS, lambda: self.window, action="pick", key="w", id="span")
                yield Listing(COLUMNS, self._filling, id="ranks")
                yield FunctionPanel(self._place, id="place")

    def queries(self) -> dict[str, PageQuery]:
        return {f"ranks {self.window}": self._moment}

    async def _moment(self, control: Control) -> Moment:
        """Return one account's page, read again where it earned meanwhile; query new rows only."""
        known, days = self._moments(), int(self.window)
        leaders: tuple[LeaderRow, ...] = ()
        rows = known.rows if known else ()
        since = recap_since(self.volunteer.clock.now())
        me = await control.query(endpoints.ME)
        for _reading in range(READINGS_MAX):
            leaders = await control.query(endpoints.LEADERBOARD, days=days)
            rows = await ledger(control, since, rows)
            before, me = me, await control.query(endpoints.ME)
            if me.earned_micro == before.earned_micro:
                break
        return Moment(me=me, leaders=leaders, rows=rows)

    def action_window(self) -> None:
        names = [name for name, _ in WINDOWS]
        self.action_pick(names[(names.index(self.window) + 1) % len(names)])

    def action_pick(self, window: str) -> None:
        """Switch to another span of time."""
        self.window = window
        self.show(self.volunteer.scene(), at_once=True)

    def action_hide(self) -> None:
        """Toggle whether others see the nickname."""
        control, me = self.volunteer.control, self.volunteer.view.status.me
        if control is None or me is None:
            self.volunteer.tell(_("your account is not known before the coordinator answers"))
            return
        said = _("your name is hidden from others") if me.public else _("others can see your name")

        def done() -> None:
            self.volunteer.tell(_("{said}, as soon as the coordinator knows it", said=said))

        self.volunteer.command(control.set_settings({"public": not me.public}), done)

    def _moments(self) -> Moment | None:
        """Return the newest reply, for any window."""
        replies = [self.answer(f"ranks {window}") for window, _ in WINDOWS]
        return max(replies, key=lambda reply: reply.at).value

    def _me(self, scene: Scene) -> Me | None:
        """Return the account of the same moment as the rest of the page."""
        known = self._moments()
        return known.me if known else scene.view.status.me

    def _ranks(self) -> QueryReply[Moment]:
        return self.answer(f"ranks {self.window}")

    def _leaders(self) -> Sequence[LeaderRow]:
        known = self._ranks().value
        return known.leaders if known else ()

    def _filling(self, scene: Scene) -> Filling:
        answer = self._ranks()
        return Filling(
            rows=leader_rows(self._leaders(), scene, old=answer.old(scene)),
            empty=_empty(answer),
            title=_("Ranks"),
            subtitle=answer.note(scene),
        )

    def _place(self, scene: Scene, width: int, height: int) -> list[Line]:
        return [place_line(self._leaders(), scene, width)]

    def _week(self, scene: Scene, width: int, height: int) -> list[Line]:
        known = self._moments()
        if known is None:
            return self._ranks().instead(scene, width, height, "")
        found = week(known.rows, scene.now)
        return aged(week_lines(found, scene, width, height), scene)

    def _goals(self, scene: Scene, width: int, height: int) -> list[Line]:
        me = self._me(scene)
        if me is None:
            said = _("milestones appear here with your first contribution")
            return [((text, "dim"),) for text in wrap(said, width, height)]
        return aged(goal_lines(milestones(me), scene, width, height), scene)


def _empty(answer: QueryReply[Moment]) -> str:
    if answer.error:
        return _("cannot be shown: {error}. Press r to try again.", error=answer.error.rstrip("."))
    if answer.value is not None:
        return _(
            "no credits were earned in this time; the first accepted contribution opens the list"
        )
    return (
        _("asking the coordinator")
        if answer.asking
        else _("shown as soon as the coordinator answers")
    )


def leader_rows(leaders: Sequence[LeaderRow], scene: Scene, *, old: bool) -> tuple[Row, ...]:
    """Return the rows of the leaderboard, with this volunteer's marked."""
    top = max((row.earned_micro for row in leaders), default=0)
    rows = []
    for row in leaders:
        role = "mark" if row.me else "text"
        name = shown_name(
            printable(row.nickname, 40), _("volunteer {rank}", rank=row.rank), scene.glyphs
        )
        mine = f"{scene.glyphs.mark} {_('{name} (you)', name=name)}" if row.me else f"  {name}"
        rows.append(
            Row(
                key=str(row.rank) + row.nickname,
                cells=(
                    ((str(row.rank), "value" if row.rank <= 3 else "dim"),),
                    ((mine, role),),
                    ((credit(row.earned_micro), "value" if row.me else "text"),),
                    bar(row.earned_micro / top if top else 0.0, BAR_CELLS, scene.glyphs),
                    ((count(row.accepted), "text"),),
                    ((duration(row.device_s), "dim"),),
                    ((str(row.workers), "dim"),),
                ),
                dim=old,
            )
        )
    return tuple(rows)


def day_letters(now: float) -> str:
    """Return the last seven days by their first letters, today last, three cells each."""
    today = datetime.fromtimestamp(now, tz=UTC).astimezone().weekday()
    letters = day_initials()
    return "".join(f" {letters[(today + back) % 7]} " for back in range(1, 8))


def place_line(leaders: Sequence[LeaderRow], scene: Scene, cells: int) -> Line:
    """Return the place of this volunteer, which stays visible below the list."""
    mine = next((row for row in leaders if row.me), None)
    me = scene.view.status.me
    if mine is None:
        if me is not None and not me.public:
            return ((fit(_("your name is hidden from others; h shows it"), cells), "dim"),)
        return ((fit(_("you are not in this list yet"), cells), "dim"),) if leaders else ()
    above = [row for row in leaders if row.earned_micro > mine.earned_micro]
    gap = min((row.earned_micro for row in above), default=0) - mine.earned_micro
    text = _(
        "{rank} of {leaders}, {credits} credits",
        rank=ordinal(mine.rank),
        leaders=len(leaders),
        credits=credit(mine.earned_micro),
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


def week_lines(found: Week, scene: Scene, cells: int, height: int) -> list[Line]:
    """Return seven days in a few lines."""
    if found.total_micro == 0 and found.streak == 0:
        said = _("the credits of this week appear here, from your first accepted contribution on")
        return [((text, "dim"),) for text in wrap(said, cells, height)]
    lines: list[Line] = [_fact(_("credits"), credit(found.total_micro), "value")]
    drawn = spark([max(0, micro) for micro in found.credits_micro], 7, scene.glyphs)
    wide = "".join(sign * 3 for sign in drawn) if cells >= NAME_CELLS + 21 else drawn
    lines.append(((left(_("by day"), NAME_CELLS), "dim"), (wide, "fill")))
    if len(wide) > len(drawn):
        lines.append(((" " * NAME_CELLS, "dim"), (day_letters(scene.now), "faint")))
    lines.append(
        _fact(
            _("work"),
            ngettext("{n} contribution paid", "{n} contributions paid", found.contributions),
        )
    )
    lines.append(_fact(_("active"), _("{active} of 7 days", active=found.active)))
    if found.streak > 1:
        lines.append(_fact(_("streak"), _("{streak} days in a row", streak=found.streak), "good"))
    if found.before_micro > 0:
        change = found.total_micro / found.before_micro - 1
        sign = scene.glyphs.up if change >= 0 else scene.glyphs.down
        lines.append(
            _fact(
                _("last week"),
                f"{sign} {number(abs(change), '.0%')}",
                "good" if change >= 0 else "text",
            )
        )
    return lines[:height]


def _fact(name: str, text: str, role: str = "text") -> Line:
    return ((left(name, NAME_CELLS), "dim"), (text, role))


def goal_lines(found: Sequence[Milestone], scene: Scene, cells: int, height: int) -> list[Line]:
    """Return, for each milestone, the mark that was passed last and the distance to the next."""
    lines: list[Line] = []
    roomy = height >= 3 * len(found) - 1
    for goal in found:
        ahead = (
            _("all marks passed")
            if goal.next is None
            # whole ones only: 99.6 of 100 is not 100 yet
            else _(
                "{have} of {next}", have=number(int(goal.have), ","), next=number(goal.next, ",")
            )
        )
        if goal.next is not None and goal.name == CREDITS:
            when = time_to(round((goal.next - goal.have) * MICRO), scene.view.status)
            fits = MARK_CELLS + cell_len(_(goal.name)) + len(ahead) + len(when) + 3 <= cells
            ahead += f", {when}" if when and fits else ""
        passed = goal.last > 0
        mark = f"{scene.glyphs.check} {count(goal.last)}" if passed else scene.glyphs.wait
        name: Line = ((left(mark, MARK_CELLS), "good" if passed else "dim"), (_(goal.name), "text"))
        lines.append(spread(name, ((ahead, "dim"),), cells))
        lines.append((("  ", "text"), *bar(goal.share, cells - 2, scene.glyphs)))
        if roomy:
            lines.append(())
    return lines[:height]
