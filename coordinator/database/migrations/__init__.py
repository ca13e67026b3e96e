"""Alembic migrations and the triggers that guard history."""
