"""Collaborators of the agent's loops."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from shared.clock import Clock
from shared.workloads.base import Workload
from volunteer.account.profile import Home, Identity
from volunteer.agent.shared_state import Desk
from volunteer.control.event_bus import Hub
from volunteer.net.api import Api
from volunteer.net.transfers import Transfers
from volunteer.net.weights import Weights
from volunteer.settings.settings import Settings
from volunteer.storage.blob_cache import Cache
from volunteer.storage.carried import Residuals
from volunteer.storage.leases import Leases
from volunteer.storage.outbox import Outbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The pieces of one agent, made once."""

    settings: Settings
    identity: Identity
    api: Api
    transfers: Transfers
    weights: Weights
    cache: Cache
    home: Home
    outbox: Outbox
    leases: Leases
    residuals: Residuals
    hub: Hub
    desk: Desk
    clock: Clock
    rng: random.Random
    load: Callable[[str], Workload]  # by name; only what the owner has enabled
