"""Tables as TOML text: the standard library only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def as_toml(table: Mapping[str, Any], name: str = "") -> str:
    """A decoded table as text. Tables within lists are written inline."""
    lines, inner = [], []
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner.append(as_toml(value, f"{name}.{key}" if name else key))
        else:
            lines.append(f"{key} = {_inline(value)}")
    head = [f"[{name}]"] if name else []
    return "\n".join([*head, *lines, *inner])


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)
