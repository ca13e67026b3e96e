"""Data that the members of a run keep: its description, its numbers, and losses measured on it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.protocol.base import Count, Message
from shared.workloads.base import TrainSettings

AMOUNT_MAX = 1 << 53  # most samples, or items, of one machine
LOSS_SUM_MAX = 1e18

Amount = Annotated[int, Meta(ge=0, le=AMOUNT_MAX)]


class MembersData(Message):
    """Description of the data that the members of a run keep. The run's dataset is an example: its
    tokenizer, template and sizes build the members' files.
    """

    dataset: str  # the example: GET /datasets/{name}
    kind: str  # such as "tokens": what the files must hold
    heldout_share: float  # share of a member's samples that is never trained on
    train: TrainSettings  # inner optimiser of the run's tasks
    batch_size: int
    # Contributions that usually make a version, by the plan; with 1 a version may hold one member's
    # work alone. 0 = unknown.
    quorum: int = 0
    least: int = 0  # fewest members whose changes make a version; 0 = unknown


class MemberData(Message):
    """Numbers of the data that one machine keeps for a run; the data itself never leaves it."""

    samples: Annotated[int, Meta(ge=1, le=AMOUNT_MAX)]  # samples of one pass
    items: Amount  # tokens that are learnt from, or pictures
    heldout: Amount = 0  # held-out samples
    # random name of the data; changed data gets another name, with which a new pass begins
    edition: Annotated[str, Meta(max_length=32)] = ""


class HeldoutSums(Message):
    """Loss of a version on the held-out part of a machine's own data."""

    version: Count
    loss_sum: Annotated[float, Meta(ge=0, le=LOSS_SUM_MAX)]
    items: Annotated[int, Meta(ge=1, le=AMOUNT_MAX)]  # number of summed losses
