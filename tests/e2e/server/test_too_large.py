"""A model that the coordinator's machine cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.runs.definition import check_model
from shared.errors import InvalidRunFile
from tests.support.local_coordinator import RUN, local_coordinator


def test_a_model_is_held_against_what_is_available() -> None:
    check_model(1_000_000, lambda: 12_000_000)
    with pytest.raises(InvalidRunFile, match=r"1 million parameters .* 0\.0 GB .* are available"):
        check_model(1_000_000, lambda: 11_999_999)


async def test_a_run_too_large_for_this_machine_is_refused_when_it_is_made(tmp_path: Path) -> None:
    """Without that, `run start` was killed for want of memory, and the coordinator with it."""
    huge = RUN.replace("n_embd = 8", "n_embd = 32768").replace("n_layer = 1", "n_layer = 8")
    async with local_coordinator(tmp_path) as home:
        await home.start_run()
        with pytest.raises(InvalidRunFile, match="larger machine"):
            await home.coordinator.runs.create(huge.replace("tiny", "huge"))
        assert [run.name for run in await home.coordinator.runs.queries.listing()] == ["tiny"]
