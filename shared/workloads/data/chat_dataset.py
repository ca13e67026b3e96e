"""Build a dataset of dialogues: JSON lines -> template -> tokens, each marked as learnt or not.

A line is `{"messages": [{"role", "content"}, ...]}`, or a pair of `prompt` and `completion`, or of
`instruction` (and `input`) and `output`. A chunk is tokens as 32-bit integers whose upper two bits
say that a token is part of an answer, and that it begins a dialogue; dialogues stand one after the
other, and a model that reads a window keeps them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.decoding import complaint, convert, decoder
from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data import table_rows
from shared.workloads.data.chat_template import TEMPLATE, ChatTemplate, DialogueTurn, Endless
from shared.workloads.data.documents import LINES_SUFFIXES
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.report import SAMPLED, SAMPLED_CHARS, lengths, told_languages
from shared.workloads.data.skipped import Skipped, walk
from shared.workloads.data.tokenizer import (
    FIRST,
    LEARNT,
    MARKED,
    ChunkWriter,
    Put,
    load_tokenizer,
    vocab_of,
)

KIND = "chat-tokens"
_LINE_BYTES_MAX = 4 << 20
_CHUNK_TOKENS = 65_536


class _DialogueLine(msgspec.Struct):
    messages: list[DialogueTurn] | None = None
    prompt: str | None = None
    completion: str | None = None
    instruction: str | None = None
    input: str = ""
    output: str | None = None

    def dialogue(self) -> list[DialogueTurn]:
        if self.messages is not None:
            return self.messages
        asked, answer = self.prompt, self.completion
        if asked is None and self.instruction is not None:
            asked, answer = "\n\n".join(filter(None, (self.instruction, self.input))), self.output
        if asked is None or answer is None:
            raise InvalidRunFile(
                'it has neither "messages", nor "prompt" and "completion", nor "instruction" and'
                ' "output"'
            )
        return [DialogueTurn("user", asked), DialogueTurn("assistant", answer)]


class _Dialogue(NamedTuple):
    digest: bytes
    tokens: NDArray[np.uint32]
    answer_bytes: int


class DialogueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a dataset of dialogues: the bytes of a tokenizer.json, and its template."""

    tokenizer: bytes
    template: ChatTemplate
    licence: str = "unknown"
    source: str = ""
    heldout_share: float = 0.05
    seed: int = 0


def build_chat(
    name: str,
    sources: Iterable[str | Path],
    put: Put,
    *,
    skipped: Skipped | None = None,
    **options: Any,
) -> DatasetManifest:
    """Store a dataset of dialogues through `put` and return its manifest.

    Lines of no use are added to `skipped`. Raises InvalidRunFile for none left, or a bad template.
    """
    settings = DialogueSettings(**options)
    skipped = skipped if skipped is not None else Skipped()
    frame = settings.template.frame()
    tokenizer = load_tokenizer(settings.tokenizer)
    tokenizer.encode_special_tokens = False  # a template writes them as text
    found: dict[bytes, _Dialogue] = {}
    some, copies = list[str](), 0
    for place, messages in _dialogues(sources, skipped):
        try:
            for each in _encoded(tokenizer, settings.template, messages):
                copies += each.digest in found
                found.setdefault(each.digest, each)
            if len(some) < SAMPLED:
                some.append(" ".join(each.content for each in messages)[:SAMPLED_CHARS])
        except Endless as error:  # not on every line
            raise InvalidRunFile(f"{place}: {error.message}; mend it, or take another's") from error
        except InvalidRunFile as error:
            skipped.add(f"{place}: {error.message}")
    if len(found) < 2:
        told = f"; {skipped.sentences[0]}" if skipped.sentences else ""
        raise InvalidRunFile(f"there are fewer than two dialogues to learn from{told}")
    by_digest = [found[digest] for digest in sorted(found)]
    held = max(1, int(settings.heldout_share * len(by_digest)))
    kept = by_digest[held:]
    train = [kept[index] for index in permutation(len(kept), settings.seed, 1)]
    vocab_size = vocab_of(tokenizer)
    meta: dict[str, str | int | float] = {
        "vocab_size": vocab_size,
        "dtype": MARKED,
        "documents": len(by_digest),
        "copies": copies,
        "skipped": skipped.count,
        "answer_share": _share(train),
        "bytes_per_token": _bytes_per_token(by_digest[:held]),
        **lengths([len(each.tokens) for each in by_digest], "tokens"),
        **told_languages(some),
        **(frame.meta if frame else {}),
    }
    return DatasetManifest(
        name=name,
        kind=KIND,
        licence=settings.licence,
        source=settings.source,
        chunks=_written(train, put),
        heldout=_written(by_digest[:held], put),
        assets=_assets(settings, put, vocab_size),
        meta=meta,
    )


def _assets(settings: DialogueSettings, put: Put, vocab_size: int) -> dict[str, ChunkRef]:
    """Store a tokenizer and its template."""
    found = {}
    form = msgspec.json.encode(settings.template)
    for name, blob, items in (("tokenizer", settings.tokenizer, vocab_size), (TEMPLATE, form, 1)):
        found[name] = ChunkRef(sha256=put(blob), size=len(blob), items=items)
    return found


def _encoded(
    tokenizer: Any, template: ChatTemplate, messages: list[DialogueTurn]
) -> Iterator[_Dialogue]:
    for pieces in template.documents(messages):
        parts = []
        size = sum(len(piece.text.encode()) for piece in pieces if piece.learnt)
        for piece in pieces:
            ids = tokenizer.encode(piece.text, add_special_tokens=False).ids
            parts.append(np.asarray(ids, np.uint32) | np.uint32(LEARNT if piece.learnt else 0))
        tokens = np.concatenate(parts)
        if len(tokens):
            tokens[0] |= np.uint32(FIRST)
            yield _Dialogue(hashlib.sha256(tokens.tobytes()).digest(), tokens, size)


def _written(dialogues: Iterable[_Dialogue], put: Put) -> tuple[ChunkRef, ...]:
    writer = ChunkWriter(put, MARKED, _CHUNK_TOKENS)
    for each in dialogues:
        writer.add(each.tokens)
    return writer.close()


def _learnt(dialogues: list[_Dialogue]) -> int:
    return sum(int(np.count_nonzero(each.tokens & np.uint32(LEARNT))) for each in dialogues)


def _share(dialogues: list[_Dialogue]) -> float:
    return _learnt(dialogues) / max(1, sum(len(each.tokens) for each in dialogues))


def _bytes_per_token(dialogues: list[_Dialogue]) -> float:
    """Return the bytes of answers a token of them: loss is measured on these."""
    return sum(each.answer_bytes for each in dialogues) / max(1, _learnt(dialogues))


def _dialogues(
    sources: Iterable[str | Path], skipped: Skipped
) -> Iterator[tuple[str, list[DialogueTurn]]]:
    """Each dialogue with its file and line."""
    record = decoder(_DialogueLine)
    for path in _files(sources, skipped):
        if table_rows.is_table(path):
            yield from _rows(path, skipped)
            continue
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                place = f"{path} line {number}"
                if not line.strip():
                    continue
                try:
                    if len(line) > _LINE_BYTES_MAX:
                        raise InvalidRunFile(f"it is longer than {_LINE_BYTES_MAX >> 20} MiB")
                    yield place, record.decode(line).dialogue()
                except InvalidRunFile as error:
                    skipped.add(f"{place}: {error.message}")
                except msgspec.ValidationError as error:
                    skipped.add(complaint(error, place))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    skipped.add(f"{place}: {error}")


def _rows(path: Path, skipped: Skipped) -> Iterator[tuple[str, list[DialogueTurn]]]:
    """Each row of a table that is a dialogue."""
    for number, row in enumerate(table_rows.rows(path, _DialogueLine.__struct_fields__), 1):
        place = f"{path} row {number}"
        try:
            yield place, convert(row, _DialogueLine).dialogue()
        except InvalidRunFile as error:
            skipped.add(f"{place}: {error.message}")
        except msgspec.ValidationError as error:
            skipped.add(complaint(error, place))


def _lines(file: Any) -> Iterator[bytes]:
    """Lines of bounded length; the rest of a longer one is passed over."""
    while line := file.readline(_LINE_BYTES_MAX + 1):
        yield line
        while len(line) > _LINE_BYTES_MAX and line and not line.endswith(b"\n"):
            line = file.readline(_LINE_BYTES_MAX + 1)


def _files(sources: Iterable[str | Path], skipped: Skipped) -> Iterator[Path]:
    for source in sources:
        path = Path(source)
        if path.is_dir() and (tables := table_rows.tables_in(path, skipped)):
            yield from tables
        elif path.is_dir():
            inside = (each for each in walk(path, frozenset()))
            yield from (each for each in inside if each.suffix.lower() in LINES_SUFFIXES)
        elif path.is_file():
            yield path
        else:
            raise InvalidRunFile(f"{path}: there is no such file or directory")
