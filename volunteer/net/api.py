"""Calls of the coordinator's endpoints (`shared.protocol.endpoints`) by workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidFrame, Unavailable, VolunteerError
from shared.network.links import format_link, parse_link
from shared.protocol import endpoints
from shared.protocol.accounts import LinkCode, SignedWheel
from shared.protocol.endpoint import Endpoint
from shared.protocol.inference import AnswerTokens
from shared.protocol.leases import BeginReply, BeginRequest, ClaimReply, ClaimRequest
from shared.protocol.limits import LONG_POLL_S_MAX
from shared.sentences import Sentence
from volunteer.net.client import ApiCall, Client

ASK_S = 15.0  # patience of a request that a person waits for
SHORT_S = 5.0  # patience of a request that may fail without harm
HELD_S = 20.0  # longest delay of a long poll's reply after its wait
POLL_S = LONG_POLL_S_MAX + HELD_S  # time limit of a long poll

CURSOR_CHARS_MAX = 64

T = TypeVar("T")
Body = msgspec.Struct | Callable[[], msgspec.Struct]


class Api:
    """Calls of the coordinator's endpoints: `call` for any endpoint, and methods for endpoints that
    need a time limit or a check of their own.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T:
        """Return the reply to a read-only query; `args` are parameters of path and query."""
        return (await self.page(endpoint, **args))[0]

    async def page(self, endpoint: Endpoint[T], **args: str | int) -> tuple[T, str]:
        """Return one page of a listing and the cursor of the next page; "" after the last page."""
        cursor = ""

        def read(headers: Mapping[str, str]) -> None:
            nonlocal cursor
            cursor = headers.get("next-cursor", "")[:CURSOR_CHARS_MAX]

        reply = await self.call(endpoint, args, patience_s=ASK_S, headers=read)
        return reply, cursor

    async def call(
        self,
        endpoint: Endpoint[T],
        args: Mapping[str, str | int] | None = None,
        body: Body | None = None,
        **options: Any,
    ) -> T:
        """Call an endpoint until it answers; `options` are fields of `ApiCall`, such as the
        patience. A body that is a function is made anew at every try.
        """
        path, query = endpoint.address(args or {})
        call = ApiCall(
            method=endpoint.method,
            path=self.client.address.url + path if endpoint.root else path,
            reply=endpoint.reply,
            body=body,
            query=query,
            secret=endpoint.auth != "none" or body is not None,
            bytes_max=endpoint.bytes_max,
            **options,
        )
        return await self.client.call(call)

    async def wheel(self, wheel: SignedWheel) -> bytes:
        """Return the bytes of a wheel. Raises InvalidFrame if it is larger than announced."""
        path, _ = endpoints.WHEEL.address({"name": wheel.name})
        data = bytearray()
        async with self.client.stream(self.client.address.url + path, {}) as reply:
            async for piece in reply.body:
                data += piece
                if len(data) > wheel.size:
                    raise InvalidFrame(Sentence("the package is larger than announced"))
        return bytes(data)

    async def link_code(self) -> LinkCode:
        """Return a code for another machine. Its link is written anew, since a person types it into
        a shell. Raises BadRequest for a link that is none.
        """
        code = await self.call(endpoints.LINK, patience_s=ASK_S)
        return msgspec.structs.replace(code, link=format_link(parse_link(code.link)))

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        """Claim a task. Raises Unavailable for a reply with neither a lease nor a reason."""
        limit_s = request.wait_s + HELD_S
        reply = await self.call(endpoints.CLAIM, body=request, timeout_s=limit_s)
        if reply.lease is None and reply.idle is None:
            raise Unavailable(Sentence("the coordinator sent an empty reply to a claim"))
        return reply

    async def begin(self, task: int, attempt: int, newest_version: int | None = None) -> BeginReply:
        """Begin a task. If a running merge makes the version that this task needs, the coordinator
        replies after the merge.

        `newest_version` is the newest version on this machine, from which running work can
        continue.
        """
        request = BeginRequest(
            attempt=attempt, newest=newest_version is not None, known=newest_version
        )
        return await self.call(endpoints.BEGIN, {"task": task}, request, timeout_s=POLL_S)

    async def answer_tokens(self, answer: str, sent: AnswerTokens) -> bool:
        """Send the next tokens of an answer; return False when no more are wanted."""
        where = {"answer": answer}
        return (await self.call(endpoints.ANSWER_TOKENS, where, sent, patience_s=SHORT_S)).go_on

    async def blob_url(self, sha256: str) -> str:
        """Return the URL of a blob in the object store; "" if volunteers cannot reach the store, or
        the request fails.
        """
        try:
            return (await self.call(endpoints.BLOB_URL, {"sha256": sha256}, patience_s=0)).url
        except VolunteerError:
            return ""
