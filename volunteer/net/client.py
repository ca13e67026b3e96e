"""HTTP client of the volunteer, and the only import of httpx: size limits, retries, errors and TLS.

`api.py` makes the requests and `transfers.py` moves whole files. Any request may be repeated after
a failure; a change that must not be made twice carries an id.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from shared import errors
from shared.clock import Clock
from shared.decoding import MALFORMED, decode
from shared.errors import VolunteerError
from shared.network.links import is_loopback
from shared.network.proxy import proxy_of, without_credentials
from shared.network.tls_pin import WrongCertificate
from shared.protocol.limits import API, HEARTBEAT_S, JSON_BYTES_MAX
from shared.protocol.protocol_version import HEADER, PROTOCOL
from shared.sentences import Sentence, encode_english, figure
from shared.text import printable
from volunteer.net.bandwidth import Throttle, TimeLimit
from volunteer.net.peer import Peer, other_coordinator
from volunteer.net.reply_errors import REQUEST_ID, connection_failure, decode_reply, refusal
from volunteer.net.retry import FOREVER, Backoff, is_temporary
from volunteer.net.tls import Address, context_for

CONNECT_S, READ_S, WRITE_S = 10.0, 30.0, 30.0
ERROR_BYTES_MAX = 64 << 10
KEPT_ALIVE = 2  # connections: one for the poll for work, one for heartbeats
IDLE_S = 2 * HEARTBEAT_S  # an unused connection is kept this long; a server closes it after 75 s
REDIRECTS_MAX = 5
JSON = {"Content-Type": "application/json"}
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "volunteer"}
SLACK_S = CONNECT_S + WRITE_S  # time of a request beside the wait for its answer
EXPIRY_CODES = (9, 10)  # OpenSSL: certificate not valid yet, or expired

T = TypeVar("T")


class Watcher(Protocol):
    """Callback for the connection's state: online, a sentence, and the time of the next retry."""

    def __call__(self, online: bool, message: str, retry_at: float | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall(Generic[T]):
    """One request and the type of its reply."""

    method: str
    path: str  # path below /api/v1, or a whole URL
    reply: type[T]
    body: msgspec.Struct | Callable[[], msgspec.Struct] | None = (
        None  # a function is called each try
    )
    query: Mapping[str, str] = field(default_factory=dict)
    secret: bool = True  # sends the token, or has a secret in its body
    timeout_s: float = READ_S
    bytes_max: int = JSON_BYTES_MAX
    patience_s: float = FOREVER  # longest time of retries
    headers: Callable[[Mapping[str, str]], None] | None = None  # receives the answer's headers


class StreamedReply(msgspec.Struct, frozen=True):
    """Head of a streamed answer."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


class _IdentityProof(msgspec.Struct, frozen=True):
    """Only field of a `ServerInfo` that is read before the coordinator is verified."""

    proof: str = ""


class Client:
    """HTTP client of one coordinator."""

    read_s = READ_S
    slack_s = SLACK_S
    json_bytes_max = JSON_BYTES_MAX

    def __init__(
        self,
        address: Address,
        *,
        clock: Clock,
        rng: random.Random | None = None,
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = address
        self.clock = clock
        self.rng = rng or random.Random()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.up, self.down = Throttle(clock), Throttle(clock)
        self.watch: Watcher | None = None
        self._token = token
        self._online: bool | None = None
        self._sleepers: dict[asyncio.Future[None], float] = {}  # end of each delay
        self._context = context_for(address)
        self._peer = Peer(address, self._prove)
        proxy = "" if transport is not None else proxy_of(address.url)
        self._proxy = proxy and without_credentials(proxy)
        try:
            self._http = httpx.AsyncClient(
                base_url=address.url + API,
                transport=transport,
                verify=self._context,
                proxy=proxy or None,
                trust_env=False,
                headers=HEADERS,
                # Connections are unlimited, so that none waits for another: the volunteer's work
                # bounds their number.
                limits=httpx.Limits(max_keepalive_connections=KEPT_ALIVE, keepalive_expiry=IDLE_S),
                follow_redirects=False,
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # an invalid URL
            raise errors.Configuration(
                Sentence("the proxy {proxy} cannot be used: {why}", proxy=self._proxy, why=error)
            ) from error

    @property
    def _host(self) -> str:
        """Return the host for messages; a proxy may have answered in its place."""
        if not self._proxy:
            return self.address.host
        return Sentence("{host} (or the proxy {proxy})", host=self.address.host, proxy=self._proxy)

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, call: ApiCall[T]) -> T:
        """Send a request, again after temporary errors, until it is answered or the patience of
        `call` is over. Raises the coordinator's error, or Unreachable.
        """

        async def once() -> T:
            body = call.body() if callable(call.body) else call.body
            content = b"" if body is None else msgspec.json.encode(body, enc_hook=encode_english)
            limit = TimeLimit(call.timeout_s + self.slack_s)
            more: dict[str, Any] = {"params": dict(call.query) or None, "content": content or None}
            more |= {"timeout": _timeout(call.timeout_s), "secret": call.secret}
            async with self._request(call.method, call.path, JSON, limit, **more) as response:
                self.sent_bytes += len(content)
                data = await self._read(response, call.bytes_max, limit)
                if call.headers is not None:
                    call.headers(response.headers)
            return decode_reply(data, call.reply, foreign=REQUEST_ID not in response.headers)

        return await self.retrying(once, call.patience_s)

    @asynccontextmanager
    async def stream(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        """GET a path; the answer's body arrives in pieces. Not retried: the caller knows where to
        resume.
        """
        limit = TimeLimit(self.read_s + self.slack_s)
        async with self._request("GET", path, headers, limit) as response:
            body = self._limited_pieces(response.aiter_raw(), limit)
            yield StreamedReply(response.status_code, response.headers, body)

    @asynccontextmanager
    async def events(self, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST to a path outside /api/v1 with a streamed answer. Not retried."""
        limit = TimeLimit(self.read_s + self.slack_s)
        url = self.address.url + path
        async with self._request("POST", url, JSON, limit, content=body) as response:
            self.sent_bytes += len(body)
            yield self._limited_pieces(response.aiter_raw(), limit)

    @asynccontextmanager
    async def get_elsewhere(
        self, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[StreamedReply]:
        """GET from another server, such as a model hub, without the token. The connection must be
        encrypted or stay on this machine. Not retried.

        Raises Unreachable for any status but 200 and 206.
        """
        limit = TimeLimit(self.read_s + self.slack_s)
        async with self._client_for(url, limit) as http, _followed(http, url, headers) as response:
            body = self._limited_pieces(response.aiter_raw(), limit)
            yield StreamedReply(response.status_code, response.headers, body)

    @asynccontextmanager
    async def _client_for(self, url: str, limit: TimeLimit) -> AsyncIterator[httpx.AsyncClient]:
        """Open a client for another server, without the token; its network failures become
        Unreachable.
        """
        host = urlsplit(url).hostname
        try:
            async with (
                limit.running(),
                httpx.AsyncClient(headers=HEADERS, timeout=_timeout(self.read_s)) as http,
            ):
                yield http
        except TimeoutError as error:
            raise errors.Unreachable(
                Sentence("{host} did not answer in time", host=host)
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            kind = type(error).__name__
            raise errors.Unreachable(
                Sentence("{host} cannot be reached ({kind})", host=host, kind=kind)
            ) from error

    def may_go_to(self, url: str) -> bool:
        """Return True if the coordinator may send this machine to an address: any https address; a
        loopback address only if the coordinator itself has one.
        """
        to, home = urlsplit(url), urlsplit(self.address.url)
        near = is_loopback(to.hostname or "")
        return is_loopback(home.hostname or "") if near else to.scheme == "https"

    async def put_elsewhere(self, url: str, size: int, body: AsyncIterator[bytes]) -> None:
        """PUT to another server, such as a store, without the token; only the status of its answer
        is read. Raises Unreachable.
        """
        limit = TimeLimit(self.read_s + self.slack_s)
        content, headers = self._limited_body(body, limit), {"Content-Length": str(size)}
        async with (
            self._client_for(url, limit) as http,
            http.stream("PUT", url, headers=headers, content=content) as answer,
        ):
            if answer.status_code not in (200, 201, 204):
                raise errors.Unreachable(
                    Sentence(
                        "{host} answered {status}",
                        host=answer.request.url.host,
                        status=answer.status_code,
                    )
                )

    async def put(
        self, path: str, headers: Mapping[str, str], body: AsyncIterator[bytes], reply: type[T]
    ) -> T:
        """PUT a streamed body; `headers` name its Content-Length. Not retried."""
        limit = TimeLimit(self.read_s + self.slack_s)
        content = self._limited_body(body, limit)
        async with self._request("PUT", path, headers, limit, content=content) as response:
            data = await self._read(response, self.json_bytes_max, limit)
        return decode_reply(data, reply, foreign=REQUEST_ID not in response.headers)

    async def recognise(self) -> None:
        """Wait until the joined coordinator, and no other, answers."""
        await self.retrying(self._peer.recognise)

    def _trace_extensions(self) -> dict[str, object] | None:
        """Return httpx's extensions for a request with a secret: they verify the peer of each new
        connection. None if TLS verifies the peer, or before joining.
        """
        if self.address.url.startswith("https://") or not self.address.public_key:
            return None
        return {"trace": self._peer.tracer()}

    async def _prove(self, nonce: str) -> str:
        """Return the peer's signature of a nonce, in hex; "" if the answer has none.

        Raises Unreachable if another coordinator answers.
        """
        request = self._http.build_request(
            "GET", "/server", params={"nonce": nonce}, timeout=_timeout(self.read_s)
        )
        limit = TimeLimit(self.read_s + self.slack_s)
        async with self._converted_errors(limit):
            response = await self._http.send(request, stream=True)
            try:
                data = await self._read(response, self.json_bytes_max, limit)
            finally:
                await response.aclose()
        if response.status_code >= 300:
            error = refusal(self._host, response.status_code, response.headers, data)
            away = response.status_code in (408, 429) or response.status_code >= 500
            raise error if away else errors.Unreachable(other_coordinator(self.address))
        try:
            return decode(data, _IdentityProof).proof
        except MALFORMED:
            return ""

    async def _refusal(self, response: httpx.Response, body: bytes) -> VolunteerError:
        """Return an answer's error. If the server does not know the account, first verify that it
        is the joined coordinator.
        """
        v1 = API not in response.request.url.path
        error = refusal(self._host, response.status_code, response.headers, body, v1=v1)
        if isinstance(error, errors.Unauthorized):
            self._peer.forget()
            await self._peer.recognise()
        return error

    async def retrying(self, once: Callable[[], Awaitable[T]], patience_s: float = FOREVER) -> T:
        """Call `once` until it succeeds; retry after temporary errors, with growing delays, while
        `patience_s` lasts.

        With a patience of 0 every error is raised at once, and the caller may retry.
        """
        if patience_s <= 0:
            return await once()
        backoff = Backoff(self.rng)
        give_up = self.clock.monotonic() + patience_s
        while True:
            try:
                result = await once()
            except VolunteerError as error:
                if not is_temporary(error):
                    self._report_state(True)  # any answer shows that the server is reachable
                    raise
                wait = backoff.next(error)
                if self.clock.monotonic() + wait > give_up:
                    self._report_state(False, error.message)
                    raise
                await self._sleep(wait, error.message)
            else:
                self._report_state(True)
                return result

    def hurry(self) -> None:
        """End all retry delays now: a person is waiting."""
        for sleeper in self._sleepers:
            sleeper.cancel()

    async def _sleep(self, seconds: float, message: str) -> None:
        sleeper = asyncio.ensure_future(self.clock.sleep(seconds))
        self._sleepers[sleeper] = self.clock.now() + seconds
        self._report_state(False, message)
        try:
            await asyncio.wait({sleeper})
        finally:
            del self._sleepers[sleeper]
            sleeper.cancel()

    def _report_state(self, online: bool, message: str = "") -> None:
        """Report the connection's state to `watch`, with the time of the next retry."""
        if self.watch and not (online and self._online):
            again = None if online else min(self._sleepers.values(), default=None)
            self.watch(online, message, again)
        self._online = online

    def _headers(self, headers: Mapping[str, str], secret: bool = True) -> dict[str, str]:
        """Return the headers; a `secret` request has the token and the version of the protocol,
        and raises Configuration on an insecure connection.
        """
        sent = dict(headers)
        if secret:
            if not self.address.private:
                raise errors.Configuration(
                    Sentence(
                        "{url} is not encrypted: your secret is not sent there; join again with an "
                        "https link",
                        url=self.address.url,
                    )
                )
            if self._token:
                sent["Authorization"] = f"Bearer {self._token}"
                sent[HEADER] = str(PROTOCOL)
        return sent

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        limit: TimeLimit,
        *,
        secret: bool = True,
        **more: Any,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; yield a response with a good status. Raises the error of any other
        response.

        `more` are arguments of httpx. A `secret` request goes only to the joined coordinator.
        """
        headers = self._headers(headers, secret)
        if secret:
            await self._peer.recognise()
        more = {"timeout": _timeout(self.read_s), **more}
        extensions = self._trace_extensions() if secret else None
        request = self._http.build_request(
            method, path, headers=headers, extensions=extensions, **more
        )
        async with self._converted_errors(limit), self._good_response(request, limit) as response:
            yield response

    @asynccontextmanager
    async def _converted_errors(self, limit: TimeLimit) -> AsyncIterator[None]:
        """Enforce the time limit; convert errors of httpx to errors of the volunteer."""
        try:
            async with limit.running():
                yield
        except TimeoutError as error:
            self._peer.forget()
            raise errors.Unreachable(
                Sentence("{url} did not answer in time", url=self.address.url)
            ) from error
        except httpx.TransportError as error:
            self._peer.forget()
            raise _unreachable(error, self.address, self._proxy) from error
        except httpx.HTTPError as error:
            raise errors.Internal(
                Sentence("the coordinator's reply is invalid: {error}", error=error)
            ) from error

    @asynccontextmanager
    async def _good_response(
        self, request: httpx.Request, limit: TimeLimit
    ) -> AsyncIterator[httpx.Response]:
        response = await self._http.send(request, stream=True)
        try:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise errors.Internal(
                    Sentence(
                        "the reply is compressed ({encoding}), which is refused: is there a "
                        "proxy in "
                        "between?",
                        encoding=printable(encoding, 40),
                    )
                )
            if response.status_code >= 300 and response.status_code != 304:
                body = await self._read(response, ERROR_BYTES_MAX, limit)
                raise await self._refusal(response, body)
            yield response
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response, bytes_max: int, limit: TimeLimit) -> bytes:
        """Read a short answer. Its bytes count against the owner's bandwidth, but it never waits
        for bandwidth. Raises Internal if it is longer than `bytes_max`.
        """
        data = bytearray()
        async for piece in response.aiter_raw():
            self._received(len(piece), limit)
            data += piece
            if len(data) > bytes_max:
                raise errors.Internal(
                    Sentence("the coordinator sent more than {n} bytes", n=figure(f"{bytes_max:,}"))
                )
        return bytes(data)

    def _received(self, count: int, limit: TimeLimit) -> float:
        limit.moved(count)
        self.received_bytes += count
        return self.down.charge(count)

    async def _limited_pieces(
        self, body: AsyncIterator[bytes], limit: TimeLimit
    ) -> AsyncIterator[bytes]:
        async for whole in body:
            step = self.down.piece_bytes or len(whole) or 1
            for start in range(0, len(whole), step):
                piece = whole[start : start + step]
                wait = self._received(len(piece), limit)
                if wait > 0:
                    await self.clock.sleep(wait)
                yield piece

    async def _limited_body(
        self, body: AsyncIterator[bytes], limit: TimeLimit
    ) -> AsyncIterator[bytes]:
        async for whole in body:
            step = self.up.piece_bytes or len(whole) or 1
            for start in range(0, len(whole), step):
                piece = whole[start : start + step]
                limit.moved(len(piece))
                await self.up.take(len(piece))
                yield piece
                self.sent_bytes += len(piece)


@asynccontextmanager
async def _followed(
    http: httpx.AsyncClient, url: str, headers: Mapping[str, str]
) -> AsyncIterator[httpx.Response]:
    """Yield the answer after redirects, each to an encrypted address, or within this machine.

    Raises Unreachable.
    """
    host = urlsplit(url).hostname or ""
    near = is_loopback(host)
    request = http.build_request("GET", url, headers=headers)
    for _ in range(REDIRECTS_MAX + 1):
        host = request.url.host
        if request.url.scheme != "https" and not (near and is_loopback(host)):
            raise errors.Unreachable(
                Sentence("{host} is not asked: its address is not encrypted (https)", host=host)
            )
        response = await http.send(request, stream=True)
        try:
            if response.next_request is None:
                if response.status_code not in (200, 206):
                    raise errors.Unreachable(
                        Sentence("{host} answered {status}", host=host, status=response.status_code)
                    )
                yield response
                return
            request = response.next_request
        finally:
            await response.aclose()
    raise errors.Unreachable(Sentence("{host} redirects without end", host=host))


# reasons of OpenSSL's errors after a peer has answered a handshake with plain HTTP
PLAIN_HTTP = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")


def _timeout(read_s: float) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=CONNECT_S, write=min(read_s, WRITE_S), pool=None)


def _login_hint(error: Exception) -> str:
    if isinstance(error, httpx.ProxyError) and "407" in str(error):
        return Sentence("it asks for a name and a password: http://NAME:PASSWORD@HOST:PORT")
    return ""


def _unreachable(error: Exception, address: Address, proxy: str) -> VolunteerError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WrongCertificate):
            kind = errors.Unreachable if address.public_key else errors.Configuration
            return kind(
                Sentence(
                    "{host} presents another certificate than your join link names: ask your "
                    "organiser for a new link",
                    host=address.host,
                )
            )
        if isinstance(cause, ssl.SSLCertVerificationError):
            if cause.verify_code in EXPIRY_CODES:
                return errors.Configuration(
                    Sentence(
                        "the certificate of {host} is not valid now ({problem}): is the clock "
                        "of this machine right? If so, the organiser has to renew it",
                        host=address.host,
                        problem=cause.verify_message,
                    )
                )
            return errors.Configuration(
                Sentence(
                    "the certificate of {host} cannot be trusted ({problem}): join with the "
                    "complete link of your organiser, which names the certificate",
                    host=address.host,
                    problem=cause.verify_message,
                )
            )
        if isinstance(cause, ssl.SSLError) and cause.reason in PLAIN_HTTP:
            kind = errors.Unreachable if address.public_key else errors.Configuration
            return kind(
                Sentence(
                    "{host} answers without TLS: a link to it begins with http://, not https://",
                    host=address.host,
                )
            )
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.TimeoutException):
        return errors.Unreachable(Sentence("{url} did not answer in time", url=address.url))
    why = connection_failure(error)
    if proxy:
        return errors.Unreachable(
            Sentence(
                "{url} cannot be reached through the proxy {proxy}: {why}",
                url=address.url,
                proxy=proxy,
                why=_login_hint(error) or why,
            )
        )
    return errors.Unreachable(
        Sentence("{url} cannot be reached: {why}", url=address.url, why=why)
        if why
        else Sentence("{url} cannot be reached", url=address.url)
    )
