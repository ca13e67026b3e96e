"""Bearer tokens of workers: checked against the database, and cached.

Every worker sends a heartbeat each 30 s; reading its secret from the database each time would cost
more than the rest of the request. A verified token is therefore cached for a minute. A stamp in the
database, read twice a second for all tokens, shows whether an account was banned meanwhile, so that
every process obeys a ban or a revoked secret within half a second.
"""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts import registration
from coordinator.database import key_values
from coordinator.database import volunteers as store
from coordinator.rules import secret_codes
from coordinator.ttl_cache import CachedValue

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

CACHE_S = 0.5  # a ban by another process takes effect within this time
# validity of a cached worker; after it, a request of a machine that was signed off signs it on
# again
AGAIN_S = 60.0
CACHE_MAX = 20_000  # workers that are cached


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The authenticated caller: one worker of one volunteer."""

    volunteer_id: str
    worker_id: str
    nickname: str


class _VerifiedWorker(msgspec.Struct, frozen=True):
    """Worker with a recently verified secret."""

    principal: Principal
    stamp: str
    until: float  # instant of the monotonic clock


class Tokens:
    """The workers of a coordinator, by their secrets."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        # Workers by the SHA-256 of the header: no secret stays in memory, and the time of a look-up
        # reveals nothing about a secret.
        self._verified: dict[bytes, _VerifiedWorker] = {}
        self._stamp = CachedValue(self._read_stamp, CACHE_S, clock)

    async def _read_stamp(self) -> str:
        return await self._db.read(lambda conn: key_values.get(conn, key_values.ACCOUNTS)) or ""

    def recall(self, header: bytes) -> Principal | None:
        """Return the cached sender of `Bearer <worker id>.<secret>`; None if accounts changed."""
        hit = self._verified.get(sha256(header).digest())
        if hit is None or hit.stamp != self._stamp.peek() or hit.until < self._clock.monotonic():
            return None
        return hit.principal

    async def principal(self, worker_id: str, secret: str) -> Principal:
        """Return the worker with this secret. Raises Unauthorized or Banned."""
        secret_codes.check_credentials(worker_id, secret)
        header = f"Bearer {worker_id}.{secret}".encode()
        stamp = await self._stamp.get()  # read before the account: a later change has another stamp
        if (remembered := self.recall(header)) is not None:
            return remembered
        principal = await self._look(worker_id, secret)
        while len(self._verified) >= CACHE_MAX:
            self._verified.pop(next(iter(self._verified)))
        key, until = sha256(header).digest(), self._clock.monotonic() + AGAIN_S
        self._verified.pop(key, None)
        self._verified[key] = _VerifiedWorker(principal, stamp, until)
        return principal

    async def _look(self, worker_id: str, secret: str) -> Principal:
        credentials = await self._db.read(lambda conn: store.credentials(conn, worker_id))
        credentials = registration.authorise(credentials, secret)
        if credentials.left:
            back = {"state": "online", "last_seen_at": self._clock.now()}
            await self._db.write(lambda conn: store.set_worker(conn, worker_id, **back))
        return Principal(
            volunteer_id=credentials.volunteer_id,
            worker_id=worker_id,
            nickname=credentials.nickname,
        )

    def forget(self, worker_id: str = "") -> None:
        """Drop the cache of this process: one worker's entry, or all."""
        items = self._verified.items() if worker_id else ()
        self._verified = {key: hit for key, hit in items if hit.principal.worker_id != worker_id}
        if not worker_id:
            self._stamp.drop()


def renew_stamp(conn: Connection) -> None:
    """Make all processes read the accounts again, after a change that each must notice at once."""
    key_values.put(conn, key_values.ACCOUNTS, secrets.token_hex(8))
