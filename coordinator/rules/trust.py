"""Trust in a volunteer, moved by every verdict. Pure rules; the rows are in the database.

    trust    0..1 of a volunteer: multiplies the weight of a contribution in a merge. Begins at 1, +0.01 for accepted work,
             -0.1 for work refused for what was in it. One bad result takes ten good ones to mend.
    streak   of a worker: accepted results in a row, 0 after a bad one. A machine that overheats is found by its streak while
             its owner's other machines keep theirs. Spot checks are meant to follow it.

An event that a volunteer cannot help moves no trust, so there is no rule for it: work that came too
late, that was overtaken by a merge, that was cancelled, or that was set aside with a merge that
failed.
"""

from __future__ import annotations

TRUST_START = 1.0
GAIN = 0.01
LOSS = 0.1
LOSS_FAILED = 0.02  # a task given back as failed
STREAK_MAX = 1_000_000  # far above anything a rule asks for, far below the column's limit


def accepted(trust: float, streak: int) -> tuple[float, int]:
    """Return trust and streak after good work, needed or not."""
    return _bounded(trust + GAIN), min(STREAK_MAX, streak + 1)


def rejected(trust: float, streak: int) -> tuple[float, int]:
    """Return trust and streak after a rejection for content; the streak is lost."""
    return _bounded(trust - LOSS), 0


def gave_up(trust: float, streak: int) -> tuple[float, int]:
    """Return trust and streak after a task was given back as failed: a small loss, for machines do
    fail.
    """
    return _bounded(trust - LOSS_FAILED), streak


def _bounded(trust: float) -> float:
    """Clamp to 0..1 in whole thousandths, so that a hundred small steps add up to exactly one."""
    return min(1.0, max(0.0, round(trust, 3)))
