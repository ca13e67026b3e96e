"""Base of pages that query the coordinator; during an outage the last reply stays, with its age."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

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

NEWS_S = 1.0  # least time between two queries that follow changes of the account
EVERY_S = 25.0  # time between two queries of a visible page
# A reply older than this is shown with its age: newer queries failed, or the page was hidden.
AGED_S = EVERY_S + 3


class QueryReply(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Newest reply to a query and its time, with the state of the last query."""

    value: T | None = None
    at: float = 0.0
    error: str = ""
    asking: bool = False
    tried_at: float = float("-inf")

    def old(self, scene: Scene) -> bool:
        """Return True if the reply is old: offline, after a failed query, or after `AGED_S`."""
        away = not scene.view.status.online or bool(self.error)
        return self.value is not None and (away or scene.now - self.at > AGED_S)

    def note(self, scene: Scene) -> str:
        """Return the note for the border: the age of the reply, or that it is awaited."""
        if self.value is not None and self.old(scene):
            return as_of(scene.now - self.at)
        return _("asking") if self.asking and self.value is None else ""

    def instead(self, empty: str) -> str:
        """Return the sentence of a list without rows: the error, the wait, or `empty`."""
        if self.error:
            return _(
                "cannot be shown: {error}. Press r to try again.", error=self.error.rstrip(".")
            )
        if self.value is not None:
            return empty
        return _("asking the coordinator") if self.asking else _(OFFLINE)


RELOAD = keys.KeyCommand(
    key="r", action="reload", short=N_("reload"), help=N_("Ask the coordinator again.")
)
OFFLINE = N_("shown as soon as the coordinator answers")


class QueryPage(Page):
    """Page with queries: `queries` names them, `answer` returns the newest reply of one."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[str, QueryReply[Any]] = {}
        self._asked_for: dict[str, Me | None] = {}  # account at the time of each query

    @abstractmethod
    def queries(self) -> dict[str, PageQuery]:
        """Return the queries of this page by name."""

    def answer(self, name: str) -> QueryReply[Any]:
        return self._answers.get(name) or QueryReply()

    def shown(self, scene: Scene) -> None:
        if self.volunteer.control is None or self.volunteer.view.ended is not None:
            return
        overdue: dict[str, PageQuery] = {}
        for name, question in self.queries().items():
            answer = self.answer(name)
            moved = self._asked_for.get(name) != scene.view.status.me
            wait_s = NEWS_S if moved else EVERY_S
            if not answer.asking and scene.now - answer.tried_at >= wait_s:
                overdue[name] = question
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
            self._asked_for[name] = self.volunteer.view.status.me
            answer = self.answer(name)
            self._answers[name] = msgspec.structs.replace(answer, asking=True, tried_at=now)
        work = {name: question(control) for name, question in queries.items()}
        self.run_worker(self._ask(work), group=" ".join(work), exclusive=True)

    async def _ask(self, work: Mapping[str, Awaitable[Any]]) -> None:
        replies = await asyncio.gather(*(self._reply(name, work[name]) for name in work))
        self._publish(dict(zip(work, replies, strict=True)))

    async def _reply(self, name: str, work: Awaitable[Any]) -> QueryReply[Any]:
        earlier = self.answer(name)
        try:
            value = await work
        except VolunteerError as error:
            return msgspec.structs.replace(earlier, asking=False, error=translated(error.message))
        reply = QueryReply(value=value, at=self.volunteer.clock.now(), tried_at=earlier.tried_at)
        if earlier.value is None:  # a first reply contradicts no older one
            self._publish({name: reply})
        return reply

    def _publish(self, replies: Mapping[str, QueryReply[Any]]) -> None:
        for name, reply in replies.items():
            earlier = self.answer(name)
            if (
                reply is not earlier and reply.tried_at >= earlier.tried_at
            ):  # else it was sent again
                self._answers[name] = reply
                self.answered(name)
        if self.is_current:
            self.show(self.volunteer.scene(), at_once=True)

    def answered(self, name: str) -> None:
        """Handle the end of a query, answered or failed; for subclasses."""

    def again(self) -> None:
        """Send every query again."""
        self.query_now(self.queries())

    def action_reload(self) -> None:
        """Retry the connection and send every query again."""
        self.volunteer.action_retry()
        self.again()
