"""Output of a command: one JSON document with --json, or a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shared.sentences import encode_english


def print_json(value: object) -> int:
    """Print one JSON document; return the exit code."""
    import msgspec

    from shared.text import ascii_json

    print(ascii_json(msgspec.json.encode(value, enc_hook=encode_english).decode()))
    return 0


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int] = ()
) -> None:
    """Print a table with a header, without characters that control a terminal."""
    from shared.text import printable, table_lines

    clean = [[printable(cell) for cell in row] for row in rows]
    print("\n".join(table_lines(names, clean, numbers)))
