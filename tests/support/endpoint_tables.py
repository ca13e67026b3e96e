"""Tables of docs/http-api.md, made from the list of endpoints.

    python -m tests.support.endpoint_tables docs/http-api.md

writes the tables of that page anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_origin

from shared.protocol.endpoint import NOTHING, Endpoint
from shared.protocol.endpoints import ENDPOINTS

_BETWEEN = r"(<!-- {name}: .*? -->\n).*?(<!-- end -->)"


def tables(page: str) -> str:
    """Return the page of the HTTP interface with its tables of endpoints as the list has them."""
    below = [endpoint for endpoint in ENDPOINTS if not endpoint.root]
    at_root = [endpoint for endpoint in ENDPOINTS if endpoint.root]
    for name, listed in (("endpoints", below), ("endpoints at the root", at_root)):
        between = re.compile(_BETWEEN.format(name=name), re.DOTALL)
        page = between.sub(rf"\1\n{_table(listed)}\n\2", page)
    return page


def _table(endpoints: Iterable[Endpoint[Any]]) -> str:
    rows = ["| method and path | request | reply | |", "|---|---|---|---|"]
    for endpoint in endpoints:
        sent = [f"`{endpoint.request.__name__}`"] if endpoint.request is not None else []
        sent += ["bytes"] if endpoint.sends else []
        sent += [f"`?{query.name}=`" for query in endpoint.query]
        sent += [f"`{name}`" for name in endpoint.headers]
        sent += {
            "worker": [],
            "key": ["key"],
            "none": ["no token"],
            "admin": ["organiser's token"],
        }[endpoint.auth]
        reply = endpoint.gives or _reply(endpoint.reply)
        path = f"{endpoint.method} `{endpoint.path}`"
        rows.append(f"| {path} | {', '.join(sent)} | {reply} | {endpoint.summary} |")
    return "\n".join(rows) + "\n"


def _reply(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"`list of {kind.__args__[0].__name__}`"
    return "204" if kind is NOTHING else f"`{getattr(kind, '__name__', str(kind))}`"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(tables(Path(name).read_text("utf-8")), "utf-8")
