"""Build of a token dataset: documents -> tokenizer -> shuffled chunks, and a held-out share that is
never served to volunteers.

Two builds from the same input give the same bytes. Text goes through a temporary file, so memory
holds only an index of the documents. `documents.py` reads the sources, `tokenizer.py` defines the
format of a chunk.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np

from shared.errors import InvalidRunFile
from shared.text import counted
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.documents import TEXT, Document, read_documents
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.text_lengths import lengths
from shared.workloads.data.tokenizer import (
    BuiltParts,
    ChunkWriter,
    Put,
    TextSettings,
    beginning,
    dtype_for,
    end_of_text,
    load_tokenizer,
    train_tokenizer,
    vocab_of,
)

UNTRAINED = (
    "vocab_size is the size of a tokenizer that the build trains, and this dataset has a tokenizer:"
    " leave vocab_size out"
)

_PART_MIN, _PART_MAX = 1 << 10, 256 << 10  # bytes of a part of a long document
_TOKENIZER_BYTES = 64 << 20  # bytes of text after which training the tokenizer ends
_BATCH_BYTES = 1 << 20  # bytes that are encoded at a time


class TextBuild(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a build. `total` is 0 while it is unknown."""

    stage: Literal["reading", "tokenizer", "writing"]
    done: int
    total: int


class _DocumentPart(NamedTuple):
    """Document, or part of a long document, in the temporary file."""

    digest: bytes
    offset: int
    size: int


Tell = Callable[[TextBuild], None]


def build_text(
    name: str,
    sources: Iterable[str | Path | Document],
    put: Put,
    *,
    on_progress: Tell | None = None,
    skipped: Skipped | None = None,
    column: str = TEXT,
    **options: Any,
) -> DatasetManifest:
    """Store a token dataset through `put` and return its manifest.

    A source is a file, a directory or a `Document`; records have their text in a `column`;
    `options` are fields of `TextSettings`. Long documents are cut, exact copies dropped. The parts
    with the smallest SHA-256 are held out until they make `heldout_share` of the bytes, so that the
    split depends only on the text. Unreadable texts are added to `skipped`. Raises InvalidRunFile.
    """
    settings = TextSettings(**options)
    if settings.tokenizer is not None and "vocab_size" in options:
        raise InvalidRunFile(UNTRAINED)
    tell = on_progress or (lambda _: None)
    skipped = skipped if skipped is not None else Skipped()
    with tempfile.TemporaryFile() as spool:
        documents = read_documents(sources, skipped, column)
        parts, counts = _spool(documents, spool, settings.heldout_share, tell)
        built = _build(_TextScratch(spool, parts), put, settings, tell)
    built.meta.update(counts, skipped=skipped.count)
    return DatasetManifest(
        name=name,
        kind="tokens",
        licence=settings.licence,
        source=settings.source,
        chunks=built.chunks,
        heldout=built.heldout,
        assets=built.assets,
        meta=built.meta,
    )


class _TextScratch:
    """Temporary file, and the position of each part in it."""

    def __init__(self, spool: BinaryIO, parts: list[_DocumentPart]) -> None:
        self._spool = spool
        self.parts = parts
        self.bytes = sum(part.size for part in parts)

    def texts(self, parts: Iterable[_DocumentPart]) -> Iterator[str]:
        for part in parts:
            self._spool.seek(part.offset)
            yield self._spool.read(part.size).decode()

    def split(self, share: float) -> tuple[list[_DocumentPart], list[_DocumentPart]]:
        """Return (train, held out), each with at least one part."""
        by_digest = sorted(self.parts)
        count, size = 0, 0
        while count == 0 or (size < share * self.bytes and count < len(by_digest) - 1):
            size += by_digest[count].size
            count += 1
        return by_digest[count:], by_digest[:count]


def _spool(
    documents: Iterable[Document], spool: BinaryIO, share: float, tell: Tell
) -> tuple[list[_DocumentPart], dict[str, str | int | float]]:
    """Write every new document to the temporary file and cut the long ones; return the parts and
    the counts of the texts. Raises InvalidRunFile for too little text.
    """
    digests: set[bytes] = set()
    whole: list[_DocumentPart] = []
    offset = copies = 0
    for document in documents:
        data = document.text.encode("utf-8", "replace")
        digest = hashlib.sha256(data).digest()
        if digest in digests:
            copies += 1
        elif data.strip():
            digests.add(digest)
            spool.write(data)
            whole.append(_DocumentPart(digest, offset, len(data)))
            offset += len(data)
            if len(whole) % 64 == 0:
                tell(TextBuild(stage="reading", done=offset, total=0))
    limit = min(_PART_MAX, max(_PART_MIN, int(share * offset / 2)))
    parts = [piece for part in whole for piece in _cut(part, limit, spool)]
    if len(parts) < 2:
        raise InvalidRunFile(
            "there is too little text to train on and hold some out"
            f" ({offset} bytes in {counted(len(whole), 'document')}): name more files, or other ones"
        )
    counts: dict[str, str | int | float] = {"documents": len(whole), "copies": copies}
    counts |= {"bytes": offset, **lengths([part.size for part in whole], "bytes")}
    return parts, counts


def _cut(part: _DocumentPart, limit: int, spool: BinaryIO) -> Iterator[_DocumentPart]:
    """Yield parts of at most `limit` bytes, cut after a line if possible, never within a
    character.
    """
    if part.size <= limit:
        yield part
        return
    start = 0
    while start < part.size:
        size = min(limit, part.size - start)
        if start + size < part.size:
            spool.seek(part.offset + start)
            window = spool.read(size + 1)
            line = window.rfind(b"\n", size // 2, size) + 1
            while not line and size > 1 and window[size] & 0xC0 == 0x80:  # a continuation byte
                size -= 1
            size = line or size
        digest = hashlib.sha256(part.digest + start.to_bytes(8, "little")).digest()
        yield _DocumentPart(digest, part.offset + start, size)
        start += size


def _build(corpus: _TextScratch, put: Put, settings: TextSettings, tell: Tell) -> BuiltParts:
    by_digest, heldout = corpus.split(settings.heldout_share)
    shuffled = permutation(len(by_digest), settings.seed, 1)
    train = [by_digest[index] for index in shuffled]
    blob = settings.tokenizer or _learn(corpus, train, settings.vocab_size, tell)
    tokenizer = load_tokenizer(blob)
    vocab_size = vocab_of(tokenizer)
    begin, end = beginning(tokenizer), end_of_text(tokenizer)
    done = 0

    def encode(parts: list[_DocumentPart]) -> ChunkWriter:
        nonlocal done
        writer = ChunkWriter(put, dtype_for(vocab_size), settings.chunk_tokens)
        for batch in _batches(parts):
            texts = list(corpus.texts(batch))
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                tokens = [*begin, *encoding.ids, *([] if end is None else [end])]
                writer.add(np.asarray(tokens, np.uint32))
            done += sum(part.size for part in batch)
            tell(TextBuild(stage="writing", done=done, total=corpus.bytes))
        return writer

    written, heldout_writer = encode(train), encode(heldout)
    meta: dict[str, str | int | float] = {
        "vocab_size": vocab_size,
        "dtype": dtype_for(vocab_size),
        "tokens": written.tokens,
        "heldout_tokens": heldout_writer.tokens,
        "bytes_per_token": sum(part.size for part in heldout) / max(1, heldout_writer.tokens),
    }
    if end is not None:
        meta["end_of_text"] = end
    assets = {"tokenizer": ChunkRef(sha256=put(blob), size=len(blob), items=vocab_size)}
    return BuiltParts(written.close(), heldout_writer.close(), assets, meta)


def _learn(corpus: _TextScratch, train: list[_DocumentPart], vocab_size: int, tell: Tell) -> bytes:
    """Train a tokenizer on training text only, until it has read `_TOKENIZER_BYTES`."""
    total = min(_TOKENIZER_BYTES, sum(part.size for part in train))
    tell(TextBuild(stage="tokenizer", done=0, total=total))

    def some() -> Iterator[str]:
        size = 0
        for part, text in zip(train, corpus.texts(train), strict=True):
            yield text
            size += part.size
            if size >= _TOKENIZER_BYTES:
                return

    blob = train_tokenizer(some(), vocab_size)
    tell(TextBuild(stage="tokenizer", done=total, total=total))
    return blob


def _batches(parts: list[_DocumentPart]) -> Iterator[list[_DocumentPart]]:
    batch: list[_DocumentPart] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += part.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
