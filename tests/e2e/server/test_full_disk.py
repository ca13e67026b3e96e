"""Organiser's commands on a full disk: a sentence, exit code 75, and nothing half done."""

from __future__ import annotations

import resource
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.database.engine.sqlite import translate
from shared.errors import StorageFull
from tests.support.local_coordinator import local_coordinator


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to let any file of this process grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    # A module that is imported now would be cached cut off, for every later process.
    cached, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = cached


@pytest.mark.parametrize(
    ("made", "format"),
    [(False, "safetensors"), (True, "safetensors"), (False, "transformers")],
)
async def test_an_export_that_finds_no_room_leaves_nothing(
    tmp_path: Path, made: bool, format: str
) -> None:
    to = tmp_path / "model"
    if made:
        to.mkdir()
    async with local_coordinator(tmp_path / "data") as home:
        await home.start_run()
        with files_of_at_most(1024), pytest.raises(StorageFull) as full:
            await home.coordinator.export.export("tiny", to, format=format)
        assert str(to) in full.value.message
        assert full.value.exit_code == 75
        assert not to.exists() or list(to.iterdir()) == []
        exported = await home.coordinator.export.export(
            "tiny", to, format=format
        )  # space has returned
        assert "model.safetensors" in exported.files


@pytest.mark.parametrize("name", ["SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"])
def test_a_database_without_room_says_so(name: str) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = name
    told = translate(error)
    assert isinstance(told, StorageFull)
    assert "no space" in told.message
