"""What lies in the blob store for a version besides its weights and state."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Integer, String, Table

from coordinator.store.ledger_tables import metadata

__all__ = ["metadata", "version_blobs"]

# Shorter ways to a version's published weights (links, snapshots), as its manifest lists them; they stay as long as it does.
version_blobs = Table(
    "version_blobs",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("sha256", String(64), primary_key=True, index=True),
)
