"""Coordinator's sentences in the language of the owner. They are looked up by their code, never by
their words, which the coordinator chose.

In English the coordinator's words are shown. Other languages show the sentence of the code, and
quote the words in it if they say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.protocol.base import Cause, Reason, Standstill
from shared.protocol.contributions import Verdict
from shared.sentences import Sentence, sentence_of
from shared.text import printable
from volunteer.i18n.catalogue import N_

REFUSED = {
    "bad_request": N_('the coordinator cannot use what was sent ("{words}")'),
    "invalid_frame": N_('the coordinator cannot use this file ("{words}")'),
    "invalid_name": N_('the coordinator does not take this name ("{words}")'),
    "unauthorized": N_('the coordinator does not know this machine ("{words}")'),
    "bad_signature": N_("the signature does not fit"),
    "forbidden": N_('the coordinator does not allow this ("{words}")'),
    "invalid_code": N_('the coordinator takes no more people by this link ("{words}")'),
    "banned": N_('the organiser has banned this account ("{words}")'),
    "unknown_task": N_('the coordinator knows no such task of this machine ("{words}")'),
    "not_found": N_('the coordinator does not have this ("{words}")'),
    "conflict": N_('this conflicts with what the coordinator has ("{words}")'),
    "gone": N_("somebody else holds this task now"),
    "cancelled": N_("the task was cancelled"),
    "too_large": N_('the coordinator takes no more bytes ("{words}")'),
    "upgrade_required": N_("this version is too old for the coordinator: `volunteer update`"),
    "too_many_requests": N_('too many requests for now ("{words}")'),
    "insufficient_quota": N_("there are not enough credits for this"),
    "internal": N_('the coordinator made a mistake ("{words}")'),
    "unavailable": N_('the coordinator cannot do this now ("{words}")'),
    "storage_full": N_("the coordinator's disk is full"),
}
IDLE = {
    Reason.NO_RUN: N_("nothing for this machine is running here just now"),
    Reason.NO_FIT: N_('no run needs this device ("{words}")'),
    Reason.RUN_PAUSED: N_('the run is paused ("{words}")'),
    Reason.RUN_ENDED: N_("the run has ended"),
    Reason.ALL_TAKEN: N_("all tasks are held by others just now"),
    Reason.IN_FLIGHT: N_('this machine gets no further task for now ("{words}")'),
    Reason.MERGING: N_("every pass is done; the last results are being merged"),
    Reason.BANNED: N_('this account gets no work ("{words}")'),
    Reason.READ_ONLY: N_("the coordinator's disk is full: it takes nothing in"),
}
VERDICTS = {
    Reason.RUN_ENDED: N_("the run ended before it could be merged"),
    Reason.STALE: N_("it came after a newer version: nothing is counted against you"),
    Reason.NOT_FINITE: N_(
        "the update holds NaN or infinity: the training diverged, or memory is bad"
    ),
    Reason.NORM: N_("the update is far larger or smaller than such work makes it"),
    Reason.LOSS: N_("its loss cannot be right"),
    Reason.EMPTY: N_("the update changes nothing, or hardly anything"),
    Reason.FRAME: N_('its file is not as it must be ("{words}")'),
    Reason.REPLAY: N_("it is a copy of other work"),
    Reason.STEPS: N_("its steps or samples are not those of the task"),
    Reason.MERGE_FAILED: N_("it was set aside because the merge failed with it"),
    Reason.CANCELLED: N_("its task was taken back: nothing is counted against you"),
    Reason.EXPERIENCE: N_("some of its games or answers are not valid"),
}
STANDSTILLS = {
    Cause.PAUSED: N_('paused by its organiser ("{words}")'),
    Cause.AT_FAULT: N_('it paused itself ("{words}")'),
    Cause.NO_SERVER: N_("its server does not run"),
    Cause.CLOSED: N_('the coordinator takes nothing in ("{words}")'),
    Cause.MERGE_FAILS: N_("the merge of its next version fails"),
    Cause.FAILING: N_('its tasks fail on every machine ("{words}")'),
    Cause.REFUSED: N_('its work is refused ("{words}")'),
    Cause.NOTHING_TEACHES: N_("nothing that its machines make can be learnt from"),
    Cause.NO_FIT: N_('no machine here fits ("{words}")'),
    Cause.NOBODY: N_("nobody is here"),
    Cause.NO_DATA: N_("nobody with data for it is here"),
    Cause.PROOF: N_('work waits for its proof ("{words}")'),
    Cause.MERGE_DUE: N_("a merge is due and does not begin"),
    Cause.COMPANY: N_('its merge waits for work of other members ("{words}")'),
    Cause.STALLED: N_('no new version ("{words}")'),
}
SAYS = N_('coordinator: "{words}"')  # sentence for an error without a code


def error_sentence(code: str, words: str) -> str:
    """Return the sentence for an error's code, or the coordinator's words."""
    return _by_code(REFUSED, code, words)


def idle_sentence(reason: str, words: str) -> str:
    """Return the sentence for a reason without a task, or the coordinator's words."""
    return _by_code(IDLE, reason, words)


def standstill_sentence(standstill: Standstill) -> str:
    """Return the sentence for the cause of a run's standstill, or the coordinator's words."""
    return _by_code(STANDSTILLS, standstill.cause, printable(standstill.message, 400))


def verdict_reason(verdict: Verdict) -> str:
    """Return the reason of a verdict; "" if its state and version say enough."""
    words = verdict.message
    if verdict.state == "merged":  # the message may say why it is not paid
        words = words.removeprefix(f"merged into version {verdict.version}").removeprefix("; ")
    if words in ("", verdict.state):
        return Sentence("waiting for the merge") if verdict.state == "accepted" else ""
    if verdict.reason:
        return _by_code(VERDICTS, verdict.reason, words)
    return sentence_of(words, SAYS, {"words": words})


def _by_code(table: Mapping[Any, str], code: str, words: str) -> str:
    message = table.get(code, "")
    return sentence_of(words, message, {"words": words} if "{words}" in message else {})
