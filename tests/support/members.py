"""Steps of a member: it declares data of its own for a run, and contributes to it."""

from __future__ import annotations

import msgspec

from shared.protocol.contributions import Verdict
from shared.protocol.leases import Lease
from shared.protocol.limits import API
from shared.protocol.members import HeldoutSums, MemberData
from tests.support.local_coordinator import Worker, decode

TRAINED = 7777.125  # loss that every training reports


async def declare(worker: Worker, samples: int, run: str = "tiny", edition: str = "") -> None:
    """Declare the numbers of a machine's data."""
    numbers = MemberData(samples=samples, items=8 * samples, heldout=1, edition=edition)
    body = msgspec.json.encode(numbers)
    reply = await worker.http.put(f"{API}/runs/{run}/data", content=body)
    assert reply.status_code == 204, reply.text


async def contribute(
    worker: Worker, seed: int, heldout: HeldoutSums | None = None, scale: float = 1e-3
) -> Lease:
    """Do a whole task of the run "tiny", with the loss that was measured before it."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update("tiny", seed, scale)
    await worker.upload(lease, data)
    losses = {"loss_first": TRAINED, "loss_last": TRAINED}
    submission = worker.submission(lease, begun, data)
    submission = msgspec.structs.replace(submission, heldout=heldout, **losses)
    verdict = decode(await worker.post(f"/tasks/{lease.task}/submit", submission), Verdict)
    assert verdict.state == "accepted", verdict
    return lease
