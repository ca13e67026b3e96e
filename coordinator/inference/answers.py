"""Answers to prompts: which versions may be asked, and limits, price and stream of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.accounts.api_keys import Asker
from coordinator.database import datasets, evaluations, runs, versions
from coordinator.database.datasets import DatasetRow
from coordinator.database.inference import api_key_rows
from coordinator.database.ledger import payments
from coordinator.inference.answerers import Answerers
from coordinator.inference.inference_engine import (
    AnswerPiece,
    AnswerRule,
    ChatPrompt,
    FinishReason,
    Generation,
    InferenceEngine,
    InvalidField,
    ModelVersion,
    PreparedPrompt,
    TokenPrompt,
)
from coordinator.inference.metering import Meter, MeteredRequest, RunningRequest
from coordinator.rate_limit import PerMinute
from coordinator.rules import answer_prices
from coordinator.rules.run_file import ServeSettings, TierSettings
from coordinator.runs.definition import definition
from shared.errors import BadRequest, Forbidden, NotFound, Unavailable
from shared.nearest_name import nearest
from shared.protocol.inference import DEFAULT_TOKENS, ModelCard
from shared.workloads.data.chat_template import TEMPLATE
from shared.workloads.data.tool_calls import ToolCallForm
from shared.workloads.declaration import Output, refusal
from shared.workloads.generation import batch
from shared.workloads.generation.sampling import Shaping

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from coordinator.database.runs import RunRow
    from shared.clock import Clock

RETRY_S = 10.0
NO_KEY = (
    "send the header Authorization: Bearer KEY; `volunteer key create` makes one for who has helped"
)
PLAIN_CHAT = "chat: a plain transcript (System, User, Assistant), because the run has no template"
READ_BY_VOLUNTEERS = (
    "volunteers' machines may answer, and their owners can read prompts;"
    ' answered_by = "organiser" keeps yours off them'
)
RUN_TEMPLATE = "chat: the run's own template"
TOKENIZER_TEMPLATE = "chat: the template of the model's tokenizer"


class UnknownModel(NotFound):
    """Raised if no model has the given name."""


class Servable(msgspec.Struct, frozen=True, kw_only=True):
    """Servable version of a run, with its prices and access."""

    name: str  # name in the request
    version: ModelVersion
    output: Output
    serve: ServeSettings
    template: bool  # True: the chat template of the model's tokenizer formats chats
    tier: TierSettings
    unit_nano: int  # price of a token or image, in thousandths of a micro-credit
    asker: Asker


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to continue, and their sampling options."""

    kind: str
    prompts: tuple[str | TokenPrompt | ChatPrompt, ...]
    rule: AnswerRule | None = None
    echo: bool = False  # the answer begins with the prompt
    max_tokens: int | None
    seed: int
    count: int = 1  # answers to each prompt
    temperature: float = 1.0
    top_p: float = 1.0
    shaping: Shaping | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    private: bool = False  # only the organiser's machines may read the prompt

    @property
    def field(self) -> str:
        """Return the name of the request's field that holds the text."""
        return "prompt" if self.kind == "completion" else "messages"

    @property
    def choices(self) -> int:
        """Return the number of answers to all prompts."""
        return self.count * len(self.prompts)


class AnswerStream:
    """Running answer: pieces of its sequences as they arrive, then its price."""

    def __init__(
        self,
        metered: RunningRequest,
        prompt_tokens: int,
        sequences: Sequence[AsyncIterator[AnswerPiece]],
        count: Callable[[int, str], None],
    ) -> None:
        self.id = metered.id
        self.metered = metered
        self.prompt_tokens = prompt_tokens
        self.cost_micro = 0
        self.echoes: tuple[AnswerPiece, ...] = ()  # the prompts, if sequences begin with them
        self.calls: ToolCallForm | None = None  # form of calls of functions in the text
        self._sequences = sequences
        self._count = count

    async def pieces(
        self, disconnect: asyncio.Future[None]
    ) -> AsyncGenerator[tuple[int, AnswerPiece], None]:
        """Yield the pieces of all sequences as they arrive, each with the number of its sequence,
        until all sequences end or `disconnect` is done.

        Each piece is counted on arrival, even if the asker no longer waits for it.
        """
        waiting = {asyncio.ensure_future(_next(s)): n for n, s in enumerate(self._sequences)}
        try:
            while waiting and not disconnect.done():
                futures: list[asyncio.Future[Any]] = [*waiting, disconnect]
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                done = [task for task in waiting if task.done()]
                arrived = [(waiting.pop(task), self._counted(task)) for task in done]
                for number, piece in arrived:
                    if piece is not None and piece.finish is None:
                        task = asyncio.ensure_future(_next(self._sequences[number]))
                        waiting[task] = number
                for number, piece in arrived:
                    if piece is not None:
                        yield number, piece
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for task in waiting:
                if not task.cancelled() and task.exception() is None:
                    self._counted(task)

    def _counted(self, task: asyncio.Future[AnswerPiece | None]) -> AnswerPiece | None:
        piece = task.result()
        if piece is not None:
            self._count(len(piece.tokens), piece.by)
        return piece

    async def stop(self) -> None:
        """Cancel the sequences that have not ended."""
        for sequence in self._sequences:
            close = getattr(sequence, "aclose", None)
            if close is not None:
                with suppress(Exception):
                    await close()


async def _next(sequence: AsyncIterator[AnswerPiece]) -> AnswerPiece | None:
    return await anext(sequence, None)


class Answers:
    """Lists the models, and checks, limits and meters the engine's answers."""

    def __init__(self, db: Database, clock: Clock, settings: Settings) -> None:
        self._db = db
        self.meter = Meter(db, clock, settings)
        self.rates = PerMinute(clock.monotonic)
        self.answerers = Answerers(db, clock)
        self._engine: InferenceEngine | None = None
        self._only: Mapping[str, int] = {}

    def connect(self, engine: InferenceEngine, only: Mapping[str, int] | None = None) -> None:
        """Set the engine; `only` maps the runs of which it has a single version to that version."""
        self._engine, self._only = engine, only or {}

    # --- models ---

    async def models(self, asker: Asker) -> tuple[ModelCard, ...]:
        """Return the models that this asker may prompt: newest and best version of each run."""

        def read(conn: Connection) -> tuple[ModelCard, ...]:
            helped = api_key_rows.has_contributed(conn, asker.volunteer_id)
            return tuple(
                card
                for run in runs.every(conn)
                if _may_ask(run, asker, helped)
                for card in _cards(conn, run, self._only.get(run.name), self._templates)
            )

        return await self._db.read(read)

    async def model(self, asker: Asker, name: str) -> ModelCard:
        """Return a model by its id. Raises UnknownModel, whose message names the nearest id;
        Forbidden; InvalidField if the run generates nothing.
        """

        def read(conn: Connection) -> ModelCard:
            run, version = _resolve(conn, name, asker, self._only)
            return _card(conn, run, name, version, self._templates)

        return await self._db.read(read)

    async def find(self, asker: Asker, name: str) -> Servable:
        """Return the version named by a model id, and this asker's tier; count the request.

        Raises UnknownModel, Forbidden, TooManyRequests, InvalidField if the run generates nothing.
        """

        def read(conn: Connection) -> Servable:
            run, version = _resolve(conn, name, asker, self._only)
            serve = definition(run).file.serve
            total = payments.balances(conn, asker.volunteer_id).total_micro
            return Servable(
                name=name,
                version=ModelVersion(run_id=run.id, run=run.name, version=version),
                output=definition(run).declaration.output,
                serve=serve,
                template=_chat_format(run, datasets.of_run(conn, run), self._templates)
                == TOKENIZER_TEMPLATE,
                tier=answer_prices.ORGANISER
                if asker.organiser
                else answer_prices.tier_of(serve, total),
                unit_nano=0 if asker.organiser else _unit_nano(run),
                asker=asker,
            )

        model = await self._db.read(read)
        key = f"{asker.volunteer_id}:{model.version.run_id}"
        self.rates.hit(key, model.tier.requests_per_minute)
        return model

    # --- answers ---

    @asynccontextmanager
    async def text(self, model: Servable, request: TextPrompt) -> AsyncIterator[AnswerStream]:
        """Answer prompts within the block; at its end, the generated tokens are settled.

        Raises InvalidField, Forbidden, InsufficientQuota, TooManyRequests, Unavailable without an
        engine.
        """
        if why := refusal(model.output, "ask", model.name):
            raise InvalidField(why, "model")
        engine = self._working()
        least = 1 if request.max_tokens is None else min(request.max_tokens, model.tier.tokens)
        # checked here too, before the engine loads the model to prepare the prompts
        await self.meter.check(_order(model, request.kind, 1, least * request.choices))
        prepared = [await _prepare(engine, model, request, prompt) for prompt in request.prompts]
        _check_bias(request, prepared[0].vocabulary)
        prompt_tokens = sum(len(prompt.tokens) for prompt in prepared)
        tokens_max = [
            _room(model, request, len(prompt.tokens), prompt.context) for prompt in prepared
        ]
        # the prompts' tokens are paid as they are scored
        scored = prompt_tokens if request.echo and request.logprobs is not None else 0
        order = _order(
            model, request.kind, prompt_tokens - scored, scored + sum(tokens_max) * request.count
        )
        metered = await self.meter.begin(msgspec.structs.replace(order, scored=scored))
        count = partial(self.meter.count, metered)
        try:
            if scored:
                for number, prompt in enumerate(request.prompts):
                    prepared[number] = await _prepare(
                        engine, model, request, prompt, request.logprobs
                    )
                    count(len(prepared[number].tokens))
            generations = _generations(model, request, prepared, tokens_max, metered.id)
            sequences = [engine.generate(generation) for generation in generations]
            answer = AnswerStream(metered, prompt_tokens, sequences, count)
            answer.calls = prepared[0].calls
            if request.echo:
                answer.echoes = _echoes(request, prepared, tokens_max)
        except BaseException:
            await self.meter.end(metered)
            raise
        try:
            yield answer
        finally:
            await asyncio.shield(self.close(answer))

    async def close(self, answer: AnswerStream) -> int:
        """Stop and settle an answer before its price is sent; return the price."""
        if not answer.metered.ended:
            await answer.stop()
            answer.cost_micro = await self.meter.end(answer.metered)
        return answer.cost_micro

    async def images(self, model: Servable, count: int, seed: int) -> tuple[Sequence[bytes], int]:
        """Return PNG files and their price. Raises like `text`."""
        if why := refusal(model.output, "draw", model.name):
            raise InvalidField(why, "model")
        engine = self._working()
        metered = await self.meter.begin(_order(model, "image", 0, count))
        try:
            pictures = await engine.images(model.version, count, seed)
            self.meter.count(metered, len(pictures))
        finally:
            cost = await asyncio.shield(self.meter.end(metered))
        return pictures, cost

    @property
    def _templates(self) -> bool:
        return self._engine is not None and self._engine.templates

    def _working(self) -> InferenceEngine:
        if self._engine is None:
            raise Unavailable("no engine answers prompts here now", retry_after_s=RETRY_S)
        return self._engine


async def _prepare(
    engine: InferenceEngine,
    model: Servable,
    request: TextPrompt,
    prompt: str | TokenPrompt | ChatPrompt,
    probe: int | None = None,
) -> PreparedPrompt:
    try:
        return await engine.prepare(model.version, prompt, probe, request.rule)
    except InvalidField:
        raise
    except BadRequest as error:
        raise InvalidField(error.message, request.field) from error


def _generations(
    model: Servable,
    request: TextPrompt,
    prepared: Sequence[PreparedPrompt],
    tokens_max: Sequence[int],
    request_id: str,
) -> list[Generation]:
    """Return the sequences to generate, prompt by prompt; a prompt that is only scored has none."""
    generations: list[Generation] = []
    for place, prompt in enumerate(prepared):
        text = request.prompts[place]
        for number in range(place * request.count, (place + 1) * request.count):
            sequence = batch.Sequence(
                id=f"{request_id}-{number}",
                prompt=prompt.tokens,
                max_tokens=tokens_max[place],
                seed=request.seed + number,
                temperature=request.temperature,
                top_p=request.top_p,
                shaping=request.shaping,
                grammar=prompt.grammar,
                stop=(*request.stop, *model.serve.stop, *prompt.stop),
                ends=prompt.ends,
                logprobs=request.logprobs,
            )
            generation = Generation(
                model=model.version,
                sequence=sequence,
                text=text if isinstance(text, str) else "",
                vocabulary=prompt.vocabulary,
                volunteers=_volunteers_may_answer(model, request),
                asker=model.asker.volunteer_id,
            )
            generations += [generation] if tokens_max[place] else []
    return generations


def _echoes(
    request: TextPrompt, prepared: Sequence[PreparedPrompt], tokens_max: Sequence[int]
) -> tuple[AnswerPiece, ...]:
    """Return the prompts as beginnings of their answers; an answer for which no tokens are left
    ends with its prompt.
    """
    echoes: list[AnswerPiece] = []
    for words, prompt, room in zip(request.prompts, prepared, tokens_max, strict=True):
        text = words if isinstance(words, str) else prompt.text
        end: FinishReason | None = None if room else "length"
        echoes += [AnswerPiece(text=text, logprobs=prompt.logprobs, finish=end)] * request.count
    return tuple(echoes)


def _check_bias(request: TextPrompt, vocabulary: int) -> None:
    """Raise InvalidField for a biased token that the model does not have."""
    largest = max((token for token, _ in request.shaping.bias), default=0) if request.shaping else 0
    if largest >= vocabulary > 0:
        raise InvalidField(
            f"logit_bias has the token {largest}, and the model {vocabulary}", "logit_bias"
        )


def _volunteers_may_answer(model: Servable, request: TextPrompt) -> bool:
    """Return True if the run lets volunteers' machines answer, and the prompt is neither private
    nor the organiser's, whose free answers would not pay them.
    """
    is_private = request.private or model.asker.organiser
    return model.serve.answered_by == "volunteers" and not is_private


def _order(model: Servable, kind: str, tokens_in: int, tokens_max: int) -> MeteredRequest:
    return MeteredRequest(
        asker=model.asker,
        run_id=model.version.run_id,
        version=model.version.version,
        serve=model.serve,
        tier=model.tier,
        unit_nano=model.unit_nano,
        model=model.name,
        kind=kind,
        tokens_in=tokens_in,
        tokens_max=tokens_max,
        house_share=model.serve.house_share,
    )


def _room(model: Servable, request: TextPrompt, prompt: int, context: int) -> int:
    """Return how many tokens may be generated. Raises InvalidField with the figures."""
    room, limit = context - prompt, model.tier.tokens
    if room < (1 if request.max_tokens is None else request.max_tokens):
        answer_room = f" and {request.max_tokens} more" if request.max_tokens and room > 0 else ""
        remedy = "shorten it, or lower max_tokens" if answer_room else "shorten it"
        raise InvalidField(
            f"the prompt has {prompt} tokens{answer_room}, and {context} fit, answer included: "
            f"{remedy}",
            request.field,
            "context_length_exceeded",
        )
    if request.max_tokens is not None and request.max_tokens > limit:
        raise InvalidField(
            f"an answer for this account has at most {limit} tokens, not {request.max_tokens}: "
            "training raises this limit",
            "max_tokens",
        )
    return min(room, limit, DEFAULT_TOKENS) if request.max_tokens is None else request.max_tokens


def _unit_nano(run: RunRow) -> int:
    """Return the price of a run's token or image, in thousandths of a micro-credit."""
    about = definition(run)
    flops = answer_prices.TOKEN_FLOPS * about.parameters
    if about.declaration.output == "image":
        flops = run.step_flops / about.file.task.batch_size * answer_prices.FORWARD_SHARE
    return answer_prices.unit_nano(run.price_micro, run.step_flops, flops, about.file.serve.price)


def _may_ask(run: RunRow, asker: Asker, helped: bool) -> bool:
    if run.head < 0 or refusal(definition(run).declaration.output, "generate", run.name):
        return False
    who = definition(run).file.serve.who
    allowed = asker.organiser or who == "keys" or (who == "volunteers" and helped)
    return allowed and (not asker.runs or run.name in asker.runs)


def _resolve(
    conn: Connection, name: str, asker: Asker, only: Mapping[str, int]
) -> tuple[RunRow, int]:
    """Return the run and the version of a model id. Raises UnknownModel, Forbidden, InvalidField if
    the run generates nothing.
    """
    run_name, _, which = name.partition("@")
    by_name = {run.name: run for run in runs.every(conn)}
    run = by_name.get(run_name)
    if run is None:
        near = nearest(run_name, by_name)
        hint = (
            f'; did you mean "{near}"?'
            if near
            else ": `volunteer runs`, or GET /v1/models, lists all"
        )
        raise UnknownModel(f'there is no model "{name[:80]}"{hint}')
    if run.head < 0:
        raise UnknownModel(
            f'the run "{run.name}" has no version yet: it gets one when its organiser starts it'
        )
    if asker.runs and run.name not in asker.runs:
        raise Forbidden(f'this key may not ask "{run.name}": {", ".join(asker.runs)} only')
    if why := refusal(definition(run).declaration.output, "generate", run.name):
        raise InvalidField(why, "model")
    if not _may_ask(run, asker, api_key_rows.has_contributed(conn, asker.volunteer_id)):
        if definition(run).file.serve.who == "volunteers":
            raise Forbidden(
                f'the run "{run.name}" answers those who helped: come back when an update of yours'
                " is merged, or games or answers are accepted"
            )
        raise Forbidden(f'nobody may ask the run "{run.name}"')
    here = only.get(run.name)
    if here is None:
        return run, _version(conn, run, which)
    if here > run.head or which not in ("", str(here), "best" if here == run.best else ""):
        raise UnknownModel(f"only {run.name}@{here} answers here, no other version of this run")
    return run, here


def _version(conn: Connection, run: RunRow, which: str) -> int:
    if not which:
        return run.head
    if which == "best":
        return run.head if run.best is None else run.best
    number = int(which) if which.isascii() and which.isdigit() and len(which) < 10 else -1
    try:
        versions.get(conn, run.id, number)
    except NotFound:
        raise UnknownModel(
            f'the run "{run.name}" has no version "{which[:40]}": {run.name}@0 to '
            f"{run.name}@{run.head}, or {run.name}@best"
        ) from None
    if evaluations.evaluation(conn, run.id, number).pruned:
        raise UnknownModel(f"the files of {run.name}@{number} are gone: ask a later version")
    return number


def _cards(conn: Connection, run: RunRow, only: int | None, templates: bool) -> list[ModelCard]:
    """Return a run's newest version, and its best one if known; only version `only` if given."""
    if only is not None:
        return [_card(conn, run, run.name, only, templates)] if only <= run.head else []
    cards = [_card(conn, run, run.name, run.head, templates)]
    if run.best is not None:
        cards.append(_card(conn, run, f"{run.name}@best", run.best, templates))
    return cards


def _chat_format(run: RunRow, dataset: DatasetRow | None, templates: bool) -> str:
    """Return how conversations are formatted for a run's model, in words."""
    if definition(run).file.serve.chat != ServeSettings().chat:
        return RUN_TEMPLATE
    templated = templates and dataset is not None and TEMPLATE in dataset.manifest.assets
    return TOKENIZER_TEMPLATE if templated else PLAIN_CHAT


def _card(conn: Connection, run: RunRow, name: str, version: int, templates: bool) -> ModelCard:
    about, dataset = definition(run), datasets.of_run(conn, run)
    file = about.file
    text = about.declaration.output == "text"
    chat = _chat_format(run, dataset, templates) if text else ""
    read = READ_BY_VOLUNTEERS if text and file.serve.answered_by == "volunteers" else ""
    return ModelCard(
        id=name,
        created=int(versions.get(conn, run.id, version).created_at),
        owned_by="volunteers",
        description=". ".join(part for part in (file.description, chat, read) if part),
        licence=file.licence,
        dataset="" if dataset is None else dataset.name,
        loss=evaluations.evaluation(conn, run.id, version).loss,
        version=version,
        parameters=about.parameters,
        price_micro=answer_prices.cost_micro(_unit_nano(run), 1000 if text else 1),
        output=about.declaration.output,
        answered_by=file.serve.answered_by if text else "organiser",
    )
