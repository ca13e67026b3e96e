"""Conversion of prompts to tokens and back, for a decoder; without a tokenizer, numbers in a text
are its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from shared.errors import InvalidRunFile
from shared.workloads.base import Reader
from shared.workloads.data.tokenizer import (
    BYTE_OF_SIGN,
    beginning,
    end_of_text,
    load_tokenizer,
)
from shared.workloads.generation.text_stream import UNFINISHED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DIGITS_MAX = 12
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in tokenizers of the kind of SentencePiece
_BLANK = "\u2581"  # SentencePiece's sign for a blank


class PromptText:
    """Text conversion of a `Decoder`."""

    def __init__(self, tokenizer: bytes | None, vocabulary: int) -> None:
        """Read a tokenizer.json, if there is one. Raises InvalidRunFile."""
        self.vocabulary = vocabulary
        self._data = tokenizer
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self.end = end_of_text(self._tokenizer) if self._tokenizer else None
        self._beginning = beginning(self._tokenizer) if self._tokenizer else []

    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        """Return the tokens of a prompt: the special tokens before every text, then the tokens of
        `text`; for an empty prompt the token that ends a text, or 0.

        With `marks` a chat template has written `text`: special tokens in it count as such, and
        none is put before it. Otherwise they are plain text. Raises InvalidRunFile for tokens
        unknown to the model, and for words without a tokenizer.
        """
        if marks:
            tokens = self._tokens(text, self._marking)
        else:
            tokens = [*self._beginning, *self._tokens(text, self._tokenizer)]
        return self._checked(tokens) or [self.end or 0]

    def continuation(self, text: str) -> list[int]:
        """Return the tokens of a text that follows a prompt, such as an answer. Raises
        InvalidRunFile like `encode`.
        """
        return self._checked(self._tokens(text, self._tokenizer))

    def _checked(self, tokens: list[int]) -> list[int]:
        if any(token >= self.vocabulary for token in tokens):
            raise InvalidRunFile("the prompt has tokens that this model does not know")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without marks such as the end of a text."""
        if self._tokenizer:
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
            return text
        return "".join(f"{token} " for token in tokens)

    def spelling(self, token: int) -> bytes:
        """Return the bytes of text that a token stands for; b"" for a special token."""
        text = self.decode([token])
        written = self._tokenizer.id_to_token(token) if self._tokenizer else None
        if written is None or not text:
            return text.encode()
        if byte := _BYTE.fullmatch(written):
            return bytes([int(byte[1], 16)])
        if written.startswith(_BLANK):  # a decoder leaves out the blank before a first word
            return written.replace(_BLANK, " ").encode()
        if UNFINISHED in text and all(sign in BYTE_OF_SIGN for sign in written):
            return bytes(BYTE_OF_SIGN[sign] for sign in written)
        return text.encode()

    @cached_property
    def _marking(self) -> Tokenizer | None:
        """Return the same tokenizer, set to read special tokens; None without a tokenizer."""
        tokenizer = load_tokenizer(self._data) if self._data is not None else None
        if tokenizer is not None:
            tokenizer.encode_special_tokens = False
        return tokenizer

    def _tokens(self, text: str, tokenizer: Tokenizer | None) -> list[int]:
        if tokenizer:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        words = text.split()
        if wrong := [word for word in words if not (word.isascii() and word.isdecimal())]:
            raise InvalidRunFile(
                f"this model has no tokenizer: its prompts are numbers, not {wrong[0][:40]!r}"
            )
        return [int(word[:DIGITS_MAX]) for word in words]


def ending(reader: Reader, text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the tokens, and the texts, that end an answer; `text` follows an answer in a
    template.
    """
    if not text.strip():
        return (), ()
    first = reader.encode(text, marks=True)[:1]
    if reader.decode(first):
        return (), (text.rstrip(),)
    return tuple(first), ()  # a special token, which is not text


def padded(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return prompts as rows of one length. The padding follows a prompt's end, so that it changes
    nothing before, and the answer's tokens overwrite it.
    """
    longest = max(map(len, prompts))
    return [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
