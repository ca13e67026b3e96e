"""Data directory, backup and profile of each release, in small: every later version opens them.

    python -m tests.support.released            writes tests/golden/released-VERSION.tar.gz

The archive holds the data directory of a coordinator (`coordinator`), a backup of it (`backup`),
and the machine of a volunteer (`machine`) that was killed with one result that it could not send.
Before a release its archive is made anew whenever a format changes; after it, never.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
import tarfile
import tempfile
import tomllib
from pathlib import Path

import msgspec
import structlog

from coordinator.upkeep.backup import backup
from shared.protocol.limits import API
from tests.e2e.agent.test_offline import OVERLAP, away
from tests.support.local_coordinator import LocalCoordinator
from tests.support.sources import ROOT
from volunteer.account.profile_directory import Profile
from volunteer.control import events

GOLDEN = ROOT / "tests" / "golden"
PARTS = ("coordinator", "backup", "machine")
VOLUNTEER = "Ann"


async def make(folder: Path) -> None:
    """Let a volunteer work for a coordinator, cut its connection, kill both."""
    async with away(folder, "", OVERLAP) as there:
        home, machine = there.machine.home, there.machine
        async with machine.working() as process:
            await process.until(events.Submitted)
            await merged(home)
            process.network.refuse("/submit")
            await process.until(events.Connection, lambda event: event.queued >= 1)
        identity = Profile(machine.directories.profile).current()
        assert identity is not None
        async with home.client(identity.token) as client:
            key = msgspec.json.encode({"name": "editor"})
            reply = await client.post(f"{API}/me/keys", content=key)
            assert reply.is_success, reply.text
        c = home.coordinator
        await c.volunteers.invites.create(uses=3)
        await backup(c.db, c.blobs, c.settings, c.clock, folder / "backup")


async def merged(home: LocalCoordinator) -> None:
    """Wait until the run has a version of its own."""
    async with asyncio.timeout(120):
        while (await home.coordinator.runs.queries.listing())[0].version < 1:
            await asyncio.sleep(0.01)


def pack(folder: Path, target: Path) -> None:
    """Write the parts of a folder into one archive."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for part in PARTS:
            archive.add(folder / part, part, filter=plain)
    target.write_bytes(gzip.compress(packed.getvalue(), 9, mtime=0))


def unpack(archive: Path, folder: Path) -> None:
    """Put the parts of an archive into a folder."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = GOLDEN / f"released-{project['version']}.tar.gz"
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(make(Path(folder)))
        pack(Path(folder), target)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
