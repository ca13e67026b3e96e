"""Records in files of an organiser: JSON lines, a JSON array (also the only array inside an
object), CSV and TSV, parquet and arrow. A file compressed by gzip is read as the file inside it.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from shared.decoding import MALFORMED, complaint, decoder
from shared.errors import InvalidRunFile
from shared.files.text_file import UTF8, UTF16, unmarked
from shared.workloads.data import table_rows
from shared.workloads.data.skipped_files import Skipped, no_source, walk

HEAD_BYTES = 4096  # bytes from the beginning of a file that decide about its kind
_LINE_BYTES_MAX = 16 << 20
_ARRAY_BYTES_MAX = 2 << 30  # limit of a file that is one array, which is read whole
_CELLS = {".csv": ",", ".tsv": "\t"}
_LINES = frozenset({".jsonl", ".ndjson"})
SUFFIXES = _LINES | {".json", *_CELLS}
_OTHER_KINDS = {  # other formats, recognised by their first bytes, whatever the file's name
    b"BZh": "it is compressed: unpack it first (bunzip2)",
    b"\xfd7zXZ": "it is compressed: unpack it first (unxz)",
    b"\x28\xb5\x2f\xfd": "it is compressed: unpack it first (unzstd)",
    b"PK\x03\x04": "it is an archive or an office document: unpack it, or save it as text (.txt)",
    b"\xd0\xcf\x11\xe0": "it is an office document: save it as text (.txt)",
    b"{\\rtf": "it is an office document: save it as text (.txt)",
    b"%PDF": "it is a PDF: save it as text (.txt) first",
    b"\x89PNG": "it is a picture, not text",
    b"\xff\xd8\xff": "it is a picture, not text",
    b"\x7fELF": "it is a program: name files of text",
}


# What to do with files of other kinds, by suffix.
REMEDIES = {
    **dict.fromkeys(
        (".pdf", ".doc", ".docx", ".odt", ".rtf", ".pages", ".ppt", ".pptx", ".odp", ".epub"),
        "save them as text: .txt",
    ),
    **dict.fromkeys((".xls", ".xlsx", ".ods", ".numbers"), "save them as tables: .csv"),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".bz2", ".xz", ".zst"), "unpack them"),
    **dict.fromkeys(
        (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic"),
        "pictures, not text",
    ),
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
            suffixes: Counter[str] = Counter()
            for file in walk(path, skipped=skipped):
                if suffix(file) in SUFFIXES:
                    yield file
                else:
                    suffixes[file.suffix] += 1
            skipped.add_others(path, suffixes, REMEDIES)
        elif path.is_file():
            yield path
        else:
            raise no_source(path)


def records(path: Path, columns: Set[str], skipped: Skipped, name: str = "") -> Iterator[Record]:
    """Yield the records of a file; malformed records are added to `skipped`. Messages call the file
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
            yield from _cells(path, name, skipped)
        return
    if head.startswith(UTF16):
        raise InvalidRunFile(f"{name}: it is UTF-16: save it as UTF-8")
    with _readable(name):
        if head.lstrip(b" \t\r\n").startswith(b"["):
            yield from _elements(_array(path, name), name, skipped)
        elif suffix(path) == ".json" and (elements := only_list(path)):
            yield from _elements(elements, name, skipped)
        else:
            yield from _line_records(path, name, skipped)


def head_of(path: Path, name: str) -> bytes:
    """Return the first bytes of a file. Raises InvalidRunFile if it is unreadable or no text."""
    with _readable(name), open_unpacked(path) as file:
        head = unmarked(file.read(HEAD_BYTES))
    for beginning, kind in _OTHER_KINDS.items():
        if head.startswith(beginning):
            raise InvalidRunFile(f"{name}: {kind}")
    return head


def holds_records(path: Path, name: str, column: str) -> bool:
    """Return True if a file holds records: by its suffix, or for JSON if it is an array of objects,
    lines of objects, or an object whose only list has objects with `column`. Raises InvalidRunFile
    if it is unreadable or no text.
    """
    start = head_of(path, name).lstrip(b" \t\r\n")
    if suffix(path) != ".json":
        return suffix(path) in SUFFIXES
    if start.startswith(b"{"):
        with _readable(name):
            return any(_has(element, column) for element in only_list(path)[:1]) or _are_lines(path)
    return start.startswith((b'[{"', b"[\n", b"[ "))


def _are_lines(path: Path) -> bool:
    """Return True if a file begins with two lines of JSON objects, of which one may be bad."""
    with open_unpacked(path) as file:
        written = (unmarked(line) for line in _lines(file) if line.strip())
        lines = [*islice(written, 2)]
    objects = all(line.startswith(b"{") for line in lines)
    return len(lines) == 2 and objects and any(map(_is_object, lines))


def _is_object(line: bytes) -> bool:
    try:
        decoder(dict[str, msgspec.Raw]).decode(line)
    except MALFORMED:
        return False
    return True


def _has(element: msgspec.Raw, key: str) -> bool:
    try:
        return key in decoder(dict[str, msgspec.Raw]).decode(element)
    except MALFORMED:
        return False


def only_list(path: Path) -> list[msgspec.Raw]:
    """Return the elements of the only list in a file of one JSON object; [] for another file."""
    with open_unpacked(path) as file:
        data = file.read(_ARRAY_BYTES_MAX + 1)
    try:
        fields = decoder(dict[str, msgspec.Raw]).decode(unmarked(data))
        lists = [value for value in fields.values() if bytes(value).lstrip()[:1] == b"["]
        return decoder(list[msgspec.Raw]).decode(lists[0]) if len(lists) == 1 else []
    except MALFORMED:
        return []


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read; a file that gzip compressed is read unpacked. Reading raises EOFError
    for such a file without its end, OSError for a damaged one.
    """
    with path.open("rb") as file:
        if file.read(len(GZIP)) != GZIP:
            file.seek(0)
            yield file
            return
        file.seek(0)
        with gzip.open(file) as inside:
            try:
                yield inside  # type: ignore[misc]  # GzipFile has what readers call
            except zlib.error as error:
                raise OSError("it is compressed, and damaged") from error


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn the block's errors of reading a file into InvalidRunFile, with a sentence."""
    try:
        yield
    except EOFError as error:
        raise InvalidRunFile(f"{name}: it is compressed, and its end is missing") from error
    except OSError as error:
        raise InvalidRunFile(f"{name}: {error.strerror or error}") from error


def suffix(path: Path) -> str:
    """Return the suffix of a file in lower case, without that of gzip: ".jsonl" for a.jsonl.gz."""
    inside = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return inside.suffix.lower()


def _cells(path: Path, name: str, skipped: Skipped) -> Iterator[Record]:
    """Yield the rows of a CSV or TSV file; rows with a quotation mark that is not closed are added
    to `skipped`. Raises InvalidRunFile if such a row reaches to the end of the file.
    """
    csv.field_size_limit(_LINE_BYTES_MAX)
    row = _RowLines()
    try:
        with open_unpacked(path) as file:
            encoding = "utf-16" if file.peek(2)[:2] in UTF16 else UTF8  # type: ignore[attr-defined]
            with io.TextIOWrapper(file, encoding=encoding, newline="") as text:
                heading = text.readline()
                delimiter = _delimiter(heading, _CELLS[suffix(path)])
                names = next(csv.reader([heading], delimiter=delimiter), [])
                rows = csv.reader(row.noted(text), delimiter=delimiter)
                for number, cells in enumerate(filter(None, rows), 1):
                    line, fault = row.taken(delimiter)
                    if fault == "end":
                        raise InvalidRunFile(_unclosed(name, line))
                    if fault:
                        skipped.add(_unclosed(name, line))
                        continue
                    fields = dict(zip_longest(names, cells[: len(names)]))
                    yield Record(f"{name} row {number}", number, fields)
    except csv.Error as error:
        if len(row.lines) > 1:
            raise InvalidRunFile(_unclosed(name, row.first)) from error
        raise InvalidRunFile(f"{name} is not a table of texts: {error}") from error
    except UnicodeError as error:
        raise InvalidRunFile(not_unicode(name, error)) from error


class _RowLines:
    """Lines of the row that is read, to find a quotation mark that is not closed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.first = 2  # number of the row's first line; the heading is line 1

    def noted(self, text: Iterable[str]) -> Iterator[str]:
        for line in text:
            self.lines.append(line)
            yield line

    def taken(self, delimiter: str) -> tuple[int, str]:
        """Return the number of the finished row's first line, and the row's fault: "end" for a
        quotation mark that is not closed at the end of the file, "quote" for a quotation mark that
        is closed in a later row, "" for no fault.
        """
        lines, first = self.lines, self.first
        blank = next((n for n, line in enumerate(lines) if line.strip("\r\n")), 0)
        self.lines, self.first = [], first + len(lines)
        fault = ""
        if len(lines) - blank > 1:
            try:
                next(csv.reader(lines[blank:], delimiter=delimiter, strict=True), None)
            except csv.Error as error:
                fault = "end" if "end of data" in str(error) else "quote"
        return first + blank, fault


def _unclosed(name: str, line: int) -> str:
    return (
        f"{name} line {line}: a quotation mark is not closed before the next row: close it, or"
        ' write "" for one inside a text'
    )


def not_unicode(name: str, error: UnicodeError) -> str:
    """Return the sentence about a file that is not UTF-8, with the encoding that it probably
    has.
    """
    if not isinstance(error, UnicodeDecodeError) or "utf-16" in error.encoding:
        return (
            f"{name}: it begins with the mark of UTF-16 but is not valid UTF-16: save it as UTF-8"
        )
    return (
        f"{name}: not UTF-8 text ({error.reason}, byte 0x{error.object[error.start]:02x}): save it"
        " as UTF-8 in the program that wrote it, or convert it, e.g. iconv -f"
        f" {_eight_bits(error.object)} -t utf-8"
    )


def _eight_bits(data: bytes) -> str:
    """Return the likely encoding of a text that is not UTF-8: Windows uses 0x80 to 0x9f for signs
    such as quotes and the euro, which Latin-1 has as control characters.
    """
    return "windows-1252" if any(0x80 <= byte <= 0x9F for byte in data) else "latin1"


def _delimiter(heading: str, usual: str) -> str:
    """Return the sign between the names of columns: the most frequent sign, `usual` in a tie."""
    counts = {sign: heading.count(sign) for sign in _DELIMITERS}
    return usual if counts[usual] == max(counts.values()) else max(counts, key=counts.__getitem__)


def _array(path: Path, name: str) -> list[msgspec.Raw]:
    with open_unpacked(path) as file:
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


def _line_records(path: Path, name: str, skipped: Skipped) -> Iterator[Record]:
    with open_unpacked(path) as file:
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
            reason = "this is not text in UTF-8: save the file as UTF-8"
        elif "truncated" in reason:
            reason = "its JSON goes on in the next line"
        elif data.lstrip()[:1] not in (b"{", b"["):
            reason = "it is not JSON: a record is a line such as {...}"
        skipped.add(f"{place}: {reason}")


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines of bounded length; the rest of a longer line is skipped."""
    while line := file.readline(_LINE_BYTES_MAX + 1):
        yield line
        while len(line) > _LINE_BYTES_MAX and line and not line.endswith(b"\n"):
            line = file.readline(_LINE_BYTES_MAX + 1)
