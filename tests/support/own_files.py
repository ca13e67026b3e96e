"""Own files of a machine, added for a run over data that stay with their members."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.workloads.data.skipped_files import Skipped
from tests.support.local_volunteer import LocalMachine
from volunteer.account.membership import OwnSources, build, declare, member_run
from volunteer.account.profile_directory import Profile
from volunteer.net.api import Api
from volunteer.storage.own_data import OwnData, OwnRecord


def own_data_of(machine: LocalMachine) -> OwnData:
    """Return the own data of a machine, as another process reads it."""
    profile = Profile(machine.directories.profile)
    identity = profile.current()
    assert identity is not None
    return OwnData(profile.home(identity).own_data)


async def add(
    machine: LocalMachine, *paths: Path, run: str = "tiny", declared: bool = True
) -> OwnRecord:
    """Do as `volunteer data add` does, or as one that ends before it is `declared`."""
    identity = Profile(machine.directories.profile).current()
    assert identity is not None
    client = machine.connect()(identity.address, identity.token)
    try:
        api = Api(client)
        found = await member_run(api, run, identity.public_key, ("gpt", "dcgan", "causal-lm"))
        own = own_data_of(machine)
        with own.building(run) as target:
            sources = OwnSources(paths=paths)
            manifest, numbers = await asyncio.to_thread(
                build, found, sources, target, Skipped(), lambda _: None
            )
            record = OwnRecord(
                run=run, build=target.folder.name, manifest=manifest, numbers=numbers, at=0.0
            )
            record = own.use(record)
        if declared:
            await declare(api, record)
        return record
    finally:
        await client.close()
