"""Alembic migrations: one revision after the other, applied in one transaction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

# Revisions, oldest first; listed here too, so that opening a database need not load alembic.
REVISIONS: tuple[str, ...] = ("0001",)


def settings(connection: Connection) -> Config:
    """Return the alembic configuration for this connection."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("file_template", "r%%(rev)s_%%(slug)s")
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection) -> None:
    """Apply the missing migrations within the caller's transaction."""
    from alembic import command

    command.upgrade(settings(connection), "head")
