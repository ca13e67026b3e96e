"""Pictures and skipped files, for authors whose `samples` reads files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from shared.workloads.data.image_dataset import ImageSettings, fit
from shared.workloads.data.image_files import Pixels
from shared.workloads.data.image_sources import read_pictures
from shared.workloads.data.skipped_files import Skipped

SKIPPED: ContextVar[Skipped] = ContextVar("SKIPPED")


def skip(sentence: str) -> None:
    """Record a file that cannot be used, in a sentence with file and place."""
    SKIPPED.get(Skipped()).add(sentence)


def pictures(
    paths: Iterable[Path], size: int = 64, channels: int = 3
) -> Iterator[tuple[Pixels, str]]:
    """Yield each picture of files and folders as bytes (channels, size, size), with the name of its
    folder.

    Pictures that cannot be decoded are skipped. Raises InvalidRunFile for a missing path.
    """
    ImageSettings(size=size, channels=channels)  # checks both
    for path in paths:
        for picture in read_pictures([path], SKIPPED.get(Skipped()), size):
            label = picture.label or (path if path.is_dir() else path.parent).name
            yield fit(picture.pixels, size, channels), label
