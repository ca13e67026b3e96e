"""Tokens on disk, and the tokenizer that made them.

A chunk consists of raw little-endian unsigned integers: 16 bits a token, 32 if the vocabulary has
more than 65,535 tokens. Chunks of one stream overlap by one token, so that every token but the
first is the target of exactly one prediction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, Data, DatasetManifest, DatasetTerms

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Put = Callable[[bytes], str]  # stores a blob and returns its SHA-256 in hex

END_OF_TEXT = "<|endoftext|>"
_ENDS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)  # names of end tokens in tokenizers made elsewhere
VOCAB_MIN = 257  # every byte, and the end of a text
VOCAB_MAX = 1 << 20
FILE_BYTES_MAX = 64 << 20  # largest tokenizer.json
_TOKEN_BYTES_MAX = 32  # longest token: without this limit, runs of blanks would fill the vocabulary
# A run of so many characters without a blank becomes several words for the training of a tokenizer,
# whose time grows with the square of a word's length (13 s for 100,000 letters).
_LONG_RUN = re.compile(r"\S{2000}")
_SCAN = 1 << 20  # tokens checked at a time
_DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "marked32": np.dtype("<u4"),
}
MARKED = "marked32"  # tokens whose two upper bits are the marks below
LEARNT, FIRST = 1 << 31, 1 << 30  # marks: part of an answer; first token of a dialogue
TOKEN_BITS = FIRST - 1


def _byte_signs() -> list[str]:
    """Return the character with which a byte-level tokenizer writes each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in plain)
    signs = {byte: chr(byte) for byte in plain}
    signs |= {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
    return [signs[byte] for byte in range(256)]


BYTE_OF_SIGN = {sign: byte for byte, sign in enumerate(_byte_signs())}


def dtype_for(vocab_size: int) -> str:
    """Return the name of the stored type that holds every token below `vocab_size`."""
    return "uint16" if vocab_size <= 65535 else "uint32"


def dtype_of(manifest: DatasetManifest) -> str:
    """Return the name of the stored type of tokens."""
    return str(manifest.meta.get("dtype", "uint16"))


def stored_type(dtype: str) -> np.dtype[np.unsignedinteger]:
    """Return the stored type of a name. Raises InvalidRunFile for an unknown name."""
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise InvalidRunFile(f'tokens of type "{dtype}" are not known; use uint16 or uint32')
    return kind


class TextSettings(DatasetTerms, frozen=True, kw_only=True):
    """Settings of a token dataset.

    Without a `tokenizer` (the bytes of a tokenizer.json), the build trains one.
    """

    vocab_size: int = 4096
    tokenizer: bytes | None = None
    chunk_tokens: int = 131_072

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 16 <= self.chunk_tokens <= 1 << 23:
            raise InvalidRunFile(
                f"chunk_tokens {self.chunk_tokens} must lie between 16 and {1 << 23}"
            )


class BuiltParts(NamedTuple):
    """Parts of a manifest that a build stored."""

    chunks: tuple[ChunkRef, ...]
    heldout: tuple[ChunkRef, ...]
    assets: dict[str, ChunkRef]
    meta: dict[str, str | int | float]


class TokenChunk:
    """File of tokens, memory-mapped read-only; `tokens` is a one-dimensional view."""

    def __init__(self, path: Path, dtype: str) -> None:
        kind = stored_type(dtype)
        size = path.stat().st_size
        if size == 0 or size % kind.itemsize:
            raise InvalidRunFile(f"{path.name}: {size} bytes are not a list of {dtype} tokens")
        self.name = path.name
        self._bits = TOKEN_BITS if dtype == MARKED else -1 % (1 << 8 * kind.itemsize)
        self.tokens: NDArray[np.unsignedinteger] = np.memmap(path, dtype=kind, mode="r")

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, vocab_size: int) -> None:
        """Refuse a token that is not below `vocab_size`. Raises InvalidRunFile."""
        for start in range(0, len(self.tokens), _SCAN):
            part = self.tokens[start : start + _SCAN] & self.tokens.dtype.type(self._bits)
            if int(part.max()) >= vocab_size:
                at = start + int(np.argmax(part >= vocab_size))
                raise InvalidRunFile(
                    f"{self.name}: token {int(part[at - start])} at position {at} is not below"
                    f" vocab_size {vocab_size}; was it made with another tokenizer?"
                )


class TokenChunks:
    """Chunks of a dataset, opened and checked when they are first read."""

    def __init__(self, data: Data, vocab_size: int) -> None:
        self._data = data
        self._vocab = vocab_size
        self._open: dict[int, TokenChunk] = {}

    def tokens(self, index: int) -> NDArray[np.unsignedinteger]:
        """Return the tokens of a chunk. Raises InvalidRunFile for an unusable chunk."""
        chunk = self._open.get(index)
        if chunk is None:
            chunk = self._open[index] = self._check(index)
        return chunk.tokens

    def _check(self, index: int) -> TokenChunk:
        manifest = self._data.manifest
        chunk = TokenChunk(self._data.chunk(index), dtype_of(manifest))
        if len(chunk) != manifest.chunks[index].items:
            raise InvalidRunFile(
                f"chunk {index} of {manifest.name} has {len(chunk)} tokens, but its manifest says"
                f" {manifest.chunks[index].items}"
            )
        chunk.check(self._vocab)
        return chunk


class ChunkWriter:
    """Cuts one stream of tokens into chunks of `chunk_tokens` targets stored through `put`."""

    def __init__(self, put: Put, dtype: str, chunk_tokens: int) -> None:
        self._put = put
        self._dtype = _DTYPES[dtype]
        self._size = chunk_tokens + 1  # the last token of a chunk is the first of the next
        self._rest: list[NDArray[np.unsignedinteger]] = []
        self._held = 0
        self._chunks: list[ChunkRef] = []
        self.tokens = 0

    def add(self, tokens: NDArray[np.integer]) -> None:
        self._rest.append(tokens.astype(self._dtype))
        self._held += len(tokens)
        self.tokens += len(tokens)
        if self._held < self._size:
            return
        stream = np.concatenate(self._rest)
        while len(stream) >= self._size:
            self._store(stream[: self._size])
            stream = stream[self._size - 1 :]
        self._rest, self._held = [stream], len(stream)

    def close(self) -> tuple[ChunkRef, ...]:
        """Store the remaining tokens, and return all chunks; a single remaining token is dropped,
        since it predicts nothing.
        """
        if self._held > 1:
            self._store(np.concatenate(self._rest))
        self._rest, self._held = [], 0
        return tuple(self._chunks)

    def _store(self, tokens: NDArray[np.unsignedinteger]) -> None:
        blob = tokens.tobytes()
        self._chunks.append(ChunkRef(sha256=self._put(blob), size=len(blob), items=len(tokens)))


def check_size(path: Path) -> None:
    """Refuse a too large tokenizer.json before reading it. Raises InvalidRunFile."""
    size = path.stat().st_size
    if size > FILE_BYTES_MAX:
        raise InvalidRunFile(
            f"{path} has {size / 1e6:,.0f} MB: a tokenizer of more than"
            f" {FILE_BYTES_MAX / 1e6:,.0f} MB is not read"
        )


def load_tokenizer(data: bytes) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, set to encode plain text only. Raises
    InvalidRunFile.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidRunFile("this is not a tokenizer.json: it is not UTF-8 text") from error
    except Exception as error:  # the library raises plain Exception
        raise InvalidRunFile(f"this is not a tokenizer.json that can be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not an end
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a byte-level BPE of at most `vocab_size` tokens as tokenizer.json; the same texts give
    the same bytes. Raises InvalidRunFile for a `vocab_size` out of range.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not VOCAB_MIN <= vocab_size <= VOCAB_MAX:
        raise InvalidRunFile(
            f"vocab_size {vocab_size} must lie between {VOCAB_MIN} (every byte and the end of a"
            f" text) and {VOCAB_MAX}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_TOKEN_BYTES_MAX,
        show_progress=False,
    )
    tokenizer.train_from_iterator((_LONG_RUN.sub(r"\g<0>\n", text) for text in texts), trainer)
    text: str = tokenizer.to_str()
    return text.encode()


@lru_cache(maxsize=1)
def byte_tokenizer() -> bytes:
    """Return a tokenizer.json whose tokens are the bytes of UTF-8; byte 0 is the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    signs = _byte_signs()
    vocabulary = {END_OF_TEXT if byte == 0 else sign: byte for byte, sign in enumerate(signs)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    text: str = tokenizer.to_str()
    return text.encode()


def vocab_of(tokenizer: Tokenizer) -> int:
    """Return one more than the largest token id (ids may have gaps)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer's post-processor writes before a text, such as a
    mark of its beginning.
    """
    encoding = tokenizer.encode("a", add_special_tokens=True)
    marks = encoding.special_tokens_mask
    count = marks.index(0) if 0 in marks else 0
    ids: list[int] = encoding.ids[:count]
    return ids


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a document; None if the tokenizer has no token of a known name."""
    tokens = (tokenizer.token_to_id(text) for text in _ENDS)
    return next((token for token in tokens if token is not None), None)
