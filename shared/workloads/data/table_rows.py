"""Rows of tables as the library datasets writes them: parquet, and arrow in a saved folder.

pyarrow reads them piece by piece; no code of the library or of such a folder runs. If a folder has
a split "train", its other splits are not read, since they are for measuring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shared.decoding import MALFORMED, decode
from shared.errors import InvalidRunFile
from shared.files.text_file import unmarked
from shared.programs.installation import missing_extra_error
from shared.text import printable
from shared.workloads.data.skipped_files import Skipped, walk

SUFFIXES = frozenset({".parquet", ".arrow"})
_BATCH_ROWS = 256
_INFO_BYTES_MAX = 1 << 20  # bytes that are read of a file about a dataset's origin
_SPLITS = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")
_CACHED = "cache-"  # prefix of files in which the library caches results; they are not read


def is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(_CACHED)


def tables_in(folder: Path, skipped: Skipped) -> list[Path]:
    """Return the tables of a folder. If it has a split "train", its other splits are left out, and
    added to `skipped`.
    """
    tables = [path for path in walk(folder) if is_table(path)]
    splits = {path: _split(path.relative_to(folder)) for path in tables}
    if "train" not in splits.values():
        return tables
    for path, split in splits.items():
        if split not in ("train", ""):
            skipped.add(f"{path}: it is of the split {split}, and only train is learnt")
    return [path for path, split in splits.items() if split in ("train", "")]


def _split(inside: Path) -> str:
    for part in (inside.name, *reversed(inside.parts[:-1])):
        if match := _SPLITS.match(part.lower()):
            return match[1]
    return ""


def columns(path: Path) -> list[str]:
    """Return the names of a table's columns. Raises InvalidRunFile, Configuration."""
    with _readable(path):
        return _opened(path)[0]


def rows(path: Path, names_read: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield each row of a table by column, with the columns of `names_read` that are not null.

    Raises InvalidRunFile if the table cannot be read, Configuration without pyarrow.
    """
    with _readable(path):
        names, batches = _opened(path)
        for batch in batches([name for name in names if name in set(names_read)]):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert the errors of reading a table to InvalidRunFile. Raises Configuration without
    pyarrow.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra_error(f"reading {path}", "datasets") from error
    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        why = printable(str(error), 200)
        kind = path.suffix[1:].lower()
        raise InvalidRunFile(f"{path} is no {kind} file that can be read: {why}") from error


def _opened(path: Path) -> tuple[list[str], Callable[[list[str]], Iterator[Any]]]:
    """Return the columns of a table, and a function that reads some columns batch by batch."""
    import pyarrow
    from pyarrow import ipc, parquet

    if path.suffix.lower() == ".parquet":
        file = parquet.ParquetFile(path)
        return file.schema_arrow.names, lambda names: file.iter_batches(_BATCH_ROWS, columns=names)
    source = pyarrow.memory_map(str(path))
    try:
        stream = ipc.open_stream(source)  # the format in which the library datasets saves
        return stream.schema.names, lambda names: (batch.select(names) for batch in stream)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        whole = ipc.open_file(source)
        batches_of_file = (whole.get_batch(number) for number in range(whole.num_record_batches))
        return whole.schema.names, lambda names: (batch.select(names) for batch in batches_of_file)


class _Info(msgspec.Struct):
    license: str = ""
    homepage: str = ""
    dataset_name: str = ""


def licence_and_source(sources: Iterable[Path]) -> tuple[str, str]:
    """Return the licence and the source of a dataset, "" if unknown, from `dataset_info.json` in
    its folders; the licence also from the head of a README.md, as model hubs write it.
    """
    licence = source = ""
    for folder in (path for path in sources if path.is_dir()):
        for path in sorted(folder.rglob("dataset_info.json"))[:8]:
            try:
                info = decode(_text(path), _Info)
            except MALFORMED:
                continue
            licence = licence or printable(info.license, 100)
            source = source or printable(info.homepage or info.dataset_name, 200)
        card = folder / "README.md"
        if not licence and card.is_file():
            front = re.match(r"---\n(.*?)\n---", _text(card), re.DOTALL)
            line = re.search(
                r"^license:\s*[\"']?([\w.-]+)", front[1] if front else "", re.MULTILINE
            )
            licence = line[1] if line else ""
    return licence, source


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return unmarked(file.read(_INFO_BYTES_MAX)).decode("utf-8", "replace")
