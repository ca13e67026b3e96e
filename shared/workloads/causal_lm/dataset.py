"""Dataset build for a language model, from dialogues or from plain text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from shared.decoding import decode
from shared.errors import BadRequest, InvalidRunFile
from shared.settings import check_keys
from shared.workloads.base import DatasetManifest, DatasetWanted
from shared.workloads.data import table_rows
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.chat_template import NO_TOKENIZER, ChatTemplate
from shared.workloads.data.dialogue_forms import FIELDS, is_dialogue
from shared.workloads.data.record_files import SUFFIXES, files, records
from shared.workloads.data.skipped import Skipped
from shared.workloads.data.text_dataset import build_text
from shared.workloads.data.tokenizer import Put


def build(wanted: DatasetWanted, put: Put, skip: Callable[[str], None]) -> DatasetManifest:
    """Build the kind of dataset that the first record shows; see `build_chat`, `build_text`.

    Raises InvalidRunFile, and BadRequest for dialogues without tokenizer or template.
    """
    check_keys(wanted.options, ("vocab_size",), "--set")
    skipped = _Skipped(skip)
    known: dict[str, Any] = {
        "licence": wanted.licence,
        "source": wanted.source,
        "heldout_share": wanted.heldout_share,
        "seed": wanted.seed,
    }
    if not _has_dialogues(wanted.sources):
        if wanted.tokenizer is not None:
            known["tokenizer"] = wanted.tokenizer
        if said := wanted.options.get("vocab_size"):
            known["vocab_size"] = _count(said)
        return build_text(wanted.name, wanted.sources, put, skipped=skipped, **known)
    if wanted.tokenizer is None or not wanted.template:
        raise BadRequest(NO_TOKENIZER)
    template = decode(wanted.template, ChatTemplate)
    known |= {"tokenizer": wanted.tokenizer, "template": template}
    return build_chat(wanted.name, wanted.sources, put, skipped=skipped, **known)


class _Skipped(Skipped):
    """Skipped records of a build, announced as they are found."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def add(self, sentence: str) -> None:
        super().add(sentence)
        self._tell(sentence)


def _count(said: str) -> int:
    if not (said.isascii() and said.isdecimal() and 256 <= int(said[:9]) <= 1 << 20):
        raise InvalidRunFile(f"--set vocab_size must be 256 to {1 << 20}, not {said[:40]!r}")
    return int(said)


def _has_dialogues(sources: tuple[Path, ...]) -> bool:
    """Return True if the first record of the files is a dialogue."""
    for path in files(sources, Skipped()):
        if table_rows.is_table(path):
            return is_dialogue(table_rows.columns(path))
        if path.suffix.lower() in SUFFIXES:
            with suppress(InvalidRunFile):  # the build reports the error
                for record in islice(records(path, FIELDS, Skipped()), 1):
                    return is_dialogue(record.fields)
    return False
