"""Base of all messages; the states, reasons and error body that they share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias, dataclass_transform

import msgspec
from msgspec import Meta

from shared.protocol.limits import UPLOAD_BYTES_MAX

# Bounded values from the other side; larger values do not fit the database columns.
Count: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=UPLOAD_BYTES_MAX)]
Word: TypeAlias = Annotated[str, Meta(max_length=64)]
Line: TypeAlias = Annotated[str, Meta(max_length=1000)]

TaskState = Literal["todo", "doing", "accepted", "done", "discarded", "cancelled"]
RunState = Literal["draft", "running", "paused", "completed", "failed"]
ContributionState = Literal["received", "checking", "accepted", "merged", "superseded", "rejected"]


class Reason(StrEnum):
    """Reason of an idle volunteer or of a refusal: a code for machines, next to a sentence."""

    NO_RUN = "no_run"  # no run is running
    NO_FIT = "no_fit"  # no run needs this device
    RUN_PAUSED = "run_paused"
    RUN_ENDED = "run_ended"
    ALL_TAKEN = "all_taken"  # other workers hold every task
    IN_FLIGHT = "in_flight"  # this worker holds as many tasks as it may
    MERGING = "merging"
    BANNED = "banned"
    READ_ONLY = "read_only"  # the coordinator's disk is full
    # reasons of verdicts
    STALE = "stale"
    NOT_FINITE = "not_finite"
    NORM = "norm"
    LOSS = "loss"
    EMPTY = "empty"  # all zeros: nothing was learnt
    FRAME = "frame"
    REPLAY = "replay"  # the same bytes were handed in before
    STEPS = "steps"
    MERGE_FAILED = "merge_failed"  # a merge with this contribution failed
    CANCELLED = "cancelled"
    EXPERIENCE = "experience"


class Cause(StrEnum):
    """Cause of a run's standstill; see coordinator/rules/standstill_causes.py."""

    PAUSED = "paused"  # the organiser has paused the run
    AT_FAULT = "at_fault"  # the run paused itself
    NO_SERVER = "no_server"
    CLOSED = "closed"  # a disk or store is full, read-only or away
    MERGE_FAILS = "merge_fails"
    FAILING = "failing"  # tasks fail on every machine
    REFUSED = "refused"
    NOTHING_TEACHES = "nothing_teaches"
    NO_FIT = "no_fit"
    NOBODY = "nobody"
    NO_DATA = "no_data"  # no live machine keeps data for the run
    PROOF = "proof"
    MERGE_DUE = "merge_due"
    COMPANY = "company"  # a version must mix updates of more members
    STALLED = "stalled"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of most wire messages."""


class Standstill(Message):
    """Standstill of a run: its cause, a sentence about it, and the remedy."""

    cause: Cause
    message: str
    todo: str = ""  # what the organiser can do about it
    since: float | None = None

    @property
    def sentence(self) -> str:
        """Return the reason and the remedy."""
        return f"{self.message}: {self.todo}" if self.todo else self.message


class ErrorBody(Message):
    """Error as the body of a reply; below /v1 errors have OpenAI's form."""

    code: str
    message: str
    request_id: str = ""
    retry_after_s: float | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """State of the process, and whether it accepts uploads."""

    status: str
    read_only: bool = False
    why: str = ""  # reason for accepting no uploads; "" = uploads are accepted


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a file, in bytes, that the coordinator has stored."""

    size: int
