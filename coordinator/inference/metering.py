"""Metering: credit is held before the first token, and the generated tokens are paid at the end.

A request writes the ledger twice. Each piece is logged before it is sent, on this process's disk
(`stream_log`), and once a second in the database. A request of a killed process is therefore
settled for the tokens in the log, which include all tokens that were sent. Without the log (another
replica settles the request after a minute, or the power failed), the tokens of the last second may
stay unpaid.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.accounts.api_keys import Asker
from coordinator.database import volunteers as store
from coordinator.database.inference import api_key_rows, request_rows
from coordinator.database.inference.request_rows import Ending, OpenRow, StreamProgress, UnderWay
from coordinator.database.ledger import answer_pay, payments
from coordinator.database.ledger.postings import AMOUNT_MAX
from coordinator.inference.answer_draws import AnswerDraws
from coordinator.inference.stream_log import FOLDER, OrphanStreams, StreamLog
from coordinator.rules.answer_prices import cost_micro
from coordinator.rules.run_file import ServeSettings, TierSettings
from coordinator.traffic import SLOW_S, Durations
from shared.errors import (
    BadRequest,
    Forbidden,
    InsufficientQuota,
    NotFound,
    TooManyRequests,
    Unauthorized,
    VolunteerError,
)
from shared.text import credit
from shared.units import DAY_S, MINUTE_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from coordinator.database.volunteers import VolunteerRow
    from shared.clock import Clock

TICK_S = 1.0  # interval at which streamed tokens are written to the database
BEAT_S = 20.0  # interval at which requests without new tokens are written as alive
GONE_S = 60.0  # a request that was not written for this long counts as abandoned
WAIT_S = 5.0  # `retry_after_s` for an account whose open requests may generate too many tokens
KEPT_S = 90 * DAY_S  # age at which settled requests are deleted; the ledger is kept
EARN = "train with `volunteer`: each merged contribution earns credits"

log = structlog.get_logger("metering")


class MeteredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to be metered: its asker, its model, and its highest price."""

    asker: Asker
    run_id: int
    version: int
    model: str
    kind: str
    serve: ServeSettings
    tier: TierSettings
    unit_nano: int
    tokens_in: int
    tokens_max: int
    scored: int = 0  # tokens of the prompt within `tokens_max`, which are paid as they are scored
    house_share: float = 0.0

    @property
    def run(self) -> str:
        return self.model.partition("@")[0]


class RunningRequest:
    """Running request with its token count."""

    def __init__(self, request_id: str, began: float, order: MeteredRequest) -> None:
        self.id = request_id
        self.order = order
        self.began = began  # instant of the monotonic clock
        self.tokens = 0
        self.answered: Counter[str] = Counter()  # tokens computed by volunteers, by account
        self.written = 0  # tokens that the database has
        self.first_s: float | None = None  # time to the first token
        self.ended = False  # True once the request is to be settled

    @property
    def streamed(self) -> StreamProgress:
        return StreamProgress(out=self.tokens, answered=dict(self.answered))


class Meter:
    """Holds, counts and settles the requests of this process."""

    def __init__(self, db: Database, clock: Clock, settings: Settings) -> None:
        self._db = db
        self._clock = clock
        self._day_micro = round(settings.answer_credits_per_day * 1_000_000)
        self._replica = secrets.token_hex(8)
        self._folder = settings.directory / FOLDER
        self._log = StreamLog(self._folder)
        self.draws = AnswerDraws(db, clock)
        self._live: dict[str, RunningRequest] = {}
        self._beaten = clock.monotonic()
        self.requests: Counter[str] = Counter()  # by run, since this process began
        self.tokens: Counter[str] = Counter()
        self.first_token = Durations(SLOW_S)

    @property
    def running(self) -> int:
        """Return how many requests of this process are running."""
        return len(self._live)

    async def check(self, order: MeteredRequest) -> None:
        """Raise the refusal that `begin` would raise; hold nothing."""
        who, now = order.asker.volunteer_id, self._clock.now()
        await self._db.read(lambda conn: self._price(conn, order, store.existing(conn, who), now))

    async def begin(self, order: MeteredRequest) -> RunningRequest:
        """Check a request's rights and limits, and hold its highest price. Raises like `_price`."""
        metered = RunningRequest(secrets.token_hex(16), self._clock.monotonic(), order)
        now = self._clock.now()
        self._live[metered.id] = metered
        # logged first, so that a killed process leaves no hold that nobody releases
        self._log.write(metered.id, metered.streamed)
        try:
            await self._db.write(lambda conn: self._hold(conn, order, metered.id, now))
        except VolunteerError:
            self._forget(metered)
            raise
        except BaseException:  # the asker left: `tick` settles the request if it was stored
            metered.ended = True
            raise
        self.requests[order.run] += 1
        return metered

    def count(self, metered: RunningRequest, tokens: int, by: str = "") -> None:
        """Count tokens before they are streamed; `by` is the volunteer that computed them."""
        run = metered.order.run
        if not metered.tokens and tokens:
            metered.first_s = self._clock.monotonic() - metered.began
            self.first_token.add(metered.first_s)
        metered.tokens += tokens
        if by:
            metered.answered[by] += tokens
        self.tokens[run] += tokens
        if tokens:
            self._log.write(metered.id, metered.streamed)

    async def end(self, metered: RunningRequest) -> int:
        """Settle the generated tokens and release the rest of the hold; return the price in
        micro-credits.

        A failed settlement is retried by the tick.
        """
        metered.ended = True
        now, first = self._clock.now(), metered.first_s
        done = metered.streamed
        ending = Ending(now=now, roll=self.draws.roll, first_s=first, replica=self._replica)
        cost = await self._db.write(lambda conn: request_rows.end(conn, metered.id, done, ending))
        self._forget(metered)
        self.draws.note_settled(metered.id, metered.answered)
        return cost

    def _forget(self, metered: RunningRequest) -> None:
        self._live.pop(metered.id, None)
        self._log.forget(metered.id)

    def close(self) -> None:
        """Close the log of streams; no request is answered afterwards."""
        self._log.close()

    def _hold(self, conn: Connection, order: MeteredRequest, request_id: str, now: float) -> None:
        account = store.locked(conn, order.asker.volunteer_id)
        free, price_max = self._price(conn, order, account, now)
        row = OpenRow(
            run_id=order.run_id,
            version=order.version,
            model=order.model,
            kind=order.kind,
            unit_nano=order.unit_nano,
            tokens_in=order.tokens_in,
            tokens_max=order.tokens_max,
            house_share=order.house_share,
            id=request_id,
            volunteer_id=account.id,
            key_id=order.asker.key_id,
            free=free,
            held_micro=price_max,
            replica=self._replica,
            at=now,
        )
        request_rows.begin(conn, row, f"{order.kind} of {order.model}")

    def _price(
        self, conn: Connection, order: MeteredRequest, account: VolunteerRow, now: float
    ) -> tuple[bool, int]:
        """Return True if a request is free, and its highest price in micro-credits. Raises
        Forbidden for a banned or suspended account, TooManyRequests, InsufficientQuota,
        Unauthorized for a dead key, BadRequest for a price that nobody can pay.
        """
        if not account.takes_part:
            raise Forbidden("a banned or suspended account gets no answers")
        since = now - now % DAY_S
        _check_minute(conn, order, account.id, now)
        open_now = request_rows.under_way(conn, account.id, order.asker.key_id)
        _check_waiting(order, open_now)
        units = order.tokens_in + order.tokens_max
        # free tokens need a vetted account, since anybody can make new accounts
        vetted = account.standing == "vetted"
        quota = order.serve.free_tokens_per_day if vetted else 0
        free = units <= quota and (
            request_rows.free_since(conn, account.id, order.run_id, since) + units <= quota
        )
        price_max = 0 if free else cost_micro(order.unit_nano, units)
        if price_max > AMOUNT_MAX:
            raise BadRequest("this would cost more than can be paid: ask for fewer tokens")
        if price_max:
            self._check_caps(conn, order, open_now, price_max, now)
        return free, price_max

    def _check_caps(
        self,
        conn: Connection,
        order: MeteredRequest,
        open_now: UnderWay,
        price_max: int,
        now: float,
    ) -> None:
        """Raise InsufficientQuota if credit or a cap is too small, Unauthorized for a dead key."""
        asker = order.asker
        earned_micro = payments.balances(conn, asker.volunteer_id).earned_micro
        if earned_micro < price_max:
            missing = credit(price_max - earned_micro, 6)
            raise InsufficientQuota(
                f"this may cost {credit(price_max, 6)} credits, and {missing} are "
                f"missing: ask for fewer tokens, or {EARN}"
            )
        since, most = now - now % DAY_S, self._day_micro
        spent_today = request_rows.spent_since(conn, asker.volunteer_id, since) if most else 0
        if most and spent_today + price_max > most:
            raise InsufficientQuota(
                f"this account may spend {credit(most)} credits a day, and has spent "
                f"or held {credit(spent_today, 6)} of them: ask again tomorrow (UTC)"
            )
        if asker.key_id is None:
            return
        key = api_key_rows.existing(conn, asker.key_id)
        if not key.works(now):
            raise Unauthorized("this key was revoked or has expired")
        used = key.spent_micro + open_now.key_micro
        if key.cap_micro is not None and used + price_max > key.cap_micro:
            raise InsufficientQuota(
                f"this key may spend {credit(key.cap_micro, 6)} credits, and has spent or held "
                f"{credit(used, 6)}: this may cost {credit(price_max, 6)}; use or make another key"
            )

    # --- crash safety ---

    async def run(self, stop: asyncio.Event) -> None:
        """Write live requests and settle abandoned ones, until `stop` is set."""
        await self.recover(all_replicas=self._db.dialect == "sqlite")  # SQLite has one server
        checked = self._clock.monotonic()
        while not stop.is_set():
            await self.tick()
            if self._clock.monotonic() - checked > BEAT_S:
                checked = self._clock.monotonic()
                await self.recover()
                old = self._clock.now() - KEPT_S
                await self._db.write(partial(request_rows.prune, before=old))
            try:
                await asyncio.wait_for(stop.wait(), TICK_S)
            except TimeoutError:
                pass

    async def tick(self) -> None:
        """Store the tokens streamed so far, and retry failed settlements."""
        for metered in [row for row in self._live.values() if row.ended]:
            try:
                await self.end(metered)
            except NotFound:  # the request was never stored
                self._forget(metered)
            except VolunteerError as error:
                log.warning("not settled yet", request=metered.id, error=error.message)
        is_due = self._clock.monotonic() - self._beaten > BEAT_S
        rows = [row for row in self._live.values() if is_due or row.tokens != row.written]
        out = {row.id: row.streamed for row in rows}
        now = self._clock.now()
        if is_due:
            self._beaten = self._clock.monotonic()
            if self.draws.waiting:
                await self._db.write(lambda conn: answer_pay.beat(conn, self._replica, now))
        self.draws.start_comparisons()
        if out:
            await self._db.write(lambda conn: request_rows.beat(conn, out, now))
            for row in rows:
                row.written = out[row.id].out

    async def recover(self, *, all_replicas: bool = False) -> int:
        """Settle the requests of dead processes by their logged tokens; return their number.
        Waiting draws of such processes cannot be compared, since the prompts were lost.

        `all_replicas` says that no other process runs, so every other open request is abandoned.
        """
        now = self._clock.now()
        before = now + 1 if all_replicas else now - GONE_S
        orphans, settled = await asyncio.to_thread(OrphanStreams.take, self._folder), False
        ending = Ending(now=now, roll=self.draws.roll)
        try:
            logged = orphans.streamed
            open_rows = await self._db.read(
                lambda conn: (
                    request_rows.abandoned(conn, before) | request_rows.still_open(conn, [*logged])
                )
            )
            # compared after the read: a request lives here before its row can be read
            abandoned = {name: row for name, row in open_rows.items() if name not in self._live}
            for request_id, recorded in abandoned.items():
                streamed = max(
                    recorded, logged.get(request_id, recorded), key=lambda progress: progress.out
                )
                end = partial(
                    request_rows.end, request_id=request_id, streamed=streamed, ending=ending
                )
                await self._db.write(end)
            settled = True
        finally:
            orphans.release(settled=settled)
        lost = partial(answer_pay.abandoned, before=before, replica=self._replica)
        for request_id, who in await self._db.read(lost):
            untold = partial(answer_pay.mark_untold, request_id=request_id, who=who, now=now)
            await self._db.write(untold)
        if abandoned:
            log.info("settled after a crash", requests=len(abandoned))
        return len(abandoned)


def _check_minute(conn: Connection, order: MeteredRequest, volunteer_id: str, now: float) -> None:
    """Raise TooManyRequests if the replicas together began too many requests within a minute."""
    most = order.tier.requests_per_minute
    oldest = request_rows.recent(conn, volunteer_id, order.run_id, now - MINUTE_S, most)
    if oldest is not None:
        raise TooManyRequests(
            f"more than {most} requests a minute", retry_after_s=oldest + MINUTE_S - now
        )


def _check_waiting(order: MeteredRequest, open_now: UnderWay) -> None:
    most, tokens = order.tier.tokens_waiting, order.tokens_max if order.kind != "image" else 0
    # a prompt that alone exceeds the limit is scored while no other request of the account is open
    if open_now.tokens + max(tokens - order.scored, min(tokens, most)) > most:
        raise TooManyRequests(
            f"{open_now.tokens} tokens of this account are under way, and at most "
            f"{most} may be: wait for an answer, or ask for fewer tokens",
            retry_after_s=WAIT_S,
        )
