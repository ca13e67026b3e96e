"""Routes of the OpenAI-compatible interface."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import structlog
from starlette.routing import Route

from coordinator.accounts.api_keys import PREFIX, Asker
from coordinator.inference.answers import NO_KEY, AnswerStream, Servable, TextPrompt
from coordinator.inference.inference_engine import AnswerPiece
from coordinator.request_body import ClientGone, Receive, Scope, Send
from coordinator.v1.replies import ReplyForm, chat_text_prompt, completion_text_prompt
from coordinator.v1.reply_sender import ReplySender
from coordinator.v1.requests import read_request, refusal
from coordinator.v1.tool_answers import call_readers
from shared.errors import (
    LOCAL,
    Internal,
    NotFound,
    Unauthorized,
    Unavailable,
    VolunteerError,
)
from shared.protocol.endpoints import V1
from shared.protocol.inference import (
    ChatRequest,
    CompletionRequest,
    ImageData,
    ImageReply,
    ImageRequest,
    ImageUsage,
    ModelList,
    StreamOptions,
)

if TYPE_CHECKING:
    from coordinator.services import Coordinator

SEED_BITS = 31
# Reply to a browser that asks what pages of other sites may send (CORS). Every site may send all,
# since a page has to set the header with the key itself: there are no cookies.
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-max-age", b"86400"),
]
Handle = Callable[[Asker, Scope, Receive, ReplySender], Awaitable[None]]

log = structlog.get_logger("v1")


class V1Api:
    """Handlers of /v1, on the services of one coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._answers = coordinator.answers

    async def models(self, asker: Asker, scope: Scope, receive: Receive, out: ReplySender) -> None:
        await out.whole(ModelList(data=await self._answers.models(asker)))

    async def model(self, asker: Asker, scope: Scope, receive: Receive, out: ReplySender) -> None:
        await out.whole(await self._answers.model(asker, scope["path_params"]["model"]))

    async def completions(
        self, asker: Asker, scope: Scope, receive: Receive, out: ReplySender
    ) -> None:
        ask = await read_request(scope, receive, CompletionRequest)
        prompt = completion_text_prompt(ask, _seed(ask.seed))
        model = await self._answers.find(asker, ask.model)
        await self._text(model, prompt, ask.stream_options if ask.stream else None, out, ask)

    async def chat(self, asker: Asker, scope: Scope, receive: Receive, out: ReplySender) -> None:
        ask = await read_request(scope, receive, ChatRequest)
        model = await self._answers.find(asker, ask.model)
        written = None if model.template else model.serve.chat
        prompt = chat_text_prompt(ask, _seed(ask.seed), written)
        await self._text(model, prompt, ask.stream_options if ask.stream else None, out, ask)

    async def images(self, asker: Asker, scope: Scope, receive: Receive, out: ReplySender) -> None:
        ask = await read_request(scope, receive, ImageRequest)
        model = await self._answers.find(asker, ask.model)
        # Drawn and paid even if the client leaves: no engine stops in the middle of a picture.
        images, cost = await self._answers.images(model, ask.n or 1, _seed(ask.seed))
        data = tuple(ImageData(b64_json=png) for png in images)
        created = int(self._coordinator.clock.now())
        await out.whole(ImageReply(created=created, data=data, usage=ImageUsage(cost_micro=cost)))

    async def _text(
        self,
        model: Servable,
        prompt: TextPrompt,
        options: StreamOptions | None,
        out: ReplySender,
        ask: CompletionRequest | ChatRequest,
    ) -> None:
        comments = out.kept_alive() if ask.stream else nullcontext()
        async with comments, self._answers.text(model, prompt) as answer:
            created = int(self._coordinator.clock.now())
            readers = call_readers(answer.calls, ask, prompt.choices)
            form = ReplyForm(answer.id, model.name, created, prompt, readers)
            if not ask.stream:
                async for number, piece in self._pieces(answer, out):
                    form.add(number, piece)
                cost = await self._answers.close(answer)
                await out.whole(form.whole(answer.prompt_tokens, cost))
                return
            await out.comment()
            async for number, piece in self._pieces(answer, out):
                for chunk in form.chunks(number, piece):
                    await out.event(chunk)
            cost = await self._answers.close(answer)
            if options is not None and options.include_usage:
                await out.event(form.last(answer.prompt_tokens, cost))
            await out.done()

    async def _pieces(
        self, answer: AnswerStream, out: ReplySender
    ) -> AsyncIterator[tuple[int, AnswerPiece]]:
        """Yield pieces as they arrive. Raises ClientGone as soon as the client leaves."""
        disconnect = out.gone()
        for number, echo in enumerate(answer.echoes):
            yield number, echo
        async with aclosing(answer.pieces(disconnect)) as pieces:
            async for piece in pieces:
                yield piece
        if disconnect.done():
            raise ClientGone


class _ApiHandler:
    """Handler as an ASGI application: sign-in, and every error in OpenAI's shape."""

    def __init__(self, coordinator: Coordinator, path: str, handle: Handle) -> None:
        self._coordinator = coordinator
        self._path = path
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint_path"] = self._path
        out = ReplySender(scope, receive, send)
        try:
            if scope["method"] == "OPTIONS":
                await out.reply(200, PREFLIGHT, b"")
                return
            asker = await self._sign_in(scope)
            await self._handle(asker, scope, receive, out)
        except ClientGone:
            scope["status"] = 499
        except LOCAL as error:
            log.error("refused", path=self._path, error=error.message)
            await self._refuse(out, Unavailable("the coordinator cannot answer now"))
        except VolunteerError as error:
            await self._refuse(out, error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("request failed", path=self._path)
            await self._refuse(out, Internal())
        finally:
            out.close()

    async def _refuse(self, out: ReplySender, error: VolunteerError) -> None:
        """Send a refusal; in a stream that has begun, as its last event."""
        status, headers, body = refusal(error)
        try:
            if out.begun:
                await out.event(body)
                await out.done()
            else:
                await out.reply(status, headers, body)
        except ClientGone:
            return

    async def _sign_in(self, scope: Scope) -> Asker:
        """Return the asker, by an API key or by the token of a machine. Raises Unauthorized."""
        authorization = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        kind, _, secret = authorization.decode("latin-1").partition(" ")
        secret = secret.strip()
        coordinator = self._coordinator
        if kind.lower() != "bearer" or not secret:
            raise Unauthorized(NO_KEY)
        if secret.startswith(PREFIX):
            return await coordinator.api_keys.sign_in(secret)
        worker, dot, rest = secret.partition(".")
        if not dot:
            raise Unauthorized(NO_KEY)
        principal = await coordinator.volunteers.authenticate(worker, rest)
        return Asker(volunteer_id=principal.volunteer_id)


def routes(coordinator: Coordinator) -> list[Route]:
    """Return the routes of /v1, including the refusal of every other path below it."""
    api = V1Api(coordinator)
    handles: dict[str, Handle] = {
        "/v1/models": api.models,
        "/v1/models/{model}": api.model,
        "/v1/completions": api.completions,
        "/v1/chat/completions": api.chat,
        "/v1/images/generations": api.images,
    }

    async def nothing(asker: Asker, scope: Scope, receive: Receive, out: ReplySender) -> None:
        raise NotFound("there is no such path below /v1: " + ", ".join(handles))

    endpoints: list[Any] = [
        Route(e.path, _ApiHandler(coordinator, e.path, handles[e.path]), methods=[e.method])
        for e in V1
    ]
    rest = _ApiHandler(coordinator, "/v1", nothing)
    return [
        *endpoints,
        Route("/v1/{rest:path}", rest, methods=["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
    ]


def _seed(seed: int | None) -> int:
    return secrets.randbits(SEED_BITS) if seed is None else seed
