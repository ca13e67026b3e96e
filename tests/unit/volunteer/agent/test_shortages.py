"""A model that does not fit the memory of a device is remembered: no task of it is claimed again
there until something has changed.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from typing_extensions import override

from shared.units import HOUR_S
from shared.workloads.gpt.workload import GptWorkload
from tests.support.local_volunteer import SHORT, Process, local_machine
from tests.support.workplaces import workplace
from tests.tui import scenes
from volunteer.agent.run_choice import RunChoice
from volunteer.control import events
from volunteer.control.model_step import AGE_MAX_S
from volunteer.control.shortage import Shortage, memory_properties, shortage_words
from volunteer.control.status import Status
from volunteer.settings.work_rules import WorkRules

FITS, OTHER = 'name = "tiny"', 'name = "other"'
SHORTAGE = Shortage(
    run="stdlib-gpt",
    device="cpu",
    model=memory_properties(scenes.RUN),
    torch="2.9",
    needed_bytes=6_200_000_000,
    had_bytes=4_000_000_000,
    fitted=False,
    at=1000.0,
)


class Huge(GptWorkload):
    """A workload whose smallest piece of a batch does not fit the memory, in one run."""

    @override
    def begin(self, job: Any, *rest: Any) -> Any:
        work = super().begin(job, *rest)
        if job.run == "tiny":
            work.advance = self._refused  # type: ignore[method-assign]
        return work

    def _refused(self) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 6.20 GiB. GPU 0 has ...")


def claims(process: Process) -> int:
    return sum("/claims" in seen for seen in process.network.seen)


async def test_a_run_that_does_not_fit_is_not_claimed_again_until_more_is_lent(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path) as machine:
        async with machine.working(lambda name: Huge()) as process:
            told = await process.until(events.Idle, lambda e: e.reason == "memory")
            assert '"tiny" needs more than 6.' in told.message
            assert "cpu has 4.29 GB for it" in told.message
            (ended,) = process.all(events.TaskEnded)
            assert ended.how == "released"  # it counts against no task
            assert len(process.all(events.Claimed)) == 1
        async with machine.working(lambda name: Huge()) as process:
            again = await process.until(events.Idle, lambda e: e.reason == "memory")
            assert again.message == told.message
            assert claims(process) == 0
            (stored,) = process.control.status.shortages
            assert stored.run == "tiny"
        async with machine.working(max_tasks=1, memory_gb=7.0) as process:
            assert await process.ended() == 0


async def test_the_device_goes_on_with_other_runs_at_once(tmp_path: Path) -> None:
    async with (
        local_machine(tmp_path) as machine,
        machine.working(lambda name: Huge(), max_tasks=1) as process,
    ):
        await process.until(events.Idle, lambda e: e.reason == "memory")
        await machine.home.start_run(SHORT.replace(FITS, OTHER))
        assert await process.ended() == 0
        assert [event.run for event in process.all(events.Trained)] == ["other"]


@pytest.mark.parametrize(
    ("shortage", "run", "lent", "later_s"),
    [
        (SHORTAGE, replace(scenes.RUN, parameters=scenes.RUN.parameters - 1), 4_000_000_000, 0.0),
        (SHORTAGE, scenes.RUN, 4_000_000_001, 0.0),
        (SHORTAGE, scenes.RUN, 4_000_000_000, AGE_MAX_S),
        (replace(SHORTAGE, fitted=True), scenes.RUN, 4_000_000_000, HOUR_S),
    ],
    ids=["another model", "more memory", "a week", "an hour, for one that had fitted"],
)
def test_what_did_not_fit_is_tried_again_when_something_has_changed(
    shortage: Shortage, run: Any, lent: int, later_s: float
) -> None:
    assert shortage.stands((scenes.RUN,), {"cpu": 4_000_000_000}, 1001.0)
    assert shortage.stands((scenes.RUN,), {"cpu": 3_000_000_000}, 1001.0)
    assert not shortage.stands((run,), {"cpu": lent}, 1001.0 + later_s)


def test_a_run_that_is_not_listed_yet_is_not_claimed_again_at_once() -> None:
    """Otherwise a run that has just started is claimed, loaded and given back again and again."""
    status = Status(shortages=(SHORTAGE,), lent_bytes={"cpu": 4_000_000_000})
    settings: Any = SimpleNamespace(runs=(), rules=WorkRules(), consent="all")
    bus: Any = SimpleNamespace(status=status)
    clock = SimpleNamespace(now=lambda: 1001.0, monotonic=lambda: 1.0)
    life: Any = SimpleNamespace(clock=clock)
    choice = RunChoice(settings, workplace(life.clock, bus=bus, life=life))
    wanted = choice.wanted_work("cpu")
    assert wanted is not None
    assert '"stdlib-gpt" needs more than' in wanted.short
    bus.status = replace(status, runs=(replace(scenes.RUN, name="other"),))
    wanted = choice.wanted_work("cpu")
    assert wanted is not None
    assert (wanted.runs, wanted.short) == (("other",), "")


def test_without_a_measured_need_the_sentence_claims_none() -> None:
    said = shortage_words(replace(SHORTAGE, needed_bytes=0))
    assert said.startswith('the run "stdlib-gpt" did not fit into the memory of cpu, 4 GB')
    assert "tried again in an hour" in shortage_words(replace(SHORTAGE, fitted=True))
