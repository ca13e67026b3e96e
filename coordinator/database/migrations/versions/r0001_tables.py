"""Every table of the first release: as long as this is the only revision, it is what `tables.py`
says.

Before a second revision is added, this one is written out as it stood (a test insists): it must
never change with the code.
"""

from __future__ import annotations

from alembic import op

from coordinator.database.migrations import triggers
from coordinator.database.tables.schema import metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    metadata.create_all(op.get_bind())
    triggers.create(op.get_bind())
