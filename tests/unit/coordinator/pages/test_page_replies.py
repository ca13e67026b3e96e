"""Replies of the page: a file that lies elsewhere."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from coordinator.pages.page_replies import send_file
from coordinator.storage.blobs import DiskBlobs


class Elsewhere(DiskBlobs):
    """A store that volunteers reach."""

    @override
    async def url(self, sha256: str) -> str:
        return f"https://store.example/{sha256}?signature"


async def test_a_signed_address_is_not_kept(tmp_path: Path) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await send_file({"method": "GET"}, send, Elsewhere(tmp_path), "ab" * 32)
    headers = dict(sent[0]["headers"])
    assert (sent[0]["status"], headers[b"cache-control"]) == (302, b"no-store")
    assert headers[b"location"].startswith(b"https://store.example/")
