"""Limits of the owner reach the parts of a running volunteer that keep them."""

from __future__ import annotations

from pathlib import Path

from tests.support.local_volunteer import local_machine
from volunteer.control import events
from volunteer.machine.policy import MachineFacts


async def test_each_direction_of_the_line_is_held_to_its_own_limit(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        for limits in ({}, {"upload_mbit": 80.0}, {"download_mbit": 40.0}):
            begun = len(machine.clients)
            async with machine.working(max_tasks=1, **limits) as process:
                assert await process.ended() == 0
            client = machine.clients[begun]
            limited = (client.up.piece_bytes > 0, client.down.piece_bytes > 0)
            assert limited == ("upload_mbit" in limits, "download_mbit" in limits)


async def test_no_file_is_moved_over_a_metered_connection(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        async with machine.working() as process:
            process.network.refuse("/uploads")
            trained = await process.until(events.Trained)
        metered = True
        machine.read = lambda rules, devices: MachineFacts(metered=metered)
        async with machine.working() as process:
            paused = await process.until(events.Paused)
            assert paused.by == "metered"
            await process.heartbeats(3)
            files = [
                seen for seen in process.network.seen if "/uploads" in seen or "/blobs" in seen
            ]
            assert files == []
            metered = False
            sent = await process.until(events.Submitted)
            assert sent.task == trained.task
