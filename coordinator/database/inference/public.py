"""Tokens that those without a key may have: one count a run, of the day that it was last used."""

from __future__ import annotations

from sqlalchemy import Connection

from coordinator.database import key_values


def take(conn: Connection, run_id: int, day: int, tokens: int, most: int) -> int:
    """Take tokens off a day's quota; how many are missing, and nothing is taken then."""
    key, used = _used(conn, run_id, day)
    if used + tokens > most:
        return used + tokens - most
    key_values.put(conn, key, f"{day} {used + tokens}")
    return 0


def give_back(conn: Connection, run_id: int, day: int, tokens: int) -> None:
    """Return what was taken that day and not used."""
    key, used = _used(conn, run_id, day)
    if used:
        key_values.put(conn, key, f"{day} {max(0, used - tokens)}")


def used(conn: Connection, run_id: int, day: int) -> int:
    """Return how many tokens of a day were used or are under way."""
    return _count(key_values.get(conn, _key(run_id)) or "", day)


def _used(conn: Connection, run_id: int, day: int) -> tuple[str, int]:
    key = _key(run_id)
    return key, _count(key_values.locked(conn, key), day)


def _key(run_id: int) -> str:
    return f"public:{run_id}"


def _count(value: str, day: int) -> int:
    its_day, _, count = value.partition(" ")
    return int(count) if its_day == str(day) else 0
