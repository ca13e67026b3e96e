"""How much was sent and received, told every few seconds while it moves."""

from __future__ import annotations

from volunteer import events
from volunteer.parts import Parts

TRAFFIC_S = 10.0


async def keep_counting(parts: Parts) -> None:
    """Emit the counts when they have changed, until cancelled."""
    client, told = parts.api.client, (0, 0)
    while True:
        now = (client.sent_bytes, client.received_bytes)
        if now != told:
            told = now
            parts.hub.emit(
                events.Traffic(
                    sent_bytes=now[0],
                    received_bytes=now[1],
                    up_bytes_per_s=parts.transfers.up_bytes_per_s,
                    down_bytes_per_s=parts.transfers.down_bytes_per_s,
                )
            )
        await parts.clock.sleep(TRAFFIC_S)
