"""Sources of text: files, directories, JSON lines, and the source of Python's standard library.

All files are read in pieces of bounded size. A source named by a person must be readable; an
unreadable file in a directory, or one bad line of many, is skipped and recorded with its name and
reason.
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
from shared.nearest import nearest
from shared.text import escaped
from shared.workloads.data import table_rows
from shared.workloads.data.record_files import (
    HEAD_BYTES,
    SUFFIXES,
    head_of,
    holds_records,
    opened,
    records,
    suffix,
)
from shared.workloads.data.skipped import Skipped, no_source, walk

_SUFFIXES = """
.txt .text .md .rst .tex .org .adoc .srt
.html .htm .xml .css .csv .tsv .json .toml .yaml .yml .ini .cfg .log
.py .pyi .c .h .cc .cpp .hpp .rs .go .js .mjs .ts .tsx .jsx .java .kt .scala .swift
.rb .php .pl .lua .r .jl .hs .ml .sh .bat .ps1 .sql
"""
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())  # suffixes for which a directory is searched
TEXT = "text"  # column of records that holds the text, where no other is named
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
    sources: Iterable[str | Path | Document], skipped: Skipped, column: str = TEXT
) -> Iterator[Document]:
    """Yield every document of `sources`; records have it in a `column`. Raises InvalidRunFile for
    an unreadable source.
    """
    for source in sources:
        if isinstance(source, Document):
            yield source
            continue
        path = Path(source)
        if path.is_dir():
            yield from _directory(path, skipped, column)
        elif path.is_file():
            yield from _file(path, str(path), skipped, column)
        else:
            raise no_source(path)


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
            yield from _text(path, path.relative_to(_stdlib()).as_posix())
        except InvalidRunFile as error:
            skipped.add(error.message)


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _directory(root: Path, skipped: Skipped, column: str) -> Iterator[Document]:
    tables = set(table_rows.tables_in(root, skipped))
    suffixes: Counter[str] = Counter()
    documents = 0
    for path in walk(root, skipped=skipped):
        if tables and (path.name == "README.md" or path.suffix == ".json"):
            continue  # these files describe the tables
        if path not in tables and suffix(path) not in TEXT_SUFFIXES | SUFFIXES:
            if not table_rows.is_table(path):  # skips tables of other splits
                suffixes[path.suffix] += 1
            continue
        try:
            for document in _file(path, path.relative_to(root).as_posix(), skipped, column):
                documents += 1
                yield document
        except InvalidRunFile as error:
            skipped.add(error.message)
    skipped.add_others(root, suffixes)
    if not documents:
        reason = f" ({skipped.sentences[-1].removeprefix(f'{root}: ')})" if skipped.count else ""
        raise InvalidRunFile(
            f"{root}: there is no text to read in this folder{reason}: name files of text, or"
            " another folder"
        )


def _file(path: Path, name: str, skipped: Skipped, column: str) -> Iterator[Document]:
    if table_rows.is_table(path) or holds_records(path, head_of(path, name), column):
        return _texts(path, name, skipped, column)
    return _text(path, name)


def _texts(path: Path, name: str, skipped: Skipped, column: str) -> Iterator[Document]:
    """Yield the texts in a column of records; `skipped` gets bad ones. Raises InvalidRunFile if all
    are.
    """
    bad, good, columns = Skipped(), False, dict[str, str]()
    for place, number, fields in records(path, {column}, bad, name):
        if isinstance(text := fields.get(column), str):
            good = True
            yield Document(f"{name}:{number}", text)
        else:
            columns = columns or {k: v for k, v in fields.items() if isinstance(v, str)}
            keys = ", ".join(f'"{escaped(key, 40)}"' for key in [*fields][:8]) or "none"
            kind = ": it is a number, a list or a table" if column in fields else ""
            bad.add(f'{place}: it has no text in "{column}"{kind}; its keys are {keys}')
    if bad.count and not good:
        likely = nearest(column, columns) or max(columns, key=lambda k: len(columns[k]), default="")
        other = f"name one with --column {escaped(likely, 40)}, or " if likely else ""
        raise InvalidRunFile(
            f'{name}: none of its {bad.count} records has a "{column}" to learn from;'
            f" {bad.sentences[0].removeprefix(name).lstrip()}; {other}name the file .txt to train"
            " on it as it stands"
        )
    skipped.take(bad)


def _text(path: Path, name: str) -> Iterator[Document]:
    """Yield a UTF-8 file in documents of about four million characters, cut at line ends."""
    try:
        with opened(path) as raw, io.TextIOWrapper(raw, encoding=_encoding(path)) as file:
            piece = 0
            while text := file.read(_PIECE_CHARS):
                if not piece and "\0" in text[:HEAD_BYTES]:
                    raise InvalidRunFile(_zeros(path, name))
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
            raise InvalidRunFile(_zeros(path, name)) from error
        raise InvalidRunFile(
            f"{name}: not UTF-8 text ({error.reason}, byte 0x{error.object[error.start]:02x});"
            f" convert it first, e.g. iconv -f {_eight_bits(error.object)} -t utf-8"
        ) from error
    except EOFError as error:
        raise InvalidRunFile(f"{name}: it is compressed, and its end is missing") from error
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error


def _encoding(path: Path) -> str:
    """Return UTF-16 for a file with its byte order mark, as Windows writes it; else UTF-8."""
    with opened(path) as file:
        return "utf-16" if file.read(2) in UTF16 else UTF8


def _zeros(path: Path, name: str) -> str:
    """Return the sentence about a file with bytes of zero: UTF-16 without its mark has them on one
    side of its pairs.
    """
    with opened(path) as file:
        head = file.read(HEAD_BYTES)
    first, second = head[::2].count(0), head[1::2].count(0)
    order = "be" if first > second else "le"
    text = head.decode(f"utf-16-{order}", errors="ignore")
    if not all(char.isprintable() or char.isspace() for char in text):
        return f"{name}: it is not text"
    return f"{name}: it is UTF-16 without its mark: iconv -f utf-16{order} -t utf-8"


def _eight_bits(data: bytes) -> str:
    """Return the likely encoding of a text that is not UTF-8: Windows uses 0x80 to 0x9f for signs
    such as quotes and the euro, which Latin-1 has as control characters.
    """
    return "windows-1252" if any(0x80 <= byte <= 0x9F for byte in data) else "latin1"
