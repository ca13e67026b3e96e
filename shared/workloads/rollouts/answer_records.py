"""Records of answers: submitted by actors, judged by the coordinator, read by learners.

A group is all answers to one problem by one version. Its record has the tokens, and their
log-probabilities under the version in a byte each; only the coordinator writes rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest
from shared.workloads.data.jsonl_zst import pack, unpack

FILE_BYTES_MAX = 256 << 20
GROUPS_MAX = 4096
LOWEST = 16.0  # nats: log-probabilities below -LOWEST are stored as -LOWEST
STEPS = 255
WIDTHS = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"))  # types of the tokens of a record


class InvalidGroup(BadRequest):
    """Group that its task cannot have produced."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All answers to one problem, one after the other."""

    problem: int  # number of the problem among all problems of the run
    version: int  # version that generated the answers, from the first token to the last
    weights: str  # SHA-256 of the published weights of that version
    lengths: tuple[int, ...]  # tokens of each answer, including its end
    tokens: bytes  # see `packed`
    logprobs: bytes  # see `quantised`

    def answers(self) -> list[NDArray[np.int64]]:
        """Return the tokens of each answer. Raises InvalidGroup unless `lengths` fit the bytes."""
        if min(self.lengths, default=0) < 1:
            raise InvalidGroup(f"problem {self.problem}: an answer has no token")
        whole = sum(self.lengths)
        width = next(
            (dtype for dtype in WIDTHS if len(self.tokens) == whole * dtype.itemsize), None
        )
        if width is None or len(self.logprobs) != whole:
            raise InvalidGroup(f"problem {self.problem}: its lengths do not fit its tokens")
        tokens = np.frombuffer(self.tokens, width).astype(np.int64)
        return np.split(tokens, np.cumsum(self.lengths)[:-1])

    def said(self) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of each answer's tokens."""
        return np.split(restored(self.logprobs), np.cumsum(self.lengths)[:-1])


class JudgedGroup(GroupRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group with the rewards that the coordinator computed."""

    rewards: tuple[float, ...]


def packed(tokens: Sequence[int]) -> bytes:
    """Return tokens in the smallest of `WIDTHS` that holds them all."""
    fits = next(dtype for dtype in WIDTHS if max(tokens) < 1 << 8 * dtype.itemsize)
    return np.array(tokens, fits).tobytes()


def quantised(logprobs: Sequence[float] | NDArray[np.floating]) -> bytes:
    """Return log-probabilities in a byte each, with equal steps of the square root, so that likely
    tokens, the most frequent, are exact to a few thousandths.
    """
    nats = np.clip(-np.asarray(logprobs, np.float64), 0, LOWEST)
    steps = np.rint(np.sqrt(nats / LOWEST) * STEPS).astype(np.uint8)
    return bytes(steps)


def restored(data: bytes) -> NDArray[np.float32]:
    """Return log-probabilities from `quantised` ones, to the nearest step."""
    shares = np.frombuffer(data, np.uint8).astype(np.float32) / np.float32(STEPS)
    logprobs: NDArray[np.float32] = -np.float32(LOWEST) * shares * shares
    return logprobs


def encode(records: Iterable[GroupRecord]) -> bytes:
    return pack(records)


def decode(data: bytes) -> list[GroupRecord]:
    """Return the groups of a submitted file. Raises InvalidGroup, naming the line."""
    try:
        return unpack(data, GroupRecord, FILE_BYTES_MAX, GROUPS_MAX)
    except BadRequest as error:
        raise InvalidGroup(error.message) from error


def judged(data: bytes) -> list[JudgedGroup]:
    """Return the groups of a sealed chunk."""
    return unpack(data, JudgedGroup, FILE_BYTES_MAX, GROUPS_MAX)
