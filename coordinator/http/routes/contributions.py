"""What a volunteer handed in, and what it earned."""

from __future__ import annotations

from coordinator.http.routes.endpoint import Call, Reply, json_reply
from shared.protocol.heartbeat import LedgerRow
from shared.protocol.work import Verdict


async def history(call: Call[None]) -> Reply:
    rows = await call.coordinator.intake.history(call.principal, call.query_number("cursor"))
    headers = (("next-cursor", str(rows[-1][0])),) if rows else ()
    return json_reply([verdict for _, verdict in rows], headers=headers)


async def verdict(call: Call[None]) -> Verdict:
    return await call.coordinator.intake.verdict(call.principal, call.number("contribution"))


async def ledger(call: Call[None]) -> tuple[LedgerRow, ...]:
    return await call.coordinator.ledger.history(
        call.principal.volunteer_id, call.query_number("cursor")
    )
