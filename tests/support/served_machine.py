"""Whole volunteers of this process before coordinators of other processes, which may be killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
from typing_extensions import override

from tests.support.local_coordinator import LocalCoordinator
from tests.support.local_volunteer import URL, LocalMachine


class Balanced(httpx.AsyncBaseTransport):
    """The way to the first of several coordinators that takes a connection, as behind a load
    balancer; none does while all are away.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = list(ports)
        self._inner = httpx.AsyncHTTPTransport()

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for port in list(self._ports):
            request.url = request.url.copy_with(port=port)
            try:
                return await self._inner.handle_async_request(request)
            except httpx.ConnectError:
                self._ports.append(self._ports.pop(0))
        raise httpx.ConnectError("nobody listens")

    @override
    async def aclose(self) -> None:
        await self._inner.aclose()


class _Away:
    """A coordinator elsewhere, as far as a machine asks for it."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport


class ServedMachine(LocalMachine):
    """One machine that is lent to coordinators of other processes."""

    def __init__(self, path: Path, transport: httpx.AsyncBaseTransport, fingerprint: str) -> None:
        super().__init__(path, cast("LocalCoordinator", cast("Any", _Away(transport))))
        self._fingerprint = fingerprint

    @property
    @override
    def link(self) -> str:
        return f"{URL}/join#key={self._fingerprint}"
