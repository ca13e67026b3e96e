"""Delivery of an alert: a POST of JSON to the webhook."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec

from shared.errors import why
from shared.text import printable

if TYPE_CHECKING:
    from coordinator.upkeep.alerts import Alert

SEND_S = 10.0


async def deliver(webhook: str, alert: Alert) -> str:
    """Send an alert; return what went wrong, or "", also where no webhook is set (any more)."""
    if not webhook:
        return ""
    try:
        await asyncio.to_thread(_post, webhook, alert)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return (why(error) if isinstance(error, OSError) else str(error))[:500] or repr(error)
    return ""


def _post(webhook: str, alert: Alert) -> None:
    """Raises URLError, HTTPException, OSError."""
    over = "over: " if alert.state == "over" else ""
    line = printable(f"{alert.server}: {over}{alert.message}", 1000)
    # Chats read one of the two: `text` most of them, `content` Discord.
    body = msgspec.structs.asdict(alert) | {"text": line, "content": line}
    request = urllib.request.Request(  # http or https, checked by the settings
        webhook,
        data=msgspec.json.encode(body),
        headers={"Content-Type": "application/json", "User-Agent": "volunteer-coordinator"},
    )
    with urllib.request.urlopen(request, timeout=SEND_S) as reply:
        reply.read(1)
