"""Inference engine at an address: the organiser's OpenAI-compatible server computes answers.

The server gets texts through `/completions`. The run's tokenizer counts prompts. Each chunk counts
as one token; once the server has ended the text, the reply's `usage` corrects the count; for a
reply without `usage` the tokenizer counts the text again. The server may read the prompts, but its
replies are not trusted: they are bounded, timed and read strictly. A fault becomes Unavailable; a
refusal with the status 404 becomes NotFound, one with 400, 413 or 422 BadRequest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn, TypeVar

import httpx
import msgspec
import structlog

from coordinator.config import Settings, model_names
from coordinator.inference.inference_engine import (
    AnswerPiece,
    AnswerRule,
    ChatPrompt,
    FinishReason,
    Generation,
    InvalidField,
    ModelVersion,
    PreparedPrompt,
    TokenLogprob,
    TokenPrompt,
    check_length,
)
from coordinator.inference.run_text import RunText
from coordinator.storage.secret_file import read_secret
from shared.decoding import decoder
from shared.errors import BadRequest, NotFound, Unavailable
from shared.workloads.data.tokenizer import end_of_text, load_tokenizer
from shared.workloads.generation.sampling import Shaping
from shared.workloads.generation.text_stream import StopStrings

if TYPE_CHECKING:
    from coordinator.database.engine.open_database import Database
    from coordinator.storage.blobs import BlobStore
    from shared.clock import Clock

CONNECT_S = 5.0
SILENT_S = 60.0  # longest wait for a token, or for a whole reply that is not streamed
USAGE_S = 5.0  # longest wait for data after the end of a text
REST_S = 2.0  # wait after a failed connection, before the server is tried again
STREAMS_MAX = 256  # streams at once; more requests wait for CONNECT_S and are then refused
STOPS_MAX = 4  # most stop strings that the server gets; this engine searches for all of them itself
SEEDS = 1 << 31
UNKNOWN_TOKEN = -1  # a token whose number is unknown
SPARE_CHUNKS = 8  # chunks with text that are allowed beyond one for each token
LINE_BYTES_MAX, CHUNK_BYTES = 1 << 18, 8192
BROKE_OFF = "the answer broke off"

T = TypeVar("T")
log = structlog.get_logger("inference")


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """Organiser's inference server. `names` holds the server's names of versions: under RUN@40 the
    name of one version, under RUN that of every version, with {version} for the version's number.
    """

    url: str
    names: Mapping[str, str] = {}
    key: str = ""

    def pinned_versions(self) -> dict[str, int]:
        """Return the version of each run of which `names` has a single one (RUN@40)."""
        pinned = (name.partition("@") for name in self.names)
        return {run: int(version) for run, at, version in pinned if at}

    def name_of(self, model: ModelVersion) -> str:
        """Return the server's name of a version."""
        exact = f"{model.run}@{model.version}"
        name = self.names.get(exact) or self.names.get(model.run, exact)
        return name.replace("{version}", str(model.version))


def upstream(settings: Settings) -> Upstream:
    """Return the server that the settings name. Raises Configuration for an invalid key."""
    key = read_secret(settings.inference_key_file, f"the key of {settings.inference}")
    return Upstream(url=settings.inference, names=model_names(settings), key=key)


class _Probabilities(msgspec.Struct, frozen=True):
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None
    logprobs: _Probabilities | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: object = None


_CHUNK = decoder(_Chunk)


class UpstreamEngine:
    """Inference engine on the organiser's server, without chat templates; see `InferenceEngine`."""

    templates = False

    def __init__(
        self,
        db: Database,
        clock: Clock,
        blobs: BlobStore,
        upstream: Upstream,
        silent_s: float = SILENT_S,
    ) -> None:
        self._db = db
        self._clock = clock
        self._blobs = blobs
        self._upstream = upstream
        self._silent_s = silent_s
        self._rest_until = 0.0
        headers = {"accept-encoding": "identity"}
        if upstream.key:
            headers["authorization"] = f"Bearer {upstream.key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            follow_redirects=False,  # prompts go only to the configured address
            trust_env=False,
            timeout=httpx.Timeout(self._silent_s, connect=CONNECT_S, pool=CONNECT_S),
            limits=httpx.Limits(max_connections=STREAMS_MAX, max_keepalive_connections=32),
        )

    async def prepare(
        self,
        model: ModelVersion,
        prompt: str | TokenPrompt | ChatPrompt,
        probe: int | None = None,
        rule: AnswerRule | None = None,
    ) -> PreparedPrompt:
        if isinstance(prompt, TokenPrompt) or probe is not None:
            raise BadRequest("this engine takes prompts as text only, and echoes no probabilities")
        if rule is not None:
            raise InvalidField("this engine takes no response_format", "response_format")
        if not isinstance(prompt, str):
            raise BadRequest("this engine cannot apply the chat template of a run")
        rest = self._rest_until - self._clock.monotonic()
        if rest > 0:
            raise Unavailable("answers are not computed at the moment", retry_after_s=rest)
        context, tokenizer = await self._context_and_tokenizer(model)
        check_length(len(prompt), context)
        tokens = await asyncio.to_thread(_tokens, prompt, tokenizer)
        return PreparedPrompt(tokens=tokens, context=context)

    async def generate(self, request: Generation) -> AsyncIterator[AnswerPiece]:
        bytes_max = LINE_BYTES_MAX + CHUNK_BYTES * request.sequence.max_tokens
        text = _TextStream(request)
        reply = self._reply("/completions", request.model, _body(request))
        async with reply as response, aclosing(_chunks(response, bytes_max)) as chunks:
            while (piece := await self._within(text.next(chunks), self._silent_s)) is not None:
                yield piece
            if not text.cut:
                with suppress(Unavailable):
                    await self._within(text.rest(chunks), USAGE_S)
        if text.usage is None and text.written and not text.cut:
            _, tokenizer = await self._context_and_tokenizer(request.model)
            text.usage = len(await asyncio.to_thread(_tokens, text.written, tokenizer))
        yield text.last()

    async def images(self, model: ModelVersion, count: int, seed: int) -> Sequence[bytes]:
        raise BadRequest("this engine writes texts and draws no pictures")

    async def close(self) -> None:
        """Drop every stream."""
        await self._http.aclose()

    # --- the server ---

    @asynccontextmanager
    async def _reply(
        self, path: str, model: ModelVersion, body: Mapping[str, object]
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; yield its reply, with the head read, until the block is left. Raises
        Unavailable, and the errors of `_refuse`.
        """
        body = {"model": self._upstream.name_of(model), **body}
        request = self._http.build_request("POST", self._upstream.url.rstrip("/") + path, json=body)
        try:
            response = await self._within(self._http.send(request, stream=True), self._silent_s)
        except httpx.PoolTimeout:
            raise Unavailable("too many prompts wait for an answer", retry_after_s=5) from None
        except (httpx.HTTPError, OSError) as error:
            self._rest_until = self._clock.monotonic() + REST_S
            log.warning("the server for answers is not reached", error=repr(error)[:200])
            message = "answers are not computed at the moment"
            raise Unavailable(message, retry_after_s=REST_S) from error
        try:
            if response.status_code != 200:
                await self._refuse(response, model)
            if response.headers.get("content-encoding", "identity") != "identity":
                _break_off("a compressed reply")
            yield response
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            _break_off(error)
        finally:
            await response.aclose()

    async def _refuse(self, response: httpx.Response, model: ModelVersion) -> NoReturn:
        """Raise NotFound, BadRequest or Unavailable for a refusal by the server, whose own words
        are logged.
        """
        status = response.status_code
        try:
            reply_bytes = await self._within(_read_all(response, LINE_BYTES_MAX), USAGE_S)
        except Unavailable:
            reply_bytes = b""
        words = "".join(c for c in reply_bytes.decode(errors="replace")[:200] if c.isprintable())
        name = f"{model.run}@{model.version}"
        log.warning("the server for answers refuses", model=name, status=status, said=words)
        if status == 404:
            raise NotFound(f'the server that computes answers here does not have "{name}"')
        if status in (400, 413, 422):
            raise BadRequest(
                "the server that computes answers refuses this request: ask for fewer tokens, or "
                "ask the organiser, whose log has the reason"
            )
        after = response.headers.get("retry-after", "")
        wait_s = min(3600, int(after[:6])) if after[:6].isdecimal() else REST_S
        raise Unavailable("answers are not computed at the moment", retry_after_s=wait_s)

    async def _within(self, work: Awaitable[T], limit_s: float) -> T:
        """Return the result of `work`. Raises Unavailable after `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise Unavailable(BROKE_OFF, retry_after_s=REST_S) from None

    # --- the run ---

    async def _context_and_tokenizer(self, model: ModelVersion) -> tuple[int, bytes | None]:
        """Return the length of a run's context in tokens, and its tokenizer; None for a run without
        a tokenizer.
        """
        reading = await self._db.read(lambda conn: RunText.of_run(conn, model.run_id))
        return reading.context, await reading.tokenizer(self._blobs)


class _TextStream:
    """Streamed text: counts its tokens, and ends it at its limits."""

    def __init__(self, request: Generation) -> None:
        self._most = request.sequence.max_tokens
        self._stops = StopStrings(request.sequence.stop)
        self._reported = 0  # tokens that the pieces reported
        self._chunks = 0
        self.written = ""
        self.usage: int | None = None
        self.finish: FinishReason | None = None
        self.cut = False  # True if this class cut the text off while the server was writing

    async def next(self, chunks: AsyncIterator[_Chunk]) -> AnswerPiece | None:
        """Return the next piece; None at the end of the text. Raises Unavailable."""
        while not self.finish:
            if (piece := self._add(await anext(chunks, None))) is not None:
                return piece
        return None

    async def rest(self, chunks: AsyncIterator[_Chunk]) -> None:
        """Read the stream to its end, since its last chunk may contain the usage."""
        async for chunk in chunks:
            self._count(chunk)

    def last(self) -> AnswerPiece:
        """Return the end of the text, with the tokens that no chunk reported."""
        tokens = self._take_new(self._reported if self.usage is None else self.usage)
        return AnswerPiece(text=self._stops.end(), tokens=tokens, finish=self.finish)

    def _count(self, chunk: _Chunk) -> None:
        if chunk.usage is not None and chunk.usage.completion_tokens >= 0:
            self.usage = chunk.usage.completion_tokens

    def _add(self, chunk: _Chunk | None) -> AnswerPiece | None:
        if chunk is None:
            _break_off("a stream without an end")
        if chunk.error is not None:
            _break_off(str(chunk.error)[:200])
        self._count(chunk)
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        self._chunks += bool(choice.text)
        if self._chunks > self._most + SPARE_CHUNKS:
            self.finish, self.cut = "length", True
            return None
        self.written += choice.text
        text = self._stops.take(choice.text)
        if self._stops.stopped:
            self.finish, self.cut = "stop", True
        elif choice.finish_reason is not None:
            self.finish = "length" if choice.finish_reason == "length" else "stop"
        probabilities = _logprobs(choice.logprobs)
        if not (text or probabilities or choice.text):
            return None
        return AnswerPiece(
            text=text,
            tokens=self._take_new(self._reported + bool(choice.text)),
            logprobs=probabilities,
        )

    def _take_new(self, total: int) -> tuple[int, ...]:
        """Return the tokens, of `total` so far, that no piece has reported, and count them."""
        more = max(0, min(total, self._most) - self._reported)
        self._reported += more
        return (UNKNOWN_TOKEN,) * more


def _body(request: Generation) -> dict[str, object]:
    sequence = request.sequence
    body: dict[str, object] = {
        "prompt": request.text,
        "max_tokens": sequence.max_tokens,
        "temperature": sequence.temperature,
        "top_p": sequence.top_p,
        "seed": sequence.seed % SEEDS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sequence.stop:
        body["stop"] = sequence.stop[:STOPS_MAX]
    if sequence.logprobs is not None:
        body["logprobs"] = sequence.logprobs
    return body | _shaping(sequence.shaping)


def _shaping(shaping: Shaping | None) -> dict[str, object]:
    """Return the fields of options that differ from their defaults."""
    if shaping is None:
        return {}
    fields = msgspec.structs.asdict(shaping)
    bias = fields.pop("bias")
    plain = msgspec.structs.asdict(Shaping())
    body = {name: value for name, value in fields.items() if value != plain[name]}
    if bias:
        body["logit_bias"] = {str(token): value for token, value in bias}
    return body


async def _chunks(response: httpx.Response, bytes_max: int) -> AsyncGenerator[_Chunk, None]:
    """Yield the events of a stream, up to [DONE]. Raises Unavailable for malformed ones."""
    unread, total, done = bytearray(), 0, False
    async for part in response.aiter_raw():
        total += len(part)
        unread += part
        *lines, rest = unread.split(b"\n")
        unread = rest
        if total > bytes_max or len(unread) > LINE_BYTES_MAX:
            _break_off("more bytes than an answer has")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = bytes(line[5:]).strip()
            if data == b"[DONE]":
                done = True
                break
            try:
                chunk = _CHUNK.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                _break_off(error)
            yield chunk
        if done:
            return


async def _read_all(response: httpx.Response, bytes_max: int) -> bytes:
    data = bytearray()
    async for part in response.aiter_raw():
        data += part
        if len(data) > bytes_max:
            _break_off("more bytes than an answer has")
    return bytes(data)


def _break_off(why: object) -> NoReturn:
    log.warning("the server for answers broke off", error=repr(why)[:200])
    raise Unavailable(BROKE_OFF, retry_after_s=REST_S) from (
        why if isinstance(why, Exception) else None
    )


def _logprobs(probabilities: _Probabilities | None) -> tuple[TokenLogprob, ...]:
    if probabilities is None:
        return ()
    tops = probabilities.top_logprobs or ({},) * len(probabilities.tokens)
    return tuple(
        TokenLogprob(
            data=text.encode(),
            logprob=value,
            top=tuple((name.encode(), number) for name, number in (top or {}).items()),
        )
        for text, value, top in zip(
            probabilities.tokens, probabilities.token_logprobs, tops, strict=False
        )
        if value is not None
    )


_tokenizer = lru_cache(maxsize=8)(load_tokenizer)


def _tokens(text: str, tokenizer: bytes | None) -> tuple[int, ...]:
    """Return the tokens of a text, at least one. Without a tokenizer a prompt is written in numbers
    of tokens, so each word counts as a token.
    """
    if tokenizer is None:
        return (UNKNOWN_TOKEN,) * max(1, len(text.split()))
    loaded = _tokenizer(tokenizer)
    ids = loaded.encode(text, add_special_tokens=False).ids
    return tuple(ids) or (end_of_text(loaded) or 0,)
