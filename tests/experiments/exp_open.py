"""An open server with its defaults, for some minutes: two honest volunteers that really train, two
lazy ones that do a fifth of their steps, and three that send noise and come back by new accounts.

    honest   freed pay, and what is at stake
    lazy     freed pay by its own share of the work: 1.0 is what honest work is paid
    noise    freed pay

Everything is real but the clock of the machines, which runs fast, so that waits are short.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection

from coordinator.database import volunteers
from coordinator.database.ledger import payments
from shared.errors import VolunteerError
from shared.protocol.contributions import Commitment, Verdict
from shared.protocol.leases import ClaimReply
from shared.workloads.base import Job, Result, Work, Workload, load
from tests.e2e.server.test_open_run import claim, head
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator
from tests.support.local_volunteer import LocalMachine

RUN = """
name = "tiny"
workload = "gpt"
dataset = "sums"
[model]
block_size = 8
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.0
[train]
lr = 0.003
warmup_steps = 0
[task]
local_steps = 20
batch_size = 8
min_steps = 1
[plan]
preset = "fedavg"
quorum = 2
codec = "int8"
"""
SHARE = 5  # a lazy volunteer does one of so many steps
HONEST, LAZY, NOISE = ("Ann", "Bob"), ("Lia", "Leo"), 3
SETTINGS: dict[str, tuple[tuple[str, ...], int]] = {
    "with the others": (HONEST + LAZY, NOISE),
    "alone": (HONEST, 0),
    "only noise": ((), NOISE),
}


class Fifth:
    """Does the first fifth of the steps, and says that it did all."""

    def __init__(self, work: Work, job: Job) -> None:
        self._work, self._job = work, job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def result(self) -> tuple[Result, Mapping[str, Any]]:
        report, tensors = self._work.result()
        told = {"steps": self._job.steps, "samples": self._job.stop - self._job.start}
        return msgspec.structs.replace(report, **told), tensors


def lazy(name: str) -> Workload:
    """Return a workload of which a fifth is done."""
    workload = load(name)
    begin = workload.begin

    def little(job: Job, *more: Any) -> Work:
        steps = max(1, job.steps // SHARE)
        part = msgspec.structs.replace(job, steps=steps, stop=job.start + steps * job.batch_size)
        return Fifth(begin(part, *more), job)  # type: ignore[return-value]

    workload.begin = little  # type: ignore[method-assign,assignment]
    return workload


async def noise(home: LocalCoordinator, name: str) -> None:
    """Send noise with made-up commitments, by another account where this one gets no work."""
    number = 0
    while True:
        eve = await home.stranger(f"{name} {number}")
        number += 1
        for seed in range(100):
            if not await _sent(home, eve, seed):
                break
            await asyncio.sleep(0.5)
        await asyncio.sleep(2.0)  # what an account costs


async def _sent(home: LocalCoordinator, eve: Worker, seed: int) -> bool:
    """Submit noise of about the honest norm; False where there is no lease."""
    lease = decode(await eve.post("/claims", claim()), ClaimReply).lease
    if lease is None:
        return False
    with contextlib.suppress(VolunteerError, AssertionError):
        begun = await eve.begin(lease)
        data = await eve.update(lease.job.run, seed, scale=0.05)
        await eve.upload(lease, data)
        said = msgspec.structs.replace(
            eve.submission(lease, begun, data),
            loss_last=2.0,
            commitment=Commitment(left=f"{seed:064x}"),
        )
        decode(await eve.post(f"/tasks/{lease.task}/submit", said), Verdict)
    return True


async def accounts(home: LocalCoordinator) -> dict[str, dict[str, Any]]:
    """Return standing and pay of every account."""

    def read(conn: Connection) -> dict[str, dict[str, Any]]:
        found = {}
        for name, number in people:
            row, has = volunteers.existing(conn, number), payments.balances(conn, number)
            found[name] = {
                "standing": row.standing,
                "proofs": row.proofs,
                "accepted_micro": row.accepted_micro,
                "freed_micro": has.earned_micro,
                "stake_micro": has.escrow_micro + has.pending_micro,
            }
        return found

    people = [(p.nickname, p.volunteer_id) for p in await home.coordinator.volunteers.list()]
    return await home.coordinator.db.read(read)


async def play(minutes: float, people: Sequence[str], noises: int) -> dict[str, Any]:
    """Let all work for some minutes; what each has at the end, and the versions that came."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        settings = {"open": True, "proof_of_work_bits": 1}
        async with local_coordinator(path / "coordinator", **settings) as home:
            await home.start_run(RUN)
            async with home.coordinator.working(), AsyncExitStack() as stack:
                for name in people:
                    machine = LocalMachine(path / name, home)
                    await machine.join(name)
                    kind = lazy if name in LAZY else None
                    await stack.enter_async_context(machine.working(kind))
                attackers = [
                    asyncio.create_task(noise(home, f"Eve {number}")) for number in range(noises)
                ]
                await asyncio.sleep(60.0 * minutes)
                for attacker in attackers:
                    attacker.cancel()
                await asyncio.gather(*attackers, return_exceptions=True)
            breaches = await home.coordinator.ledger.check()
            found = {"accounts": await accounts(home), "versions": await head(home)}
            return found | {"breaches": len(breaches)}


def table(found: dict[str, Any]) -> list[str]:
    """Return the lines of one setting."""
    lines = [f"versions {found['versions']}, breaches {found['breaches']}"]
    for name, has in sorted(found["accounts"].items()):
        if name.startswith("Eve"):
            continue
        share = has["freed_micro"] / max(1, has["accepted_micro"])
        lines.append(
            f"{name:6} {has['standing']:10} proofs {has['proofs']:3} accepted "
            f"{has['accepted_micro']:>10,} freed {has['freed_micro']:>10,} ({share:.2f}) at stake "
            f"{has['stake_micro']:>9,}"
        )
    eves = [has for name, has in found["accounts"].items() if name.startswith("Eve")]
    if eves:
        freed, standing = sum(e["freed_micro"] for e in eves), {e["standing"] for e in eves}
        lines.append(f"noise  {len(eves)} accounts, freed {freed}, {sorted(standing)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, (people, noises) in SETTINGS.items():
        file = given.out / f"{name.replace(' ', '-')}-{given.minutes:g}.json"
        if not file.exists():
            found = asyncio.run(play(given.minutes, people, noises))
            file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(name)
        print("\n".join(table(json.loads(file.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
