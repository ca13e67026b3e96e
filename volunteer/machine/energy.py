"""Energy that the lent devices used today: counted by their meters, else integrated from their
power, which is estimated where no sensor measures it.

An estimate is the power at full load times the load. The power at full load is what the owner says
(the setting `device_watts`), else the limit that the driver or the kernel names; without either
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from volunteer.control.events import Sensed

GAP_S = 60.0  # a longer time between two looks is no use: the machine slept
STORE_S = 300.0  # between two writes
RAPL = Path("/sys/class/powercap/intel-rapl:0")
WATTS_MAX = 5000.0


class Today(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of a day, by device; `guessed` names the devices with an estimated part."""

    day: str = ""
    joules: dict[str, float] = {}
    guessed: tuple[str, ...] = ()


class EnergyMeter:
    """Adds up the energy of today over the readings of the sensors."""

    def __init__(self, today: Today, store: Callable[[Today], None]) -> None:
        self.today = today
        self._store = store
        self._last: dict[str, tuple[float, Sensed]] = {}  # by device: when, and its reading
        self._stored_at = 0.0

    def count(self, sensed: Sensed, now: float) -> Sensed:
        """Return the reading with the energy of today, this reading included."""
        if sensed.watts is None and sensed.metered_joules is None:
            return sensed
        day = f"{datetime.fromtimestamp(now, tz=UTC).astimezone():%Y-%m-%d}"
        if day != self.today.day:
            self.today = Today(day=day)
        device = sensed.device
        used = self._since(sensed, now)
        joules = {**self.today.joules, device: self.today.joules.get(device, 0.0) + used}
        guessed = set(self.today.guessed) | ({device} if sensed.estimated and used else set())
        self.today = Today(day=day, joules=joules, guessed=tuple(sorted(guessed)))
        if now >= self._stored_at + STORE_S or now < self._stored_at:
            self._stored_at = now
            self.store()
        return msgspec.structs.replace(
            sensed, joules=joules[device], estimated=sensed.estimated or device in guessed
        )

    def store(self) -> None:
        """Store the counted energy for the next start."""
        self._store(self.today)

    def _since(self, sensed: Sensed, now: float) -> float:
        """Return the energy since the reading before; 0 for the first one."""
        before = self._last.get(sensed.device)
        self._last[sensed.device] = (now, sensed)
        if before is None:
            return 0.0
        at, known = before
        if sensed.metered_joules is not None and known.metered_joules is not None:
            return max(0.0, sensed.metered_joules - known.metered_joules)
        if not 0.0 < now - at <= GAP_S:
            return 0.0
        watts = [w for w in (known.watts, sensed.watts) if w is not None]
        return sum(watts) / len(watts) * (now - at) if watts else 0.0


def guessed(sensed: Sensed, full_watts: Mapping[str, float], limit: float | None) -> Sensed:
    """Return a reading with an estimate of its missing power, where one can be made."""
    full = full_watts.get(sensed.device, limit)
    if sensed.watts is not None or full is None or sensed.utilisation is None:
        return sensed
    return msgspec.structs.replace(
        sensed, watts=min(full, WATTS_MAX) * sensed.utilisation, estimated=True
    )


class Rapl:
    """Counter of the processor's energy, and its power limit, as the kernel shows them."""

    def __init__(self, path: Path = RAPL) -> None:
        self._path = path
        self._turns = 0  # of the counter, which begins anew at its end
        self._last = 0

    def joules(self) -> float | None:
        """Return the energy by the processor's counter; None where it is not to be read."""
        now = self._number("energy_uj")
        if now is None:
            return None
        if now < self._last:
            self._turns += 1
        self._last = now
        return (now + self._turns * (self._number("max_energy_range_uj") or 0)) / 1e6

    def limit(self) -> float | None:
        """Return the power that the processor may use for long, in watts."""
        found = self._number("constraint_0_power_limit_uw")
        return found / 1e6 if found else None

    def _number(self, name: str) -> int | None:
        try:
            return int((self._path / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None  # no such counter, or for the administrator only
