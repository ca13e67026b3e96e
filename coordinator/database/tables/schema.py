"""All tables, in one metadata."""

from __future__ import annotations

from coordinator.database.tables import (
    accounts,
    contributions,
    datasets,
    experience,
    inference,
    ledger,
    merges,
    record,
    replicas,
    runs,
    tasks,
    transparency,
    trust,
    versions,
)
from coordinator.database.tables.base import metadata

TABLES = (
    accounts,
    contributions,
    datasets,
    experience,
    inference,
    ledger,
    merges,
    record,
    replicas,
    runs,
    tasks,
    transparency,
    trust,
    versions,
)

__all__ = ["TABLES", "metadata"]
