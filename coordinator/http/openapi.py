"""The OpenAPI document, made from the same table as the routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from shared.errors import BY_CODE
from shared.protocol.base import ErrorBody
from shared.protocol.limits import PROTOCOL

if TYPE_CHECKING:
    from coordinator.http.routes.endpoint import Endpoint

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")
_NUMBERS = frozenset({"task", "version", "contribution"})


@lru_cache(maxsize=2)
def document(endpoints: tuple[Endpoint, ...]) -> dict[str, Any]:
    """OpenAPI 3.1 for the given routes."""
    types = [kind for e in endpoints for kind in (e.request, e.reply) if kind is not None]
    _, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
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
                "admin": {"type": "http", "scheme": "bearer", "description": "admin.<token>"},
            },
        },
    }


def _schema(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', endpoint.path)}".rstrip(
            "_"
        ),
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


def _parameters(endpoint: Endpoint) -> Sequence[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in _PARAMETER.findall(endpoint.path):
        kind = "integer" if name in _NUMBERS else "string"
        found.append({"name": name, "in": "path", "required": True, "schema": {"type": kind}})
    for query in endpoint.query:
        kind = "integer" if query.kind is int else "string"
        found.append(
            {"name": query.name, "in": "query", "description": query.help, "schema": {"type": kind}}
        )
    text = {"type": "string"}
    found += [{"name": name, "in": "header", "schema": text} for name in endpoint.headers]
    return found


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.gives:
        content = {endpoint.gives: {"schema": {"type": "string", "format": "binary"}}}
        responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    elif endpoint.reply is None:
        responses = {"204": {"description": "Done."}}
    else:
        content = {"application/json": {"schema": _schema(endpoint.reply)}}
        responses = {"200": {"description": "Done.", "content": content}}
    codes = ", ".join(sorted(code for code, error in BY_CODE.items() if error.status >= 400))
    responses["default"] = {
        "description": f"Refused; `code` is one of {codes}.",
        "content": {"application/json": {"schema": _schema(ErrorBody)}},
    }
    return responses
