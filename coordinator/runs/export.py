"""Export of a version as a folder: safetensors, or files of another library's format, which run
without this program.

    model.safetensors   the tensors, a tied head written out
    config.json         the model's own settings
    tokenizer.json      if the workload has one
    metrics.jsonl       one line a version
    README.md           description, licence, source, example code
    LICENSE.txt         the licence the volunteers agreed to

A version that drew a picture has it next to the card, as version.png. A format of another library
(`Workload.formats`) has its own files instead of the first three.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.compute import Compute, Stop
from coordinator.database import datasets, evaluations, runs, versions
from coordinator.database.datasets import DatasetRow
from coordinator.database.evaluations import EvaluationRow
from coordinator.database.runs import RunRow
from coordinator.database.versions import VersionRow
from coordinator.plan import privacy
from coordinator.runs.definition import Definition, definition
from coordinator.runs.model_card import PICTURE, CardFacts, StatedShare, card
from coordinator.runs.queries import suite_courses
from coordinator.runs.version_files import read_weights
from shared.decoding import decode
from shared.errors import InvalidRunFile, NotFound
from shared.files.new_folder import new_folder
from shared.protocol.versions import SuiteCourse
from shared.sentences import Sentence
from shared.workloads.base import ConvertedModel, DatasetManifest, FormatWanted, load
from shared.workloads.data.chat_template import TEMPLATE
from shared.workloads.declaration import Measure
from shared.workloads.model_files import PLAIN, check_format, convert_version, write_model

if TYPE_CHECKING:
    import torch
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.storage.blobs import BlobStore

HISTORY_MAX = 1_000_000


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Files that an export wrote."""

    run: str
    version: int
    path: str
    files: tuple[str, ...]
    bytes: int
    loss: float | None
    measure: Measure = "loss"
    remarks: tuple[str, ...] = ()


class ExportSource(msgspec.Struct, frozen=True, kw_only=True):
    """Stored facts about an exported version."""

    run: RunRow
    version: VersionRow
    measured: EvaluationRow
    history: tuple[tuple[VersionRow, EvaluationRow], ...]
    dataset: DatasetRow | None
    merges: int  # number of merges up to the version
    suites: tuple[SuiteCourse, ...] = ()


class ExportFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Stored files of an export, and its format."""

    weights: Path
    assets: Mapping[str, Path]  # tokenizer and template of its dataset
    picture: Path | None  # sample that this version drew
    format: str
    dtype: str = ""
    more: Mapping[str, Path]  # files of the run


class Export:
    """Exports versions."""

    def __init__(self, db: Database, blobs: BlobStore, compute: Compute) -> None:
        self._db = db
        self._blobs = blobs
        self._compute = compute

    async def export(
        self,
        name: str,
        to: Path,
        version: int | None = None,
        format: str = PLAIN,
        dtype: str = "",
    ) -> Exported:
        """Write a version (by default the best measured one) into the new or empty folder `to`;
        `dtype` converts the numbers to another type.

        Raises NotFound for an unknown run or version, or for a version whose files were pruned,
        Conflict if the folder is not empty, BadRequest for a format or type that the workload does
        not know, Configuration if a library is not installed.
        """
        source, files = await self.find(name, version, format, dtype)
        return await self._compute.run(write, source, files, to)

    async def find(
        self, name: str, version: int | None, format: str, dtype: str = ""
    ) -> tuple[ExportSource, ExportFiles]:
        """Look up a version for `write` and fetch its files from the store. Raises like
        `export`.
        """
        source = await self._db.read(lambda conn: _read(conn, name, version, format, dtype))
        weights = await self._blobs.local(source.version.master_sha256)
        assets = source.dataset.manifest.assets if source.dataset else {}
        asset_files = {
            name: await self._blobs.local(assets[name].sha256)
            for name in ("tokenizer", TEMPLATE)
            if name in assets
        }
        picture = None
        if source.measured.sample_sha256:
            picture = await self._blobs.local(source.measured.sample_sha256)
        about = definition(source.run)
        refs = about.workload.files(about.file.model)
        more = {file_name: await self._blobs.local(ref.sha256) for file_name, ref in refs.items()}
        files = ExportFiles(
            weights=weights,
            assets=asset_files,
            picture=picture,
            format=format,
            dtype=dtype,
            more=more,
        )
        return source, files


def _read(
    conn: Connection, name: str, version: int | None, format: str, dtype: str
) -> ExportSource:
    run = runs.by_name(conn, name)
    check_format(load(run.workload), format, dtype)
    if run.head < 0:
        raise NotFound(f'"{name}" has not been started: `coordinator run start {name}`')
    number = version if version is not None else (run.best if run.best is not None else run.head)
    row = versions.get(conn, run.id, number)
    measured = evaluations.evaluation(conn, run.id, number)
    if measured.pruned:
        raise NotFound(
            f"the files of version {number} were pruned; the best is {run.best}, the newest "
            f"{run.head}"
        )
    dataset = datasets.of_run(conn, run)
    history = tuple(versions.listing(conn, run.id, -1, HISTORY_MAX))
    return ExportSource(
        run=run,
        version=row,
        measured=measured,
        history=history,
        dataset=dataset,
        merges=versions.count_merges(conn, run.id, number),
        suites=suite_courses(conn, run, number),
    )


def write(stop: Stop, source: ExportSource, files: ExportFiles, to: Path) -> Exported:
    """Write all files, or none. Raises StorageFull, Conflict if the folder is not empty."""
    remarks: list[Sentence] = []
    with new_folder(to, "the export", tell=remarks.append) as unfinished:
        exported = _fill(source, files, unfinished)
    return msgspec.structs.replace(exported, path=str(to), remarks=tuple(map(str, remarks)))


def _fill(source: ExportSource, files: ExportFiles, to: Path) -> Exported:
    about = definition(source.run)
    model = _converted(source, about, files)
    write_model(model, to, _metadata(source))
    (to / "metrics.jsonl").write_text(
        "".join(f"{line}\n" for line in _metrics(source)), encoding="utf-8"
    )
    (to / "LICENSE.txt").write_text(_licence(source, about), encoding="utf-8")
    if files.picture:
        shutil.copyfile(files.picture, to / PICTURE)
    text = card(_facts(source, about, files, model))
    (to / "README.md").write_text(text, encoding="utf-8")
    names = tuple(sorted(path.name for path in to.iterdir()))
    return Exported(
        run=source.run.name,
        version=source.version.version,
        path=str(to),
        files=names,
        bytes=sum((to / name).stat().st_size for name in names),
        loss=source.measured.loss,
        measure=about.declaration.measure,
    )


def _converted(source: ExportSource, about: Definition, files: ExportFiles) -> ConvertedModel:
    """Return the tensors and files of the format."""
    config = about.file.model
    weights = about.workload.whole(config, read_weights(files.weights, about), files.more)
    assets = {name: path.read_bytes() for name, path in files.assets.items()}
    target = FormatWanted(files.format, assets.get("tokenizer"), assets.get(TEMPLATE), files.dtype)
    return convert_version(about.workload, config, weights, target)


def _metadata(source: ExportSource) -> dict[str, str]:
    return {
        "run": source.run.name,
        "version": str(source.version.version),
        "master_sha256": source.version.master_sha256,
    }


def _metrics(source: ExportSource) -> list[str]:
    lines = []
    for row, evaluation in source.history:
        line: dict[str, object] = {
            "version": row.version,
            "at": row.created_at,
            "global_step": row.global_step,
            "tokens": row.tokens,
            "contributions": len(decode(row.contributions)),
            "update_norm": row.update_norm,
            "loss": evaluation.loss,
            **decode(evaluation.metrics, dict[str, float]),
        }
        lines.append(msgspec.json.encode(line).decode())
    return lines


def _licence(source: ExportSource, about: Definition) -> str:
    data = source.dataset.manifest if source.dataset else None
    text = f"Model: {about.file.licence}\n"
    origin = f", from {data.source}" if data and data.source else ""
    return text + (f"Data: {data.licence}{origin}\n" if data else "")


def _data(name: str, *about: str) -> str:
    """Return a dataset's name with its licence and source."""
    details = ", ".join(filter(None, about))
    return f"{name} ({details})" if details else name


def _trained_on(data: DatasetManifest | None, about: Definition) -> str:
    """Return the data of a run in words."""
    if data is None:
        return f"{about.declaration.items} of its own"
    example = _data(data.name, data.licence, data.source)
    return f"data that its members keep, of the kind of {example}" if about.at_members else example


def _facts(
    source: ExportSource, about: Definition, files: ExportFiles, model: ConvertedModel
) -> CardFacts:
    data = source.dataset.manifest if source.dataset else None
    metrics = decode(source.measured.metrics, dict[str, float])
    return CardFacts(
        version=source.version.version,
        description=about.file.description,
        workload=about.file.workload,
        workload_version=source.run.workload_version,
        output=about.declaration.output,
        measure=about.declaration.measure,
        loss=source.measured.loss,
        global_step=source.version.global_step,
        items=about.declaration.items,
        licence=about.file.licence,
        contact=about.file.contact,
        sample=source.measured.sample,
        run=source.run.name,
        parameters=about.parameters,
        trained_on=_trained_on(data, about),
        count=source.version.tokens,
        library="" if files.format == PLAIN else files.format,
        base_model=_base_model(about),
        dataset=_hub_dataset(data) if data and not about.at_members else "",
        packages=model.needs,
        code=model.code,
        pictured=files.picture is not None,
        bits=metrics.get("bits_per_byte"),
        solved=_solved(metrics) if about.declaration.measure == "share solved" else None,
        suites=source.suites,
        privacy=privacy.privacy_spent(about.file.privacy, source.merges),
    )


def _solved(metrics: Mapping[str, float]) -> StatedShare | None:
    """Return the share of held-out problems that a version solves; None if it is not measured."""
    if "solved" not in metrics:
        return None
    return StatedShare(
        share=metrics["solved"],
        error=metrics.get("solved_error", 0.0),
        problems=round(metrics.get("problems", 0)),
    )


def _base_model(about: Definition) -> str:
    """Return the hub name of the model that a run starts from; "" for a model in a folder."""
    origin = about.workload.origin(about.file.model)
    name, _, commit = origin.name.partition("@") if origin is not None else ("", "", "")
    return name if commit else ""


def _hub_dataset(data: DatasetManifest) -> str:
    """Return a dataset's name on a hub, taken from its source, or else its own name."""
    match = re.search(r"(?:/datasets/|^)([\w.-]+/[\w.-]+)$", data.source.strip().rstrip("/"))
    return match[1] if match else data.name


def check_source(path: Path, about: Definition, tokenizer: str | None) -> None:
    """Check a folder's weights for `[train] init_from`, and its tokenizer against that of the run,
    given by its hash.

    Raises InvalidRunFile.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InvalidRunFile(
            f"[train] init_from: there is no {path}; name a folder written by coordinator run "
            "export, or a version like my-run@40"
        )
    try:
        with safe_open(path, "np") as file:
            names = list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise InvalidRunFile(f"[train] init_from: {path} is no safetensors file") from error
    for spec in about.schema:
        is_left_out = spec.role == "momentum" and spec.name not in shapes
        if shapes.get(spec.name) != spec.shape and not is_left_out:
            raise InvalidRunFile(
                f'[train] init_from: {path} has no tensor "{spec.name}" of shape {spec.shape}: '
                f"export a run of the same [model] in the format {PLAIN}"
            )
    own_tokenizer = path.with_name("tokenizer.json")
    if tokenizer and own_tokenizer.is_file():
        check_tokenizers(
            str(path.parent), sha256(own_tokenizer.read_bytes()).hexdigest(), tokenizer
        )


def check_tokenizers(source: str, first: str | None, second: str | None) -> None:
    """Raise InvalidRunFile if a run would begin from a model of another tokenizer."""
    if first and second and first != second:
        raise InvalidRunFile(
            f"[train] init_from: {source} has another tokenizer than the dataset, so its tokens "
            "mean other texts: add the dataset with that tokenizer (--tokenizer)"
        )


def imported(path: Path, about: Definition) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a version or an exported folder for `[train] init_from`; a folder has
    no momenta, which begin at zero.

    Raises InvalidRunFile if they do not fit the model.
    """
    import torch
    from safetensors.torch import load_file

    check_source(path, about, None)
    tensors = load_file(path)
    for spec in about.schema:
        if spec.role == "momentum" and spec.name not in tensors:
            tensors[spec.name] = torch.zeros(spec.shape)
    return {
        spec.name: tensors[spec.name].float() if spec.dtype == "F32" else tensors[spec.name]
        for spec in about.schema
    }
