"""Refused updates: the task is done again before anybody is blamed. Pure rules.

    the same refusal   the run is at fault; after a few of them it pauses itself
    another result     the account is suspended, as after a draw that failed
    proves nothing     nobody is blamed

A refusal because the same bytes came for two tasks never counts against a run, so an account that
copies updates cannot pause it. If the recompute agrees with such an update, its account did the
task, and another account may have copied the bytes: nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.protocol.base import Reason
from shared.text import counted

# Setting or data of a run at fault, for each refusal that a recompute can repeat.
ADVICE: Mapping[str, str] = {
    Reason.NOT_FINITE: "the training diverges: lower `[train] lr`, or set `clip_norm`",
    Reason.LOSS: "the loss rises: lower `[train] lr`, or raise `[validation] loss_limit`",
    Reason.NORM: "updates are too large or too small: look at `[train] lr` and `clip_norm`, or "
    "raise `[validation] norm_limit`",
    Reason.EMPTY: "tasks change nothing: look whether the data has learnt tokens, and at "
    "`[train] lr`",
}
OPEN_OF_RUN, OPEN_OF_ACCOUNT = 4, 1  # most refused tasks that are done again at one time
FAULTS_MAX = 3  # repeated refusals since a run's newest version at which the run pauses itself
FAULTS_ALONE = 2  # the same number, if no update was accepted since that version
LOSS_SLACK = 0.1  # largest relative difference at which a reported loss counts as the server's own


def is_question(reason: str) -> bool:
    """Return True if a recompute can tell whose fault a refusal for this reason is."""
    return reason in ADVICE or reason == Reason.REPLAY


def may_ask(of_run: int, of_account: int) -> bool:
    """Return True if one more refused task may be done again, while `of_run` of its run and
    `of_account` of its account are being done again.
    """
    return of_run < OPEN_OF_RUN and of_account < OPEN_OF_ACCOUNT


def repeats(reason: str, reported_loss: float | None, own_loss: float | None) -> bool:
    """Return True if an update that agrees with its recompute is refused again, for `reason`. A
    refusal for a reported loss is repeated only if the server's own loss is about the same.
    """
    if reason != Reason.LOSS or own_loss is None:
        return True
    return reported_loss is not None and abs(own_loss - reported_loss) <= LOSS_SLACK * reported_loss


def is_at_fault(repeated: int, accepted: int) -> bool:
    """Return True if a run pauses itself. `repeated` counts the refusals that a recompute repeated,
    `accepted` the accepted updates, both since the newest version.
    """
    return repeated >= (FAULTS_MAX if accepted else FAULTS_ALONE)


def explanation(reason: str, repeated: int) -> str:
    """Return the reason for which a run pauses itself."""
    again = "it was done again" if repeated == 1 else "they were done again"
    return (
        f"{counted(repeated, 'task')} of it ended in refused updates, and {again} with the same "
        f"result: {ADVICE[reason]}"
    )
