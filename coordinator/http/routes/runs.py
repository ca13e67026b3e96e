"""Runs, their versions, figures, rankings and data; verdicts and credits of a volunteer."""

from __future__ import annotations

from coordinator.http.routes.endpoint_app import Call, Reply, json_reply
from shared.decoding import decode
from shared.protocol.accounts import RunInfo, WorkerInfo
from shared.protocol.endpoint import INTEGER_MAX
from shared.protocol.listings import LeaderRow, LedgerRow, LossPoint
from shared.protocol.versions import SignedManifest, VersionInfo, VersionManifest
from shared.workloads.base import DatasetManifest


async def listing(call: Call[None]) -> tuple[RunInfo, ...]:
    return await call.coordinator.runs.queries.listing()


async def info(call: Call[None]) -> RunInfo:
    return await call.coordinator.runs.queries.info(call.text("run"))


async def loss(call: Call[None]) -> tuple[LossPoint, ...]:
    return await call.coordinator.runs.queries.loss_history(call.text("run"))


async def workers(call: Call[None]) -> tuple[WorkerInfo, ...]:
    return await call.coordinator.runs.queries.workers(call.text("run"))


async def dataset(call: Call[None]) -> DatasetManifest:
    return await call.coordinator.datasets.manifest(call.text("dataset"))


async def versions(call: Call[None]) -> tuple[VersionInfo, ...]:
    after = call.query_number("cursor")
    return await call.coordinator.runs.queries.versions(
        call.text("run"),
        after=-1 if after is None else min(after, INTEGER_MAX),
        volunteer_id=call.principal.volunteer_id,
    )


async def latest(call: Call[None]) -> Reply:
    return _signed(call, await call.coordinator.runs.queries.manifest(call.text("run")))


async def version(call: Call[None]) -> Reply:
    signed = await call.coordinator.runs.queries.manifest(call.text("run"), call.number("version"))
    return _signed(call, signed)


def _signed(call: Call[None], signed: SignedManifest) -> Reply:
    """Return a signed manifest with the hash of the published weights as ETag; status 304 for a
    client that has these weights.
    """
    weights = decode(signed.payload, VersionManifest).weights
    tag = f'"{weights.sha256}"'
    headers = (("etag", tag), ("cache-control", "no-cache"))
    if tag in call.header("if-none-match"):
        return Reply(status=304, headers=headers)
    return json_reply(signed, headers=headers)


async def leaderboard(call: Call[None]) -> tuple[LeaderRow, ...]:
    return await call.coordinator.volunteers.leaderboard(
        call.query("run") or None, call.query_number("days"), call.principal.volunteer_id
    )


async def history(call: Call[None]) -> Reply:
    rows = await call.coordinator.intake.history(call.principal, call.query_number("cursor"))
    headers = (("next-cursor", str(rows[-1][0])),) if rows else ()
    return json_reply([verdict for _, verdict in rows], headers=headers)


async def ledger(call: Call[None]) -> tuple[LedgerRow, ...]:
    return await call.coordinator.ledger.history(
        call.principal.volunteer_id, call.query_number("cursor")
    )
