"""Evidence that is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from shared.clock import SystemClock
from shared.errors import UpgradeRequired
from tests.support.workplaces import workplace
from volunteer.agent.lifecycle import Lifecycle
from volunteer.agent.revealer import Revealer
from volunteer.control.event_bus import EventBus
from volunteer.control.status import Status
from volunteer.storage.evidence import EvidenceFiles


class Api:
    """Coordinator that refuses requests and transfers of this version of the program."""

    def __init__(self) -> None:
        self.client = self

    async def retrying(self, once: Any, patience_s: float) -> None:
        raise UpgradeRequired


async def test_what_ends_the_volunteer_leaves_evidence_to_its_next_start(tmp_path: Path) -> None:
    clock = SystemClock()
    evidence = EvidenceFiles(tmp_path / "evidence")
    state = tmp_path / "state"
    state.write_bytes(b"state")
    sha256 = evidence.add(state, "cpu")
    evidence.keep("7-1-0-0", (sha256,))
    evidence.ask(5, (sha256,))
    life = Lifecycle(clock)
    api: Any = Api()
    remote = {"api": api, "transfers": api}
    hub = EventBus(clock, Status())
    place = workplace(clock, remote=remote, store={"evidence": evidence}, hub=hub, life=life)
    revealer = Revealer(place=place)
    work = asyncio.create_task(revealer.run())
    await life.until(lambda: life.fatal is not None)
    work.cancel()
    assert isinstance(life.fatal, UpgradeRequired)
    assert evidence.asked()
