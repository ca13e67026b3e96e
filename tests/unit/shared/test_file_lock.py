"""The lock of a file: another holder is one thing, a disk without locks another."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from shared.errors import Configuration
from shared.files.file_lock import locked
from volunteer.account.instance_lock import ProfileAtWork, instance_lock


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EAGAIN, ProfileAtWork), (errno.ENOLCK, Configuration)]
)
def test_a_disk_without_locks_is_not_taken_for_another_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(kind), instance_lock(tmp_path):
        pass


def test_a_file_is_locked_once(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("wb") as first, (tmp_path / "lock").open("wb") as second:
        assert locked(first.fileno())
        assert not locked(second.fileno())
