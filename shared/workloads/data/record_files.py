"""Records in files of an organiser: JSON lines, an array of JSON, also inside an object, tables of
cells, parquet and arrow. A file that gzip compressed is read as the file inside.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from shared.decoding import MALFORMED, complaint, decoder
from shared.errors import InvalidRunFile
from shared.files.text_file import UTF8, UTF16, unmarked
from shared.workloads.data import table_rows
from shared.workloads.data.skipped import Skipped, no_source, walk

HEAD_BYTES = 4096
_LINE_BYTES_MAX = 16 << 20
_ARRAY_BYTES_MAX = 2 << 30  # limit of a file that is one array, which is read whole
_CELLS = {".csv": ",", ".tsv": "\t"}
_LINES = frozenset({".jsonl", ".ndjson"})
SUFFIXES = _LINES | {".json", *_CELLS}
_OTHER_KINDS = {  # other formats, recognised by their first bytes, whatever the file's name
    b"BZh": "it is compressed: unpack it first (bunzip2)",
    b"\xfd7zXZ": "it is compressed: unpack it first (unxz)",
    b"\x28\xb5\x2f\xfd": "it is compressed: unpack it first (unzstd)",
    b"PK\x03\x04": "it is an archive or an office document: unpack it, or save it as text",
    b"%PDF": "it is a PDF: save it as text first",
    b"\x89PNG": "it is a picture: pictures are named after --images",
    b"\xff\xd8\xff": "it is a picture: pictures are named after --images",
    b"\x7fELF": "it is a program: name files of text",
}


GZIP = b"\x1f\x8b"
_DELIMITERS = ",;\t"  # Excel writes semicolons where the comma stands before decimals


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
            yield from (file for file in walk(path, skipped=skipped) if suffix(file) in SUFFIXES)
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
    if suffix(path) in _CELLS:
        with _readable(name):
            yield from _cells(path, name)
        return
    if head.startswith(UTF16):
        raise InvalidRunFile(f"{name}: it is UTF-16: save it as UTF-8")
    with _readable(name):
        if head.lstrip(b" \t\r\n").startswith(b"["):
            yield from _elements(_array(path, name), name, skipped)
        elif suffix(path) == ".json" and (elements := enclosed(path)):
            yield from _elements(elements, name, skipped)
        else:
            yield from _of_lines(path, name, skipped)


def head_of(path: Path, name: str) -> bytes:
    """Return the first bytes of a file. Raises InvalidRunFile if it is unreadable or no text."""
    with _readable(name), opened(path) as file:
        head = unmarked(file.read(HEAD_BYTES))
    for beginning, kind in _OTHER_KINDS.items():
        if head.startswith(beginning):
            raise InvalidRunFile(f"{name}: {kind}")
    return head


def holds_records(path: Path, head: bytes, column: str) -> bool:
    """Return True if a file with this beginning holds records, by its name and for JSON by its
    array of objects, or by the one list of objects with a `column` inside an object.
    """
    if suffix(path) != ".json":
        return suffix(path) in SUFFIXES
    start = head.lstrip(b" \t\r\n")
    if start.startswith(b"{"):
        return any(_has(element, column) for element in enclosed(path)[:1])
    return start.startswith((b'[{"', b"[\n", b"[ "))


def _has(element: msgspec.Raw, key: str) -> bool:
    try:
        return key in decoder(dict[str, msgspec.Raw]).decode(element)
    except MALFORMED:
        return False


def enclosed(path: Path) -> list[msgspec.Raw]:
    """Return the elements of the only list in a file of one JSON object; none for another file."""
    with opened(path) as file:
        data = file.read(_ARRAY_BYTES_MAX + 1)
    try:
        fields = decoder(dict[str, msgspec.Raw]).decode(unmarked(data))
        lists = [value for value in fields.values() if bytes(value).lstrip()[:1] == b"["]
        return decoder(list[msgspec.Raw]).decode(lists[0]) if len(lists) == 1 else []
    except MALFORMED:
        return []


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read, or the file inside one that gzip compressed."""
    with path.open("rb") as file:
        if file.read(len(GZIP)) != GZIP:
            file.seek(0)
            yield file
            return
        file.seek(0)
        with gzip.open(file) as inside:
            yield inside  # type: ignore[misc]  # GzipFile has what readers call


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Say in a sentence why a file cannot be read. Raises InvalidRunFile."""
    try:
        yield
    except EOFError as error:
        raise InvalidRunFile(f"{name}: it is compressed, and its end is missing") from error
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error


def suffix(path: Path) -> str:
    """Return the suffix of a file, or of the file inside one with the suffix of gzip."""
    inside = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return inside.suffix.lower()


def _cells(path: Path, name: str) -> Iterator[Record]:
    csv.field_size_limit(_LINE_BYTES_MAX)
    try:
        with opened(path) as file:
            encoding = "utf-16" if file.peek(2)[:2] in UTF16 else UTF8  # type: ignore[attr-defined]
            with io.TextIOWrapper(file, encoding=encoding, newline="") as text:
                heading = text.readline()
                delimiter = _delimiter(heading, _CELLS[suffix(path)])
                names = next(csv.reader([heading], delimiter=delimiter), [])
                rows = csv.DictReader(text, fieldnames=names, delimiter=delimiter)
                for number, row in enumerate(rows, 1):
                    fields = {str(k): v for k, v in row.items() if k is not None}
                    yield Record(f"{name} row {number}", number, fields)
    except (csv.Error, UnicodeError) as error:
        raise InvalidRunFile(f"{name} is not a table of texts: {error}") from error


def _delimiter(heading: str, usual: str) -> str:
    """Return the sign between the names of columns: the most frequent one, or the usual one."""
    counts = {sign: heading.count(sign) for sign in _DELIMITERS}
    return usual if counts[usual] == max(counts.values()) else max(counts, key=counts.__getitem__)


def _array(path: Path, name: str) -> list[msgspec.Raw]:
    with opened(path) as file:
        data = file.read(_ARRAY_BYTES_MAX + 1)
    if len(data) > _ARRAY_BYTES_MAX:
        raise InvalidRunFile(
            f"{name} is one array of more than {_ARRAY_BYTES_MAX >> 30} GiB: write one record a"
            " line instead (.jsonl)"
        )
    try:
        return decoder(list[msgspec.Raw]).decode(unmarked(data))
    except MALFORMED as error:
        raise InvalidRunFile(f"{name} is not an array of JSON: {error}") from error


def _elements(parts: list[msgspec.Raw], name: str, skipped: Skipped) -> Iterator[Record]:
    for number, part in enumerate(parts, 1):
        yield from _decoded(bytes(part), f"{name} element {number}", number, skipped)


def _of_lines(path: Path, name: str, skipped: Skipped) -> Iterator[Record]:
    with opened(path) as file:
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
        elif data.lstrip()[:1] not in (b"{", b"["):
            reason = "it is not JSON: a record is a line such as {...}"
        skipped.add(f"{place}: {reason}")


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines of bounded length; the rest of a longer one is skipped."""
    while line := file.readline(_LINE_BYTES_MAX + 1):
        yield line
        while len(line) > _LINE_BYTES_MAX and line and not line.endswith(b"\n"):
            line = file.readline(_LINE_BYTES_MAX + 1)
