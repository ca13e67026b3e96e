"""Workplace of an agent with the parts that a test gives it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from shared.clock import Clock, ServerClock
from volunteer.agent.held_leases import HeldLeases
from volunteer.agent.lifecycle import Lifecycle
from volunteer.agent.workplace import Timing, Workplace


def workplace(
    clock: Clock,
    *,
    remote: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    bus: Any = None,
    life: Lifecycle | None = None,
) -> Workplace:
    far: Any = SimpleNamespace(**remote or {})
    files: Any = SimpleNamespace(**store or {})
    life = life or Lifecycle(clock)
    return Workplace(
        remote=far,
        store=files,
        bus=bus,
        life=life,
        held=HeldLeases(life),
        timing=Timing(clock=clock, rng=random.Random(1)),
        server_clock=ServerClock(clock),
    )
