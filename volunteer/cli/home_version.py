"""Version of a run over members' data, downloaded by a member of the run for its own use.

Nothing is sent to the coordinator but the requests of the download.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import BadRequest, InvalidFrame
from shared.protocol import endpoints
from shared.protocol.accounts import RunInfo
from shared.protocol.versions import BlobRef, VersionManifest, chunks_digest
from shared.sentences import Sentence
from shared.text import printable
from shared.workloads.base import ConvertedModel, load
from shared.workloads.data.local_data import LocalData
from shared.workloads.model_files import check_format
from volunteer.account.membership import check_form, run_info
from volunteer.cli.exit_codes import remark
from volunteer.net.api import Api
from volunteer.net.transfers import OnBytes, Transfers, hub_address
from volunteer.net.weights import Weights
from volunteer.storage.blob_cache import Cache
from volunteer.storage.manifests import verified_manifest
from volunteer.storage.own_data import OwnData
from volunteer.training.own_copy import CopySource, OwnCopy

DOWNLOAD_BYTES_MAX = 1 << 40

OnDownload = Callable[[int, int], None]  # bytes of a file so far, and in all


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChoice:
    """Version that a member asks for, and the format of its files."""

    run: str
    version: int | None  # None = the newest
    format: str
    public_key: str
    enabled: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeVersion:
    """Version of a run on its member's machine, and the member's own data for the run."""

    info: RunInfo
    source: CopySource
    files: Mapping[str, Path]  # files of the run besides the tensors, by asset name


async def fetch(
    api: Api,
    choice: VersionChoice,
    own_data: OwnData,
    folder: Path,
    on_download: OnDownload,
) -> HomeVersion:
    """Fetch a version into a folder, with the files of its run. Raises NotFound, BadRequest,
    OwnDataUnusable, InvalidFrame, BadSignature, StorageFull.
    """
    info = await run_info(api, choice.run)
    if info.members is None:
        raise BadRequest(
            Sentence(
                "the run {run} does not learn from data of its members: its organiser exports it",
                run=choice.run,
            )
        )
    record = own_data.record(choice.run)
    workload = load(info.workload, choice.enabled)
    check_format(workload, choice.format)
    manifest = await _manifest(api, choice, info)
    example = await api.query(endpoints.DATASET, dataset=info.members.dataset)
    if manifest.chunks_sha256 != chunks_digest(example):
        raise InvalidFrame(Sentence("the coordinator sent the example of another run"))
    check_form(choice.run, record.manifest, example)
    cache = Cache(folder, DOWNLOAD_BYTES_MAX)
    transfers = Transfers(api, cache, hub_address)

    def progress_of(total: int) -> OnBytes:
        return lambda done: on_download(done, total)

    weights = await Weights(transfers, cache, remark).fetch(manifest, progress_of)
    more, origin = workload.files(manifest.config), workload.origin(manifest.config)
    public = origin.paths if origin is not None else {}
    files = {
        name: await transfers.fetch(
            BlobRef(sha256=ref.sha256, size=ref.size),
            progress_of(ref.size),
            public.get(ref.sha256, ""),
        )
        for name, ref in more.items()
    }
    paths = own_data.files(record, record.refs)
    paths |= {ref.sha256: files[name] for name, ref in more.items()}
    source = CopySource(
        manifest=manifest,
        workload=workload,
        weights=weights,
        form=info.members,
        data=LocalData(record.manifest, paths, more),
        samples=record.numbers.samples,
    )
    return HomeVersion(info=info, source=source, files=files)


async def _manifest(api: Api, choice: VersionChoice, info: RunInfo) -> VersionManifest:
    """Return the verified manifest of the version that is asked for."""
    signed = await (
        api.query(endpoints.LATEST, run=choice.run)
        if choice.version is None
        else api.query(endpoints.VERSION, run=choice.run, version=choice.version)
    )
    manifest = verified_manifest(signed, choice.public_key)
    if (manifest.run, manifest.workload) != (choice.run, info.workload):
        raise InvalidFrame(Sentence("the coordinator sent the manifest of another run"))
    if choice.version not in (None, manifest.version):
        raise InvalidFrame(Sentence("the coordinator sent the manifest of another version"))
    return manifest


def write_papers(home: HomeVersion, model: ConvertedModel, to: Path, copy: OwnCopy) -> None:
    """Write the licence and the model card."""
    (to / "LICENSE.txt").write_text(f"Model: {home.info.licence}\n", encoding="utf-8")
    needs = f"`pip install {model.needs}`" if model.needs else "the program `volunteer`"
    info, manifest = home.info, home.source.manifest
    lines = [
        f"# {info.name}, version {manifest.version}",
        "",
        printable(info.description) or "Trained by volunteers.",
        "",
        f"- workload: {manifest.workload} {manifest.workload_version},"
        f" {info.parameters:,} parameters",
        f"- licence: {printable(info.licence)}",
    ]
    if copy.steps:
        losses = (copy.before, copy.after)
        measured = f", on whose held-out part the loss was {copy.before} and is {copy.after}"
        lines += [
            f"- trained further on the data of one member{'' if None in losses else measured}",
            "- it may repeat parts of those data: whoever may not read them may not have it",
        ]
    code = ["", f"In this folder, with {needs}:", "", "```python", *model.code, "```", ""]
    (to / "README.md").write_text("\n".join([*lines, *code]), encoding="utf-8")
