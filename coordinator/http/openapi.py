"""OpenAPI document and the tables of docs/http-api.md, made from the list of endpoints.

    python -m coordinator.http.openapi docs/http-api.md

writes the tables of that page anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import BY_CODE
from shared.protocol.base import ErrorBody
from shared.protocol.endpoints import ENDPOINTS, NOTHING, NUMBERS, Endpoint
from shared.protocol.inference import OpenAiErrorBody
from shared.protocol.limits import PROTOCOL

_REF = "#/components/schemas/{name}"
_BETWEEN = r"(<!-- {name}: .*? -->\n).*?(<!-- end -->)"


@lru_cache(maxsize=2)
def document(endpoints: tuple[Endpoint[Any], ...]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these endpoints."""
    types = [
        kind for e in endpoints for kind in (e.request, e.reply) if kind not in (None, NOTHING)
    ]
    _, components = msgspec.json.schema_components(
        [*types, ErrorBody, OpenAiErrorBody], ref_template=_REF
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.full_path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "volunteer coordinator", "version": f"{PROTOCOL}"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "worker": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "<worker id>.<secret>",
                },
                "key": {"type": "http", "scheme": "bearer", "description": "vk-..."},
                "admin": {"type": "http", "scheme": "bearer", "description": "admin.<token>"},
            },
        },
    }


def _schema(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _operation(endpoint: Endpoint[Any]) -> dict[str, Any]:
    words = re.sub(r"[^a-zA-Z0-9]+", "_", endpoint.full_path)
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": (endpoint.method.lower() + words).rstrip("_"),
        "parameters": _parameters(endpoint),
        "responses": _responses(endpoint),
    }
    if endpoint.auth != "none":
        operation["security"] = [{endpoint.auth: []}]
    if endpoint.request is not None:
        content = {"application/json": {"schema": _schema(endpoint.request)}}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.sends:
        content = {endpoint.sends: {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(endpoint: Endpoint[Any]) -> Sequence[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in endpoint.parameters:
        kind = "integer" if name in NUMBERS else "string"
        found.append({"name": name, "in": "path", "required": True, "schema": {"type": kind}})
    for query in endpoint.query:
        kind = "integer" if query.kind is int else "string"
        found.append(
            {"name": query.name, "in": "query", "description": query.help, "schema": {"type": kind}}
        )
    text = {"type": "string"}
    found += [{"name": name, "in": "header", "schema": text} for name in endpoint.headers]
    return found


def _responses(endpoint: Endpoint[Any]) -> dict[str, Any]:
    if endpoint.gives:
        content = {endpoint.gives: {"schema": {"type": "string", "format": "binary"}}}
        responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    elif endpoint.reply is NOTHING:
        responses = {"204": {"description": "Done."}}
    else:
        content = {"application/json": {"schema": _schema(endpoint.reply)}}
        responses = {"200": {"description": "Done.", "content": content}}
    codes = ", ".join(sorted(code for code, error in BY_CODE.items() if error.status >= 400))
    responses["default"] = {
        "description": f"Refused; `code` is one of {codes}.",
        "content": {
            "application/json": {
                "schema": _schema(OpenAiErrorBody if endpoint.auth == "key" else ErrorBody)
            }
        },
    }
    return responses


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
        reply = endpoint.gives or (f"`{endpoint.reply_name}`" if endpoint.reply_name else "204")
        path = f"{endpoint.method} `{endpoint.path}`"
        rows.append(f"| {path} | {', '.join(sent)} | {reply} | {endpoint.summary} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(tables(Path(name).read_text("utf-8")), "utf-8")
