"""Base of pages that query the coordinator; during an outage the last reply stays, with its age."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from typing_extensions import override

from shared.errors import VolunteerError
from shared.protocol.accounts import Me
from volunteer.control.control import Control
from volunteer.i18n.catalogue import N_, _, translated
from volunteer.tui import keys
from volunteer.tui.page import Page
from volunteer.tui.text import as_of
from volunteer.tui.widgets.panel import Scene

T = TypeVar("T")
PageQuery: TypeAlias = Callable[[Control], Awaitable[Any]]

NEWS_S = 1.0  # least time between two queries that changes of the account cause
EVERY_S = 25.0  # time between two queries of a visible page
# A reply older than this is shown with its age: newer queries failed, or the page was hidden.
AGED_S = EVERY_S + 3


class QueryReply(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Newest reply to a query, with its time and the state of the last query."""

    value: T | None = None
    at: float = 0.0
    error: str = ""
    pending: bool = False
    sent_at: float = float("-inf")

    def old(self, scene: Scene) -> bool:
        """Return True for a reply older than `AGED_S`, or any reply while the machine is offline or
        the last query has failed.
        """
        away = not scene.view.status.online or bool(self.error)
        return self.value is not None and (away or scene.now - self.at > AGED_S)

    def note(self, scene: Scene) -> str:
        """Return the note for the border: an old reply's age, or that the first reply is awaited;
        "" for a fresh reply.
        """
        if self.value is not None and self.old(scene):
            return as_of(scene.now - self.at)
        return _("asking") if self.pending and self.value is None else ""

    def empty_sentence(self, empty: str) -> str:
        """Return the sentence of a list without rows: the error of the last query; `empty` if a
        reply has arrived; else that the first reply is awaited.
        """
        if self.error:
            return _(
                "cannot be shown: {error}. Press r to try again.", error=self.error.rstrip(".")
            )
        if self.value is not None:
            return empty
        return _("asking the coordinator") if self.pending else _(OFFLINE)


RELOAD = keys.KeyCommand(
    key="r", action="reload", short=N_("reload"), help=N_("Ask the coordinator again.")
)
OFFLINE = N_("shown as soon as the coordinator answers")


class QueryPage(Page):
    """Page with queries: `queries` names them, `reply` returns the newest reply to one."""

    def __init__(self) -> None:
        super().__init__()
        self._replies: dict[str, QueryReply[Any]] = {}
        self._accounts: dict[str, Me | None] = {}  # account at the time of each query

    @abstractmethod
    def queries(self) -> dict[str, PageQuery]:
        """Return the queries of this page by name."""

    def reply(self, name: str) -> QueryReply[Any]:
        return self._replies.get(name) or QueryReply()

    @override
    def update_from(self, scene: Scene) -> None:
        """Send the queries that are due."""
        if self.volunteer.control is None or self.volunteer.view.ended is not None:
            return
        overdue: dict[str, PageQuery] = {}
        for name, query in self.queries().items():
            reply = self.reply(name)
            account_changed = self._accounts.get(name) != scene.view.status.me
            wait_s = NEWS_S if account_changed else EVERY_S
            if not reply.pending and scene.now - reply.sent_at >= wait_s:
                overdue[name] = query
        if overdue:
            self.query_now(overdue)

    def query_now(self, queries: Mapping[str, PageQuery]) -> None:
        """Send queries now, even if the reply is fresh. All new replies replace the old ones
        together, so that all parts of the page show the same moment.
        """
        control = self.volunteer.control
        if control is None:
            return
        now = self.volunteer.clock.now()
        for name in queries:
            self._accounts[name] = self.volunteer.view.status.me
            reply = self.reply(name)
            self._replies[name] = msgspec.structs.replace(reply, pending=True, sent_at=now)
        work = {name: query(control) for name, query in queries.items()}
        self.run_worker(self._send(work), group=" ".join(work), exclusive=True)

    async def _send(self, work: Mapping[str, Awaitable[Any]]) -> None:
        replies = await asyncio.gather(*(self._fetch_reply(name, work[name]) for name in work))
        self._publish(dict(zip(work, replies, strict=True)))

    async def _fetch_reply(self, name: str, work: Awaitable[Any]) -> QueryReply[Any]:
        earlier = self.reply(name)
        try:
            value = await work
        except VolunteerError as error:
            return msgspec.structs.replace(earlier, pending=False, error=translated(error.message))
        reply = QueryReply(value=value, at=self.volunteer.clock.now(), sent_at=earlier.sent_at)
        if earlier.value is None:  # no older reply is shown next to it
            self._publish({name: reply})
        return reply

    def _publish(self, replies: Mapping[str, QueryReply[Any]]) -> None:
        for name, reply in replies.items():
            earlier = self.reply(name)
            # an older reply: the query was sent again meanwhile
            if reply is not earlier and reply.sent_at >= earlier.sent_at:
                self._replies[name] = reply
                self.reply_arrived(name)
        if self.is_current:
            self.show(self.volunteer.scene(), at_once=True)

    def reply_arrived(self, name: str) -> None:
        """Handle a new reply, or the error of a failed query, to the query `name`; subclasses
        override it.
        """

    def query_again(self) -> None:
        """Send every query again."""
        self.query_now(self.queries())

    def action_reload(self) -> None:
        """Retry the connection and send every query again."""
        self.volunteer.action_retry()
        self.query_again()
