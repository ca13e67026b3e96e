"""Tables of blobs, and of the datasets made of blobs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, String, Table, Text

from coordinator.database.tables.base import Key, metadata

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    # chunk, heldout, asset, weights, way, state, update, experience, sample
    Column("kind", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
)

datasets = Table(
    "datasets",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("manifest", Text, nullable=False),  # whole, with the held-out split
    Column("manifest_sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
)

# Blobs that a dataset keeps alive, and whether a volunteer may fetch them.
dataset_blobs = Table(
    "dataset_blobs",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("sha256", String(64), primary_key=True, index=True),
    Column("served", Boolean, nullable=False),
)
