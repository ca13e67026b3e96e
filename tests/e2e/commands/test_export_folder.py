"""Folder of an export: a failure removes the export's own files, and nothing of others."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from coordinator.runs.export import write
from shared.workloads.model_files import PLAIN
from tests.support.local_coordinator import local_coordinator


async def test_a_failed_export_leaves_the_files_of_others(tmp_path: Path) -> None:
    pipe, to = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    async with local_coordinator(tmp_path / "home") as home:
        await home.start_run()
        source, files = await home.coordinator.export.find("tiny", 0, PLAIN)
        broken = msgspec.structs.replace(
            files, assets={"tokenizer": pipe}, picture=tmp_path / "missing.png"
        )

        def arrive() -> None:
            with pipe.open("wb"):  # opens when the export reads its tokenizer
                (to / "notes.txt").write_text("of somebody else")

        thread = threading.Thread(target=arrive)
        thread.start()
        with pytest.raises(FileNotFoundError):
            write(lambda: False, source, broken, to)
        thread.join()
        assert [path.name for path in to.iterdir()] == ["notes.txt"]
        with pytest.raises(FileNotFoundError):
            write(
                lambda: False,
                source,
                msgspec.structs.replace(files, picture=tmp_path / "missing.png"),
                tmp_path / "other",
            )
        assert not (tmp_path / "other").exists()
