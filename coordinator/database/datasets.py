"""Datasets and the register of blobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from sqlalchemy import Connection, insert, select, union

from coordinator.database import key_values, unreferenced_blobs
from coordinator.database.contributions import UPDATES
from coordinator.database.engine.statements import deletion, equals, insert_new
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.datasets import blobs, dataset_blobs, datasets
from shared.decoding import decode
from shared.errors import Conflict, NotFound
from shared.nearest_name import hint
from shared.workloads.base import ChunkRef, DatasetManifest

if TYPE_CHECKING:
    from coordinator.database.runs import RunRow

_SKIPPED = "dataset.skipped."  # + the number of the dataset: a key of `meta`


class DatasetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `datasets`, with its manifest decoded. The manifest lists the held-out split, so
    it is never sent unchanged.
    """

    id: int
    name: str
    kind: str
    manifest: DatasetManifest
    manifest_sha256: str


def _row(mapping: dict[str, Any]) -> DatasetRow:
    manifest = decode(mapping["manifest"], DatasetManifest)
    return DatasetRow(**(mapping | {"manifest": manifest}))


def add(conn: Connection, manifest: DatasetManifest, manifest_sha256: str) -> int:
    """Insert a dataset and references to its blobs; return its number, also if an equal dataset is
    there. Raises Conflict if a different dataset has its name.
    """
    row = conn.execute(select(datasets).where(datasets.c.name == manifest.name)).mappings().first()
    if row is not None:
        if row["manifest_sha256"] == manifest_sha256:
            return int(row["id"])
        raise Conflict(
            f'there is a different dataset called "{manifest.name}": choose another name, or '
            f"remove that one with `coordinator dataset delete {manifest.name} --yes`"
        )
    insertion = insert(datasets).values(
        name=manifest.name,
        kind=manifest.kind,
        manifest=msgspec.json.encode(manifest).decode(),
        manifest_sha256=manifest_sha256,
    )
    dataset_id = int(conn.execute(insertion.returning(datasets.c.id)).scalar_one())
    served = {chunk.sha256: True for chunk in (*manifest.chunks, *manifest.assets.values())}
    chunks = {chunk.sha256: served.get(chunk.sha256, False) for chunk in manifest.heldout} | served
    if chunks:
        conn.execute(
            insert(dataset_blobs),
            [
                {"dataset_id": dataset_id, "sha256": sha, "served": servable}
                for sha, servable in chunks.items()
            ],
        )
    return dataset_id


def serve(
    conn: Connection,
    dataset_id: int,
    files: Iterable[ChunkRef],
    now: float,
    serials: Mapping[str, str],
) -> None:
    """Keep the files that a dataset's runs need, and let volunteers fetch them. Raises like
    `register`.
    """
    by_hash = {file.sha256: file for file in files}
    register(conn, [(file.sha256, file.size, "asset") for file in by_hash.values()], now, serials)
    registered = select(dataset_blobs.c.sha256).where(dataset_blobs.c.dataset_id == dataset_id)
    present = set(
        conn.execute(registered.where(dataset_blobs.c.sha256.in_(list(by_hash)))).scalars()
    )
    fresh = [
        {"dataset_id": dataset_id, "sha256": sha, "served": True}
        for sha in by_hash.keys() - present
    ]
    if fresh:
        conn.execute(insert(dataset_blobs), fresh)


def note_skipped(conn: Connection, dataset_id: int, sentences: Sequence[str]) -> None:
    """Store the sentences about files that the build of a dataset skipped."""
    key_values.put(conn, f"{_SKIPPED}{dataset_id}", msgspec.json.encode(sentences).decode())


def remove(conn: Connection, dataset_id: int) -> None:
    """Delete a dataset; a later sweep deletes the blobs that nothing else uses."""
    conn.execute(deletion(dataset_blobs, "asked").where(dataset_blobs.c.dataset_id == dataset_id))
    conn.execute(deletion(datasets, "asked").where(datasets.c.id == dataset_id))
    key_values.delete_key(conn, f"{_SKIPPED}{dataset_id}", "asked")


def skipped(conn: Connection, dataset_id: int) -> tuple[str, ...]:
    """Return the sentences about files that the build of a dataset skipped."""
    text = key_values.get(conn, f"{_SKIPPED}{dataset_id}")
    return () if text is None else decode(text, tuple[str, ...])


def by_name(conn: Connection, name: str) -> DatasetRow:
    """Find a dataset by name. Raises NotFound, whose message names the nearest dataset, or all
    datasets.
    """
    row = conn.execute(select(datasets).where(datasets.c.name == name)).mappings().first()
    if row is None:
        names = conn.execute(select(datasets.c.name).order_by(datasets.c.name)).scalars().all()
        advice = (
            hint(name, names) if names else f"add it: `coordinator dataset add {name} --text PATH`"
        )
        raise NotFound(f'there is no dataset "{name}": {advice}')
    return _row(dict(row))


_BY_ID = select(datasets).where(equals(datasets.c.id))


def by_id(conn: Connection, dataset_id: int) -> DatasetRow:
    return _row(dict(conn.execute(_BY_ID, {"where_id": dataset_id}).mappings().one()))


def of_run(conn: Connection, run: RunRow) -> DatasetRow | None:
    """Return a run's dataset; None if the run makes its own data."""
    return None if run.dataset_id is None else by_id(conn, run.dataset_id)


def assets_of(conn: Connection, run: RunRow) -> Mapping[str, ChunkRef]:
    """Return the assets of a run's dataset, such as its tokenizer."""
    dataset = of_run(conn, run)
    return {} if dataset is None else dataset.manifest.assets


def every(conn: Connection) -> list[DatasetRow]:
    return [
        _row(dict(row))
        for row in conn.execute(select(datasets).order_by(datasets.c.name)).mappings()
    ]


_D = dataset_blobs.c
_SERVED = select(_D.sha256).where(equals(_D.sha256), _D.served).limit(1)


def is_served(conn: Connection, sha256: str) -> bool:
    """Return True if a volunteer may fetch this blob as part of a dataset."""
    return conn.execute(_SERVED, {"where_sha256": sha256}).first() is not None


# --- the register of blobs ---


Blob: TypeAlias = tuple[str, int, str]  # SHA-256, bytes and kind


def register(
    conn: Connection, rows: Iterable[Blob], now: float, serials: Mapping[str, str]
) -> None:
    """Register blobs that this process announced and then stored; `serials` has the serial of each
    announcement by name. Blobs that are registered already stay unchanged.

    Raises Unavailable for a blob that a sweep deletes, or has deleted since its announcement.
    """
    _register(conn, rows, now, serials)


def register_referenced(conn: Connection, rows: Iterable[Blob], now: float) -> None:
    """Register blobs to which rows of uploads or of merge parts have referred since the blobs were
    announced. Raises Unavailable for a blob that a sweep deletes.
    """
    _register(conn, rows, now, None)


def _register(
    conn: Connection, rows: Iterable[Blob], now: float, serials: Mapping[str, str] | None
) -> None:
    row_by_sha = {
        sha: {"sha256": sha, "size": size, "kind": kind, "created_at": now}
        for sha, size, kind in rows
    }
    if row_by_sha:
        # Rows are inserted in one order, so that two transactions cannot deadlock.
        insertion = insert_new(conn, blobs, "sha256", "sha256")
        names = sorted(row_by_sha)
        new = conn.execute(insertion, [row_by_sha[name] for name in names]).scalars()
        unreferenced_blobs.reference(conn, names, set(new), serials)


def blob_sizes(conn: Connection, sha256s: Sequence[str]) -> dict[str, int]:
    query = select(blobs.c.sha256, blobs.c.size).where(blobs.c.sha256.in_(sha256s))
    return dict(conn.execute(query).all())


def all_registered(conn: Connection) -> dict[str, int]:
    return dict(conn.execute(select(blobs.c.sha256, blobs.c.size)).all())


def in_use(conn: Connection) -> set[str]:
    """Return the blobs of datasets, undecided contributions, and accepted but unmerged updates."""
    c = contributions.c
    undecided = c.state.in_(("received", "checking"))
    waiting = select(c.sha256).where(undecided | ((c.state == "accepted") & c.kind.in_(UPDATES)))
    return set(conn.execute(union(select(dataset_blobs.c.sha256), waiting)).scalars())
