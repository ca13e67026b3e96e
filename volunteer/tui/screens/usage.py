"""Usage log: every request to a model, by tokens, credits and time. No prompt is kept."""

from __future__ import annotations

from textual.app import ComposeResult

from shared.protocol import endpoints
from shared.protocol.inference import UsageRow
from shared.text import printable
from volunteer.i18n.catalogue import N_, _, ngettext, number
from volunteer.i18n.formats import credit
from volunteer.tui.query_page import AccountPage, PageQuery, QueryReply
from volunteer.tui.text import Line, count, when
from volunteer.tui.widgets.panel import FunctionPanel, Scene, aged
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

COLUMNS = (
    Column(title=N_("when"), cells=8),
    Column(title="model", least=36),
    Column(title=N_("in"), cells=6, align="right", least=44),
    Column(title=N_("out"), cells=6, align="right"),
    Column(title=N_("credits"), cells=11, align="right"),
    Column(title=N_("took"), cells=9, align="right", least=60),
    Column(title=N_("first"), cells=8, align="right", least=100),
    Column(title=N_("by"), cells=14, least=76),
)
EMPTY = N_(
    "Nothing was asked yet. Press p on a run of the Runs page, or run: volunteer generate RUN"
)


class UsageLog(AccountPage):
    """Page of requests to models."""

    AUTO_FOCUS = "#requests"
    CSS = """
    UsageLog {
        #spent { height: 4; }
        &.-short #spent, &.-flat #spent { display: none; }
    }
    """

    def body(self) -> ComposeResult:
        yield FunctionPanel(self._totals, title=N_("Spent on answers"), id="spent", classes="card")
        yield Listing(COLUMNS, self._filling, id="requests")

    def queries(self) -> dict[str, PageQuery]:
        return {"usage": lambda control: control.query(endpoints.USAGE)}

    def _rows(self) -> tuple[UsageRow, ...]:
        return self.answer("usage").value or ()

    def _filling(self, scene: Scene) -> Filling:
        answer: QueryReply[tuple[UsageRow, ...]] = self.answer("usage")
        empty = answer.error or ("" if answer.asking and answer.value is None else _(EMPTY))
        return Filling(
            rows=tuple(usage_row(row, scene, old=answer.old(scene)) for row in self._rows()),
            empty=empty or _("asking the coordinator"),
            title=_("Requests"),
            subtitle=answer.note(scene),
        )

    def _totals(self, scene: Scene, width: int, height: int) -> list[Line]:
        return aged(total_lines(self._rows(), scene), scene)[:height]


def usage_row(row: UsageRow, scene: Scene, *, old: bool) -> Row:
    """Return a request as a row of the table."""
    under_way = row.latency_s is None
    images = " " + _("img") if row.kind == "image" else ""
    price = _("free") if row.free else credit(row.cost_micro, 6)
    return Row(
        key=row.id,
        cells=(
            ((when(row.at, scene.now), "dim"),),
            ((printable(row.model, 80), "text"),),
            ((count(row.tokens_in, 4), "dim"),),
            ((f"{count(row.tokens_out, 4)}{images}", "text"),),
            ((_("held") if under_way else price, "warn" if under_way else "value"),),
            (
                (
                    _("under way")
                    if row.latency_s is None
                    else f"{number(row.latency_s, '.1f')} s",
                    "dim",
                ),
            ),
            (
                (
                    "-" if row.first_token_s is None else f"{number(row.first_token_s, '.2f')} s",
                    "dim",
                ),
            ),
            ((f"{row.key}..." if row.key else _("this account"), "dim"),),
        ),
        dim=old,
    )


def total_lines(rows: tuple[UsageRow, ...], scene: Scene) -> list[Line]:
    """Return the account's balance, and the total of the listed requests."""
    me = scene.view.status.me
    lines: list[Line] = []
    if me is not None:
        held = (
            "   " + _("held {credits}", credits=credit(me.held_micro, 6)) if me.held_micro else ""
        )
        lines.append(
            (
                (_("spent") + " ", "dim"),
                (credit(me.spent_micro, 6), "value"),
                (held, "warn"),
                ("   " + _("balance") + " ", "dim"),
                (credit(me.balance_micro), "value"),
            )
        )
    written = sum(row.tokens_out for row in rows if row.kind != "image")
    said = ngettext(
        "{n} newest request: {tokens_in} tokens in, {tokens_out} out",
        "{n} newest requests: {tokens_in} tokens in, {tokens_out} out",
        len(rows),
        tokens_in=sum(row.tokens_in for row in rows),
        tokens_out=written,
    )
    lines.append(((said, "text"),))
    return lines
