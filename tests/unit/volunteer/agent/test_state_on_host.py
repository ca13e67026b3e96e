"""A card that has no room for the state of a model works with the state on the host.

The device "cpu:0" is the processor as a card.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from shared.protocol.accounts import Device
from shared.workloads.base import Data, Job, Weights, Work
from shared.workloads.gpt.workload import GptWorkload
from shared.workloads.training.step_loop import StepWork
from tests.support.local_volunteer import SHORT, local_machine
from volunteer.control import events

DEEP = SHORT.replace("n_layer = 1", "n_layer = 12").replace("n_embd = 8", "n_embd = 64")
CARD_BYTES = 2_000_000  # the state of this model takes 11 MB, a block at a time 0.8 MB
HOST = Device(id="cpu", kind="cpu", name="a processor", memory_bytes=8 << 30)


def card(memory_bytes: int) -> Device:
    return Device(id="cpu:0", kind="cuda", name="a card", memory_bytes=memory_bytes)


class Watched(GptWorkload):
    """The workload on a card that holds `state_bytes`."""

    def __init__(self, state_bytes: int = 1 << 40) -> None:
        self.begun: list[StepWork] = []
        self._state_bytes = state_bytes

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        if device != "cpu" and sum(value.nbytes for value in weights.values()) > self._state_bytes:
            raise torch.OutOfMemoryError("out of memory")
        work = super().begin(job, weights, data, device)
        assert isinstance(work, StepWork)
        self.begun.append(work)
        return work


@pytest.mark.parametrize(
    ("memory_bytes", "state_bytes"),
    [
        (CARD_BYTES, 1 << 40),  # known beforehand
        (1 << 40, CARD_BYTES),  # the card says so
    ],
)
async def test_such_a_card_is_paid_like_any_other(
    tmp_path: Path, memory_bytes: int, state_bytes: int
) -> None:
    workload = Watched(state_bytes)
    async with local_machine(tmp_path, DEEP) as machine:
        machine.devices = (HOST, card(memory_bytes))
        async with machine.working(lambda name: workload, device="cpu:0", max_tasks=1) as process:
            assert await process.ended() == 0
            [work] = workload.begun
            assert work.device == "cpu:0"
            assert is_parametrized(work.model.get_submodule("tok_emb"), "weight")
            claimed = process.all(events.Claimed)[0]
            paid = [event.verdict.credits_micro for event in process.all(events.Judged)]
            assert paid == [claimed.price_micro]


async def test_without_room_on_the_host_the_card_gets_no_task(tmp_path: Path) -> None:
    async with local_machine(tmp_path, DEEP) as machine:
        small = Device(id="cpu", kind="cpu", name="a processor", memory_bytes=16_000_000)
        machine.devices = (small, card(CARD_BYTES))
        async with machine.working(device="cpu:0", max_tasks=1) as process:
            await process.until(events.Idle, lambda event: "of memory, cpu:0 has" in event.message)
            assert process.all(events.Claimed) == []
