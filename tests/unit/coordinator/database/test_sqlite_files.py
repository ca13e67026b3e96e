"""Files that SQLite opens while it serves: none but its own, whatever a transaction changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Enough pages that undoing a job does not fit into what SQLite keeps in memory by itself.
PROGRAM = """
import asyncio, os, resource, sys
from coordinator.database.engine.open_database import Database, migrate

def fill(conn):
    conn.exec_driver_sql("CREATE TABLE filled (id INTEGER PRIMARY KEY, text TEXT)")
    rows = [(number, "x" * 2000) for number in range(400)]
    conn.exec_driver_sql("INSERT INTO filled VALUES (?, ?)", rows)

def change(conn):
    conn.exec_driver_sql("UPDATE filled SET text = ?", ("y" * 2000,))

async def main(url):
    await migrate(url)
    db = await Database.open(url)
    await db.write(fill)
    most = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    while os.dup(0) < most:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # nothing can be opened from here
    await asyncio.gather(*(db.write(change) for _ in range(4)))  # jobs of one commit
    print("written")

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_change_needs_no_temporary_file(tmp_path: Path) -> None:
    """The folder for them may be full, or the root of a container read-only."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"sqlite:///{tmp_path / 'db.sqlite3'}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == "written\n", ran.stderr[-1000:]
