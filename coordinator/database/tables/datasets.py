"""Tables of blobs, and of the datasets made of blobs."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

blobs = sa.Table(
    "blobs",
    metadata,
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    # chunk, heldout, asset, weights, way (link or snapshot), state, update, experience, sample
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

# Blobs that a sweep may delete: announced before they are written, or no longer referred to.
unreferenced_blobs = sa.Table(
    "unreferenced_blobs",
    metadata,
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("serial", sa.String(16), nullable=False),  # changes with each deletion
    sa.Column("since", sa.Double, nullable=False, index=True),
    sa.Column("sweeper", sa.String(32)),  # the process that deletes the blob at this moment
)

datasets = sa.Table(
    "datasets",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String(128), nullable=False, unique=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("manifest", sa.Text, nullable=False),  # whole, with the held-out split
    sa.Column("manifest_sha256", sa.String(64), nullable=False),
)

# Blobs that a dataset keeps alive, and whether a volunteer may fetch them.
dataset_blobs = sa.Table(
    "dataset_blobs",
    metadata,
    sa.Column("dataset_id", sa.ForeignKey("datasets.id"), primary_key=True),
    sa.Column("sha256", sa.String(64), primary_key=True, index=True),
    sa.Column("served", sa.Boolean, nullable=False),
)
