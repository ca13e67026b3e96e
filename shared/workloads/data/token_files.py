"""Datasets of tokens: nanoGPT's `.bin` files, raw integers without a header.

Beside them belongs the tokenizer.json that made them, or at least the size of its vocabulary;
without a tokenizer the run trains as well, only its samples cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef
from shared.workloads.data.documents import Document
from shared.workloads.data.tokenizer import (
    Built,
    ChunkWriter,
    Put,
    TextSettings,
    TokenChunk,
    dtype_for,
    load_tokenizer,
    vocab_of,
)

_TRAIN = "train.bin"
_HELDOUT = ("val.bin", "heldout.bin")
_COPIED_TOKENS = 1 << 20  # at a time


def token_files(sources: Sequence[str | Path | Document]) -> list[Path]:
    """Return the token files among sources, also in folders. Raises InvalidRunFile for a mix."""
    found: list[Path] = []
    others = 0
    for source in sources:
        path = None if isinstance(source, Document) else Path(source)
        if path is not None and path.suffix == ".bin":
            found.append(path)
        elif path is not None and (path / _TRAIN).is_file():
            found += [path / name for name in (_TRAIN, *_HELDOUT) if (path / name).is_file()]
        else:
            others += 1
    if found and others:
        raise InvalidRunFile("token files (.bin) and text cannot be mixed in one dataset")
    return found


def build_token_files(paths: list[Path], put: Put, settings: TextSettings) -> Built:
    """Store token files unchanged: val.bin is held out, or else the last share of the stream."""
    vocab_size = settings.vocab_size
    assets: dict[str, ChunkRef] = {}
    if settings.tokenizer is not None:
        vocab_size = vocab_of(load_tokenizer(settings.tokenizer))
        digest = put(settings.tokenizer)
        size = len(settings.tokenizer)
        assets["tokenizer"] = ChunkRef(sha256=digest, size=size, items=vocab_size)
    dtype = dtype_for(vocab_size)
    files = [_open(path, dtype, vocab_size) for path in paths]
    train_files = [file for file in files if file.name not in _HELDOUT]
    held_files = [file for file in files if file.name in _HELDOUT]
    total = sum(len(file) for file in train_files)
    kept = total if held_files else total - max(2, int(total * settings.heldout_share))
    if kept < 2:
        raise InvalidRunFile(f"there is too little to train on: {total} tokens in all")
    train = ChunkWriter(put, dtype, settings.chunk_tokens)
    held = ChunkWriter(put, dtype, settings.chunk_tokens)
    for file in train_files:
        for start in range(0, len(file), _COPIED_TOKENS):
            part = file.tokens[start : start + _COPIED_TOKENS]
            room = kept - train.tokens
            train.add(part[:room])
            held.add(part[room:])
    for file in held_files:
        held.add(file.tokens)
    meta: dict[str, str | int | float] = {
        "vocab_size": vocab_size,
        "dtype": dtype,
        "tokens": train.tokens,
        "heldout_tokens": held.tokens,
    }
    return Built(train.close(), held.close(), assets, meta)


def _open(path: Path, dtype: str, vocab_size: int) -> TokenChunk:
    if not path.is_file():
        raise InvalidRunFile(f"{path}: there is no such file")
    file = TokenChunk(path, dtype)
    file.check(vocab_size)
    return file
