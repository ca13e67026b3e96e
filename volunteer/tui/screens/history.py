"""Credits page: contributions with verdicts, reasons and pay, and the account's totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from typing_extensions import override

from shared.protocol import endpoints
from shared.protocol.contributions import Verdict
from shared.protocol.listings import LedgerRow
from shared.text import printable
from shared.units import DAY_S
from volunteer.control.control import Control
from volunteer.control.event_sentences import debt_words, escrow_words
from volunteer.control.ledger_pages import ledger
from volunteer.i18n.catalogue import N_, _, pgettext
from volunteer.i18n.formats import credit
from volunteer.tui import keys
from volunteer.tui.page import SEARCH
from volunteer.tui.query_page import RELOAD, PageQuery, QueryPage, QueryReply
from volunteer.tui.text import (
    Line,
    clock_time,
    fit,
    gain,
    gain_role,
    left,
    paragraph,
    percent,
    when,
)
from volunteer.tui.widgets.choice_row import ChoiceRow
from volunteer.tui.widgets.panel import FunctionPanel, Scene, aged
from volunteer.tui.widgets.recent_work import (
    NO_STEPS,
    VERDICTS,
    deciding_steps,
    outcome,
    reason_of,
)
from volunteer.tui.widgets.search_box import Finder
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

PAGES_MAX = 40  # pages of older contributions
RECENT_S = 14 * DAY_S  # age of the oldest ledger rows, which show the pay of contributions
NAME_CELLS = 9
# Reached stage of a contribution by its state: 1 pending, 2 checked, 3 paid; 0 for not paid.
STAGES = {
    "received": 1,
    "checking": 1,
    "accepted": 2,
    "merged": 3,
    "paid": 3,
    "superseded": 3,
    "rejected": 0,
    "unpaid": 0,
    "reversed": 0,
}
COLUMNS = (
    Column(title=N_("when"), cells=8),
    Column(title=N_("run"), cells=16, least=66),
    Column(title=N_("task"), cells=7, align="right", least=50),
    Column(title=N_("state"), cells=12),
    Column(title=N_("credits"), cells=8, align="right"),
    Column(title=N_("why"), least=40),
)


# Verdicts, newest first, and the cursor of older verdicts.
VerdictPage = tuple[tuple[Verdict, ...], str]


class History(QueryPage):
    """Credits page: a table of contributions, the chosen one in detail, and the totals."""

    NAME = "history"
    AUTO_FOCUS = "#work"
    CHOICES = (
        ("all", N_("all")),
        ("open", N_("waiting")),
        ("paid", N_("paid")),
        ("rejected", N_("rejected")),
    )
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="w",
            action="choose",
            short=N_("filter"),
            help=N_("Show all contributions, or those that wait, were paid, were rejected."),
            rank=35,
        ),
        SEARCH,
        RELOAD,
    )
    CSS = """
    History {
        #totals { width: 34; height: 1fr; }
        #side { width: 34; }
        #detail { height: 2fr; }
        #span { height: 1; }
        &.-normal, &.-narrow {
            #columns { layout: vertical; }
            #side { width: 1fr; height: 7; layout: horizontal; }
            #totals { height: 1fr; width: 30; }
            #detail { height: 1fr; }
        }
        &.-narrow #totals { display: none; }
        &.-short #side { height: 5; }
        &.-tiny, &.-low, &.-flat { #side, #span { display: none; } }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._older: list[Verdict] = []
        self._pages = 0
        self._cursor = ""

    @override
    def body(self) -> ComposeResult:
        with Horizontal(id="columns"):
            with Vertical(id="list"):
                yield ChoiceRow(self.CHOICES, lambda: self.active_choice, id="span")
                yield Finder(id="finder")
                yield Listing(COLUMNS, self._filling, id="work")
            with Vertical(id="side"):
                yield FunctionPanel(self._totals, title=N_("Credits"), id="totals", classes="card")
                yield FunctionPanel(
                    self._detail, title=self._detail_title, id="detail", classes="card"
                )

    @override
    def queries(self) -> dict[str, PageQuery]:
        return {
            "history": lambda control: control.page(endpoints.CONTRIBUTIONS),
            "ledger": self._recent_ledger,
        }

    async def _recent_ledger(self, control: Control) -> tuple[LedgerRow, ...]:
        """Return the ledger rows of the last two weeks; only new rows are queried."""
        older: Sequence[LedgerRow] = self.reply("ledger").value or ()
        return await ledger(control, self.volunteer.clock.now() - RECENT_S, older)

    # The rows.

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the newest known verdict of each contribution, newest contribution first."""
        reply: QueryReply[VerdictPage] = self.reply("history")
        newest: dict[int, Verdict] = {}
        for verdict in (
            *self._older,
            *self.volunteer.view.status.verdicts,
            # the newest reply last: pay that was taken back does not change a verdict's time
            *reversed(reply.value[0] if reply.value else ()),
        ):
            earlier = newest.get(verdict.contribution)
            if earlier is None or earlier.at <= verdict.at:
                newest[verdict.contribution] = verdict
        return tuple(sorted(newest.values(), key=lambda v: v.contribution, reverse=True))

    def _steps(self) -> dict[int, str]:
        """Return the last deciding step of the ledger by contribution."""
        return deciding_steps(self.reply("ledger").value or ())

    def _filling(self, scene: Scene) -> Filling:
        reply: QueryReply[VerdictPage] = self.reply("history")
        verdicts = self.verdicts()
        steps = self._steps()
        matching = [v for v in verdicts if passes(v, self.active_choice, self.needle, steps)]
        old = not scene.view.status.online or reply.old(scene)
        count = (
            _("{chosen} of {known}", chosen=len(matching), known=len(verdicts))
            if len(matching) != len(verdicts)
            else ""
        )
        note = " ".join(part for part in (count, reply.note(scene)) if part)
        return Filling(
            rows=tuple(verdict_row(v, scene, steps, old=old) for v in matching),
            empty=_("nothing of this kind; w shows others, / searches for another text")
            if verdicts
            else reply.empty_sentence(
                _(
                    "your contributions appear here with their verdicts and reasons, from the "
                    "first task on"
                )
            ),
            title=_('Contributions with "{needle}"', needle=self.needle)
            if self.needle
            else _("Contributions"),
            subtitle=note,
        )

    # Older rows.

    @on(Listing.Ended)
    def _query_older(self) -> None:
        if self._cursor and self._pages < PAGES_MAX and not self.reply("older").pending:
            cursor = self._cursor
            self.query_now(
                {"older": lambda control: control.page(endpoints.CONTRIBUTIONS, cursor=cursor)}
            )

    @override
    def reply_arrived(self, name: str) -> None:
        page: VerdictPage | None = self.reply(name).value
        if name == "older" and page is not None:
            self._pages += 1
            self._older += page[0]
            self._cursor = page[1]
        elif name == "history" and page is not None and not self._pages:
            self._cursor = page[1]

    @on(Listing.Moved)
    def _moved(self) -> None:
        self.query_one("#detail", FunctionPanel).draw()

    # Details next to the list.

    def _detail_title(self, scene: Scene) -> tuple[str, str]:
        return _("Why"), ""

    def _chosen(self) -> Verdict | None:
        key = self.query_one("#work", Listing).key
        return next((v for v in self.verdicts() if str(v.contribution) == key), None)

    def _detail(self, scene: Scene, width: int, height: int) -> list[Line]:
        verdict = self._chosen()
        if verdict is None:
            return []
        rows: Sequence[LedgerRow] = self.reply("ledger").value or ()
        return detail_lines(verdict, rows, scene, width, height)

    def _totals(self, scene: Scene, width: int, height: int) -> list[Line]:
        return aged(total_lines(scene, width, height), scene)


def passes(verdict: Verdict, kind: str, needle: str, steps: Mapping[int, str] = NO_STEPS) -> bool:
    """Return True if a contribution passes the filter and the search text."""
    state = outcome(verdict, steps)
    in_kind = {
        "all": True,
        "open": state in ("received", "checking", "accepted"),
        "paid": STAGES[state] == 3,
        "rejected": STAGES[state] == 0,
    }[kind]
    reasons = f"{verdict.reason} {verdict.message} {reason_of(verdict)}"
    text = f"{verdict.run} {verdict.task} {verdict.state} {reasons}"
    return in_kind and needle.casefold() in text.casefold()


def verdict_row(verdict: Verdict, scene: Scene, steps: Mapping[int, str], *, old: bool) -> Row:
    """Return a contribution as a row of the table."""
    state = outcome(verdict, steps)
    sign, word, role = VERDICTS[state]
    pay = credit(verdict.credits_micro) if verdict.credits_micro else "-"
    why = reason_of(verdict, paid=state == "paid")
    if not why and verdict.state == "merged" and verdict.version is not None:
        why = _("in version {version}", version=verdict.version)
    return Row(
        key=str(verdict.contribution),
        cells=(
            ((when(verdict.at, scene.now), "dim"),),
            ((printable(verdict.run, 64), "text"),),
            ((str(verdict.task), "dim"),),
            ((f"{getattr(scene.glyphs, sign)} {_(word)}", role),),
            ((pay, "value" if STAGES[state] == 3 else "dim"),),
            ((printable(why, 200), "text"),),
        ),
        dim=old,
    )


def stages_line(state: str, scene: Scene) -> Line:
    """Return the stages "pending, checked, paid", bright up to `state`; or "pending, not paid"."""
    glyphs = scene.glyphs
    if not STAGES[state]:
        return ((_("pending") + " ", "dim"), (f"{glyphs.right} ", "faint"), (_("not paid"), "bad"))
    progress = STAGES[state]
    spans: list[tuple[str, str]] = []
    for place, word in enumerate((_("pending"), _("checked"), _("paid")), start=1):
        if place > 1:
            spans.append((f" {glyphs.right} ", "faint"))
        role = "good" if place == 3 and progress == 3 else "text" if place <= progress else "faint"
        spans.append((word, role))
    return tuple(spans)


def detail_lines(
    verdict: Verdict, rows: Sequence[LedgerRow], scene: Scene, cells: int, height: int
) -> list[Line]:
    """Return the details of one contribution: verdict, failed check, and postings."""
    state = outcome(verdict, deciding_steps(rows))
    sign, word, role = VERDICTS[state]
    lines: list[Line] = [((f"{getattr(scene.glyphs, sign)} {_(word)}", role),)]
    if verdict.reason:
        lines.append(_fact(_("check"), printable(verdict.reason, 60)))
    why = reason_of(verdict, paid=state == "paid")
    lines += paragraph(why, cells, 5) if why else []
    lines.append(stages_line(state, scene))
    lines.append(
        _fact(
            _("number"),
            _("{contribution} (task {task})", contribution=verdict.contribution, task=verdict.task),
        )
    )
    if verdict.version is not None:
        lines.append(_fact(_("version"), str(verdict.version)))
    if verdict.weight is not None:
        lines.append(_fact(_("weight"), percent(verdict.weight)))
    for row in reversed(rows):  # rows are newest first
        if row.contribution == verdict.contribution:
            amount = gain(row.amount_micro)
            line = ((left(clock_time(row.at), 6), "dim"), (left(_(row.kind), 9), "text"))
            lines.append((*line, (fit(amount, max(0, cells - 15)), "value")))
            if row.kind == "reversed":
                lines += paragraph(row.memo, cells, 3, "dim")
    return lines[:height]


def total_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return the balance, the credits owed, pending, at stake, earned and spent, and the work."""
    me = scene.view.status.me
    if me is None:
        sentence = _("credits appear here when your first contribution has been checked")
        return paragraph(sentence, cells, height, "dim")
    lines = [_fact(_("balance"), credit(me.balance_micro), "value")]
    if me.debt_micro:
        lines.append(_fact(_("owed"), credit(me.debt_micro), "bad"))
    pending_role = "warn" if me.pending_micro else "text"
    lines.append(_fact(_("pending"), credit(me.pending_micro), pending_role))
    if me.escrow_micro:
        lines.append(_fact(_("at stake"), credit(me.escrow_micro), "warn"))
    lines.append(_fact(_("today"), gain(me.today_micro), gain_role(me.today_micro)))
    lines.append(_fact(_("earned"), credit(me.earned_micro)))
    lines.append(_fact(_("spent"), credit(me.spent_micro)))
    if me.held_micro:
        lines.append(
            _fact(
                _("held"),
                _("{credits} for answers under way", credits=credit(me.held_micro, 6)),
                "warn",
            )
        )
    lines.append(
        _fact(
            pgettext("label", "accepted"),
            _(
                "{accepted} of {all}",
                accepted=me.accepted,
                all=me.accepted + me.rejected,
            ),
        )
    )
    for sentence in (escrow_words(me), debt_words() if me.debt_micro else ""):
        lines += paragraph(sentence, cells, height, "dim") if sentence else []
    return lines[:height]


def _fact(name: str, text: str, role: str = "text") -> Line:
    return ((left(name, NAME_CELLS), "dim"), (text, role))
