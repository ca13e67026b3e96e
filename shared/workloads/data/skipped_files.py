"""Source files of a dataset, and their skipped parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from shared.errors import InvalidRunFile

_REMEMBERED = 1000  # skipped parts that are listed one by one
_KINDS_SHOWN = 8


class Skipped:
    """Skipped parts of a dataset's sources."""

    def __init__(self) -> None:
        self.sentences: list[str] = []  # name and reason of each skipped part, up to a thousand
        self.count = 0  # all skipped parts
        self.read = 0  # files that were read

    def add(self, sentence: str) -> None:
        self.count += 1
        if len(self.sentences) < _REMEMBERED:
            self.sentences.append(sentence)

    def add_others(self, folder: Path, kinds: Counter[str], remedies: Mapping[str, str]) -> None:
        """Add one sentence about the unread files of a folder, counted by suffix, with a remedy for
        the suffixes that have one.
        """
        if not kinds:
            return
        groups: dict[str, list[str]] = {}
        for kind, n in kinds.most_common(_KINDS_SHOWN):
            remedy = remedies.get(kind.lower(), "")
            groups.setdefault(remedy, []).append(f"{kind or 'without a suffix'} {n}")
        kinds_shown = "; ".join(
            f"{', '.join(names)} ({remedy})" if remedy else ", ".join(names)
            for remedy, names in groups.items()
        )
        self.add(f"{folder}: files of other kinds were not read: {kinds_shown}")

    def take(self, more: Skipped) -> None:
        """Add the counts and sentences of another `Skipped`."""
        self.read += more.read
        self.count += more.count - len(more.sentences)
        for sentence in more.sentences:
            self.add(sentence)


def no_source(path: Path) -> InvalidRunFile:
    """Return the refusal of a path that is neither a file nor a folder."""
    if path.exists():
        return InvalidRunFile(f"{path}: it is neither a file nor a folder: save it as a file first")
    return InvalidRunFile(f"{path}: there is no such file or directory")


def walk(
    root: Path, left_out: frozenset[str] = frozenset(), skipped: Skipped | None = None
) -> Iterator[Path]:
    """Yield files below `root` in an order independent of the file system. Hidden files and links
    are skipped, since a link may point out of the folder, and so are unreadable folders.
    """
    try:
        entries = sorted(root.iterdir(), key=lambda path: path.name)
    except OSError as error:
        if skipped is not None:
            skipped.add(f"{root}: this folder cannot be read: {error.strerror or error}")
        return
    for path in entries:
        if path.name.startswith(".") or path.name in left_out:
            continue
        if path.is_symlink():
            if skipped is not None:
                skipped.add(f"{path}: a link, which is not followed")
        elif path.is_dir():
            yield from walk(path, left_out, skipped)
        elif path.is_file():
            yield path
