"""Interface of an inference engine: tokens of a version for a prompt, streamed.

An engine does not handle accounts, credits or HTTP, and computes outside of the serving process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from shared.errors import BadRequest
from shared.workloads.data.chat_template import DialogueTurn
from shared.workloads.data.tool_calls import ToolCallForm
from shared.workloads.generation import batch

CHARACTERS_MAX = 64  # a prompt may have so many characters for each token of the context

FinishReason = Literal["stop", "length", "cancelled"]


class InvalidField(BadRequest):
    """Raised for an invalid field of a prompt."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.reason = param, code


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Version of a run that can be loaded."""

    run_id: int
    run: str
    version: int


class TokenPrompt(NamedTuple):
    """Prompt given as tokens."""

    tokens: tuple[int, ...]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of a conversation, the functions that its answer may call, in OpenAI's form, and
    options of the chat template.
    """

    turns: tuple[DialogueTurn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = {}


class AnswerRule(msgspec.Struct, frozen=True, kw_only=True):
    """Form that an answer must have: JSON by a schema, calls of functions, or either."""

    schema: dict[str, Any] | None = None
    functions: dict[str, dict[str, Any]] = {}  # schemas of arguments, by the names of functions
    must_call: bool = False
    several: bool = True  # several calls in one answer


class PreparedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt in the model's tokens, and the tokens that end an answer to it."""

    tokens: tuple[int, ...]
    context: int  # most tokens of prompt and answer together
    vocabulary: int = 0  # number of the model's tokens; 0 = unknown
    ends: tuple[int, ...] = ()  # tokens that end an answer
    stop: tuple[str, ...] = ()  # texts that end an answer
    text: str = ""  # text of a prompt given as tokens
    logprobs: tuple[
        TokenLogprob, ...
    ] = ()  # log-probabilities of the prompt's tokens, if requested
    grammar: str = ""  # grammar of the answer, for a rule
    calls: ToolCallForm | None = None  # form of the answer's calls of functions


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Sequence that a version generates. Its tokens depend only on model and sequence, never on the
    batch.
    """

    model: ModelVersion
    sequence: batch.Sequence
    text: str = ""  # the prompt as it was given, for engines that tokenize it themselves
    vocabulary: int = 0  # number of the model's tokens; 0 = unknown
    volunteers: bool = False  # volunteers' machines may compute the answer, and so read it
    asker: str = ""  # account that asks: its own machines do not answer


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a token, and of its likeliest alternatives (bytes of text, value)."""

    data: bytes  # UTF-8 of the token, which may end within a character
    logprob: float | None  # None for the first token of a prompt
    top: tuple[tuple[bytes, float], ...] = ()


class AnswerPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Next part of an answer; the last part has a `finish`, and any text may be empty."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    by: str = ""  # volunteer whose machine made the piece; "" = the organiser's


class InferenceEngine(Protocol):
    """Source of answers to prompts.

    Every method raises Unavailable, with the seconds to wait, while the engine cannot compute or
    the files of a version are gone, and NotFound for a version that is unknown.
    """

    @property
    def templates(self) -> bool:
        """Return True if the engine can format conversations by a tokenizer's chat template."""

    async def prepare(
        self,
        model: ModelVersion,
        prompt: str | TokenPrompt | ChatPrompt,
        probe: int | None = None,
        rule: AnswerRule | None = None,
    ) -> PreparedPrompt:
        """Return the prompt's tokens and the model's limits, loading the version if necessary.
        A `ChatPrompt` needs a model with a chat template. `probe` also requests the
        log-probabilities of the prompt's tokens, with that many alternatives; `rule` the grammar
        of the answer.
        """

    def generate(self, request: Generation) -> AsyncIterator[AnswerPiece]:
        """Generate up to a stop, an end token or `max_tokens`; closing the iterator cancels."""

    async def images(self, model: ModelVersion, count: int, seed: int) -> Sequence[bytes]:
        """Return `count` PNG files of an image run."""

    async def close(self) -> None: ...


def check_length(characters: int, context: int) -> None:
    """Raise BadRequest for a prompt of more than CHARACTERS_MAX characters for each token of
    `context`, since tokenizing it would delay other prompts.
    """
    if characters > context * CHARACTERS_MAX:
        raise BadRequest(
            f"the prompt has {characters:,} characters, and {context} tokens fit, answer "
            "included: shorten it"
        )
