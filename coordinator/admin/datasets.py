"""Commands about datasets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from typing_extensions import override

from coordinator.admin.command import (
    CommandRequest,
    ConfirmedRequest,
    EmptyRequest,
    organiser_command,
)
from coordinator.runs.wind_down import Deed
from shared.decoding import decode
from shared.errors import BadRequest, InvalidRunFile, why
from shared.files.source_paths import existing_path
from shared.files.text_file import unmarked
from shared.workloads.base import DatasetWanted
from shared.workloads.data.chat_template import NO_TOKENIZER, ChatTemplate
from shared.workloads.data.skipped_files import Skipped

if TYPE_CHECKING:
    from coordinator.services import Coordinator
    from shared.workloads.base import DatasetManifest

TOKENIZER_FILE = "tokenizer.json"  # a file with this name in a box is the tokenizer, not text
NAME_FILES = (
    "name the files the dataset is made of: --text PATH, --chat PATH, --images PATH, --suite FILE,"
    " --problems FILE, or --for WORKLOAD --files PATH"
)
FOLDERS = "folders"  # folder in a box for images that are moved back into folders
_SENT = re.compile(
    r"(?<![^\s/])(?:\d+/)?\d{6}-(\d{4,})-"
)  # beginning of a name in a box, see `flat_names`

_COMMON = ("licence", "source", "heldout_share", "seed")
_OPTIONS = {
    "text": (*_COMMON, "tokenizer", "vocab_size", "column"),
    "chat": (*_COMMON, "tokenizer"),
    "images": (*_COMMON, "size", "channels"),
    "suite": ("licence", "source"),
    "files": (*_COMMON, "tokenizer"),
}


class AddDataset(CommandRequest, frozen=True, kw_only=True):
    """Request for a new dataset. `text`, `chat`, `images`, `suite` and `files` are paths on the
    machine that runs the command; files from another machine are in a transfer box, `box`.
    """

    name: str
    # kind of the files in the box
    kind: Literal["text", "chat", "images", "suite", "files"] = "text"
    text: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    tokenizer: str = ""  # a tokenizer.json to use instead of training one
    box: str = ""
    licence: str = ""
    source: str = ""
    vocab_size: int | None = None
    column: str = ""  # column of records that holds the text; "" = "text"
    size: int | None = None  # size of images in pixels
    channels: int | None = None
    heldout_share: float | None = None
    seed: int | None = None
    chat: tuple[str, ...] = ()
    suite: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # files for a workload that builds the dataset itself
    workload: str = ""  # workload that builds the dataset
    # options of that workload
    options: Annotated[dict[str, str], Meta(max_length=32)] = msgspec.field(default_factory=dict)
    template: str = ""  # ChatTemplate of `chat` and `files`, as JSON


class DatasetShown(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset as the organiser sees it."""

    name: str
    kind: str
    licence: str
    source: str
    items: int  # items for training
    heldout: int
    chunks: int
    size: int  # bytes
    meta: dict[str, str | int | float] = {}
    # Skipped files and parts of files, with the reasons: the first thousand.
    skipped: tuple[str, ...] = ()


def _refuse_other_options(kind: str, ask: AddDataset, tokenizer: bytes | None) -> None:
    """Raise BadRequest for an option, or a tokenizer, that a dataset of this kind does not have."""
    for name in sorted(set().union(*_OPTIONS.values()).difference(_OPTIONS[kind])):
        value = tokenizer if name == "tokenizer" else getattr(ask, name)
        if value not in (None, ""):
            option = name.replace("_", "-")
            raise BadRequest(f"--{option} does nothing for a dataset made of {kind}: leave it out")


def _shown(manifest: DatasetManifest, skipped: Iterable[str] = ()) -> DatasetShown:
    from shared.workloads.data.dialogue_windows import RUNS

    refs = (*manifest.chunks, *manifest.heldout, *manifest.assets.values())
    return DatasetShown(
        name=manifest.name,
        kind=manifest.kind,
        licence=manifest.licence,
        source=manifest.source,
        meta={key: value for key, value in manifest.meta.items() if key != RUNS},
        items=sum(chunk.items for chunk in manifest.chunks),
        heldout=sum(chunk.items for chunk in manifest.heldout),
        chunks=len(manifest.chunks),
        size=sum(chunk.size for chunk in refs),
        skipped=tuple(skipped),
    )


class _TransferSkips(Skipped):
    """Skipped parts of a transfer's files, under the names that the owner gave the files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folders = f"{folder}/{FOLDERS}/", f"{folder}/"

    @override
    def add(self, sentence: str) -> None:
        super().add(self.worded(sentence))

    def worded(self, sentence: str) -> str:
        for folder in self._folders:
            sentence = sentence.replace(folder, "")
        return _SENT.sub("", sentence)


@organiser_command("dataset.add", needs="nothing")
async def add(coordinator: Coordinator, ask: AddDataset) -> DatasetShown:
    here = [kind for kind in _OPTIONS if getattr(ask, kind)]
    if len(here) + bool(ask.box) != 1:
        raise BadRequest(NAME_FILES)
    kind = here[0] if here else ask.kind
    if (kind == "files") != bool(ask.workload):
        raise BadRequest(
            "--for WORKLOAD and --files PATH go together: the workload builds its own dataset"
        )
    datasets = coordinator.datasets
    builders = {
        "text": datasets.add_text,
        "chat": datasets.add_chat,
        "images": datasets.add_images,
        "suite": datasets.add_suite,
    }
    sent = _TransferSkips(coordinator.boxes.folder(ask.box)) if ask.box else None
    skipped = sent or Skipped()
    try:
        paths, tokenizer = await asyncio.to_thread(_sources, coordinator, ask)
        _refuse_other_options(kind, ask, tokenizer)
        options: dict[str, Any] = {
            name: value
            for name in _OPTIONS[kind]
            if (value := getattr(ask, name)) not in (None, "")
        }
        if tokenizer is not None:
            options["tokenizer"] = tokenizer
        if kind == "chat":
            if tokenizer is None:
                raise BadRequest(NO_TOKENIZER)
            options["template"] = _template(ask.template)
        if kind == "files":
            if ask.template:
                _template(ask.template)
            more: dict[str, Any] = {"template": ask.template, "options": ask.options}
            spec = DatasetWanted(name=ask.name, sources=tuple(paths), **more, **options)
            manifest = await datasets.add_for(ask.workload, spec, skipped)
        else:
            manifest = await builders[kind](ask.name, paths, skipped=skipped, **options)
    except InvalidRunFile as error:
        if sent is None:
            raise
        raise InvalidRunFile(sent.worded(error.message)) from error
    finally:
        if ask.box:
            await asyncio.to_thread(coordinator.boxes.remove, ask.box)
    return _shown(manifest, skipped.sentences)


def _sources(coordinator: Coordinator, ask: AddDataset) -> tuple[list[Path], bytes | None]:
    if ask.box:
        files = coordinator.boxes.files(ask.box)
        sources = [path for path in files if path.name != TOKENIZER_FILE]
        tokenizers = [path for path in files if path.name == TOKENIZER_FILE]
        if ask.kind == "images":
            sources = _in_folders(coordinator.boxes.folder(ask.box), sources)
    else:
        sources = [existing_path(Path(path)) for path in _paths(ask)]
        tokenizers = [Path(ask.tokenizer).expanduser()] if ask.tokenizer else []
    return sources, _read(tokenizers[0]) if tokenizers else None


def _paths(ask: AddDataset) -> tuple[str, ...]:
    return ask.text or ask.chat or ask.images or ask.suite or ask.files


def _in_folders(box: Path, files: Iterable[Path]) -> list[Path]:
    """Move the images of a box into a folder for each class; return the paths to read."""
    top: list[Path] = []
    for path in files:
        sent = _SENT.match(path.name)
        folder = int(sent[1]) if sent else 0
        if not folder:
            top.append(path)
            continue
        place = box / FOLDERS / str(folder)
        place.mkdir(parents=True, exist_ok=True)
        path.rename(place / path.name)
    return [*top, box / FOLDERS] if (box / FOLDERS).is_dir() else top


def _template(text: str) -> ChatTemplate:
    try:
        return decode(text, ChatTemplate)
    except ValueError as error:
        raise BadRequest(f"the chat template cannot be read: {error}") from error


def _read(path: Path) -> bytes:
    from shared.workloads.data.tokenizer import check_size

    try:
        check_size(path)
        if data := unmarked(path.read_bytes()):
            return data
    except OSError as error:
        raise BadRequest(f"the tokenizer {path} cannot be read: {why(error)}") from error
    raise BadRequest(f"the tokenizer {path} is empty")


@organiser_command("dataset.list", needs="database")
async def listing(coordinator: Coordinator, ask: EmptyRequest) -> tuple[DatasetShown, ...]:
    rows = await coordinator.datasets.listing()
    return tuple([_shown(row.manifest, await coordinator.datasets.skipped(row.id)) for row in rows])


@organiser_command("dataset.delete", needs="database")
async def delete(coordinator: Coordinator, ask: ConfirmedRequest) -> Deed:
    return await coordinator.wind_down.delete_dataset(ask.name, yes=ask.yes)
