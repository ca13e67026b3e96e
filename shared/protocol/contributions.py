"""Contributions: uploads, submissions and their verdicts."""

from __future__ import annotations

import msgspec

from shared.protocol.base import ContributionState, Message


class UploadRequest(Message):
    task: int
    attempt: int
    part: int
    tries: int  # recomputations requested by the server
    sha256: str
    size: int


class UploadInfo(Message):
    upload_id: str
    offset: int
    size: int
    complete: bool
    expires_at: float


class SubmitRequest(Message, kw_only=True):
    """Unique on (task, attempt, part, tries).

    What it claims is checked, never believed; pay comes from the task.
    """

    attempt: int
    part: int = 0
    tries: int = 0
    base_version: int
    codec: str
    sha256: str
    size: int
    steps: int
    samples: int
    loss_first: float
    loss_last: float
    device: str = "cpu"
    train_s: float = 0.0
    paused_s: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    games: str = ""  # sha256 of an uploaded games file, for self-play


class Verdict(Message):
    contribution: int
    task: int
    run: str
    state: ContributionState
    reason: str = ""  # code
    message: str = ""  # a sentence
    weight: float | None = None
    version: int | None = None  # merged into
    credits_micro: int = 0  # pending or earned by now
    at: float = 0.0
    # Too late; the lease goes on: compute this part again from the newest version.
    redo: bool = False
