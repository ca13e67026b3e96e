"""Handler of every endpoint below /api/v1 and at the root."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from coordinator.http.openapi import document
from coordinator.http.routes import account_credits, blob_files, operations, runs, workers
from coordinator.http.routes.endpoint_app import Call, Handler, Reply, json_reply
from shared.protocol import endpoints
from shared.protocol.endpoint import Endpoint
from shared.protocol.endpoints import V1

R = TypeVar("R")


async def _openapi(_: Call[None]) -> Reply:
    return json_reply(document((*endpoints.ENDPOINTS, *V1)))


def _route(
    endpoint: Endpoint[R], handler: Callable[[Call[Any]], Awaitable[R | Reply]]
) -> tuple[Endpoint[Any], Handler]:
    """Return an endpoint with its handler, whose reply has the type that the endpoint names."""
    return endpoint, handler


HANDLERS: dict[Endpoint[Any], Handler] = dict(
    (
        _route(endpoints.HEARTBEAT, workers.heartbeat),
        _route(endpoints.REGISTER, workers.register),
        _route(endpoints.CHALLENGE, workers.challenge),
        _route(endpoints.BENCHMARK, workers.benchmark),
        _route(endpoints.ME, workers.me),
        _route(endpoints.LEAVE, workers.leave),
        _route(endpoints.VISIBILITY, workers.visibility),
        _route(endpoints.ORDER_MACHINE, workers.order),
        _route(endpoints.LINK, workers.link),
        _route(endpoints.CLAIM, workers.claim),
        _route(endpoints.BEGIN, workers.begin),
        _route(endpoints.RELEASE, workers.release),
        _route(endpoints.SUBMIT, workers.submit),
        _route(endpoints.UPLOAD, workers.create_upload),
        _route(endpoints.UPLOAD_BYTES, workers.upload),
        _route(endpoints.BLOB, blob_files.blob),
        _route(endpoints.BLOB_URL, blob_files.blob_url),
        _route(endpoints.RUNS, runs.listing),
        _route(endpoints.RUN, runs.info),
        _route(endpoints.CONSENT, workers.consent),
        _route(endpoints.DECLARE_DATA, workers.declare_data),
        _route(endpoints.WITHDRAW_DATA, workers.withdraw_data),
        _route(endpoints.VERSIONS, runs.versions),
        _route(endpoints.LATEST, runs.latest),
        _route(endpoints.VERSION, runs.version),
        _route(endpoints.LOSS, runs.loss),
        _route(endpoints.WORKERS, runs.workers),
        _route(endpoints.DATASET, runs.dataset),
        _route(endpoints.LEADERBOARD, runs.leaderboard),
        _route(endpoints.CONTRIBUTIONS, runs.history),
        _route(endpoints.LEDGER, runs.ledger),
        _route(endpoints.RECEIPTS, account_credits.receipts),
        _route(endpoints.KEYS, account_credits.keys),
        _route(endpoints.KEY_CREATE, account_credits.create_key),
        _route(endpoints.KEY_REVOKE, account_credits.revoke_key),
        _route(endpoints.USAGE, account_credits.usage),
        _route(endpoints.GIVE, account_credits.give),
        _route(endpoints.TREE_HEAD, account_credits.head),
        _route(endpoints.CONSISTENCY, account_credits.consistency),
        _route(endpoints.SERVER, operations.server),
        _route(endpoints.WHEEL, operations.wheel),
        _route(endpoints.OPENAPI, _openapi),
        _route(endpoints.HEALTH, operations.health),
        _route(endpoints.READY, operations.ready),
        _route(endpoints.METRICS, operations.metrics),
        _route(endpoints.ANSWER_OFFER, workers.offer),
        _route(endpoints.ANSWER_TOKENS, workers.answer_tokens),
        _route(endpoints.ADMIN_COMMAND, operations.run_command),
        _route(endpoints.ADMIN_PUT, operations.put_file),
        _route(endpoints.ADMIN_GET, operations.get_file),
        _route(endpoints.ADMIN_BLOB, blob_files.any_blob),
    )
)
