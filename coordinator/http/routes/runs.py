"""Runs, their versions and figures, and who is how far."""

from __future__ import annotations

from coordinator.http.routes.endpoint import Call, Reply, json_reply
from shared.decoding import decode
from shared.protocol.accounts import RunInfo, WorkerInfo
from shared.protocol.heartbeat import LeaderRow, LossPoint, Summary
from shared.protocol.work import SignedManifest, VersionInfo, VersionManifest
from shared.workloads.base import DatasetManifest


async def listing(call: Call[None]) -> tuple[RunInfo, ...]:
    return await call.coordinator.runs.listing()


async def info(call: Call[None]) -> RunInfo:
    return await call.coordinator.runs.info(call.text("run"))


async def consent(call: Call[None]) -> None:
    await call.coordinator.volunteers.consent(call.principal, call.text("run"))


async def versions(call: Call[None]) -> tuple[VersionInfo, ...]:
    after = call.query_number("cursor")
    return await call.coordinator.runs.versions(
        call.text("run"),
        after=-1 if after is None else after,
        volunteer_id=call.principal.volunteer_id,
    )


async def latest(call: Call[None]) -> Reply:
    return _signed(call, await call.coordinator.runs.manifest(call.text("run")))


async def version(call: Call[None]) -> Reply:
    found = await call.coordinator.runs.manifest(call.text("run"), call.number("version"))
    return _signed(call, found)


def _signed(call: Call[None], signed: SignedManifest) -> Reply:
    """With the hash of the published weights as ETag: who has them need not hear of them again."""
    weights = decode(signed.payload, VersionManifest).weights
    tag = f'"{weights.sha256}"'
    headers = (("etag", tag), ("cache-control", "no-cache"))
    if tag in call.header("if-none-match"):
        return Reply(status=304, headers=headers)
    return json_reply(signed, headers=headers)


async def summary(call: Call[None]) -> Summary:
    traffic = call.coordinator.traffic
    return await call.coordinator.runs.summary(
        call.text("run"), traffic.bytes_in, traffic.bytes_out
    )


async def loss(call: Call[None]) -> tuple[LossPoint, ...]:
    return await call.coordinator.runs.loss_history(call.text("run"))


async def workers(call: Call[None]) -> tuple[WorkerInfo, ...]:
    return await call.coordinator.runs.workers(call.text("run"))


async def leaderboard(call: Call[None]) -> tuple[LeaderRow, ...]:
    return await call.coordinator.volunteers.leaderboard(
        call.query("run") or None, call.query_number("days"), call.principal.volunteer_id
    )


async def dataset(call: Call[None]) -> DatasetManifest:
    return await call.coordinator.datasets.manifest(call.text("dataset"))
