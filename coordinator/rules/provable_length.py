"""Provable length of a task: the steps up to which its drift is small. The drift is how far the
task's result moves when its base is changed slightly. Pure rules.

Tasks are as long as they can be proved: a recompute of a task whose drift exceeds `DRIFT_SOUGHT`
hardly tells left-out work from honest work on other arithmetic, and above
`recompute_result.DRIFT_MAX` it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

DRIFT_SOUGHT = 0.05  # largest drift of a task that is handed out
EXTRAPOLATED = 8  # a task has at most this many times the measured steps
AGAIN = 2  # a run is measured again once its version number has grown by this factor
FIRST = 8  # version of the first measurement after the start


class DriftPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Drift after some steps of a task."""

    steps: int
    drift: float


def provable_steps(points: Sequence[DriftPoint], planned: int) -> int:
    """Return the most steps whose drift stays below `DRIFT_SOUGHT`, from 1 to `planned`.

    Between two points the drift is taken to grow exponentially, and at the last rate beyond the
    last point, up to `EXTRAPOLATED` times its steps.
    """
    steps, drift = 0, 0.0
    rate = 0.0  # rate of the exponential growth for each step
    for point in points:
        if steps and 0.0 < drift < point.drift:
            rate = math.log(point.drift / drift) / (point.steps - steps)
        if not point.drift <= DRIFT_SOUGHT:  # also where it is no number
            return max(1, min(planned, point.steps - 1, steps + _steps_left(drift, rate)))
        steps, drift = point.steps, point.drift
    return max(1, min(planned, EXTRAPOLATED * steps, steps + _steps_left(drift, rate)))


class ProvableLength(msgspec.Struct, frozen=True, kw_only=True):
    """Most steps of a task that a recompute can prove, and the largest drift measured below it."""

    steps: int
    is_bound: bool  # the run would hand out longer tasks without this bound
    drift: float

    @classmethod
    def of(cls, points: Sequence[DriftPoint], planned: int) -> ProvableLength:
        """Return the length of the tasks of a run that would hand out `planned` steps."""
        steps = provable_steps(points, planned)
        measured = [point.drift for point in points if point.steps <= steps]
        drift = max((value for value in measured if math.isfinite(value)), default=0.0)
        return cls(steps=steps, is_bound=steps < planned, drift=drift)

    @property
    def columns(self) -> dict[str, object]:
        """Return the columns in which a run stores this length."""
        return {"steps_provable": self.steps if self.is_bound else 0, "drift": self.drift}


def _steps_left(drift: float, rate: float) -> int:
    """Return the steps until a growing drift reaches `DRIFT_SOUGHT`."""
    if drift <= 0.0 or rate <= 0.0:
        return 1 << 40
    return int(min(1e9, math.log(DRIFT_SOUGHT / drift) / rate + 1e-9))


def is_due(head: int, measured: int | None) -> bool:
    """Return True if a run at version `head` is to be measured, after its last measurement at
    version `measured`.
    """
    return measured is None or head >= max(FIRST, AGAIN * measured)


def described(drift: float | None, version: int | None, steps_provable: int) -> str:
    """Return a run's measured drift and the bound of its tasks; "" before a measurement."""
    if drift is None or version is None:
        return ""
    bound = f"tasks of at most {steps_provable} steps" if steps_provable else "no bound on tasks"
    return f"{drift:.2g} of an update at version {version} (sought: {DRIFT_SOUGHT:g}); {bound}"


def bounded(steps_provable: int) -> tuple[str, ...]:
    """Return a sentence if the tasks of a run are shorter than its file says; otherwise nothing."""
    if not steps_provable:
        return ()
    return (
        f"a task has at most {steps_provable} steps: the result of a longer one drifts by more than"
        f" {DRIFT_SOUGHT:g} of its length with rounding alone, so that doing it again would prove"
        " little; a lower [train] lr drifts less",
    )
