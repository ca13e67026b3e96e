"""Every named strategy, with its own defaults, makes versions out of what two volunteers hand
in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.database import contributions
from coordinator.plan.presets import PRESETS
from tests.support.local_coordinator import RUN, local_coordinator


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"self-play"}))
async def test_two_volunteers_alone_make_versions_by_a_preset(tmp_path: Path, preset: str) -> None:
    text = RUN.replace('preset = "fedavg"\nquorum = 2', f'preset = "{preset}"')
    async with local_coordinator(tmp_path) as home:
        await home.start_run(text)
        crew = [await home.join(name) for name in ("Ann", "Bob")]
        parts = 1
        for number, worker in enumerate(crew):
            lease = await worker.claim()
            parts = lease.grant.parts
            begun = await worker.begin(lease)
            if parts == 1:
                assert (await worker.hand_in(lease, begun, number)).state == "accepted"
                continue
            for part in range(parts):
                assert (await worker.part(lease, begun, part)).state == "accepted"
        merges = 0
        while await home.coordinator.merger.merge_if_due(1):
            merges += 1
        assert merges == 1
        states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
        assert states == {"merged": 2 * parts}
        assert (await home.coordinator.checks.run()).breaches == ()
