"""Thresholds of the alerts.

An alert stays open until its figure is well past the threshold, so that it does not flap; `said` is
True while the alert is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.units import DAY_S

if TYPE_CHECKING:
    from coordinator.config import Settings

REFUSED_SHARE, CALM_SHARE, DECISIONS_MIN = 1 / 3, 1 / 4, 30
# multiples of the disk's floor at which space becomes low, and at which it is enough again
LOW_FLOORS, ENOUGH_FLOORS = 4, 5
CERTIFICATE_S = 21 * DAY_S
WAVE_S, WAVE_MIN = 600.0, 25  # a wave: WAVE_MIN strangers or more register within WAVE_S
USUAL_TIMES = 5  # a run stalls after this many times its usual time for a version


ERRORS_SHARE, ERRORS_MIN = 0.01, 10  # share and least number of requests answered with 5xx
IDLE_S = 1800.0  # a running run without a worker for this long is idle


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds that the organiser sets; 0 = never."""

    stalled_s: float = 3600.0
    backup_s: float = 7 * DAY_S

    def stalled_after(self, usual_s: float) -> float:
        """Return the longest time that an active run may make no version."""
        return max(self.stalled_s, USUAL_TIMES * usual_s)

    def backup_is_old(self, age_s: float) -> bool:
        """Return True if a backup of this age is too old, or a run of this age without a backup."""
        return bool(self.backup_s) and age_s >= self.backup_s


def of_settings(settings: Settings) -> Thresholds:
    """Return the thresholds that the organiser set."""
    return Thresholds(
        stalled_s=settings.alert_stalled_s,
        backup_s=settings.alert_backup_days * DAY_S,
    )


def many_refused(refused: int, decided: int, *, said: bool = False) -> bool:
    """Return True if too many of the newest decisions are refusals."""
    share = CALM_SHARE if said else REFUSED_SHARE
    return decided >= DECISIONS_MIN and refused > share * decided


def disk_is_low(free: float, floor: float, *, said: bool = False) -> bool:
    """Return True if the free space is close to the floor."""
    return free < (ENOUGH_FLOORS if said else LOW_FLOORS) * floor


def certificate_ends(left_s: float) -> bool:
    """Return True if a certificate that is valid for `left_s` more seconds expires soon."""
    return left_s < CERTIFICATE_S
