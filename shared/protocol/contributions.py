"""Contributions: uploads, submissions and their verdicts."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shared.protocol.accounts import Me
from shared.protocol.base import ContributionState, Count, Message, Number, Size, Word
from shared.protocol.limits import NEWS_MAX
from shared.protocol.members import HeldoutSums

METRICS_MAX = 64  # most metrics of one submission, which are stored as long as the run

UploadId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Metrics: TypeAlias = Annotated[dict[Word, float], Meta(max_length=METRICS_MAX)]


class UploadRequest(Message):
    task: Number
    attempt: Count
    part: Count
    tries: Count  # how often the server has asked for this part again
    sha256: Word
    size: Number


class UploadInfo(Message):
    upload_id: UploadId
    offset: Size
    size: Size
    complete: bool
    expires_at: float
    url: str = ""  # of the store, to PUT UPLOAD_PIECE_BYTES at most; "" = use the coordinator


class SubmitRequest(Message, kw_only=True, forbid_unknown_fields=True):
    """Submission of a result, unique by (task, attempt, part, tries).

    Pay follows the task, never the figures in this message. Unknown fields are refused, since a
    program that sends them may do another task.
    """

    attempt: Count
    part: Count = 0
    tries: Count = 0
    base_version: Count
    codec: str  # an unknown codec is refused before anything is stored
    sha256: Word
    size: Number
    steps: Number
    samples: Number
    loss_first: float | None  # None for tasks without a loss, such as games
    loss_last: float | None
    device: Word = "cpu"
    train_s: float = 0.0
    paused_s: float = 0.0
    metrics: Metrics = msgspec.field(default_factory=dict)
    # Loss of the base version on the held-out part of a member's own data, before training.
    heldout: HeldoutSums | None = None


class Verdict(Message):
    contribution: Number
    task: Number
    run: str
    state: ContributionState
    reason: str = ""  # code of a reason
    message: str = ""  # a sentence
    weight: float | None = None
    version: Count | None = None  # version that contains the contribution
    credits_micro: int = 0  # pending or earned by now
    at: float = 0.0
    # True: the part came too late, but the lease continues with the same part, computed again from
    # the newest version.
    redo: bool = False


class SubmitReply(Verdict):
    """Verdict on a submission, and the account at that instant; `me` is None while the verdict is
    open.
    """

    me: Me | None = None
    # other new verdicts, whose credits `me` includes
    news: Annotated[tuple[Verdict, ...], Meta(max_length=NEWS_MAX)] = ()

    def verdict(self) -> Verdict:
        """Return the verdict alone, as it is stored."""
        return Verdict(**{name: getattr(self, name) for name in Verdict.__struct_fields__})
