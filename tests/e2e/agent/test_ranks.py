"""A volunteer whose devices are ranks of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.protocol.accounts import Device
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import worked
from volunteer.agent import agent
from volunteer.control import events
from volunteer.machine.devices import rank_groups

CPU = Device(id="cpu", kind="cpu", name="a processor", memory_bytes=8 << 30)


def card(at: int, name: str = "A100", memory: int = 40) -> Device:
    return Device(id=f"cuda:{at}", kind="cuda", name=name, memory_bytes=memory << 30)


def test_cards_of_one_name_are_one_worker() -> None:
    assert rank_groups((CPU,)) == ((CPU, ()),)
    [(first, more)] = rank_groups((card(0), card(1, memory=20), card(2)))
    assert (first.id, first.name, more) == ("cuda:0", "3 x A100", ("cuda:1", "cuda:2"))
    assert first.memory_bytes == 20 << 30
    found = rank_groups((card(0), card(1, "T4"), card(2), CPU))
    assert [(device.id, more) for device, more in found] == [
        ("cuda:0", ("cuda:2",)),
        ("cuda:1", ()),
        ("cpu", ()),
    ]


@pytest.mark.slow
async def test_a_task_of_two_ranks_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "rank_groups", lambda chosen: ((chosen[0], ("cpu",)),))
    async with local_coordinator(tmp_path / "coordinator") as home:
        process = await worked(home, tmp_path / "machine", tasks=2)
    verdicts = [event.verdict.state for event in process.all(events.Judged)]
    assert verdicts
    assert set(verdicts) <= {"accepted", "merged"}
