"""Machine time: the shares that a run's machines spend on training, and on merged training."""

from __future__ import annotations

import msgspec

from shared.units import DAY_S

WINDOW_S = DAY_S  # time that the shares cover
SHOWN_FROM_S = 600.0  # machine seconds from which shares are shown


class MachineSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of devices: present for a run, training, and training whose result was merged."""

    present: float = 0.0
    trained: float = 0.0
    merged: float = 0.0

    @property
    def shares(self) -> MachineTime | None:
        """Return the shares of the time; None until the machines were present for ten minutes."""
        if self.present < SHOWN_FROM_S:
            return None
        return MachineTime(
            busy=min(1.0, self.trained / self.present),
            goodput=min(1.0, self.merged / self.present),
        )


class MachineTime(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the time of a run's machines over the last day."""

    busy: float  # share spent on training whose result was received
    goodput: float  # share spent on training whose result was merged
