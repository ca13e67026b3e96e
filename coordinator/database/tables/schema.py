"""All tables, in one metadata."""

from __future__ import annotations

from coordinator.database.tables import (  # noqa: F401 - each adds its tables to the metadata
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
from coordinator.database.tables.base import metadata as metadata
