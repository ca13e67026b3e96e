"""The one JSON document that a command prints with --json."""

from __future__ import annotations

from typing import Any

from shared.sentences import english


def print_json(value: Any) -> int:
    """Print one JSON document; the exit code."""
    import msgspec

    from shared.text import ascii_json

    print(ascii_json(msgspec.json.encode(value, enc_hook=english).decode()))
    return 0
