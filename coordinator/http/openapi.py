"""OpenAPI document, made from the list of endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from shared.errors import BY_CODE
from shared.protocol.base import ErrorBody
from shared.protocol.endpoint import NOTHING, NUMBERS, Endpoint
from shared.protocol.inference import OpenAiErrorBody
from shared.protocol.protocol_version import PROTOCOL

_REF = "#/components/schemas/{name}"
_BYTES = {"schema": {"type": "string", "format": "binary"}}


def _any_json(kind: type) -> dict[str, object]:
    """Return the schema of `object`: any JSON."""
    if kind is not object:
        raise NotImplementedError(kind)  # msgspec turns this into an error that names the type
    return {"description": "Any JSON."}  # not empty, since msgspec takes {} for a missing schema


@lru_cache(maxsize=2)
def document(endpoints: tuple[Endpoint[Any], ...]) -> dict[str, object]:
    """Return the OpenAPI 3.1 document of these endpoints."""
    types = [
        kind for e in endpoints for kind in (e.request, e.reply) if kind not in (None, NOTHING)
    ]
    _, components = msgspec.json.schema_components(
        [*types, ErrorBody, OpenAiErrorBody], ref_template=_REF, schema_hook=_any_json
    )
    paths: dict[str, dict[str, object]] = {}
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


def _json(kind: object) -> dict[str, object]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF, schema_hook=_any_json)
    return {"application/json": {"schema": schema}}


def _operation(endpoint: Endpoint[Any]) -> dict[str, object]:
    words = re.sub(r"[^a-zA-Z0-9]+", "_", endpoint.full_path)
    operation: dict[str, object] = {
        "summary": endpoint.summary,
        "operationId": (endpoint.method.lower() + words).rstrip("_"),
        "parameters": _parameters(endpoint),
        "responses": _responses(endpoint),
    }
    if endpoint.auth != "none":
        operation["security"] = [{endpoint.auth: []}]
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.request)}
    elif endpoint.sends:
        operation["requestBody"] = {"required": True, "content": {endpoint.sends: _BYTES}}
    return operation


def _parameters(endpoint: Endpoint[Any]) -> Sequence[dict[str, object]]:
    parameters: list[dict[str, object]] = []
    for name in endpoint.parameters:
        kind = "integer" if name in NUMBERS else "string"
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": kind}})
    for query in endpoint.query:
        kind = "integer" if query.kind is int else "string"
        parameters.append(
            {"name": query.name, "in": "query", "description": query.help, "schema": {"type": kind}}
        )
    text = {"type": "string"}
    parameters += [{"name": name, "in": "header", "schema": text} for name in endpoint.headers]
    return parameters


def _responses(endpoint: Endpoint[Any]) -> dict[str, object]:
    responses: dict[str, object] = {"204": {"description": "Done."}}
    if endpoint.gives or endpoint.reply is not NOTHING:
        content = {endpoint.gives: _BYTES} if endpoint.gives else _json(endpoint.reply)
        responses = {"200": {"description": "Done.", "content": content}}
    codes = ", ".join(sorted(code for code, error in BY_CODE.items() if error.status >= 400))
    responses["default"] = {
        "description": f"Refused; `code` is one of {codes}.",
        "content": _json(OpenAiErrorBody if endpoint.auth == "key" else ErrorBody),
    }
    return responses
