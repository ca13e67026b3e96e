"""Sources of text: files, directories, JSON lines, and the source of Python's standard library.

All files are read in pieces of bounded size. A source named by a person must be readable; an
unreadable file in a directory, or one bad line of many, is skipped and recorded with its name and
reason.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from shared.errors import InvalidRunFile
from shared.files.text_file import UTF8
from shared.text import escaped
from shared.workloads.data import table_rows
from shared.workloads.data.record_files import (
    HEAD_BYTES,
    SUFFIXES,
    UTF16,
    head_of,
    holds_records,
    records,
)
from shared.workloads.data.skipped import Skipped, no_source, walk

_SUFFIXES = """
.txt .text .md .rst .tex .org .adoc .srt
.html .htm .xml .css .csv .tsv .json .toml .yaml .yml .ini .cfg .log
.py .pyi .c .h .cc .cpp .hpp .rs .go .js .mjs .ts .tsx .jsx .java .kt .scala .swift
.rb .php .pl .lua .r .jl .hs .ml .sh .bat .ps1 .sql
"""
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())  # suffixes for which a directory is searched
_PIECE_CHARS = 4 << 20  # a larger file becomes several documents

_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
)
_STDLIB_TABLES = "encodings"  # folder of generated tables


class Document(msgspec.Struct, frozen=True):
    """Text and its name."""

    name: str
    text: str


def read_documents(
    sources: Iterable[str | Path | Document], skipped: Skipped
) -> Iterator[Document]:
    """Yield every document of `sources`. Raises InvalidRunFile for an unreadable source."""
    for source in sources:
        if isinstance(source, Document):
            yield source
            continue
        path = Path(source)
        if path.is_dir():
            yield from _directory(path, skipped)
        elif path.is_file():
            yield from _file(path, str(path), skipped)
        else:
            raise no_source(path)


def standard_library_documents() -> Iterator[Document]:
    """Yield the source text of the running Python's own library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = Skipped()
    for path in walk(root, _STDLIB_SKIPPED):
        inside = path.relative_to(root)
        if path.suffix == ".py" and inside.parts[0] != _STDLIB_TABLES:
            try:
                yield from _text(path, inside.as_posix())
            except InvalidRunFile as error:
                skipped.add(error.message)


def _directory(root: Path, skipped: Skipped) -> Iterator[Document]:
    tables = set(table_rows.tables_in(root, skipped))
    suffixes: Counter[str] = Counter()
    for path in walk(root, skipped=skipped):
        if tables and (path.name == "README.md" or path.suffix == ".json"):
            continue  # these files describe the tables
        if path not in tables and path.suffix.lower() not in TEXT_SUFFIXES | SUFFIXES:
            if not table_rows.is_table(path):  # skips tables of other splits
                suffixes[path.suffix] += 1
            continue
        try:
            yield from _file(path, path.relative_to(root).as_posix(), skipped)
        except InvalidRunFile as error:
            skipped.add(error.message)
    skipped.add_others(root, suffixes)


def _file(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    if table_rows.is_table(path) or holds_records(path, head_of(path, name)):
        return _texts(path, name, skipped)
    return _text(path, name)


def _texts(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """Yield the "text" of records; `skipped` gets bad ones. Raises InvalidRunFile if all are."""
    bad, good = Skipped(), False
    for place, number, fields in records(path, {"text"}, bad, name):
        if isinstance(text := fields.get("text"), str):
            good = True
            yield Document(f"{name}:{number}", text)
        else:
            keys = ", ".join(f'"{escaped(key, 40)}"' for key in [*fields][:8]) or "none"
            bad.add(f'{place}: it has no text in "text"; its keys are {keys}')
    if bad.count and not good:
        raise InvalidRunFile(
            f'{name}: none of its {bad.count} records has a "text" to learn from;'
            f" {bad.sentences[0].removeprefix(name).lstrip()}; name it .txt to train on it as it"
            " stands"
        )
    skipped.take(bad)


def _text(path: Path, name: str) -> Iterator[Document]:
    """Yield a UTF-8 file in documents of about four million characters, cut at line ends."""
    try:
        with path.open(encoding=_encoding(path)) as file:
            piece = 0
            while text := file.read(_PIECE_CHARS):
                if not piece and "\0" in text[:HEAD_BYTES]:
                    raise InvalidRunFile(
                        f"{name}: it has bytes of zero: it is not text, or UTF-16 without its mark"
                        " (iconv -f utf-16le -t utf-8)"
                    )
                text += file.readline(_PIECE_CHARS)
                yield Document(f"{name}#{piece}" if piece else name, text)
                piece += 1
    except UnicodeError as error:
        if not isinstance(error, UnicodeDecodeError) or "utf-16" in error.encoding:
            raise InvalidRunFile(
                f"{name}: it begins with the mark of UTF-16 but is not valid UTF-16:"
                " save it as UTF-8"
            ) from error
        if b"\0" in error.object[:HEAD_BYTES]:
            raise InvalidRunFile(f"{name}: it is not text") from error
        raise InvalidRunFile(
            f"{name}: not UTF-8 text ({error.reason}, byte 0x{error.object[error.start]:02x});"
            " convert it first, e.g. iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error


def _encoding(path: Path) -> str:
    """Return UTF-16 for a file with its byte order mark, as Windows writes it; else UTF-8."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in UTF16 else UTF8
