"""Ends of leases while the coordinator cannot be reached."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import msgspec

from shared.decoding import decode
from shared.protocol.leases import ReleaseRequest
from tests.support.virtual_clock import VirtualClock
from tests.support.workplaces import workplace
from tests.unit.volunteer.agent.test_held_leases import held
from tests.unit.volunteer.storage.test_outbox import put
from volunteer.agent.lease_ends import SUBMIT_S, LeaseEnds
from volunteer.control.event_bus import EventBus
from volunteer.net.api import SHORT_S, Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.storage.leases import Leases
from volunteer.storage.outbox import Outbox


async def test_no_reason_is_sent_with_a_task_over_own_data(tmp_path: Path) -> None:
    """A reason may quote a path."""
    clock, sent = VirtualClock(), []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(decode(request.content, ReleaseRequest))
        return httpx.Response(204, stream=httpx.ByteStream(b""))

    client = Client(
        Address(url="http://127.0.0.1:1"),
        clock=clock,
        rng=random.Random(1),
        token="worker.secret",
        transport=httpx.MockTransport(answer),
    )
    store = {"leases": Leases(tmp_path / "leases"), "outbox": Outbox(tmp_path / "outbox")}
    place = workplace(clock, remote={"api": Api(client)}, store=store, bus=EventBus(clock))
    work, reason = held(1), "/home/ann/secret notes.txt: not UTF-8"
    for member in (False, True):
        work.change(lease=msgspec.structs.replace(work.lease, member=member))
        await LeaseEnds(place=place).give_back(work, reason, failed=True)
    assert [(release.reason, release.failed) for release in sent] == [(reason, True), ("", True)]
    await client.close()


async def test_giving_back_waits_shortly_for_a_coordinator_that_is_away(tmp_path: Path) -> None:
    clock, tried = VirtualClock(), []

    def down(request: httpx.Request) -> httpx.Response:
        tried.append(request.url.path)
        raise httpx.ConnectError("the network is down")

    client = Client(
        Address(url="http://127.0.0.1:1"),
        clock=clock,
        rng=random.Random(1),
        token="worker.secret",
        transport=httpx.MockTransport(down),
    )
    lease, leases, outbox = held(1), Leases(tmp_path / "leases"), Outbox(tmp_path / "outbox")
    store = {"leases": leases, "outbox": outbox}
    place = workplace(clock, remote={"api": Api(client)}, store=store, bus=EventBus(clock))
    ends = LeaseEnds(place=place)
    leases.keep(lease.stored)
    waiting = put(outbox, 1)
    assert waiting.submit.attempt == lease.lease.attempt
    began = clock.now()
    giving = asyncio.ensure_future(ends.give_back(lease, "stopped", failed=False))
    while not giving.done():
        await clock.advance(0.1)
    await giving
    assert SUBMIT_S <= clock.now() - began <= SUBMIT_S + SHORT_S + 0.2
    assert tried
    assert leases.stored() == ()  # it expires by itself
    assert outbox.entries() == (waiting,)
    await client.close()
