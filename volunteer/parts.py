"""What every part of the agent is given."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from shared.clock import Clock
from shared.workloads.base import Workload
from volunteer.api import Api
from volunteer.cache import Cache
from volunteer.config import Settings
from volunteer.desk import Desk
from volunteer.hub import Hub
from volunteer.leases import Leases
from volunteer.outbox import Outbox
from volunteer.profile import Home, Identity
from volunteer.residuals import Residuals
from volunteer.transfer import Transfers
from volunteer.weights import Weights


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
