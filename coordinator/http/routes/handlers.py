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


def _answered(
    endpoint: Endpoint[R], handler: Callable[[Call[Any]], Awaitable[R | Reply]]
) -> tuple[Endpoint[Any], Handler]:
    """Return an endpoint with its handler, whose reply has the type that the endpoint names."""
    return endpoint, handler


HANDLERS: dict[Endpoint[Any], Handler] = dict(
    (
        _answered(endpoints.HEARTBEAT, workers.heartbeat),
        _answered(endpoints.REGISTER, workers.register),
        _answered(endpoints.CHALLENGE, workers.challenge),
        _answered(endpoints.BENCHMARK, workers.benchmark),
        _answered(endpoints.ME, workers.me),
        _answered(endpoints.LEAVE, workers.leave),
        _answered(endpoints.VISIBILITY, workers.visibility),
        _answered(endpoints.ORDER_MACHINE, workers.order),
        _answered(endpoints.LINK, workers.link),
        _answered(endpoints.CLAIM, workers.claim),
        _answered(endpoints.BEGIN, workers.begin),
        _answered(endpoints.RELEASE, workers.release),
        _answered(endpoints.SUBMIT, workers.submit),
        _answered(endpoints.UPLOAD, workers.create_upload),
        _answered(endpoints.UPLOAD_BYTES, workers.upload),
        _answered(endpoints.BLOB, blob_files.blob),
        _answered(endpoints.BLOB_URL, blob_files.blob_url),
        _answered(endpoints.RUNS, runs.listing),
        _answered(endpoints.RUN, runs.info),
        _answered(endpoints.CONSENT, workers.consent),
        _answered(endpoints.DECLARE_DATA, workers.declare_data),
        _answered(endpoints.WITHDRAW_DATA, workers.withdraw_data),
        _answered(endpoints.VERSIONS, runs.versions),
        _answered(endpoints.LATEST, runs.latest),
        _answered(endpoints.VERSION, runs.version),
        _answered(endpoints.LOSS, runs.loss),
        _answered(endpoints.WORKERS, runs.workers),
        _answered(endpoints.DATASET, runs.dataset),
        _answered(endpoints.LEADERBOARD, runs.leaderboard),
        _answered(endpoints.CONTRIBUTIONS, runs.history),
        _answered(endpoints.LEDGER, runs.ledger),
        _answered(endpoints.RECEIPTS, account_credits.receipts),
        _answered(endpoints.KEYS, account_credits.keys),
        _answered(endpoints.KEY_CREATE, account_credits.create_key),
        _answered(endpoints.KEY_REVOKE, account_credits.revoke_key),
        _answered(endpoints.USAGE, account_credits.usage),
        _answered(endpoints.GIVE, account_credits.give),
        _answered(endpoints.TREE_HEAD, account_credits.head),
        _answered(endpoints.CONSISTENCY, account_credits.consistency),
        _answered(endpoints.SERVER, operations.server),
        _answered(endpoints.WHEEL, operations.wheel),
        _answered(endpoints.OPENAPI, _openapi),
        _answered(endpoints.HEALTH, operations.health),
        _answered(endpoints.READY, operations.ready),
        _answered(endpoints.METRICS, operations.metrics),
        _answered(endpoints.ANSWER_OFFER, workers.offer),
        _answered(endpoints.ANSWER_TOKENS, workers.answer_tokens),
        _answered(endpoints.ADMIN_COMMAND, operations.run_command),
        _answered(endpoints.ADMIN_PUT, operations.put_file),
        _answered(endpoints.ADMIN_GET, operations.get_file),
        _answered(endpoints.ADMIN_BLOB, blob_files.any_blob),
    )
)
