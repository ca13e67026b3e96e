"""Routes of the public pages."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast
from urllib.parse import parse_qs

import structlog
from starlette.routing import Route

from coordinator.accounts.install_lines import visitor_system
from coordinator.pages.event_stream import Broadcast
from coordinator.pages.page_replies import (
    FinishedPage,
    finish,
    reply,
    send_file,
)
from coordinator.pages.templates import KINDS, static_files
from coordinator.pages.views import Live, Views
from coordinator.request_body import Receive, Scope, Send, raw_header
from coordinator.rules.networks import address_key
from coordinator.runs.public_runs import PublicRuns, may_be_had
from coordinator.storage.blobs import in_pool
from shared.errors import LOCAL, Internal, NotFound, Unavailable, VolunteerError

if TYPE_CHECKING:
    from coordinator.services import Coordinator

YEAR = "public, max-age=31536000, immutable"
ROBOTS = (
    b"User-agent: *\nDisallow: /api/\nDisallow: /v1/\nDisallow: /runs/*/events\n"
    b"Disallow: /*.safetensors$\n"
)
VIEWERS_SHARE = 4  # one in so many of all connections may be a viewer's event stream
DOWNLOADS_MAX, DOWNLOADS_PER_ADDRESS = (
    8,
    2,
)  # downloads of weights at a time: in all, and by one address

Handle = Callable[[Scope], Awaitable[FinishedPage]]
Stream = Callable[[Scope, Receive, Send], Awaitable[None]]

_NUMBER = re.compile(r"[0-9]{1,9}")

log = structlog.get_logger("page")


class Site:
    """Answers requests for pages."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.public = PublicRuns(coordinator.db, coordinator.clock, coordinator.settings)
        self.views = Views(coordinator, self.public)
        most = max(1, coordinator.settings.constants.connections_max // VIEWERS_SHARE)
        self.broadcast = Broadcast(coordinator.clock, most, coordinator.stopping)
        self._downloads = Counter[str]()  # keyed by address

    async def home(self, scope: Scope) -> FinishedPage:
        return await self.views.home()

    async def figures(self, scope: Scope) -> FinishedPage:
        return await self.views.figures()

    async def join(self, scope: Scope) -> FinishedPage:
        return await self.views.join(visitor_system(raw_header(scope, b"user-agent")))

    async def leaderboard(self, scope: Scope) -> FinishedPage:
        run, window = _query(scope, "run"), _query(scope, "window")
        return await self.views.leaderboard(run, window)

    async def volunteer(self, scope: Scope) -> FinishedPage:
        return await self.views.volunteer(scope["path_params"]["name"])

    async def run(self, scope: Scope) -> FinishedPage:
        return await self.views.run(_run(scope))

    async def shared(self, scope: Scope) -> FinishedPage:
        return await self.views.shared(_run(scope))

    async def version(self, scope: Scope) -> FinishedPage:
        return await self.views.version(_run(scope), _version(scope))

    async def picture(self, scope: Scope) -> FinishedPage:
        """Return the picture that a version drew."""
        row = await self.public.find(_run(scope))
        drawn = await self.public.picture(row, _version(scope))
        path = await self.coordinator.blobs.local(drawn)
        return finish("image/png", await in_pool(path.read_bytes), keep="max-age=300")

    async def weights(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a version's weights to anybody, or redirect to the object store. Raises NotFound for
        a model that is not public or whose files are gone, Unavailable beyond the most downloads at
        once.
        """
        row = await self.public.find(_run(scope))
        if not may_be_had(row):
            raise NotFound("the licence of this model does not say that everybody may have it")
        version = await self.public.version(row, _version(scope))
        if version.evaluation.pruned:
            raise NotFound("the files of this version are gone: ask for a later version")
        address = address_key((scope.get("client") or ("",))[0])
        if (
            self._downloads.total() >= DOWNLOADS_MAX
            or self._downloads[address] >= DOWNLOADS_PER_ADDRESS
        ):
            raise Unavailable(
                "too many downloads of weights are under way, of everybody or from your address;"
                " come again in a minute"
            )
        self._downloads[address] += 1
        try:
            await send_file(scope, send, self.coordinator.blobs, version.row.published_sha256)
        finally:
            self._downloads -= Counter({address: 1})  # drops addresses at zero

    async def static(self, scope: Scope) -> FinishedPage:
        name = scope["path_params"]["name"]
        content = static_files().get(name)
        if content is None:
            raise NotFound("there is no such file")
        return finish(KINDS[name.rpartition(".")[2]], content, keep=YEAR)

    async def icon(self, scope: Scope) -> FinishedPage:
        return finish(KINDS["svg"], static_files()["icon.svg"], keep="max-age=86400")

    async def robots(self, scope: Scope) -> FinishedPage:
        return finish("text/plain; charset=utf-8", ROBOTS, keep="max-age=86400")

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the state of a run to a viewer."""
        row = await self.public.find(_run(scope))

        async def state() -> Live:
            return (await self.views.model(row.name)).live

        traffic = self.coordinator.traffic
        traffic.viewers += 1
        try:
            await self.broadcast.serve(row.name, state, scope, receive, send)
        finally:
            traffic.viewers -= 1


class _PageHandler:
    """Page as an ASGI application: every refusal is a page too."""

    def __init__(self, site: Site, path: str, handle: Handle | Stream) -> None:
        self._site = site
        self._path = path
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint_path"] = self._path
        try:
            if self._handle in (self._site.events, self._site.weights):
                await cast("Stream", self._handle)(scope, receive, send)
                return
            document = await cast("Handle", self._handle)(scope)
        except asyncio.CancelledError:
            raise
        except VolunteerError as error:
            document = self._site.views.error(_public_error(error))
        except Exception:
            log.exception("page failed", path=self._path)
            document = self._site.views.error(Internal())
        if not scope.get("status"):  # if a stream has begun, it ends without a page
            await reply(scope, send, document)


def _public_error(error: VolunteerError) -> VolunteerError:
    """Return an error as a visitor may see it; an error of this machine is logged instead."""
    if isinstance(error, LOCAL):
        log.error("refused", error=error.message)
        return Unavailable("the coordinator cannot show this now")
    return error


def routes(coordinator: Coordinator) -> list[Route]:
    """Return the routes of the pages; without public pages only the routes of a join link."""
    site = Site(coordinator)
    handles: dict[str, Handle | Stream] = {
        "/join": site.join,
        "/static/{name}": site.static,
        "/favicon.ico": site.icon,
        "/robots.txt": site.robots,
    }
    public: dict[str, Handle | Stream] = {
        "/": site.home,
        "/figures.json": site.figures,
        "/leaderboard": site.leaderboard,
        "/volunteers/{name}": site.volunteer,
        "/runs/{run}": site.run,
        "/runs/{run}/events": site.events,
        "/runs/{run}/share.png": site.shared,
        "/runs/{run}/versions/{version}": site.version,
        "/runs/{run}/versions/{version}/sample.png": site.picture,
        "/runs/{run}/versions/{version}/model.safetensors": site.weights,
    }
    if coordinator.settings.public_page:
        handles |= public
    return [
        Route(path, _PageHandler(site, path, handle), methods=["GET"])
        for path, handle in handles.items()
    ]


def _run(scope: Scope) -> str:
    return str(scope["path_params"]["run"])


def _version(scope: Scope) -> int:
    text = str(scope["path_params"]["version"])
    if not _NUMBER.fullmatch(text):
        raise NotFound("there is no such version")
    return int(text)


def _query(scope: Scope, name: str) -> str:
    try:
        fields = parse_qs(scope.get("query_string", b"").decode("latin-1"), max_num_fields=20)
    except ValueError:
        return ""
    return str(fields.get(name, [""])[0])
