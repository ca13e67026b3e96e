"""Handler of every endpoint below /api/v1 and at the root."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from coordinator.http.openapi import document
from coordinator.http.routes import blob_files, operations, runs, workers
from coordinator.http.routes.endpoint_app import Call, Handler, Reply, json_reply
from shared.protocol import endpoints
from shared.protocol.endpoint import Endpoint
from shared.protocol.endpoints import V1
from shared.protocol.inference import KeyInfo, KeyRequest, NewKey, UsageRow
from shared.protocol.transparency import SignedHead, SignedReceipt, TreeProof

R = TypeVar("R")


async def _keys(call: Call[None]) -> tuple[KeyInfo, ...]:
    return await call.coordinator.api_keys.listing(call.principal)


async def _create_key(call: Call[KeyRequest]) -> NewKey:
    return await call.coordinator.api_keys.create(call.principal, call.body)


async def _revoke_key(call: Call[None]) -> KeyInfo:
    return await call.coordinator.api_keys.revoke(call.principal, call.number("key"))


async def _usage(call: Call[None]) -> tuple[UsageRow, ...]:
    return await call.coordinator.api_keys.usage(call.principal, key=call.query_number("key"))


async def _receipts(call: Call[None]) -> tuple[SignedReceipt, ...]:
    transparency = call.coordinator.transparency
    return await transparency.receipts(call.principal, call.query_number("cursor"))


async def _head(call: Call[None]) -> SignedHead:
    return await call.coordinator.transparency.head()


async def _consistency(call: Call[None]) -> TreeProof:
    transparency = call.coordinator.transparency
    return await transparency.consistency(call.query_number("old"), call.query_number("new"))


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
        _answered(endpoints.VERSIONS, runs.versions),
        _answered(endpoints.LATEST, runs.latest),
        _answered(endpoints.VERSION, runs.version),
        _answered(endpoints.LOSS, runs.loss),
        _answered(endpoints.WORKERS, runs.workers),
        _answered(endpoints.DATASET, runs.dataset),
        _answered(endpoints.LEADERBOARD, runs.leaderboard),
        _answered(endpoints.CONTRIBUTIONS, runs.history),
        _answered(endpoints.LEDGER, runs.ledger),
        _answered(endpoints.RECEIPTS, _receipts),
        _answered(endpoints.KEYS, _keys),
        _answered(endpoints.KEY_CREATE, _create_key),
        _answered(endpoints.KEY_REVOKE, _revoke_key),
        _answered(endpoints.USAGE, _usage),
        _answered(endpoints.TREE_HEAD, _head),
        _answered(endpoints.CONSISTENCY, _consistency),
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
