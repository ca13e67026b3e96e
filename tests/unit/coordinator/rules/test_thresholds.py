"""Thresholds of the alerts."""

from __future__ import annotations

from coordinator.config import Settings
from coordinator.rules.thresholds import Thresholds, disk_is_low, many_refused, of_settings
from shared.units import DAY_S


def test_the_organiser_sets_them() -> None:
    settings = Settings(alert_stalled_s=60, alert_backup_days=2)
    limits = of_settings(settings)
    assert limits == Thresholds(stalled_s=60, backup_s=2 * DAY_S)
    assert limits.backup_is_old(2 * DAY_S)
    assert not limits.backup_is_old(DAY_S)
    assert not Thresholds(backup_s=0).backup_is_old(1000 * DAY_S)


def test_a_run_is_stalled_by_its_own_pace() -> None:
    limits = Thresholds(stalled_s=60)
    assert limits.stalled_after(usual_s=0) == 60
    assert limits.stalled_after(usual_s=13) == 65


def test_what_was_said_stays_said_a_little_longer() -> None:
    assert not many_refused(29, 29)  # too few to tell
    assert many_refused(11, 30)
    assert not many_refused(9, 30)
    assert many_refused(9, 30, said=True)
    assert disk_is_low(3.9, 1)
    assert not disk_is_low(4.5, 1)
    assert disk_is_low(4.5, 1, said=True)
