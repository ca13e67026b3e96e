"""Build of a dataset of dialogues: records -> template -> tokens, each marked as learnt or not.

The module `dialogue_forms` lists the accepted records. A chunk has tokens as 32-bit integers whose
upper two bits mark a token of an answer and the first token of a dialogue. Dialogues follow one
another in a chunk; attention does not cross from one dialogue to the next.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.text import printable
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetTerms
from shared.workloads.data.chat_template import TEMPLATE, ChatTemplate, Endless
from shared.workloads.data.dialogue_forms import FIELDS, TRL, Dialogue, read_dialogue
from shared.workloads.data.dialogue_windows import RUNS, runs_of, runs_text
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.record_files import files, records
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.text_lengths import Meta, lengths
from shared.workloads.data.tokenizer import (
    FIRST,
    LEARNT,
    MARKED,
    TOKEN_BITS,
    Put,
    load_tokenizer,
    vocab_of,
)

KIND = "chat-tokens"
_LOST = {
    "system": "a system turn",
    "tool": "a turn of a tool",
    "tools": "a list of tools",
    "tool_calls": "tool calls",
}
_UNREAD_SHOWN = 8
# Tokens after which a chunk ends, with the dialogue that reaches them. Windows of 8,192 tokens have
# 5 to 9 % of padding with chunks of half this size, and half as much padding with chunks of this
# size (measured on three distributions of lengths).
_CHUNK_TOKENS = 131_072


class _Dialogue(NamedTuple):
    digest: bytes
    tokens: NDArray[np.uint32]
    answer_bytes: int


class _Notes:
    """Counts of the records' forms, and of parts that are not learnt."""

    def __init__(self) -> None:
        self.forms, self.unread = Counter[str](), Counter[str]()
        self.unlearnt = self.thoughts = self.copies = 0

    def take(self, more: _Notes) -> None:
        """Add the counts of another file."""
        self.forms += more.forms
        self.unread += more.unread
        self.unlearnt += more.unlearnt
        self.thoughts += more.thoughts

    @property
    def meta(self) -> Meta:
        """Return the notes for the manifest: one sentence, without its full stop."""
        notes = [f"{count:,} dialogues in {form}" for form, count in self.forms.most_common()]
        if self.unlearnt:
            notes.append(f"{self.unlearnt:,} answers not learnt, as their weight or train says")
        if self.thoughts:
            notes.append(
                f"the reasoning of {self.thoughts:,} answers left out, for which the chat template"
                " has no place"
            )
        if self.unread:
            names = [printable(key, 40) for key, _ in self.unread.most_common(_UNREAD_SHOWN)]
            notes.append(f"keys that were not read: {', '.join(names)}")
        return {"found": ", ".join(notes)}


class DialogueSettings(DatasetTerms, frozen=True, kw_only=True):
    """Settings of a dataset of dialogues: the bytes of a tokenizer.json, and its template."""

    tokenizer: bytes
    template: ChatTemplate


def build_chat(
    name: str,
    sources: Iterable[str | Path],
    put: Put,
    *,
    skipped: Skipped | None = None,
    **options: Any,
) -> DatasetManifest:
    """Store a dataset of dialogues through `put` and return its manifest.

    Unusable lines are added to `skipped`. Raises InvalidRunFile for fewer than two dialogues, a
    missing source, or a bad template.
    """
    settings = DialogueSettings(**options)
    skipped = skipped if skipped is not None else Skipped()
    frame = settings.template.frame()
    tokenizer = load_tokenizer(settings.tokenizer)
    tokenizer.encode_special_tokens = False  # a template writes special tokens as text
    notes = _Notes()
    dialogues = _read_dialogues(sources, tokenizer, settings.template, notes, skipped)
    if len(dialogues) < 2:
        hint = f"; {skipped.sentences[0]}" if skipped.sentences else ""
        raise InvalidRunFile(f"there are fewer than two dialogues to learn from{hint}")
    by_digest = [dialogues[digest] for digest in sorted(dialogues)]
    heldout_count = max(1, int(settings.heldout_share * len(by_digest)))
    rest = by_digest[heldout_count:]
    train = [rest[index] for index in permutation(len(rest), settings.seed, 1)]
    vocab_size = vocab_of(tokenizer)
    meta: dict[str, str | int | float] = {
        "vocab_size": vocab_size,
        "dtype": MARKED,
        "documents": len(by_digest),
        "copies": notes.copies,
        "skipped": skipped.count,
        "answer_share": _learnt_share(train),
        RUNS: runs_text(runs_of(dialogue.tokens) for dialogue in train),
        "bytes_per_token": _bytes_per_token(by_digest[:heldout_count]),
        **lengths([len(dialogue.tokens) for dialogue in by_digest], "tokens"),
        **notes.meta,
        **(frame.meta if frame else {}),
    }
    return DatasetManifest(
        name=name,
        kind=KIND,
        licence=settings.licence,
        source=settings.source,
        chunks=_store_chunks(train, put),
        heldout=_store_chunks(by_digest[:heldout_count], put),
        assets=_assets(settings, put, vocab_size),
        meta=meta,
    )


def _assets(settings: DialogueSettings, put: Put, vocab_size: int) -> dict[str, ChunkRef]:
    """Store a tokenizer and its template; return them by asset name."""
    assets = {}
    form = msgspec.json.encode(settings.template)
    for name, blob, items in (("tokenizer", settings.tokenizer, vocab_size), (TEMPLATE, form, 1)):
        assets[name] = ChunkRef(sha256=put(blob), size=len(blob), items=items)
    return assets


def _read_dialogues(
    sources: Iterable[str | Path],
    tokenizer: object,
    template: ChatTemplate,
    notes: _Notes,
    skipped: Skipped,
) -> dict[bytes, _Dialogue]:
    """Return dialogues by hash. Unreadable files, and files of mostly unreadable records, are added
    to `skipped`. Raises InvalidRunFile for a missing source or a bad template.
    """
    dialogues: dict[bytes, _Dialogue] = {}
    for path in files(sources, skipped):
        bad, notes_of_file = Skipped(), _Notes()
        try:
            file_dialogues = [*_dialogues_in(path, tokenizer, template, notes_of_file, bad)]
        except Endless as error:  # ends the build, since every line would take as long
            raise InvalidRunFile(f"{error.message}; mend it, or take another's") from error
        except InvalidRunFile as error:
            skipped.add(error.message)
            continue
        good = notes_of_file.forms.total()
        if bad.count > good > 0:
            skipped.add(
                f"{path}: {bad.count:,} of its {bad.count + good:,} records cannot be read;"
                f" {bad.sentences[0].removeprefix(str(path)).lstrip()}"
            )
            continue
        skipped.take(bad)
        skipped.read += 1 if good else 0
        notes.take(notes_of_file)
        for dialogue in file_dialogues:
            notes.copies += dialogue.digest in dialogues
            dialogues.setdefault(dialogue.digest, dialogue)
    return dialogues


def _dialogues_in(
    path: Path, tokenizer: object, template: ChatTemplate, notes: _Notes, bad: Skipped
) -> Iterator[_Dialogue]:
    """Yield the dialogues of a file; unusable records are added to `bad`. Raises InvalidRunFile for
    an unreadable file, Endless for a template without an end.
    """
    for place, _, record in records(path, FIELDS, bad):
        try:
            read = _fit_template(read_dialogue(record), template, notes)
            yield from _encode(tokenizer, template, read)
            notes.forms[read.form] += 1
        except Endless as error:
            raise Endless(f"{place}: {error.message}") from error
        except InvalidRunFile as error:
            bad.add(f"{place}: {error.message}")


def _fit_template(read: Dialogue, template: ChatTemplate, notes: _Notes) -> Dialogue:
    """Return a dialogue without the reasoning of its answers if the template does not support it;
    `notes` counts these answers.

    Raises InvalidRunFile if the template would drop any other part of the dialogue.
    """
    has: set[str] = {
        message.role for message in read.messages if message.role in ("system", "tool")
    }
    has |= {"tools"} if read.tools else set()
    has |= {"tool_calls"} if any(message.tool_calls for message in read.messages) else set()
    if lost := sorted(has - template.supported):
        names = " and ".join(_LOST[field] for field in lost)
        raise InvalidRunFile(f"it has {names}, for which the chat template has no place")
    notes.unread.update(read.unread)
    answers = [message for message in read.messages if message.role == "assistant"]
    notes.unlearnt += sum(not answer.learnt for answer in answers) if read.form != TRL else 0
    if "reasoning_content" not in template.supported:
        notes.thoughts += sum(answer.reasoning_content is not None for answer in answers)
        plain = [msgspec.structs.replace(m, reasoning_content=None) for m in read.messages]
        return msgspec.structs.replace(read, messages=tuple(plain))
    return read


def _encode(tokenizer: Any, template: ChatTemplate, read: Dialogue) -> Iterator[_Dialogue]:
    for pieces in template.documents(read.messages, read.tools):
        parts = []
        size = sum(len(piece.text.encode()) for piece in pieces if piece.learnt)
        for piece in pieces:
            ids = tokenizer.encode(piece.text, add_special_tokens=False).ids
            parts.append(np.asarray(ids, np.uint32) | np.uint32(LEARNT if piece.learnt else 0))
        tokens = np.concatenate(parts)
        if len(tokens) > 1:
            # the first token is no target
            tokens[0] = tokens[0] & np.uint32(TOKEN_BITS) | np.uint32(FIRST)
            yield _Dialogue(hashlib.sha256(tokens.tobytes()).digest(), tokens, size)


def _store_chunks(dialogues: Iterable[_Dialogue], put: Put) -> tuple[ChunkRef, ...]:
    """Store dialogues as chunks, and return the chunks; a dialogue is never divided between two."""
    chunks: list[ChunkRef] = []
    group: list[NDArray[np.uint32]] = []

    count = 0

    def store() -> None:
        tokens = np.concatenate(group).astype("<u4")
        blob = tokens.tobytes()
        chunks.append(ChunkRef(sha256=put(blob), size=len(blob), items=len(tokens)))
        group.clear()

    for dialogue in dialogues:
        group.append(dialogue.tokens)
        count += len(dialogue.tokens)
        if count >= _CHUNK_TOKENS:
            store()
            count = 0
    if group:
        store()
    return tuple(chunks)


def _learnt(dialogues: list[_Dialogue]) -> int:
    return sum(int(np.count_nonzero(dialogue.tokens & np.uint32(LEARNT))) for dialogue in dialogues)


def _learnt_share(dialogues: list[_Dialogue]) -> float:
    return _learnt(dialogues) / max(1, sum(len(dialogue.tokens) for dialogue in dialogues))


def _bytes_per_token(dialogues: list[_Dialogue]) -> float:
    """Return the bytes of answer text per learnt token, to convert a loss to bits per byte."""
    return sum(dialogue.answer_bytes for dialogue in dialogues) / max(1, _learnt(dialogues))
