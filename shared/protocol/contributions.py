"""Contributions: uploads, submissions and their verdicts."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shared.protocol.accounts import Me
from shared.protocol.base import ContributionState, Count, Message, Number, Size, Word
from shared.protocol.limits import NEWS_MAX
from shared.workloads.base import HALVINGS_MAX

REVEAL_MAX = 4  # most files that one verdict asks for
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
    # contribution for which the coordinator requested these bytes as evidence; 0: none
    evidence_of: Number = 0


class UploadInfo(Message):
    upload_id: UploadId
    offset: Size
    size: Size
    complete: bool
    expires_at: float
    url: str = ""  # of the store, for a PUT of at most UPLOAD_PIECE_BYTES; "" = send it here


class Commitment(Message):
    """Commitment to the files that a task can be recomputed from: their SHA-256, submitted before
    it is known which tasks are recomputed. A verdict may ask for the files; "" means no file.
    """

    inner: Word = ""  # initial state of the inner optimiser
    left: Word = ""  # final state, with which the next task begins
    residual: Word = ""  # residual that the codec added to the update
    kept: Word = ""  # residual that the codec left, for the next update


class SubmitRequest(Message, kw_only=True):
    """Submission, unique by (task, attempt, part, tries). Pay follows the task, not its figures."""

    attempt: Count
    part: Count = 0
    tries: Count = 0
    base_version: Count
    codec: str  # an unknown codec is refused before anything is stored
    sha256: Word
    size: Number
    steps: Number
    samples: Number
    loss_first: float
    loss_last: float
    device: Word = "cpu"
    train_s: float = 0.0
    paused_s: float = 0.0
    metrics: Metrics = msgspec.field(default_factory=dict)
    commitment: Commitment = Commitment()
    # How many turns (see `Result.halved`) were done before each halving for lack of memory, if
    # halving changes the result; a recompute halves at the same turns.
    halved: Annotated[tuple[Number, ...], Meta(max_length=HALVINGS_MAX)] = ()


class Verdict(Message):
    contribution: Number
    task: Number
    run: str
    state: ContributionState
    reason: str = ""  # code of a reason
    message: str = ""  # a sentence
    weight: float | None = None
    version: Count | None = None  # version that it was merged into
    credits_micro: int = 0  # pending or earned by now
    at: float = 0.0
    # Too late, but the lease continues: recompute this part from the newest version.
    redo: bool = False
    # Files of its commitment that the coordinator requests: upload them for this contribution.
    reveal: Annotated[tuple[Word, ...], Meta(max_length=REVEAL_MAX)] = ()


class SubmitReply(Verdict):
    """Verdict on a submission, and the account at that instant: `me` is None while undecided."""

    me: Me | None = None
    # verdicts included in `me`
    news: Annotated[tuple[Verdict, ...], Meta(max_length=NEWS_MAX)] = ()

    def verdict(self) -> Verdict:
        """Return the verdict alone, as it is stored."""
        return Verdict(**{name: getattr(self, name) for name in Verdict.__struct_fields__})
