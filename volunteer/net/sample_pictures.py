"""The picture that a version drew, whole, to look at."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from shared.errors import BadRequest, NotFound
from shared.protocol import endpoints
from shared.protocol.endpoints import Endpoint
from shared.sentences import Sentence
from volunteer.net.api import Api
from volunteer.net.transfers import Transfers

T = TypeVar("T")

PICTURE_BYTES_MAX = 2 << 20  # of a PNG: base64 of it fits a line of the control socket


async def sample_picture(api: Api, transfers: Transfers, run: str, version: int) -> bytes:
    """Return the PNG that a version drew, from the cache where it was looked at before.

    Raises NotFound for a version without one, BadRequest for one that is too large.
    """
    rows = await api.query(endpoints.VERSIONS, run=run, cursor=version - 1 if version > 0 else "")
    ref = next((row.picture for row in rows if row.version == version), None)
    if ref is None:
        raise NotFound(
            Sentence("version {version} of {run} has no picture", version=version, run=run[:64])
        )
    if ref.size > PICTURE_BYTES_MAX:
        raise BadRequest(
            Sentence("the picture of version {version} is too large to be shown", version=version)
        )
    path = await transfers.fetch(ref, lambda _: None)
    return await asyncio.to_thread(path.read_bytes)


class Asking:
    """Queries and pictures of a coordinator, for who has no running volunteer to ask."""

    def __init__(self, api: Api, transfers: Transfers) -> None:
        self._api = api
        self._transfers = transfers

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T:
        """Return the reply to a read-only query."""
        return await self._api.query(endpoint, **args)

    async def picture(self, run: str, version: int) -> bytes:
        """Return the PNG that a version drew."""
        return await sample_picture(self._api, self._transfers, run, version)
