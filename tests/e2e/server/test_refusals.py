"""Refusals over HTTP and early ends: each with a sentence of the same form."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from coordinator.http.app import create_app
from coordinator.http.routes.operations import COMMANDS
from shared.protocol.contributions import Verdict
from shared.protocol.limits import API
from shared.protocol.listings import LedgerRow
from tests.support.local_coordinator import LocalCoordinator, decode, local_coordinator, refused
from tests.support.served import served


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        yield made


async def test_nobody_sees_what_is_not_theirs(home: LocalCoordinator) -> None:
    await home.start_run()
    ann, eve = await home.join("Ann"), await home.join("Eve")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update("tiny")
    info = await ann.upload(lease, data)
    submission = ann.submission(lease, begun, data)
    for path, body in {
        f"/tasks/{lease.task}/begin": {"attempt": lease.attempt},
        f"/tasks/{lease.task}/release": {"attempt": lease.attempt},
        f"/tasks/{lease.task}/submit": submission,
    }.items():
        refused(await eve.post(path, body), 404)
    refused(await eve.announce(lease, data), 404)
    refused(await eve.put(info.upload_id, 0, data), 404)
    decode(await ann.post(f"/tasks/{lease.task}/submit", submission), Verdict)
    assert decode(await eve.get("/contributions"), tuple[Verdict, ...]) == ()
    assert decode(await eve.get("/me/ledger"), tuple[LedgerRow, ...]) == ()


# What anybody may call, written down here and not read from the table that it checks.
OPEN_TO_ALL = {
    ("POST", f"{API}/workers/register"),
    ("GET", f"{API}/workers/challenge"),
    ("GET", f"{API}/record/head"),
    ("GET", f"{API}/record/consistency"),
    ("GET", f"{API}/server"),
    ("GET", f"{API}/openapi.json"),
}


async def test_every_route_wants_the_right_token(home: LocalCoordinator) -> None:
    ann = await home.join("Ann")
    stranger, wrong = home.client(), home.client(f"{ann.worker_id}.{'x' * 43}")
    served = {
        (method, route.path)
        for route in create_app(home.coordinator).routes
        if isinstance(route, Route) and route.path.startswith(API)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served >= OPEN_TO_ALL
    for method, path in served - OPEN_TO_ALL:
        where_own = ann.http if path.startswith(f"{API}/admin/") else home.admin
        for client in (stranger, wrong, where_own):
            reply = await client.request(method, re.sub(r"[{}]", "", path), content=b"{}")
            assert refused(reply, 401).code == "unauthorized", path
            assert reply.headers["www-authenticate"] == "Bearer"


async def test_nobody_but_the_organiser_gives_an_organisers_command(home: LocalCoordinator) -> None:
    ann = await home.join("Ann")
    forged = home.client(f"admin.{'x' * 43}")
    for name in COMMANDS:
        for client in (home.client(), ann.http, forged):
            refused(await client.post(f"{API}/admin/{name}", content=b"{}"), 401)


async def test_the_organisers_files_stay_in_their_boxes(home: LocalCoordinator) -> None:
    admin, box = home.admin, "ab" * 16
    path = f"{API}/admin/files/{box}"
    assert (await admin.put(f"{path}/000-a.txt", content=b"x" * 3_000_000)).json() == {
        "size": 3_000_000
    }
    assert (await admin.get(f"{path}/000-a.txt")).content == b"x" * 3_000_000
    for name in ("..%2f..%2fetc", ".hidden", "a" * 201, "%00", "a b"):
        reply = await admin.put(f"{path}/{name}", content=b"x")
        assert reply.status_code in (400, 404), name
    refused(await admin.put(f"{API}/admin/files/short/a.txt", content=b"x"), 400)
    refused(await admin.get(f"{path}/absent.txt"), 404)
    refused(await admin.post(f"{API}/admin/backup", content=b'{"to": "/tmp/x"}'), 404)
    refused(await admin.post(f"{API}/admin/run.list", content=b'{"typo": 1}'), 400)
    await home.clock.advance(3 * 86_400)
    home.coordinator.boxes.expire(home.clock.now() + 10**10)
    refused(await admin.get(f"{path}/000-a.txt"), 404)


BODIES = {
    "empty": b"",
    "utf8": b"\xff\xfe",
    "cut": b"{",
    "deep": b"[" * 100_000,
    "deep object": b'{"x":' * 100_000,
    "long and unknown": b'{"x":' + b"9" * 5000 + b"}",
    "long": b'{"news_since":' + b"9" * 5000 + b"}",
    "nan": b'{"rates":{"a":NaN}}',
    "large": b'{"x":"' + b"y" * (2 << 20) + b'"}',
}


async def test_hostile_bodies_get_a_sentence(home: LocalCoordinator) -> None:
    from shared.protocol.endpoints import ENDPOINTS

    ann = await home.join("Ann")
    for endpoint in ENDPOINTS:
        if endpoint.request is None or endpoint.auth == "admin":
            continue
        path = endpoint.full_path.replace("{task}", "1")
        for name, body in BODIES.items():
            reply = await ann.http.request(endpoint.method, path, content=body)
            assert 400 <= reply.status_code < 500, (endpoint.path, name, reply.text)
            refused(reply, reply.status_code)


async def test_numbers_in_paths_are_only_numbers(home: LocalCoordinator) -> None:
    ann = await home.join("Ann")
    for number in ("x", "-1", "1.5", "9" * 30, "9" * 5000, "%00", "1e3", "٣"):
        refused(await ann.post(f"/tasks/{number}/begin", {"attempt": 1}), 404)
    refused(await ann.post("/tasks/999999999999999999/begin", {"attempt": 1}), 404)
    refused(await ann.get("/contributions?cursor=x"), 400)


async def test_unknown_paths_and_methods_get_the_same_form(home: LocalCoordinator) -> None:
    client = home.client()
    refused(await client.get("/nothing"), 404)
    refused(await client.get("/api/v1/server/"), 404)
    refused(await client.delete("/api/v1/server"), 400)


async def test_a_waiting_claim_ends_when_the_server_stops(home: LocalCoordinator) -> None:
    ann = await home.join("Ann")
    waiting = asyncio.create_task(ann.post("/claims", {"claim_id": "c" * 32, "wait_s": 50}))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    home.coordinator.stopping.set()
    reply = await waiting
    assert refused(reply, 503).retry_after_s
    assert reply.headers["retry-after"] == "3"


async def test_who_waits_for_a_merge_is_answered_when_the_server_stops(
    home: LocalCoordinator,
) -> None:
    await home.start_run()
    ann, bob = await home.join("Ann"), await home.join("Bob")
    await bob.claim()  # a second machine at work: the merge waits for it
    await ann.work()
    lease = await ann.claim()
    beginning = asyncio.create_task(
        ann.post(f"/tasks/{lease.task}/begin", {"attempt": lease.attempt})
    )
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert not beginning.done()
    home.coordinator.stopping.set()
    reply = await beginning
    assert refused(reply, 503).retry_after_s
    assert reply.headers["retry-after"]


@pytest.mark.parametrize(("command", "status"), [("ban", 403), ("reissue", 401), ("forget", 401)])
async def test_a_waiting_claim_ends_when_its_volunteer_is_shut_out(
    home: LocalCoordinator, command: str, status: int
) -> None:
    ann = await home.join("Ann")
    body = {"claim_id": "c" * 32, "wait_s": 60}
    waiting = asyncio.ensure_future(ann.post("/claims", body))
    while home.clock.next_at is None:  # it waits
        await asyncio.sleep(0)
    done = await home.admin.post(f"{API}/admin/volunteer.{command}", content=b'{"name": "Ann"}')
    assert done.status_code == 200
    refused(await waiting, status)  # the clock stands still: it was woken


async def test_too_many_requests_are_told_when_to_come_back(tmp_path: Path) -> None:
    async with local_coordinator(
        tmp_path, rate_worker="5/minute", rate_register="2/minute"
    ) as home:
        ann, bob = await home.join("Ann"), await home.join("Bob")
        eve = await ann.post("/workers/register", ann.registration())
        assert refused(eve, 429).code == "too_many_requests"
        for _ in range(5):
            assert (await ann.get("/workers/me")).status_code == 200
        reply = await ann.get("/workers/me")
        refused(reply, 429)
        assert int(reply.headers["retry-after"]) >= 1
        assert (await bob.get("/workers/me")).status_code == 200


async def test_a_page_that_names_the_loopback_server_anew_changes_nothing(tmp_path: Path) -> None:
    """Its name led to its own server once, and to 127.0.0.1 since (DNS rebinding)."""
    async with local_coordinator(tmp_path) as home:
        eve = await home.join("Eve")
        for host in ("evil.example.org", "localhost.evil.example.org:8765", "10.0.0.7", "[", ""):
            foreign = {"Host": host}
            asked = await home.client().post(f"{API}/workers/register", headers=foreign)
            assert "this machine only" in refused(asked, 403).message
            for path in ("run.list", "files/x/y"):
                refused(await home.admin.get(f"{API}/admin/{path}", headers=foreign), 403)
            refused(await eve.http.put(f"{API}/uploads/x", headers=foreign), 403)
            assert (await home.client().get("/health", headers=foreign)).status_code == 200
        for host in ("localhost:8765", "127.0.0.1:1", "[::1]:8765"):
            reply = await eve.http.post(f"{API}/workers/heartbeat", json={}, headers={"Host": host})
            assert reply.status_code == 200
    async with local_coordinator(tmp_path / "b", url="https://train.example.org") as home:
        foreign = {"Host": "train.example.org"}  # a proxy sends its own name
        asked = await home.client().post(f"{API}/workers/register", headers=foreign)
        assert refused(asked, 400).message.startswith("the body is empty")


async def test_the_organisers_token_is_no_machines(home: LocalCoordinator) -> None:
    told = refused(await home.admin.get(f"{API}/workers/me"), 401).message
    assert told == "this is the organiser's token, and only a volunteer's machine may ask this"


async def test_addresses_of_one_home_share_its_rate(tmp_path: Path) -> None:
    def asks(address: str) -> Awaitable[httpx.Response]:
        return stranger.get("/health", headers={"X-Forwarded-For": address})

    async with (
        local_coordinator(tmp_path, rate_ip="5/minute") as home,
        served(home, ticking=False) as url,
        httpx.AsyncClient(base_url=url) as stranger,
    ):
        for number in range(5):
            assert (await asks(f"2001:db8:0:7::{number}")).status_code == 200
        refused(await asks("2001:db8:0:7:aaaa::1"), 429)
        assert (await asks("2001:db8:0:8::1")).status_code == 200


async def test_a_full_disk_is_read_only_until_space_returns(home: LocalCoordinator) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    space = home.coordinator.space
    space.floor_bytes = 1 << 62
    space.look()
    assert refused(await ann.announce(lease, data), 507).code == "storage_full"
    idle = (await ann.post("/claims", {"claim_id": "d" * 32})).json()["idle"]
    assert idle["reason"] == "read_only"
    assert (await ann.post("/workers/heartbeat", {})).status_code == 200
    assert (await home.client().get("/health")).json()["read_only"]
    space.floor_bytes = 0
    space.look()
    assert (await ann.upload(lease, data)).complete


async def test_an_unforeseen_error_tells_nothing_but_its_number(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails() -> None:
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr(type(home.coordinator.server), "info", lambda self: fails())
    reply = await home.client().get(f"{API}/server")
    body = refused(reply, 500)
    assert "swordfish" not in reply.text
    assert body.request_id == reply.headers["x-request-id"]


async def test_a_workload_that_is_not_installed_is_refused_with_its_sentence(
    home: LocalCoordinator,
) -> None:
    text = 'name = "odd"\nworkload = "nonesuch"\n'
    reply = await home.admin.post(f"{API}/admin/run.create", json={"text": text})
    assert '"nonesuch" is not installed here' in refused(reply, 422).message
