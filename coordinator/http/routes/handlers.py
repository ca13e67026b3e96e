"""Handlers of endpoints that need more than one service method; all other endpoints name their
method.
"""

from __future__ import annotations

from typing import Any

from coordinator.http.openapi import document
from coordinator.http.routes import blob_files, operations, runs, workers
from coordinator.http.routes.endpoint_app import Call, Handler, Reply, json_reply
from shared.protocol import endpoints
from shared.protocol.endpoint import Endpoint
from shared.protocol.endpoints import V1


async def _openapi(_: Call[None]) -> Reply:
    return json_reply(document((*endpoints.ENDPOINTS, *V1)))


HANDLERS: dict[Endpoint[Any], Handler] = {
    endpoints.REGISTER: workers.register,
    endpoints.VISIBILITY: workers.visibility,
    endpoints.ORDER_MACHINE: workers.order,
    endpoints.LINK: workers.link,
    endpoints.CLAIM: workers.claim,
    endpoints.BEGIN: workers.begin,
    endpoints.ANSWER_OFFER: workers.offer,
    endpoints.ANSWER_TOKENS: workers.answer_tokens,
    endpoints.SUBMIT: workers.submit,
    endpoints.HEARTBEAT: workers.heartbeat,
    endpoints.UPLOAD_BYTES: workers.upload,
    endpoints.BLOB: blob_files.blob,
    endpoints.BLOB_URL: blob_files.blob_url,
    endpoints.VERSIONS: runs.versions,
    endpoints.LATEST: runs.latest,
    endpoints.VERSION: runs.version,
    endpoints.LEADERBOARD: runs.leaderboard,
    endpoints.CONTRIBUTIONS: runs.history,
    endpoints.LEDGER: runs.ledger,
    endpoints.WHEEL: operations.wheel,
    endpoints.OPENAPI: _openapi,
    endpoints.HEALTH: operations.health,
    endpoints.READY: operations.ready,
    endpoints.METRICS: operations.metrics,
    endpoints.ADMIN_COMMAND: operations.run_command,
    endpoints.ADMIN_PUT: operations.put_file,
    endpoints.ADMIN_GET: operations.get_file,
    endpoints.ADMIN_BLOB: blob_files.any_blob,
}
