"""Web application: routes, request ids, and every error turned into its reply in one place."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from coordinator.http.routes.endpoint_app import client_key, error_reply, respond
from coordinator.request_body import ClientGone, Receive, Scope, Send, header
from coordinator.services import Coordinator, opened
from coordinator.v1.requests import FOR_PAGES
from shared.errors import (
    LOCAL,
    BadRequest,
    Forbidden,
    Internal,
    NotFound,
    Unavailable,
    VolunteerError,
)
from shared.network.links import is_loopback
from shared.protocol.limits import API

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

__all__ = ["Coordinator", "create_app", "opened"]

# Methods counted by name; others are counted together, so that invented names use no memory.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
STOPPING_S = 5.0  # time after which volunteers retry when this server stops
BROKEN_S = 60.0  # retry time after a failure that the organiser must repair

log = structlog.get_logger("http")


class RequestMiddleware:
    """Outermost application: gives each request an id, counts it, and turns every exception into a
    reply.
    """

    def __init__(self, app: ASGIApp, coordinator: Coordinator) -> None:
        self._app = app
        self._coordinator = coordinator
        self._prefix = secrets.token_hex(4)
        self._count = 0
        settings = coordinator.settings
        # With TLS, a page whose host name an attacker made resolve to this server fails the check
        # of the certificate.
        public = settings.url or settings.tls_cert
        self._on_loopback = not public and is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._count += 1
        scope["request_id"] = f"{self._prefix}-{self._count:x}"
        scope["traffic"] = self._coordinator.traffic
        if f"{scope['path']}/".startswith("/v1/"):
            send = _for_other_sites(send)
        began = time.perf_counter()
        try:
            self._coordinator.rates.hit("ip", client_key(scope))
            if self._on_loopback:
                _check_host(scope)
            if "\0" in scope["path"]:  # PostgreSQL cannot store NUL
                raise NotFound("there is no such path; see /api/v1/openapi.json")
            await self._app(scope, receive, send)
        except ClientGone:
            scope["status"] = 499
        except asyncio.CancelledError:
            if not self._coordinator.stopping.is_set() or scope.get("status"):
                raise
            # The server is stopping; it cancels each request only once, so a reply is possible.
            error = Unavailable("the coordinator is stopping", retry_after_s=STOPPING_S)
            await self._refuse(scope, receive, send, error)
        except LOCAL as error:  # a fault of this machine; volunteers get no details
            log.error(
                "refused", request_id=scope["request_id"], path=scope["path"], error=error.message
            )
            await self._refuse(scope, receive, send, _public_error(scope, error))
        except VolunteerError as error:
            await self._refuse(scope, receive, send, error)
        except Exception as error:
            log.exception("request failed", request_id=scope["request_id"], path=scope["path"])
            await self._refuse(scope, receive, send, Internal(), cause=error)
        finally:
            self._record(scope, time.perf_counter() - began)

    async def _refuse(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        error: VolunteerError,
        cause: Exception | None = None,
    ) -> None:
        # this reply has begun: the connection is closed, so that the reply does not look complete
        if scope.get("status"):
            raise cause or error
        if error.status == 500 and cause is None:  # the jobs log the causes of 503 and 507 once
            log.warning(
                "refused", request_id=scope["request_id"], path=scope["path"], error=error.message
            )
        await respond(scope, receive, send, error_reply(error, scope["request_id"]))

    def _record(self, scope: Scope, seconds: float) -> None:
        path = scope.get("endpoint_path", "other")
        traffic = self._coordinator.traffic
        traffic.bytes_out += scope.get("sent", 0)
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        traffic.count(method, path, scope.get("status", 500), seconds)
        log.debug(
            "request",
            id=scope["request_id"],
            path=scope["path"],
            status=scope.get("status"),
            s=round(seconds, 4),
        )


def _for_other_sites(send: Send) -> Send:
    """Return a sender of replies that pages of other sites may read."""

    async def for_pages(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *FOR_PAGES]}
        await send(message)

    return for_pages


def _check_host(scope: Scope) -> None:
    """Raise Forbidden for a request that changes something, or an organiser's request, whose Host
    is not on loopback: it may come from a page whose host name an attacker made resolve to this
    machine (DNS rebinding).
    """
    if scope["method"] in READ_METHODS and not scope["path"].startswith(f"{API}/admin/"):
        return
    try:
        host = urlsplit(f"//{header(scope, b'host')}").hostname or ""
    except ValueError:
        host = ""
    if not is_loopback(host):
        raise Forbidden(
            "this server is for this machine only: name it localhost or 127.0.0.1, or give it"
            " the setting url"
        )


def _public_error(scope: Scope, error: VolunteerError) -> VolunteerError:
    """Return the reply to a failure of this machine; only the organiser sees its details."""
    if str(scope.get("endpoint_path", "")).startswith(f"{API}/admin/"):
        return BadRequest(error.message)
    return Unavailable(
        "the coordinator cannot work now: its log tells the organiser why", retry_after_s=BROKEN_S
    )


def create_app(coordinator: Coordinator) -> Starlette:
    """Return the ASGI application; its lifespan runs the jobs, and the caller closes the
    coordinator.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from coordinator.http.routes.endpoint_app import EndpointApp
    from coordinator.http.routes.handlers import HANDLERS
    from coordinator.pages.app import routes as page_routes
    from coordinator.v1.app import routes as v1_routes
    from shared.protocol.endpoints import ENDPOINTS

    coordinator.runs.server.since = coordinator.clock.now()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with coordinator.working():
            yield

    async def not_routed(request: Request, error: Exception) -> Response:
        """Raise Starlette's own refusals (no such path, no such method) as this server's errors."""
        status = getattr(error, "status_code", 500)
        if status == 405:
            raise BadRequest(f"{request.method} is not possible here; see /api/v1/openapi.json")
        raise NotFound("there is no such path; see /api/v1/openapi.json")

    routes: list[Any] = [
        Route(
            endpoint.full_path,
            EndpointApp(endpoint, coordinator, HANDLERS[endpoint]),
            methods=[endpoint.method],
        )
        for endpoint in ENDPOINTS
    ]
    routes += v1_routes(coordinator)
    routes += page_routes(coordinator)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestMiddleware, coordinator=coordinator)],
        exception_handlers={HTTPException: not_routed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app
