"""Dataset build for a language model, from dialogues or from plain text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from typing_extensions import override

from shared.decoding import decode
from shared.errors import BadRequest, InvalidRunFile
from shared.settings import check_keys
from shared.workloads.base import DatasetManifest, DatasetWanted
from shared.workloads.data import table_rows
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.chat_template import NO_TOKENIZER, ChatTemplate
from shared.workloads.data.dialogue_forms import FIELDS, is_dialogue
from shared.workloads.data.record_files import SUFFIXES, files, records
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.text_dataset import UNTRAINED, build_text
from shared.workloads.data.tokenizer import Put


def build(request: DatasetWanted, put: Put, skip: Callable[[str], None]) -> DatasetManifest:
    """Build a dataset of dialogues if the first record is a dialogue, and otherwise of text; see
    `build_chat`, `build_text`.

    Raises InvalidRunFile, and BadRequest for dialogues without tokenizer or template.
    """
    check_keys(request.options, ("vocab_size",), "--set")
    skipped = _AnnouncedSkips(skip)
    options: dict[str, Any] = {
        "licence": request.licence,
        "source": request.source,
        "heldout_share": request.heldout_share,
        "seed": request.seed,
    }
    if not _has_dialogues(request.sources):
        if request.tokenizer is not None:
            options["tokenizer"] = request.tokenizer
        if size_text := request.options.get("vocab_size"):
            options["vocab_size"] = _count(size_text)
        return build_text(request.name, request.sources, put, skipped=skipped, **options)
    if request.tokenizer is None or not request.template:
        raise BadRequest(NO_TOKENIZER)
    if request.options:
        raise InvalidRunFile(UNTRAINED)
    template = decode(request.template, ChatTemplate)
    options |= {"tokenizer": request.tokenizer, "template": template}
    return build_chat(request.name, request.sources, put, skipped=skipped, **options)


class _AnnouncedSkips(Skipped):
    """Skipped parts of a dataset's sources, each announced when it is added."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    @override
    def add(self, sentence: str) -> None:
        super().add(sentence)
        self._tell(sentence)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 256 <= int(text[:9]) <= 1 << 20):
        raise InvalidRunFile(f"--set vocab_size must be 256 to {1 << 20}, not {text[:40]!r}")
    return int(text)


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
