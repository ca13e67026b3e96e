"""World of the simulated machines: a coordinator, a clock, its link to the world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.simulate.loop import LoopClock
from coordinator.simulate.scenario import Server
from shared.workloads.base import DatasetManifest

if TYPE_CHECKING:
    from coordinator.services import Coordinator


@dataclass(slots=True)
class Net:
    """The coordinator's link: what moves at the same time shares it, by how many there are when a
    transfer begins.
    """

    server: Server
    busy: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def rate(self, way: str, mbit: float) -> float:
        """Megabits a second for one more transfer."""
        whole = self.server.down_mbit if way == "up" else self.server.up_mbit
        return min(mbit, whole / (self.busy[way] + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    """State that all machines share."""

    coordinator: Coordinator
    clock: LoopClock
    net: Net
    run: int
    dataset: DatasetManifest | None
    scale: float  # bytes of the real model / bytes of the one that is simulated
    step_flops: float
