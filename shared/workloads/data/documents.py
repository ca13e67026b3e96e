"""Sources of text: files, directories, JSON lines, and the source of Python's standard library.

All files are read in pieces of bounded size. A source named by a person must be readable; an
unreadable file in a directory, or one bad line of many, is skipped and recorded with its name and
reason.
"""

from __future__ import annotations

import csv
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shared.decoding import MALFORMED, decoder
from shared.errors import InvalidRunFile
from shared.text_file import UTF8, unmarked
from shared.workloads.data import table_rows
from shared.workloads.data.skipped import Skipped, no_source, walk

_SUFFIXES = """
.txt .text .md .rst .tex .org .adoc .srt
.html .htm .xml .css .csv .tsv .json .toml .yaml .yml .ini .cfg .log
.py .pyi .c .h .cc .cpp .hpp .rs .go .js .mjs .ts .tsx .jsx .java .kt .scala .swift
.rb .php .pl .lua .r .jl .hs .ml .sh .bat .ps1 .sql
"""
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())  # suffixes for which a directory is searched
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_PIECE_CHARS = 4 << 20  # a larger file becomes several documents
_LINE_BYTES_MAX = 16 << 20
_HEAD_BYTES = 4096
_CELLS = {".csv": ",", ".tsv": "\t"}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_OTHER_KINDS = {  # other formats, recognised by their first bytes under any name
    b"\x1f\x8b": "it is compressed: unpack it first (gunzip)",
    b"BZh": "it is compressed: unpack it first (bunzip2)",
    b"\xfd7zXZ": "it is compressed: unpack it first (unxz)",
    b"\x28\xb5\x2f\xfd": "it is compressed: unpack it first (unzstd)",
    b"PK\x03\x04": "it is an archive or an office document: unpack it, or save it as text",
    b"%PDF": "it is a PDF: save it as text first",
    b"\x89PNG": "it is a picture",
    b"\xff\xd8\xff": "it is a picture",
    b"\x7fELF": "it is a program",
}

_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
)
_STDLIB_TABLES = "encodings"  # folder of generated tables


class Document(msgspec.Struct, frozen=True):
    """Text and its name."""

    name: str
    text: str


class _TextLine(msgspec.Struct):
    text: str


def read_documents(
    sources: Iterable[str | Path | Document], skipped: Skipped
) -> Iterator[Document]:
    """Yield every document of `sources`, sorted. Raises InvalidRunFile for unreadable ones."""
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
    others: Counter[str] = Counter()
    for path in walk(root, skipped=skipped):
        if tables and (path.name == "README.md" or path.suffix == ".json"):
            continue  # these files describe the tables
        if path not in tables and path.suffix.lower() not in TEXT_SUFFIXES | LINES_SUFFIXES:
            if not table_rows.is_table(path):  # skips tables of other splits
                others[path.suffix] += 1
            continue
        try:
            yield from _file(path, path.relative_to(root).as_posix(), skipped)
        except InvalidRunFile as error:
            skipped.add(error.message)
    skipped.add_others(root, others)


def head_of(path: Path, name: str, *, lines: bool) -> bytes:
    """Return the first bytes of a text file, or of one whose `lines` are records.

    Raises InvalidRunFile for another kind of file.
    """
    with _readable(name), path.open("rb") as file:
        head = unmarked(file.read(_HEAD_BYTES))
    for beginning, kind in _OTHER_KINDS.items():
        if head.startswith(beginning):
            raise InvalidRunFile(f"{name}: {kind}")
    if lines and head.startswith(_UTF16):
        raise InvalidRunFile(f"{name}: it is UTF-16: save it as UTF-8")
    return head


def _file(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    if table_rows.is_table(path):
        return _table(path, name)
    head = head_of(path, name, lines=path.suffix.lower() in {*LINES_SUFFIXES, *_CELLS, ".json"})
    if path.suffix.lower() in LINES_SUFFIXES:
        return _lines(path, name, skipped)
    if head.lstrip(b" \t\r\n").startswith((b'[{"', b"[\n", b"[ ")) and (
        path.suffix.lower() == ".json"
    ):
        return _array(path, name)
    if path.suffix.lower() in _CELLS:
        return _cells(path, name)
    return _text(path, name)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Report in a sentence why a file cannot be read. Raises InvalidRunFile."""
    try:
        yield
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error


def _array(path: Path, name: str) -> Iterator[Document]:
    """Yield the texts of one JSON array of objects. Raises InvalidRunFile for another array."""
    try:
        with _readable(name):
            rows = decoder(list[_TextLine]).decode(unmarked(path.read_bytes()))
    except MALFORMED as error:
        raise InvalidRunFile(
            f'{name} is JSON, but no array of objects with a "text" ({error}); name it .txt to '
            "train on it as it stands"
        ) from error
    for number, row in enumerate(rows, 1):
        yield Document(f"{name}:{number}", row.text)


def _cells(path: Path, name: str) -> Iterator[Document]:
    """Yield the column "text" of a CSV file. Raises InvalidRunFile if it has none."""
    csv.field_size_limit(_LINE_BYTES_MAX)
    try:
        with _readable(name), path.open(encoding=UTF8, newline="") as file:
            rows = csv.DictReader(file, delimiter=_CELLS[path.suffix.lower()])
            if "text" not in (rows.fieldnames or ()):
                raise InvalidRunFile(
                    f'{name} is a table without a column "text"; name it .txt to train on it as '
                    "it stands"
                )
            for number, row in enumerate(rows, 1):
                yield Document(f"{name}:{number}", row["text"] or "")
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidRunFile(f"{name} is not a table of texts: {error}") from error


def _table(path: Path, name: str) -> Iterator[Document]:
    """Yield the column "text" of a table. Raises InvalidRunFile if it has none."""
    names = table_rows.columns(path)
    if "text" not in names:
        raise InvalidRunFile(
            f'{name} has no column "text"; it has {", ".join(map(repr, names[:12])) or "none"}'
        )
    for number, row in enumerate(table_rows.rows(path, ("text",)), 1):
        text = row.get("text", "")
        if not isinstance(text, str):
            raise InvalidRunFile(f'{name} row {number}: "text" is no text')
        yield Document(f"{name}:{number}", text)


def _text(path: Path, name: str) -> Iterator[Document]:
    """Yield a UTF-8 file in documents of about four million characters, cut at line ends."""
    try:
        with path.open(encoding=_encoding(path)) as file:
            piece = 0
            while text := file.read(_PIECE_CHARS):
                if not piece and "\0" in text[:_HEAD_BYTES]:
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
        if b"\0" in error.object[:_HEAD_BYTES]:
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
        return "utf-16" if file.read(2) in _UTF16 else UTF8


def _lines(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """Yield the "text" of JSON lines; bad ones are reported. Raises InvalidRunFile if all are
    bad.
    """
    bad = Skipped()
    good = False
    for number, found in _numbered(path, name):
        if isinstance(found, Document):
            good = True
            yield found
        else:
            bad.add(f"{name} line {number}: {found}")
    if bad.count and not good:
        first = bad.sentences[0].removeprefix(f"{name} ")
        raise InvalidRunFile(
            f'{name}: none of its {bad.count} lines is a JSON object with a "text"; {first}'
        )
    skipped.take(bad)


def _numbered(path: Path, name: str) -> Iterator[tuple[int, Document | str]]:
    """Yield each line that is not blank, with its number: a document, or the reason for skipping
    it.
    """
    record = decoder(_TextLine)
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LINE_BYTES_MAX + 1):
                number += 1
                line = unmarked(line) if number == 1 else line
                if len(line) > _LINE_BYTES_MAX:
                    yield number, f"longer than {_LINE_BYTES_MAX >> 20} MiB"
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_LINE_BYTES_MAX)
                elif line.strip():
                    try:
                        text = record.decode(line).text
                    except MALFORMED as error:
                        yield number, str(error)
                    else:
                        yield number, Document(f"{name}:{number}", text)
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error
