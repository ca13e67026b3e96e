"""Membership in a run whose data stay with their members: the build of own data, and its
declaration to the coordinator.

The builders are those of the organiser's own datasets, with the tokenizer, chat template or picture
size of the run's example, so that every member's samples have the same form. A declaration sends
only numbers to the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shared.decoding import MALFORMED, decode
from shared.errors import BadRequest, InvalidFrame, InvalidRunFile, NotFound, VolunteerError
from shared.nearest_name import hint
from shared.protocol import endpoints
from shared.protocol.accounts import PrivacySpent, RunInfo
from shared.protocol.members import MemberData
from shared.protocol.versions import BlobRef
from shared.sentences import Sentence
from shared.workloads.base import DatasetManifest, DatasetWanted, Workload, load
from shared.workloads.data.skipped_files import Skipped
from volunteer.net.api import ASK_S, SHORT_S, Api
from volunteer.net.transfers import Transfers
from volunteer.storage.blob_cache import Cache
from volunteer.storage.manifests import verified_manifest
from volunteer.storage.own_data import OwnBuild, OwnData, OwnDataUnusable, OwnRecord

ASSET_BYTES_MAX = 128 << 20  # most bytes of all shared assets of an example
TEXT, DIALOGUES, IMAGES = "tokens", "chat-tokens", "images"
SHARED_ASSETS = ("tokenizer", "chat_template")  # assets that every member has alike

Tell = Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTerms:
    """Terms on which a member lets a run learn from its data."""

    licence: str = ""  # of the model
    quorum: int = 0  # contributions that usually make a version; 0 = unknown
    least: int = 0  # fewest members whose changes make a version; 0 = unknown
    privacy: PrivacySpent | None = None  # None: no noise is added


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRun:
    """Run that learns from its members' data, and the example that sets the form of the data."""

    name: str
    heldout_share: float
    example: DatasetManifest
    assets: Mapping[str, bytes]
    workload: Workload
    config: Mapping[str, Any]
    terms: MemberTerms = MemberTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSources:
    """Files and folders that a member adds, and the column of tables that holds the text."""

    paths: Sequence[Path]
    column: str = ""


async def member_run(api: Api, name: str, public_key: str, enabled: Sequence[str]) -> MemberRun:
    """Return a run over members' data. Raises NotFound, BadRequest, InvalidFrame."""
    info = await run_info(api, name)
    if info.members is None:
        raise BadRequest(
            Sentence(
                "the run {run} brings data of its own: there is nothing to add to it", run=name
            )
        )
    if info.state == "draft":
        raise BadRequest(
            Sentence("the run {run} has not begun yet: add your files when it runs", run=name)
        )
    if info.state in ("completed", "failed"):
        raise BadRequest(Sentence("the run {run} has ended", run=name))
    workload = load(info.workload, enabled)
    newest = verified_manifest(await api.query(endpoints.LATEST, run=name), public_key)
    if (newest.run, newest.workload) != (name, info.workload):
        raise InvalidFrame(Sentence("the coordinator sent the manifest of another run"))
    example = await api.query(endpoints.DATASET, dataset=info.members.dataset)
    if not (_complete(example) or _workload_builds(workload, example.kind)):
        raise BadRequest(
            Sentence(
                "this version cannot read data of the kind {kind}, which the run {run} learns from",
                kind=example.kind,
                run=name,
            )
        )
    return MemberRun(
        name=name,
        heldout_share=info.members.heldout_share,
        example=example,
        assets=await _assets(api, example),
        workload=workload,
        config=newest.config,
        terms=MemberTerms(
            licence=info.licence,
            quorum=info.members.quorum,
            least=info.members.least,
            privacy=info.privacy,
        ),
    )


async def run_info(api: Api, name: str) -> RunInfo:
    """Return the facts about a run. Raises NotFound, with the nearest name."""
    runs = await api.query(endpoints.RUNS)
    info = next((run for run in runs if run.name == name), None)
    if info is None:
        sentence = Sentence(
            'the coordinator has no run "{name}": {hint}',
            name=name[:64],
            hint=hint(name, [run.name for run in runs]),
        )
        raise NotFound(sentence)
    return info


def _workload_builds(workload: Workload, kind: str) -> bool:
    """Return True if a workload itself builds datasets of this kind."""
    builds = type(workload).dataset is not Workload.dataset
    return builds and kind in workload.dataset_kinds and kind not in _BUILDERS


def _complete(example: DatasetManifest) -> bool:
    """Return True if an example names all that the builder of its kind needs."""
    assets = {TEXT: SHARED_ASSETS[:1], DIALOGUES: SHARED_ASSETS, IMAGES: ()}.get(example.kind)
    meta = ("size", "channels") if example.kind == IMAGES else ()
    return (
        assets is not None
        and example.assets.keys() >= {*assets}
        and all(isinstance(example.meta.get(key), int) for key in meta)
    )


async def _assets(api: Api, example: DatasetManifest) -> dict[str, bytes]:
    """Return the bytes of the example's shared assets, checked by their hashes."""
    assets: dict[str, bytes] = {}
    with TemporaryDirectory(prefix="volunteer-data-") as folder:
        transfers = Transfers(api, Cache(Path(folder), ASSET_BYTES_MAX))
        for name in SHARED_ASSETS:
            if (ref := example.assets.get(name)) is not None:
                blob = BlobRef(sha256=ref.sha256, size=ref.size)
                path = await transfers.fetch(blob, lambda _: None)
                assets[name] = path.read_bytes()
    return assets


def build(
    run: MemberRun, sources: OwnSources, target: OwnBuild, skipped: Skipped, tell: Tell
) -> tuple[DatasetManifest, MemberData]:
    """Build a member's data; return its manifest and its numbers. Raises InvalidRunFile."""
    builder, kind = _BUILDERS.get(run.example.kind, _OWN_BUILDER)
    if sources.column and builder is not _text:
        raise InvalidRunFile(
            Sentence(
                'the run "{run}" learns from {kind}, in which no column is chosen: leave --column '
                "out",
                run=run.name,
                kind=kind,
            )
        )
    try:
        manifest = builder(run, sources, target, skipped, tell)
    except InvalidRunFile as error:
        sentence = Sentence(
            'the run "{run}" learns from {kind}: {error}',
            run=run.name,
            kind=kind,
            error=error.message,
        )
        raise InvalidRunFile(sentence) from error
    numbers = _numbers(run, manifest)
    if numbers.samples < 1:
        least = run.workload.items_per_sample(run.config) + 1
        count = sum(chunk.items for chunk in manifest.chunks)
        raise InvalidRunFile(
            Sentence(
                "this is too little to learn from: {count} words or parts of words, of which at "
                "least {least} have to be in one piece; add more files",
                count=count,
                least=least,
            )
        )
    return manifest, numbers


def _numbers(run: MemberRun, manifest: DatasetManifest) -> MemberData:
    """Return the numbers of a member's data that are declared to the coordinator."""
    items = sum(chunk.items for chunk in manifest.chunks)
    heldout_items = sum(chunk.items for chunk in manifest.heldout)
    answers = float(manifest.meta.get("answer_share", 1.0))  # share of the items
    return MemberData(
        samples=sum(run.workload.samples(run.config, manifest)),
        items=round(items * answers),
        heldout=max(1, heldout_items // run.workload.items_per_sample(run.config)),
    )


def _text(
    run: MemberRun, sources: OwnSources, target: OwnBuild, skipped: Skipped, tell: Tell
) -> DatasetManifest:
    from shared.workloads.data.text_dataset import build_text

    column = {"column": sources.column} if sources.column else {}
    return build_text(
        run.name,
        sources.paths,
        target.put,
        on_progress=tell,
        skipped=skipped,
        tokenizer=run.assets["tokenizer"],
        heldout_share=run.heldout_share,
        **column,
    )


def _dialogues(
    run: MemberRun, sources: OwnSources, target: OwnBuild, skipped: Skipped, tell: Tell
) -> DatasetManifest:
    from shared.workloads.data.chat_dataset import build_chat
    from shared.workloads.data.chat_template import ChatTemplate

    try:
        template = decode(run.assets["chat_template"], ChatTemplate)
    except MALFORMED as error:
        raise InvalidFrame(Sentence("the chat template of the run cannot be read")) from error
    return build_chat(
        run.name,
        sources.paths,
        target.put,
        skipped=skipped,
        tokenizer=run.assets["tokenizer"],
        template=template,
        heldout_share=run.heldout_share,
    )


def _images(
    run: MemberRun, sources: OwnSources, target: OwnBuild, skipped: Skipped, tell: Tell
) -> DatasetManifest:
    from shared.workloads.data.image_dataset import build_images

    return build_images(
        run.name,
        sources.paths,
        target.put,
        on_progress=tell,
        skipped=skipped,
        size=int(run.example.meta["size"]),
        channels=int(run.example.meta["channels"]),
        heldout_share=run.heldout_share,
    )


def _samples(
    run: MemberRun, sources: OwnSources, target: OwnBuild, skipped: Skipped, tell: Tell
) -> DatasetManifest:
    """Let the workload itself read the files, as `coordinator dataset add --for` does; return the
    manifest of the data.
    """
    request = DatasetWanted(
        name=run.name, sources=tuple(sources.paths), heldout_share=run.heldout_share
    )
    return run.workload.dataset(request, target.put, skipped.add)


_OWN_BUILDER = (_samples, Sentence("files that its own program reads"))
_BUILDERS = {
    TEXT: (_text, Sentence("texts")),
    DIALOGUES: (_dialogues, Sentence("dialogues")),
    IMAGES: (_images, Sentence("pictures")),
}


def same_form(manifest: DatasetManifest, example: DatasetManifest) -> bool:
    """Return True if data have the form of the run's example: kind, tokenizer, sizes."""

    def form(dataset: DatasetManifest) -> tuple[object, ...]:
        assets = [dataset.assets.get(name) for name in SHARED_ASSETS]
        meta = [
            dataset.meta.get(key) for key in ("vocab_size", "dtype", "size", "channels", "fields")
        ]
        return (dataset.kind, [asset and asset.sha256 for asset in assets], meta)

    return form(manifest) == form(example)


def check_form(run: str, manifest: DatasetManifest, example: DatasetManifest) -> None:
    """Raise OwnDataUnusable if own data do not have the form of the run's example."""
    if not same_form(manifest, example):
        raise OwnDataUnusable(
            Sentence(
                "the run {run} reads data in another form than when yours were added: "
                "`volunteer data add {run} PATH` prepares them again",
                run=run,
            )
        )


async def declare(api: Api, record: OwnRecord, patience_s: float = ASK_S) -> None:
    """Tell the coordinator the numbers of own data. Raises VolunteerError."""
    where = {"run": record.run}
    await api.call(endpoints.DECLARE_DATA, where, record.numbers, patience_s=patience_s)


async def withdraw(api: Api, run: str, patience_s: float = ASK_S) -> None:
    """Tell the coordinator that this machine has no data for a run. Raises VolunteerError."""
    await api.call(endpoints.WITHDRAW_DATA, {"run": run}, patience_s=patience_s)


async def declare_all(api: Api, data: OwnData) -> None:
    """Declare all own data again, since the coordinator may have lost an earlier declaration;
    errors are ignored.
    """
    for record in data.records():
        with suppress(VolunteerError):
            await declare(api, record, SHORT_S)
