"""Frames between a server and its inference process: a length of four bytes, then MessagePack."""

from __future__ import annotations

import struct

import msgspec

from coordinator.inference.inference_engine import (
    AnswerPiece,
    AnswerRule,
    ChatPrompt,
    PreparedPrompt,
)
from shared.workloads.generation.batch import Sequence

FRAME_BYTES_MAX = 64 << 20
HEAD = struct.Struct(">I")


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files that load a version: the text of the run's file, and paths of blobs."""

    key: str  # hash of the weights
    file: str
    weights: str
    tokenizer: str | None = None
    template: str | None = None  # chat template
    files: dict[str, str] = {}  # files of the run, by name


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Order to load a version and read a prompt."""

    id: str
    model: ModelFiles
    prompt: str | ChatPrompt
    tokens: tuple[int, ...] = ()  # the prompt in tokens, instead of text
    probe: int | None = None  # alternatives for each token of the prompt; None = no probabilities
    rule: AnswerRule | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Order to generate a sequence."""

    model: ModelFiles
    sequence: Sequence

    @property
    def id(self) -> str:
        return self.sequence.id


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Order to drop a sequence."""

    id: str


class DrawPictures(msgspec.Struct, frozen=True, kw_only=True, tag="images"):
    """Order to draw pictures."""

    id: str
    model: ModelFiles
    count: int
    seed: int


class Compare(msgspec.Struct, frozen=True, kw_only=True, tag="compare"):
    """Order to compare another machine's tokens with this version's choices."""

    id: str
    model: ModelFiles
    sequence: Sequence
    tokens: tuple[int, ...]
    ended: bool  # the answer ended after these tokens


Question = Prepare | Generate | DrawPictures | Compare  # an order that gets events
Order = Question | Cancel


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """Prompt in tokens."""

    id: str
    prompt: PreparedPrompt


class GeneratedPiece(msgspec.Struct, frozen=True, kw_only=True, tag="piece"):
    """Next part of an answer."""

    id: str
    piece: AnswerPiece


class DrawnPictures(msgspec.Struct, frozen=True, kw_only=True, tag="drawn"):
    """Pictures that an order asked for, as PNG files."""

    id: str
    images: tuple[bytes, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True, tag="compared"):
    """Counts of compared tokens, and of tokens that this version would not choose."""

    id: str
    compared: int
    wrong: int


class OrderFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Failure of an order: the error's code, and its message."""

    id: str
    code: str
    message: str
    param: str = ""  # invalid field of the request
    retry_after_s: float | None = None


Event = TokenizedPrompt | GeneratedPiece | DrawnPictures | Comparison | OrderFailed

ENCODE = msgspec.msgpack.Encoder()
ORDERS = msgspec.msgpack.Decoder(Order)
EVENTS = msgspec.msgpack.Decoder(Event)


def framed(message: Order | Event) -> bytes:
    """Return a message with its length before it."""
    body = ENCODE.encode(message)
    return HEAD.pack(len(body)) + body
