"""Credits and verdicts come together: whoever follows the events never sees the one without the
other.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.local_volunteer import local_machine
from volunteer.control import events
from volunteer.control.status import Status, fold

PAID = ("accepted", "merged", "superseded")


async def test_credits_equal_the_sum_of_the_verdicts_after_every_event(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=4) as process:
        assert await process.ended(60) == 0
        status, decided = Status(), 0
        for event in process.told:
            status = fold(status, event)
            if status.me is None or not isinstance(event, events.Credits | events.Judged):
                continue
            paid = sum(v.credits_micro for v in status.verdicts if v.state in PAID)
            assert status.me.earned_micro + status.me.pending_micro == paid
            assert status.me.merged == sum(v.state == "merged" for v in status.verdicts)
            assert status.me.accepted == sum(v.state in PAID for v in status.verdicts)
            decided = max(decided, len(status.verdicts))
        assert decided == 4
