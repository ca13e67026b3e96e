"""The coordinator over HTTP, in one process: work done whole, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.app import create_app
from coordinator.limits import ClientGone
from coordinator.store import runs
from shared.protocol import (
    API,
    Benchmark,
    HeartbeatReply,
    LedgerRow,
    LinkCode,
    Me,
    RegisterReply,
    RunInfo,
    ServerInfo,
    SignedManifest,
    UploadInfo,
    Verdict,
    VersionInfo,
    VersionManifest,
    WorkerInfo,
)
from shared.signing import fingerprint, verify
from tests.house import House, decode, house, refused


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path) as made:
        yield made


async def test_the_whole_way_on_either_database(tmp_path: Path, database_url: str) -> None:
    async with house(tmp_path, database=database_url) as home:
        await home.start_run()
        ann, bob = await home.join("Ann"), await home.join("Bob")
        for seed in range(2):
            assert {(await ann.work(seed)).state, (await bob.work(seed + 9)).state} == {"accepted"}
            assert await home.coordinator.merger.merge_if_due(1)
        assert decode(await ann.get("/runs/tiny"), RunInfo).version == 2
        beat = decode(await ann.post("/workers/heartbeat", {}), HeartbeatReply)
        assert {news.state for news in beat.news} == {"accepted", "merged"}
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_two_volunteers_make_a_version(home: House) -> None:
    name = await home.start_run()
    ann, bob = await home.join("Ann"), await home.join("Bob")
    first, second = await ann.work(1), await bob.work(2)
    assert (first.state, second.state) == ("accepted", "accepted")
    run = await home.coordinator.runs.info(name)
    assert await home.coordinator.merger.merge_if_due(1)
    merged = decode(await ann.get(f"/contributions/{first.contribution}"), Verdict)
    assert (merged.state, merged.version) == ("merged", 1)
    assert decode(await ann.get(f"/runs/{name}"), RunInfo).version == run.version + 1
    me = decode(await ann.get("/workers/me"), Me)
    assert me.earned_micro > 0
    assert (me.pending_micro, me.merged) == (0, 1)
    rows = decode(await ann.get("/me/ledger"), tuple[LedgerRow, ...])
    assert {row.kind for row in rows} == {"pending", "earned"}
    assert await home.coordinator.check_ledger() == []
    report = await home.coordinator.checks.run()
    assert report.breaches == ()
    assert report.looked_at["versions"] == 2


async def test_what_the_coordinator_says_is_signed(home: House) -> None:
    name = await home.start_run()
    ann = await home.join("Ann")
    server = decode(await home.client().get(f"{API}/server"), ServerInfo)
    key = bytes.fromhex(server.public_key)
    assert fingerprint(key) == server.fingerprint == home.coordinator.link().fingerprint
    signed = decode(await ann.get(f"/runs/{name}/versions/latest"), SignedManifest)
    verify(key, signed.payload.encode(), bytes.fromhex(signed.signature))
    weights = msgspec.json.decode(signed.payload, type=VersionManifest).weights
    blob = await ann.get(f"/blobs/{weights.sha256}")
    assert hashlib.sha256(blob.content).hexdigest() == weights.sha256
    tag = f'"{weights.sha256}"'
    again = await ann.get(f"/runs/{name}/versions/latest", **{"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)


async def test_blobs_come_whole_in_ranges_or_not_at_all(home: House) -> None:
    name = await home.start_run()
    ann = await home.join("Ann")
    signed = decode(await ann.get(f"/runs/{name}/versions/0"), SignedManifest)
    sha = msgspec.json.decode(signed.payload, type=VersionManifest).weights.sha256
    whole = (await ann.get(f"/blobs/{sha}")).content
    cases = {
        "bytes=0-9": (206, whole[:10]),
        "bytes=5-": (206, whole[5:]),
        "bytes=-7": (206, whole[-7:]),
        f"bytes=0-{len(whole) * 2}": (206, whole),
        "bytes=9-3": (200, whole),
        "bytes=0-1,4-5": (200, whole),
        "lines=1-2": (200, whole),
        "bytes=-": (200, whole),
    }
    for header, (status, expected) in cases.items():
        reply = await ann.get(f"/blobs/{sha}", Range=header)
        assert (reply.status_code, reply.content) == (status, expected), header
        assert reply.headers["content-length"] == str(len(expected))
        assert reply.headers["etag"] == f'"{sha}"'
    part = await ann.get(f"/blobs/{sha}", Range="bytes=3-5")
    assert part.headers["content-range"] == f"bytes 3-5/{len(whole)}"
    for header in (f"bytes={len(whole)}-", "bytes=-0", f"bytes={10**17}-"):
        reply = await ann.get(f"/blobs/{sha}", Range=header)
        refused(reply, 416)
        assert reply.headers["content-range"] == f"bytes */{len(whole)}"
    other = {"Range": "bytes=3-5", "If-Range": '"something else"'}
    assert (await ann.get(f"/blobs/{sha}", **other)).status_code == 200
    same = {"Range": "bytes=3-5", "If-Range": f'"{sha}"'}
    assert (await ann.get(f"/blobs/{sha}", **same)).content == whole[3:6]
    assert (await ann.get(f"/blobs/{sha}", **{"If-None-Match": f'"{sha}"'})).status_code == 304
    head = await ann.http.head(f"{API}/blobs/{sha}")
    assert (head.content, head.headers["content-length"]) == (b"", str(len(whole)))


async def test_held_out_data_and_uploads_are_never_served(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    manifest = (await home.coordinator.datasets.listing())[0].manifest
    assert manifest.heldout
    for chunk in manifest.heldout:
        refused(await ann.get(f"/blobs/{chunk.sha256}"), 404)
    assert (await ann.get(f"/blobs/{manifest.chunks[0].sha256}")).status_code == 200
    seen = msgspec.json.decode((await ann.get("/datasets/sums")).content)
    assert seen["heldout"] == []
    lease = await ann.claim()
    data = await ann.update("tiny")
    await ann.upload(lease, data)
    refused(await ann.get(f"/blobs/{hashlib.sha256(data).hexdigest()}"), 404)
    refused(await ann.get("/blobs/../../etc/passwd"), 404)
    refused(await ann.get("/blobs/" + "A" * 64), 400)


async def test_a_lost_reply_costs_nothing(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    again = decode(await ann.post("/workers/register", ann.registration()), RegisterReply)
    assert not again.created
    claim = {"claim_id": "c" * 32, "wait_s": 0}
    leases = [await ann.post("/claims", claim) for _ in range(2)]
    one, two = (msgspec.json.decode(reply.content)["lease"]["task"] for reply in leases)
    assert one == two
    lease = await ann.claim()
    begun = await ann.begin(lease)
    assert (await ann.begin(lease)).version == begun.version
    data = await ann.update("tiny")
    first = decode(await ann.announce(lease, data), UploadInfo)
    second = decode(await ann.announce(lease, data), UploadInfo)
    assert first.upload_id == second.upload_id
    done = await ann.upload(lease, data)
    assert done.complete
    assert decode(await ann.put(done.upload_id, 0, b""), UploadInfo).complete
    submission = ann.submission(lease, begun, data)
    verdicts = [await ann.post(f"/tasks/{lease.task}/submit", submission) for _ in range(3)]
    assert len({decode(reply, Verdict).contribution for reply in verdicts}) == 1
    other = msgspec.structs.replace(submission, loss_last=1.0)
    refused(await ann.post(f"/tasks/{lease.task}/submit", other), 409)


async def test_who_is_at_work_is_told_with_the_speed_of_the_device_that_works(home: House) -> None:
    """The best device of a machine may not be lent, and nobody compares with what does not work."""
    await home.start_run()
    ann = await home.join("Ann")
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    speeds = [
        Benchmark(
            device=device,
            fp32_flops=1e12,
            bf16_flops=1e12,
            memory_bytes_per_s=1e9,
            step_flops=steps * row.step_flops,
        )
        for device, steps in (("cpu", 3.0), ("cuda:0", 700.0))
    ]
    await ann.post("/workers/benchmark", {"benchmarks": speeds})
    await ann.claim()  # for its cpu
    (told,) = decode(await ann.get("/runs/tiny/workers"), tuple[WorkerInfo, ...])
    assert told.device == "cpu"
    assert told.rate == pytest.approx(3.0)


async def test_heartbeats_bring_news_once(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    verdict = await ann.work()
    beat = decode(await ann.post("/workers/heartbeat", {}), HeartbeatReply)
    assert [news.contribution for news in beat.news] == [verdict.contribution]
    assert beat.pending_micro
    assert beat.runs[0].run == "tiny"
    await home.clock.advance(120)
    later = await ann.post("/workers/heartbeat", {"news_since": beat.news_until})
    assert decode(later, HeartbeatReply).news == ()


async def test_nobody_sees_what_is_not_theirs(home: House) -> None:
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
    refused(await eve.get(f"/uploads/{info.upload_id}"), 404)
    refused(await eve.put(info.upload_id, 0, data), 404)
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", submission), Verdict)
    refused(await eve.get(f"/contributions/{verdict.contribution}"), 404)
    assert decode(await eve.get("/contributions"), tuple[Verdict, ...]) == ()
    assert decode(await eve.get("/me/ledger"), tuple[LedgerRow, ...]) == ()


async def test_every_route_wants_the_right_token(home: House) -> None:
    from coordinator.routes.table import ENDPOINTS

    ann = await home.join("Ann")
    stranger = home.client()
    wrong = home.client(f"{ann.worker_id}.{'x' * 43}")
    admin = home.admin
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{", "").replace("}", "")
        if endpoint.auth == "none":
            continue
        for client in (stranger, wrong, ann.http if endpoint.auth == "admin" else admin):
            reply = await client.request(endpoint.method, path, content=b"{}")
            assert refused(reply, 401).code == "unauthorized", endpoint.path
            assert reply.headers["www-authenticate"] == "Bearer"


async def test_the_organisers_files_stay_in_their_boxes(home: House) -> None:
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
    home.coordinator.depot.expire(home.clock.now() + 10**10)
    refused(await admin.get(f"{path}/000-a.txt"), 404)


async def test_a_link_code_adds_a_machine(home: House) -> None:
    ann = await home.join("Ann")
    code = decode(await ann.post("/links"), LinkCode)
    assert code.link.endswith(code.code)
    second = await home.join("Whatever", code=code.code)
    assert decode(await second.get("/workers/me"), Me).nickname == "Ann"


async def test_an_upload_goes_on_where_it_broke_off(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)
    half = decode(await ann.put(info.upload_id, 0, data[:1000]), UploadInfo)
    assert (half.offset, half.complete) == (1000, False)
    assert refused(await ann.put(info.upload_id, 0, data), 409).code == "offset_mismatch"
    assert refused(await ann.put(info.upload_id, 1001, data[1001:]), 409).code == "offset_mismatch"
    home.coordinator.uploads._hashes.clear()  # as after a restart
    assert decode(await ann.get(f"/uploads/{info.upload_id}"), UploadInfo).offset == 1000
    done = decode(await ann.put(info.upload_id, 1000, data[1000:]), UploadInfo)
    assert done.complete


async def test_a_broken_connection_keeps_what_came(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)

    async def breaks() -> AsyncIterator[bytes]:
        yield data[:700]
        raise ClientGone

    principal = await home.coordinator.volunteers.authenticate(ann.worker_id, ann.secret)
    with pytest.raises(ClientGone):
        await home.coordinator.uploads.write(principal, info.upload_id, 0, breaks())
    assert decode(await ann.get(f"/uploads/{info.upload_id}"), UploadInfo).offset == 700


async def test_a_newer_request_ends_an_older_one(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)
    sent, forever = asyncio.Event(), asyncio.Event()

    async def hangs() -> AsyncIterator[bytes]:
        yield data[:500]
        sent.set()
        await forever.wait()

    old = asyncio.create_task(ann.put(info.upload_id, 0, hangs()))
    await sent.wait()
    refused(
        await ann.put(info.upload_id, 0, data), 409
    )  # ends the old one, whose 500 bytes are kept
    refused(await old, 409)
    done = decode(await ann.put(info.upload_id, 500, data[500:]), UploadInfo)
    assert done.complete


async def test_uploads_are_counted_against_their_grant(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    refused(await ann.announce(lease, data, size=1 << 40), 413)
    refused(await ann.announce(lease, data, size=lease.grant.bytes_max + (1 << 20)), 413)
    refused(await ann.announce(lease, data, size=0), 413)
    refused(await ann.announce(lease, data, sha256="x"), 400)
    refused(await ann.announce(lease, data, part=10**6), 400)
    info = decode(await ann.announce(lease, data), UploadInfo)
    longer = await ann.put(info.upload_id, 0, data + b"more")
    refused(longer, 413)
    assert longer.headers["connection"] == "close"
    assert decode(await ann.get(f"/uploads/{info.upload_id}"), UploadInfo).offset < len(data)


async def test_other_bytes_than_announced_are_refused_and_gone(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)
    assert (
        refused(await ann.put(info.upload_id, 0, os.urandom(len(data))), 422).code
        == "invalid_frame"
    )
    refused(await ann.get(f"/uploads/{info.upload_id}"), 404)
    fresh = await ann.upload(lease, data)
    assert fresh.complete


async def test_what_has_arrived_and_is_not_handed_in_yet_is_no_orphan(home: House) -> None:
    await home.start_run()
    ann, whole = await home.join("Ann"), home.coordinator
    lease = await ann.claim()
    begun, data = await ann.begin(lease), await ann.update("tiny")
    await ann.upload(lease, data)
    blob = await whole.blobs.local(hashlib.sha256(data).hexdigest())
    os.utime(blob, (home.clock.now() - 7200, home.clock.now() - 7200))
    await whole.upkeep.sweep()  # as the server does while the volunteer is cut off for an hour
    said = ann.submission(lease, begun, data)
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict)
    assert verdict.state == "accepted"
    assert (await whole.checks.run()).breaches == ()


async def test_uploads_that_are_never_handed_in_go_in_the_end(home: House) -> None:
    await home.start_run()
    ann, whole = await home.join("Ann"), home.coordinator
    data = await ann.update("tiny")
    await ann.upload(await ann.claim(), data)
    blob = await whole.blobs.local(hashlib.sha256(data).hexdigest())
    os.utime(blob, (home.clock.now(), home.clock.now()))
    await home.clock.advance(2 * 86_400)
    assert await whole.uploads.expire() == 1
    assert await whole.upkeep.sweep() == 1
    assert not blob.exists()


async def test_unfinished_uploads_expire(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    info = decode(await ann.announce(lease, data), UploadInfo)
    await ann.put(info.upload_id, 0, data[:100])
    await home.clock.advance(2 * 86_400)
    assert await home.coordinator.uploads.expire() == 1
    refused(await ann.get(f"/uploads/{info.upload_id}"), 404)
    assert list((home.coordinator.blobs.scratch() / "uploads").iterdir()) == []


async def test_the_quota_bounds_what_lies_around(tmp_path: Path) -> None:
    async with house(tmp_path, upload_quota_bytes=20_000) as home:
        await home.start_run()
        ann = await home.join("Ann")
        lease = await ann.claim()
        data = await ann.update("tiny")
        reply = await ann.announce(lease, data, size=20_001)
        refused(reply, 429)
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b'{"x":' * 100_000,
        b'{"x":' + b"9" * 5000 + b"}",
        b'{"news_since":' + b"9" * 5000 + b"}",
        b'{"rates":{"a":NaN}}',
        b'{"x":"' + b"y" * (2 << 20) + b'"}',
    ],
    ids=["empty", "utf8", "cut", "deep", "deep-object", "long-unknown", "long", "nan", "large"],
)
async def test_hostile_bodies_get_a_sentence(home: House, body: bytes) -> None:
    from coordinator.routes.table import ENDPOINTS

    ann = await home.join("Ann")
    for endpoint in ENDPOINTS:
        if endpoint.request is None or endpoint.auth == "admin":
            continue
        path = endpoint.path.replace("{task}", "1")
        reply = await ann.http.request(endpoint.method, path, content=body)
        assert 400 <= reply.status_code < 500, (endpoint.path, reply.text)
        refused(reply, reply.status_code)


async def test_numbers_in_paths_are_only_numbers(home: House) -> None:
    ann = await home.join("Ann")
    for number in ("x", "-1", "1.5", "9" * 30, "9" * 5000, "%00", "1e3", "٣"):
        refused(await ann.get(f"/contributions/{number}"), 404)
        refused(await ann.post(f"/tasks/{number}/begin", {"attempt": 1}), 404)
    refused(await ann.get("/contributions/999999999999999999"), 404)
    refused(await ann.get("/contributions?cursor=x"), 400)


async def test_unknown_paths_and_methods_get_the_same_form(home: House) -> None:
    client = home.client()
    refused(await client.get("/nothing"), 404)
    refused(await client.get("/api/v1/server/"), 404)
    refused(await client.delete("/api/v1/server"), 400)


async def test_the_openapi_document_is_the_route_table(home: House) -> None:
    from coordinator.routes.table import ENDPOINTS

    document = (await home.client().get(f"{API}/openapi.json")).json()
    said = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert said == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    routes: Any = create_app(home.coordinator).routes
    routed = {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}
    assert said == routed
    schemas = document["components"]["schemas"]
    text = msgspec.json.encode(document).decode()
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(schemas)
    assert {"HeartbeatReply", "ErrorBody", "Verdict"} <= named


async def test_health_ready_metrics_and_the_join_page(home: House) -> None:
    name = await home.start_run()
    client = home.client()
    assert (await client.get("/health")).json()["status"] == "alive"
    assert (await client.get("/ready")).json()["status"] == "ready"
    metrics = (await client.get("/metrics")).text
    assert f'run_version{{run="{name}"}} 0.0' in metrics
    assert 'http_requests_total{method="GET",path="/ready",status="200"} 1.0' in metrics
    page = await client.get("/join")
    assert "volunteer join" in page.text
    home.coordinator.stopping.set()
    refused(await client.get("/ready"), 503)


async def test_a_waiting_claim_ends_when_the_server_stops(home: House) -> None:
    ann = await home.join("Ann")
    waiting = asyncio.create_task(ann.post("/claims", {"claim_id": "c" * 32, "wait_s": 50}))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    home.coordinator.stopping.set()
    reply = await waiting
    assert refused(reply, 503).retry_after_s
    assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize(("command", "status"), [("ban", 403), ("reissue", 401), ("forget", 401)])
async def test_a_waiting_claim_ends_when_its_volunteer_is_shut_out(
    home: House, command: str, status: int
) -> None:
    ann = await home.join("Ann")
    body = {"claim_id": "c" * 32, "wait_s": 60}
    waiting = asyncio.ensure_future(ann.post("/claims", body))
    while home.clock.next_at is None:  # it waits
        await asyncio.sleep(0)
    done = await home.admin.post(f"{API}/admin/volunteer.{command}", content=b'{"name": "Ann"}')
    assert done.status_code == 200
    refused(await asyncio.wait_for(waiting, 10), status)  # the clock stands still: it was woken


async def test_too_many_requests_are_told_when_to_come_back(tmp_path: Path) -> None:
    async with house(tmp_path, rate_worker="5/minute", rate_register="2/minute") as home:
        ann, bob = await home.join("Ann"), await home.join("Bob")
        eve = await ann.post("/workers/register", ann.registration())
        assert refused(eve, 429).code == "too_many_requests"
        for _ in range(5):
            assert (await ann.get("/workers/me")).status_code == 200
        reply = await ann.get("/workers/me")
        refused(reply, 429)
        assert int(reply.headers["retry-after"]) >= 1
        assert (await bob.get("/workers/me")).status_code == 200


async def test_a_full_disk_is_read_only_until_space_returns(home: House) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    data = await ann.update("tiny")
    space = home.coordinator.space
    space._floor_bytes = 1 << 62
    space.look()
    assert refused(await ann.announce(lease, data), 507).code == "storage_full"
    idle = (await ann.post("/claims", {"claim_id": "d" * 32})).json()["idle"]
    assert idle["reason"] == "read_only"
    assert (await ann.post("/workers/heartbeat", {})).status_code == 200
    assert (await home.client().get("/health")).json()["read_only"]
    space._floor_bytes = 0
    space.look()
    assert (await ann.upload(lease, data)).complete


async def test_an_unforeseen_error_tells_nothing_but_its_number(
    home: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails() -> None:
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr(type(home.coordinator), "server_info", lambda self: fails())
    reply = await home.client().get(f"{API}/server")
    body = refused(reply, 500)
    assert "swordfish" not in reply.text
    assert body.request_id == reply.headers["x-request-id"]


async def test_versions_are_listed_from_a_cursor(home: House) -> None:
    await home.start_run()
    ann, bob = await home.join("Ann"), await home.join("Bob")
    for seed in range(3):
        await ann.work(seed)
        await bob.work(seed + 100)
        assert await home.coordinator.merger.merge_if_due(1)
    rows = decode(await ann.get("/runs/tiny/versions"), tuple[VersionInfo, ...])
    assert [row.version for row in rows] == [0, 1, 2, 3]
    assert [row.mine for row in rows] == [0, 1, 1, 1]
    later = decode(await ann.get("/runs/tiny/versions?cursor=1"), tuple[VersionInfo, ...])
    assert [row.version for row in later] == [2, 3]
