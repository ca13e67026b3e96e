"""Parts that all services of a coordinator share: settings, clock, database, blobs, signals."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from coordinator.attendance import Attendance
from coordinator.config import Settings
from coordinator.database.engine.open_database import Database
from coordinator.signals import Signals
from coordinator.storage.blobs import BlobStore
from coordinator.storage.disk_space import Space
from shared.clock import Clock
from shared.proofs.signing import SigningKey


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Parts of one process that its services share."""

    settings: Settings
    clock: Clock
    db: Database
    blobs: BlobStore
    key: SigningKey
    signals: Signals
    threads: Executor
    space: Space
    attendance: Attendance


class PlatformService:
    """Base of the services, with the parts of their platform as attributes."""

    def __init__(self, on: Platform) -> None:
        self._settings, self._clock, self._key = on.settings, on.clock, on.key
        self._db, self._blobs, self._signals = on.db, on.blobs, on.signals
        self._threads = on.threads
