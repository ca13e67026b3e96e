"""Interface of an inference engine: tokens of a version for a prompt, streamed.

An engine knows nothing of accounts, credits and HTTP. An engine computes outside of the serving
process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from shared.errors import BadRequest

Turns = tuple[tuple[str, str], ...]  # of a conversation: role and text
CHARACTERS_MAX = 64  # of a prompt for each token that fits

FinishReason = Literal["stop", "length", "cancelled"]


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a run that can be loaded."""

    run_id: int
    run: str
    version: int


class TokenPrompt(NamedTuple):
    """Prompt that is given in tokens."""

    tokens: tuple[int, ...]


class PreparedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt in the model's tokens, and the tokens that end an answer to it."""

    tokens: tuple[int, ...]
    context: int  # tokens that fit, prompt and answer together
    vocabulary: int = 0  # tokens of the model are below it; 0: not known
    ends: tuple[int, ...] = ()  # tokens
    stop: tuple[str, ...] = ()
    text: str = ""  # of a prompt that was given in tokens
    said: tuple[TokenLogprob, ...] = ()  # log-probabilities of the prompt's tokens, if asked for


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. The tokens depend on these fields alone, never on the batch."""

    id: str
    model: ModelVersion
    prompt: tuple[int, ...]
    text: str = ""  # the same as it was given, for engines that read tokens of their own
    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()  # tokens that end it, beside the model's own
    logprobs: int | None = None  # alternatives a token; None: no probabilities at all
    vocabulary: int = 0  # as of `PreparedPrompt`
    place: int = 0  # tokens of the answer that are in the prompt already
    volunteers: bool = False  # machines of volunteers may compute it, and so read it
    asker: str = ""  # account that asks: its own machines do not answer it


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a generated token, and of its likeliest alternatives (text, value)."""

    text: str
    logprob: float | None  # None: of the first token of a prompt
    top: tuple[tuple[str, float], ...] = ()


class AnswerPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Next part of an answer, the last with a `finish`; `text` may be empty meanwhile."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    by: str = ""  # volunteer whose machine made it; "": the organiser's


class InferenceEngine(Protocol):
    """Source of answers to prompts.

    Every method raises Unavailable while nothing computes (with the seconds to wait), and NotFound
    for a version whose files are gone.
    """

    @property
    def templates(self) -> bool:
        """Return True if it writes conversations by a tokenizer's chat template."""

    async def prepare(
        self, model: ModelVersion, prompt: str | TokenPrompt | Turns, probe: int | None = None
    ) -> PreparedPrompt:
        """Return the prompt's tokens and the model's limits; loads the version if need be. Turns
        are for a model with a chat template. With `probe` the probabilities of the prompt's tokens
        come along, and so many alternatives.
        """

    def generate(self, request: Generation) -> AsyncIterator[AnswerPiece]:
        """Generate until a stop or the length; closing the iterator cancels within one token."""

    async def images(self, model: ModelVersion, count: int, seed: int) -> Sequence[bytes]:
        """Return `count` PNG files of an image run."""

    async def close(self) -> None: ...


def check_length(characters: int, context: int) -> None:
    """Raise BadRequest for a prompt too long to tokenize: others wait meanwhile."""
    if characters > context * CHARACTERS_MAX:
        raise BadRequest(
            f"the prompt has {characters:,} characters, and {context} tokens fit, answer "
            "included: shorten it"
        )
