"""Endpoint as an ASGI application: authentication, limits, decoding, encoding and counting for all
routes.

A handler gets a `Call` and returns the reply.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from coordinator.accounts.server_identity import ADMIN
from coordinator.request_body import (
    INTEGER_DIGITS_MAX,
    ClientGone,
    Receive,
    Scope,
    Send,
    header,
    raw_header,
    read_body,
    read_message,
    until_gone,
)
from coordinator.rules.networks import address_key
from coordinator.storage.blobs import Pieces
from shared.errors import BadRequest, NotFound, Unauthorized, VolunteerError
from shared.network.links import is_loopback
from shared.protocol.base import ErrorBody
from shared.protocol.endpoint import KEY_MAX, NUMBERS, Endpoint
from shared.protocol.protocol_version import HEADER, check_header
from shared.sentences import encode_english

if TYPE_CHECKING:
    from coordinator.accounts.accounts import Principal
    from coordinator.services import Coordinator

Body = TypeVar("Body")

_NUMBER = re.compile(rf"[0-9]{{1,{INTEGER_DIGITS_MAX}}}")
_encode = msgspec.json.Encoder(enc_hook=encode_english).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Reply of a handler that sets more than a struct: a status, headers, bytes, or a stream of
    `size` bytes.
    """

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    stream: Pieces | None = None
    size: int = 0


class Call(Generic[Body]):
    """One request as a handler receives it."""

    __slots__ = ("_params", "_principal", "_query", "body", "coordinator", "receive", "scope")

    def __init__(
        self,
        coordinator: Coordinator,
        scope: Scope,
        receive: Receive,
        principal: Principal | None,
        body: Body,
    ) -> None:
        self.coordinator = coordinator
        self.scope = scope
        self.receive = receive
        self.body = body
        self._principal = principal
        self._params: dict[str, str] = scope["path_params"]
        self._query: dict[str, str] | None = None

    @property
    def principal(self) -> Principal:
        """Return the calling worker. Only for endpoints of workers. Raises Unauthorized where the
        endpoint needs no token.
        """
        if self._principal is None:
            raise Unauthorized("this needs the token of a worker")
        return self._principal

    @property
    def address(self) -> str:
        """Return the client's address, from the proxy's header where the proxy is trusted; "" =
        unknown.
        """
        client = self.scope.get("client")
        return client[0] if client else ""

    def text(self, name: str) -> str:
        """Return a part of the path."""
        return self._params[name]

    def number(self, name: str) -> int:
        """Return a part of the path that is a number. Raises NotFound for anything else."""
        text = self._params[name]
        if not _NUMBER.fullmatch(text) or int(text) > NUMBERS[name]:
            raise NotFound(f'there is no {name} "{text[:40]}"')
        return int(text)

    def query(self, name: str) -> str:
        """Return a query parameter, or "". Raises BadRequest for a query string out of bounds."""
        if self._query is None:
            raw = self.scope.get("query_string", b"").decode("latin-1")
            try:
                self._query = dict(parse_qsl(raw, max_num_fields=20))
            except ValueError as error:
                raise BadRequest("the query string has too many fields") from error
            if "%00" in raw or "\0" in raw:
                raise BadRequest("the query string holds the character NUL")
        return self._query.get(name, "")

    def query_number(self, name: str) -> int | None:
        """Return a numeric query parameter, at most its maximum, or None. Raises BadRequest."""
        text = self.query(name)
        if not text:
            return None
        if not _NUMBER.fullmatch(text):
            raise BadRequest(f'the query parameter "{name}" must be a number')
        return min(int(text), NUMBERS.get(name, KEY_MAX))

    def header(self, name: str) -> str:
        """Return a request header by its lower-case name, or ""."""
        return header(self.scope, name.encode())


Handler = Callable[[Call[Any]], Awaitable[Any]]


class EndpointApp:
    """Endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint[Any], coordinator: Coordinator, handler: Handler) -> None:
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._path = endpoint.full_path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, coordinator = self._endpoint, self._coordinator
        scope["endpoint_path"] = self._path
        principal = None
        if endpoint.auth == "worker":
            principal = await sign_in(scope, coordinator)
        elif endpoint.auth == "admin":
            check_admin(scope, coordinator)
        if endpoint.strict:
            coordinator.rates.hit("register", client_key(scope))
        if endpoint.writes:
            coordinator.space.check()
        body: Any = None
        if endpoint.request is not None:
            body = read_message(await read_body(scope, receive), endpoint.request)
        result = await self._handler(Call(coordinator, scope, receive, principal, body))
        if result is None:
            await respond(scope, receive, send, Reply(status=204))
        elif type(result) is Reply:
            await respond(scope, receive, send, result)
        else:
            await respond(scope, receive, send, json_reply(result))


def json_reply(
    value: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
) -> Reply:
    return Reply(
        status=status, headers=(("content-type", "application/json"), *headers), body=_encode(value)
    )


def error_reply(error: VolunteerError, request_id: str) -> Reply:
    """Return an error as a reply, in the form of all endpoints except the endpoints below /v1."""
    body = ErrorBody(
        message=error.message,
        retry_after_s=error.retry_after_s,
        code=error.code,
        request_id=request_id,
    )
    headers: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        headers = (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)
    if error.status == 401:
        headers = (*headers, ("www-authenticate", "Bearer"))
    return json_reply(body, error.status, headers)


async def respond(scope: Scope, receive: Receive, send: Send, reply: Reply) -> None:
    """Send a reply; a refusal ends the connection if the request's body was not read."""
    size = reply.size if reply.stream is not None else len(reply.body)
    headers = [(name.encode(), value.encode("latin-1")) for name, value in reply.headers]
    headers.append((b"x-request-id", scope.get("request_id", "").encode()))
    if reply.status not in (204, 304):
        headers.append((b"content-length", str(size).encode()))
    unread = scope["method"] in ("POST", "PUT") and not scope.get("body_read")
    if unread and reply.status >= 400:
        headers.append((b"connection", b"close"))
    scope["status"] = reply.status
    try:
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if reply.stream is not None and scope["method"] != "HEAD":
            await _send_stream(scope, receive, send, reply.stream)
        else:
            body = b"" if scope["method"] == "HEAD" else reply.body
            scope["sent"] = len(body)
            await send({"type": "http.response.body", "body": body})
    finally:
        if reply.stream is not None:
            await reply.stream.aclose()


async def _send_stream(scope: Scope, receive: Receive, send: Send, stream: Pieces) -> None:
    """Send a stream piece by piece. Raises ClientGone."""
    scope["sent"] = 0
    # The server silently drops data that is sent to a closed connection.
    disconnect = asyncio.ensure_future(until_gone(receive))
    try:
        async for piece in stream:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            scope["sent"] += len(piece)
            if disconnect.done():
                raise ClientGone
        await send({"type": "http.response.body", "body": b""})
    finally:
        disconnect.cancel()


def client_key(scope: Scope) -> str:
    """Return the key under which an address's requests are counted: an IPv6 /64 is one address."""
    client = scope.get("client")
    return address_key(client[0]) if client else ""


def _bearer(scope: Scope) -> tuple[str, str]:
    """Return the id and the secret of a worker's token. Raises Unauthorized."""
    kind, _, token = header(scope, b"authorization").partition(" ")
    who, _, secret = token.strip().partition(".")
    if kind.lower() != "bearer" or not who or not secret:
        raise Unauthorized("send the header Authorization: Bearer <worker id>.<secret>")
    return who, secret


async def sign_in(scope: Scope, coordinator: Coordinator) -> Principal:
    """Return the worker behind a request. Raises Unauthorized, Banned, TooManyRequests,
    UpgradeRequired, BadRequest.
    """
    principal = coordinator.volunteers.recall(raw_header(scope, b"authorization"))
    if principal is None:
        who, secret = _bearer(scope)
        if who == ADMIN:
            raise Unauthorized(
                "this is the organiser's token, and only a volunteer's machine may ask this"
            )
        principal = await coordinator.volunteers.authenticate(who, secret)
    coordinator.rates.hit("worker", principal.worker_id)
    check_header(header(scope, HEADER.lower().encode()))
    return principal


def check_admin(scope: Scope, coordinator: Coordinator) -> None:
    """Check the organiser's token. Raises Unauthorized."""
    who, secret = _bearer(scope)
    if who != ADMIN or not coordinator.server.is_admin(secret):
        raise Unauthorized(
            "this needs the organiser's token: the file admin.token of the data directory"
        )


def check_metrics(scope: Scope, coordinator: Coordinator) -> None:
    """Check the right to read the metrics: everybody on a loopback server or with `metrics =
    "public"`, otherwise holders of the token. Raises NotFound where metrics are off, Unauthorized.
    """
    settings = coordinator.settings
    if settings.metrics == "off":
        raise NotFound("metrics are switched off here")
    if settings.metrics == "public" or (not settings.url and is_loopback(settings.host)):
        return
    kind, _, token = header(scope, b"authorization").partition(" ")
    if kind.lower() != "bearer" or not coordinator.server.may_scrape(token.strip()):
        raise Unauthorized(
            "metrics need the header Authorization: Bearer and the one line of the file"
            ' metrics.token of the data directory, or the setting metrics = "public"'
        )
