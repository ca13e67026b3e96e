"""Records in files of an organiser: JSON lines, an array of JSON, CSV, parquet and arrow."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.decoding import MALFORMED, complaint, decoder
from shared.errors import InvalidRunFile
from shared.files.text_file import UTF8, unmarked
from shared.workloads.data import table_rows
from shared.workloads.data.skipped import Skipped, no_source, walk

UTF16 = (b"\xff\xfe", b"\xfe\xff")  # marks at the beginning of a file
HEAD_BYTES = 4096
_LINE_BYTES_MAX = 16 << 20
_ARRAY_BYTES_MAX = 2 << 30  # limit of a file that is one array, which is read whole
_CELLS = {".csv": ",", ".tsv": "\t"}
_LINES = frozenset({".jsonl", ".ndjson"})
SUFFIXES = _LINES | {".json", *_CELLS}
_OTHER_KINDS = {  # other formats, recognised by their first bytes, whatever the file's name
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


class Record(NamedTuple):
    """Fields of a record, its place as messages name it, and its number in the file."""

    place: str
    number: int
    fields: dict[str, Any]


def files(sources: Iterable[str | Path], skipped: Skipped) -> Iterator[Path]:
    """Yield files that may hold records. Raises InvalidRunFile for a missing path."""
    for source in sources:
        path = Path(source)
        if path.is_dir() and (tables := table_rows.tables_in(path, skipped)):
            yield from tables
        elif path.is_dir():
            yield from (file for file in walk(path, skipped=skipped) if _suffix(file) in SUFFIXES)
        elif path.is_file():
            yield path
        else:
            raise no_source(path)


def records(path: Path, columns: Set[str], skipped: Skipped, name: str = "") -> Iterator[Record]:
    """Yield the records of a file; malformed ones are added to `skipped`. Messages call the file
    `name`. Fields of a table's records that are not `columns` are None.

    Raises InvalidRunFile, or Configuration for a table without pyarrow.
    """
    name = name or str(path)
    if table_rows.is_table(path):
        unread = dict.fromkeys(
            column for column in table_rows.columns(path) if column not in columns
        )
        for number, row in enumerate(table_rows.rows(path, columns), 1):
            yield Record(f"{name} row {number}", number, row | unread)
        return
    head = head_of(path, name)
    if head.startswith(UTF16):
        raise InvalidRunFile(f"{name}: it is UTF-16: save it as UTF-8")
    with _readable(name):
        if _suffix(path) in _CELLS:
            yield from _cells(path, name)
        elif head.lstrip(b" \t\r\n").startswith(b"["):
            yield from _elements(path, name, skipped)
        else:
            yield from _of_lines(path, name, skipped)


def head_of(path: Path, name: str) -> bytes:
    """Return the first bytes of a file. Raises InvalidRunFile if it is unreadable or no text."""
    with _readable(name), path.open("rb") as file:
        head = unmarked(file.read(HEAD_BYTES))
    for beginning, kind in _OTHER_KINDS.items():
        if head.startswith(beginning):
            raise InvalidRunFile(f"{name}: {kind}")
    return head


def holds_records(path: Path, head: bytes) -> bool:
    """Return True if a file with this beginning holds records, by its name and for JSON by its
    array of objects.
    """
    array = head.lstrip(b" \t\r\n").startswith((b'[{"', b"[\n", b"[ "))
    return _suffix(path) in SUFFIXES - {".json"} or (array and _suffix(path) == ".json")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Say in a sentence why a file cannot be read. Raises InvalidRunFile."""
    try:
        yield
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _cells(path: Path, name: str) -> Iterator[Record]:
    csv.field_size_limit(_LINE_BYTES_MAX)
    try:
        with path.open(encoding=UTF8, newline="") as file:
            for number, row in enumerate(csv.DictReader(file, delimiter=_CELLS[_suffix(path)]), 1):
                fields = {str(k): v for k, v in row.items() if k is not None}
                yield Record(f"{name} row {number}", number, fields)
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidRunFile(f"{name} is not a table of texts: {error}") from error


def _elements(path: Path, name: str, skipped: Skipped) -> Iterator[Record]:
    if path.stat().st_size > _ARRAY_BYTES_MAX:
        raise InvalidRunFile(
            f"{name} is one array of more than {_ARRAY_BYTES_MAX >> 30} GiB: write one record a"
            " line instead (.jsonl)"
        )
    try:
        parts = decoder(list[msgspec.Raw]).decode(unmarked(path.read_bytes()))
    except MALFORMED as error:
        raise InvalidRunFile(f"{name} is not an array of JSON: {error}") from error
    for number, part in enumerate(parts, 1):
        yield from _decoded(bytes(part), f"{name} element {number}", number, skipped)


def _of_lines(path: Path, name: str, skipped: Skipped) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            place = f"{name} line {number}"
            if len(line) > _LINE_BYTES_MAX:
                skipped.add(f"{place}: it is longer than {_LINE_BYTES_MAX >> 20} MiB")
            elif line.strip():
                yield from _decoded(unmarked(line), place, number, skipped)


def _decoded(data: bytes, place: str, number: int, skipped: Skipped) -> Iterator[Record]:
    try:
        yield Record(place, number, decoder(dict[str, Any]).decode(data))
    except msgspec.ValidationError as error:
        skipped.add(complaint(error, place))
    except MALFORMED as error:
        reason = str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "this is not text in UTF-8"
        elif "truncated" in reason:
            reason = "its JSON goes on in the next line"
        skipped.add(f"{place}: {reason}")


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines of bounded length; the rest of a longer one is skipped."""
    while line := file.readline(_LINE_BYTES_MAX + 1):
        yield line
        while len(line) > _LINE_BYTES_MAX and line and not line.endswith(b"\n"):
            line = file.readline(_LINE_BYTES_MAX + 1)
