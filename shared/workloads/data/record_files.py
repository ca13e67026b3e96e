"""Records in an organiser's files: JSON lines, an array of JSON, CSV, parquet and arrow."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from shared.decoding import MALFORMED, complaint, decoder
from shared.errors import InvalidRunFile
from shared.text_file import UTF8, unmarked
from shared.workloads.data import table_rows
from shared.workloads.data.dialogue_forms import FIELDS
from shared.workloads.data.documents import LINES_SUFFIXES, head_of
from shared.workloads.data.skipped import Skipped, no_source, walk

_LINE_BYTES_MAX = 4 << 20
_ARRAY_BYTES_MAX = 2 << 30  # largest file with one array, which is read whole
_CELLS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = LINES_SUFFIXES | {".json", *_CELLS}

Record = tuple[str, dict[str, Any]]  # file and line, and the record


def files(sources: Iterable[str | Path], skipped: Skipped) -> Iterator[Path]:
    """Yield files that may hold records. Raises InvalidRunFile for a missing path."""
    for source in sources:
        path = Path(source)
        if path.is_dir() and (tables := table_rows.tables_in(path, skipped)):
            yield from tables
        elif path.is_dir():
            yield from (each for each in walk(path, skipped=skipped) if _suffix(each) in SUFFIXES)
        elif path.is_file():
            yield path
        else:
            raise no_source(path)


def records(path: Path, skipped: Skipped) -> Iterator[Record]:
    """Yield the records of a file; malformed ones are added to `skipped`. Raises InvalidRunFile."""
    if table_rows.is_table(path):
        unread = dict.fromkeys(each for each in table_rows.columns(path) if each not in FIELDS)
        for number, row in enumerate(table_rows.rows(path, FIELDS), 1):
            yield f"{path} row {number}", row | unread
        return
    head = head_of(path, str(path), lines=True)
    if _suffix(path) in _CELLS:
        yield from _cells(path)
    elif head.lstrip(b" \t\r\n").startswith(b"["):
        yield from _elements(path, skipped)
    else:
        yield from _of_lines(path, skipped)


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _cells(path: Path) -> Iterator[Record]:
    csv.field_size_limit(_LINE_BYTES_MAX)
    try:
        with path.open(encoding=UTF8, newline="") as file:
            for number, row in enumerate(csv.DictReader(file, delimiter=_CELLS[_suffix(path)]), 1):
                yield f"{path} row {number}", {str(k): v for k, v in row.items() if k is not None}
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidRunFile(f"{path} is not a table of texts: {error}") from error


def _elements(path: Path, skipped: Skipped) -> Iterator[Record]:
    if path.stat().st_size > _ARRAY_BYTES_MAX:
        raise InvalidRunFile(
            f"{path} is one array of more than {_ARRAY_BYTES_MAX >> 30} GiB: write one record a"
            " line instead (.jsonl)"
        )
    try:
        parts = decoder(list[msgspec.Raw]).decode(unmarked(path.read_bytes()))
    except MALFORMED as error:
        raise InvalidRunFile(f"{path} is not an array of JSON: {error}") from error
    for number, part in enumerate(parts, 1):
        yield from _decoded(bytes(part), f"{path} element {number}", skipped)


def _of_lines(path: Path, skipped: Skipped) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            place = f"{path} line {number}"
            if len(line) > _LINE_BYTES_MAX:
                skipped.add(f"{place}: it is longer than {_LINE_BYTES_MAX >> 20} MiB")
            elif line.strip():
                yield from _decoded(unmarked(line), place, skipped)


def _decoded(data: bytes, place: str, skipped: Skipped) -> Iterator[Record]:
    try:
        yield place, decoder(dict[str, Any]).decode(data)
    except msgspec.ValidationError as error:
        skipped.add(complaint(error, place))
    except MALFORMED as error:
        cut = "truncated" in str(error)
        skipped.add(f"{place}: {'its JSON goes on in the next line' if cut else error}")


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines of bounded length; the rest of a longer one is skipped."""
    while line := file.readline(_LINE_BYTES_MAX + 1):
        yield line
        while len(line) > _LINE_BYTES_MAX and line and not line.endswith(b"\n"):
            line = file.readline(_LINE_BYTES_MAX + 1)
