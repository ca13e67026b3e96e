"""Sources of text: files, directories, JSON lines, and the source of Python's standard library.

All files are read in pieces of bounded size. An unreadable source, a file in a directory, or one
bad line of many, is skipped and recorded with its name and reason; one source at least must be
readable.
"""

from __future__ import annotations

import io
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from shared.errors import InvalidRunFile
from shared.files.text_file import UTF8, UTF16
from shared.nearest_name import nearest
from shared.text import counted, escaped
from shared.workloads.data import table_rows
from shared.workloads.data.record_files import (
    HEAD_BYTES,
    REMEDIES,
    SUFFIXES,
    holds_records,
    not_unicode,
    open_unpacked,
    records,
    suffix,
)
from shared.workloads.data.skipped_files import Skipped, no_source, walk

_SUFFIXES = """
.txt .text .md .rst .tex .org .adoc .srt
.html .htm .xml .css .csv .tsv .json .toml .yaml .yml .ini .cfg .log
.py .pyi .c .h .cc .cpp .hpp .rs .go .js .mjs .ts .tsx .jsx .java .kt .scala .swift
.rb .php .pl .lua .r .jl .hs .ml .sh .bat .ps1 .sql
"""
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())  # suffixes for which a directory is searched
TEXT = "text"  # column of records that holds the text, where no other is named
_PIECE_CHARS = 4 << 20  # a larger file becomes several documents
# Records, and characters of them, that are read before a file of mostly bad records is refused.
_JUDGED_RECORDS, _JUDGED_CHARS = 1000, 16 << 20
_REASONS_SHOWN = 3

_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
)
_STDLIB_TABLES = "encodings"  # folder of generated tables


class _BadRecords(InvalidRunFile):
    """Raised for a file of which most records, or all, are bad."""


class Document(msgspec.Struct, frozen=True):
    """Text and its name."""

    name: str
    text: str


def read_documents(
    sources: Iterable[str | Path | Document], skipped: Skipped, column: str = TEXT
) -> Iterator[Document]:
    """Yield every document of `sources`; `column` is the field of a record with its text.

    Raises InvalidRunFile for a missing source, for a named file of mostly bad records, if no source
    is readable, and for a column that no file has.
    """
    reading = _Reading(skipped, column)
    places: list[Path] = []
    refusals: list[str] = []
    documents = 0
    for source in sources:
        if isinstance(source, Document):
            yield source
            continue
        places.append(path := Path(source))
        if not (path.is_dir() or path.is_file()):
            raise no_source(path)
        try:
            for document in reading.of(path):
                documents += 1
                yield document
        except _BadRecords:
            raise  # a person named this file for its records
        except InvalidRunFile as error:
            refusals.append(error.message)
    if places and not documents:
        raise InvalidRunFile(_nothing_read(places, [*refusals, *skipped.sentences]))
    if places and column != TEXT and not reading.had_columns:
        raise InvalidRunFile(
            f"plain text has no column {escaped(column, 40)}, and none of these files is a table or"
            " has records: leave --column out"
        )
    for sentence in refusals:
        skipped.add(sentence)


def _nothing_read(places: list[Path], reasons: list[str]) -> str:
    """Return the refusal of files and folders without any text."""
    place = places[0]
    if len(places) == 1 and place.is_file() and reasons:
        return reasons[0]
    first = reasons[:_REASONS_SHOWN]
    if len(places) == 1:
        first = [reason.removeprefix(f"{place}: ") for reason in first]
    why = f" ({'; '.join(first)})" if first else ""
    if len(places) == 1:
        return (
            f"{place}: there is no text to read in this folder{why}: name files of text, or another"
            " folder"
        )
    return f"there is no text to read in these files and folders{why}: name others"


def standard_library_files() -> Iterator[Path]:
    """Yield the source files of the running Python's own library, without tests and tables."""
    root = _stdlib()
    for path in walk(root, _STDLIB_SKIPPED):
        if path.suffix == ".py" and path.relative_to(root).parts[0] != _STDLIB_TABLES:
            yield path


def standard_library_documents() -> Iterator[Document]:
    """Yield the source text of the running Python's own library, without tests and tables."""
    skipped = Skipped()
    for path in standard_library_files():
        try:
            yield from _text(path, path.relative_to(_stdlib()).as_posix(), skipped)
        except InvalidRunFile as error:
            skipped.add(error.message)


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


class _Reading:
    """Reading of files and folders, whose unreadable parts are added to `skipped`."""

    def __init__(self, skipped: Skipped, column: str) -> None:
        self._skipped, self._column = skipped, column
        self.had_columns = False  # there was a table or a file of records

    def of(self, path: Path) -> Iterator[Document]:
        """Yield the documents of a folder or a file. Raises InvalidRunFile for an unreadable file
        that is no part of a folder.
        """
        return self._folder(path) if path.is_dir() else self._file(path, str(path))

    def _folder(self, root: Path) -> Iterator[Document]:
        skipped = self._skipped
        tables = set(table_rows.tables_in(root, skipped))
        suffixes: Counter[str] = Counter()
        for path in walk(root, skipped=skipped):
            if tables and (path.name == "README.md" or path.suffix == ".json"):
                continue  # such files describe the tables
            if path not in tables and suffix(path) not in TEXT_SUFFIXES | SUFFIXES:
                if not table_rows.is_table(path):  # skips tables of other splits
                    suffixes[path.suffix] += 1
                continue
            try:
                yield from self._file(path, path.relative_to(root).as_posix())
            except InvalidRunFile as error:
                skipped.add(error.message)
        skipped.add_others(root, suffixes, REMEDIES)

    def _file(self, path: Path, name: str) -> Iterator[Document]:
        column = self._column
        if not (table_rows.is_table(path) or holds_records(path, name, column)):
            yield from _text(path, name, self._skipped)
            return
        self.had_columns = True
        yield from _texts(path, name, self._skipped, column)


def _texts(path: Path, name: str, skipped: Skipped, column: str) -> Iterator[Document]:
    """Yield the texts in a column of a file's records; `skipped` gets the bad records. Raises
    InvalidRunFile if all records are bad, or most of the first ones.
    """
    bad, columns = Skipped(), dict[str, str]()
    first: list[Document] | None = []  # records before the judgement of the file; None after it
    chars = blank = 0
    for place, number, fields in records(path, {column}, bad, name):
        text = fields.get(column)
        if not isinstance(text, str):
            columns = columns or {k: v for k, v in fields.items() if isinstance(v, str)}
            keys = ", ".join(f'"{escaped(key, 40)}"' for key in [*fields][:8]) or "none"
            kind = ": it is a number, a list or a table" if column in fields else ""
            bad.add(f'{place}: it has no text in "{column}"{kind}; its keys are {keys}')
        elif not text.strip():
            blank += 1
        elif first is None:
            yield Document(f"{name}:{number}", text)
        else:
            first.append(Document(f"{name}:{number}", text))
            chars += len(text)
        if first and (number >= _JUDGED_RECORDS or chars > _JUDGED_CHARS):
            _refuse_mostly_bad(name, bad, len(first) + blank)
            yield from first
            first = None
    if first is not None:
        if bad.count and not (first or blank):
            raise _BadRecords(_no_column(name, column, bad, columns))
        _refuse_mostly_bad(name, bad, len(first) + blank)
        yield from first
    if blank:
        bad.add(f"{name}: {counted(blank, 'record')} of it without any text")
    skipped.take(bad)
    skipped.read += 1


def _refuse_mostly_bad(name: str, bad: Skipped, good: int) -> None:
    """Raise InvalidRunFile for a file of which most records are bad."""
    if bad.count > good:
        raise _BadRecords(
            f"{name}: {bad.count:,} of its first {bad.count + good:,} records cannot be read;"
            f" {bad.sentences[0].removeprefix(name).lstrip()}; mend them, or leave the file out"
        )


def _no_column(name: str, column: str, bad: Skipped, columns: dict[str, str]) -> str:
    likely = nearest(column, columns) or max(columns, key=lambda k: len(columns[k]), default="")
    other = f"name one with --column {escaped(likely, 40)}, or " if likely else ""
    return (
        f'{name}: none of its {bad.count} records has a "{column}" to learn from;'
        f" {bad.sentences[0].removeprefix(name).lstrip()}; {other}name the file .txt to train"
        " on it as it stands"
    )


def _text(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """Yield a UTF-8 file in documents of about four million characters, cut at line ends; a blank
    file is added to `skipped`. Raises InvalidRunFile for a file that cannot be read or is not text.
    """
    piece, blank = 0, True
    try:
        with open_unpacked(path) as raw, io.TextIOWrapper(raw, encoding=_encoding(path)) as file:
            while text := file.read(_PIECE_CHARS):
                if not piece and "\0" in text[:HEAD_BYTES]:
                    raise InvalidRunFile(_zeros(path, name))
                text += file.readline(_PIECE_CHARS)
                if text.strip():
                    blank = False
                    yield Document(f"{name}#{piece}" if piece else name, text)
                piece += 1
    except UnicodeError as error:
        if (
            isinstance(error, UnicodeDecodeError)
            and "utf-16" not in error.encoding
            and b"\0" in error.object[:HEAD_BYTES]
        ):
            raise InvalidRunFile(_zeros(path, name)) from error
        raise InvalidRunFile(not_unicode(name, error)) from error
    except EOFError as error:
        raise InvalidRunFile(f"{name}: it is compressed, and its end is missing") from error
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error
    if blank:
        skipped.add(f"{name}: it is blank")
    else:
        skipped.read += 1


def _encoding(path: Path) -> str:
    """Return UTF-16 for a file with that encoding's byte order mark, as Windows writes; else
    UTF-8.
    """
    with open_unpacked(path) as file:
        return "utf-16" if file.read(2) in UTF16 else UTF8


def _zeros(path: Path, name: str) -> str:
    """Return the sentence about a file with zero bytes: it is not text, or UTF-16 without its mark,
    in which one byte of most pairs is zero.
    """
    with open_unpacked(path) as file:
        head = file.read(HEAD_BYTES)
    first, second = head[::2].count(0), head[1::2].count(0)
    order = "be" if first > second else "le"
    text = head.decode(f"utf-16-{order}", errors="ignore")
    if not all(char.isprintable() or char.isspace() for char in text):
        return f"{name}: it is not text"
    return f"{name}: it is UTF-16 without its mark: iconv -f utf-16{order} -t utf-8"
