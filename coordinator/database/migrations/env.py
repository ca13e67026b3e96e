"""Script run by alembic: migrates the connection that `upgrade` passes on."""

from __future__ import annotations

from alembic import context

from coordinator.database.tables.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
