"""All declared tables, and the triggers that guard history.

The revision follows the declared tables until the first release. The release writes them out here,
and every later change is a revision of its own.
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
    metadata.create_all(op.get_bind(), checkfirst=False)
    triggers.create(op.get_bind())
