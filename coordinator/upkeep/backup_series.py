"""Series of backups: a folder for each backup, unchanged blobs shared by hard links."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from coordinator.upkeep.backup import (
    BackupSummary,
    check_files,
    check_one_key,
    read_list,
    summary,
)
from shared.errors import BadRequest, BadSignature, Configuration
from shared.files.deletions import delete_folder

NAME = "%Y-%m-%dT%H%M%S"
IS_NAME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{6}")
LIST = "backup.json"


class DrillReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on a backup that was restored into a scratch directory."""

    backup: BackupSummary
    heads: dict[str, int]  # newest version of each run
    seconds: float
    breaches: tuple[str, ...]


def folders(series: Path) -> list[Path]:
    """Return the complete backups in a folder, oldest first, or the folder if it is a backup.

    Raises BadRequest for a path that is no folder.
    """
    if not series.is_dir():
        raise BadRequest(f"{series} is not a folder of backups")
    if (series / LIST).is_file():
        return [series]
    named = [path for path in series.iterdir() if IS_NAME.fullmatch(path.name)]
    return sorted(path for path in named if (path / LIST).is_file())


def newest(series: Path) -> Path:
    """Return the newest complete backup of a series. Raises BadRequest without a complete one."""
    backups = folders(series)
    if not backups:
        raise BadRequest(f"{series} holds no complete backup")
    return backups[-1]


def next_folder(series: Path, now: float) -> Path:
    """Return the folder for a new backup; a missing folder of the series is made.

    Raises BadRequest for a folder that is a backup itself.
    """
    if (series / LIST).is_file():
        raise BadRequest(f"{series} is a backup itself: name the folder above it")
    series.mkdir(parents=True, exist_ok=True, mode=0o700)
    while (folder := series / time.strftime(NAME, time.gmtime(now))).exists():
        now += 1.0
    return folder


def listing(series: Path) -> list[BackupSummary]:
    """Return the summary of each backup of a series, oldest first; the signatures are checked."""
    return [summary(path, read_list(path)) for path in folders(series)]


def verify(folder: Path) -> BackupSummary:
    """Read every byte of a backup. Raises the errors of `read_list` and `check_files`."""
    listed = read_list(folder)
    check_files(folder, listed)
    return summary(folder, listed)


def prune(series: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest complete backups, and the leftovers of killed processes.
    Raises Conflict if several coordinators' backups are among them, and the errors of `read_list`
    if a kept backup is damaged.
    """
    remaining = folders(series)[-keep:]
    surplus = [
        path
        for path in sorted(series.iterdir())
        if IS_NAME.fullmatch(path.name)
        and path not in remaining
        and remaining
        and path < remaining[-1]
    ]
    keys = dict[str, str]()
    for path in remaining if surplus else ():
        keys[read_list(path).public_key] = path.name
    for path in surplus:
        with suppress(BadRequest, BadSignature, Configuration):  # a leftover, or damaged
            keys[read_list(path).public_key] = path.name
    check_one_key(str(series), keys)
    for path in surplus:
        delete_folder(path, "asked", strict=True)
    return surplus
