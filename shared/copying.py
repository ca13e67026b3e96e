"""Structs built from others: fields with the same name in both are copied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def copying(kind: type[S], *sources: Any) -> partial[S]:
    """Return the constructor of a struct with the fields of its sources filled in by their names.

    A source is an object or a row of a table. A field comes from the first source that has it,
    unless the constructor is called with its name.
    """
    found: dict[str, Any] = {}
    for source in reversed(sources):
        if isinstance(source, Mapping):
            found |= {name: source[name] for name in kind.__struct_fields__ if name in source}
        else:
            found |= {
                name: getattr(source, name)
                for name in kind.__struct_fields__
                if hasattr(source, name)
            }
    return partial(kind, **found)
