"""The coordinator over HTTP, in one process: work done whole, and what can be read."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.database import runs
from coordinator.database.statistics import WorkTotals, work
from coordinator.database.tables.contributions import verdicts as verdicts_table
from coordinator.http.app import create_app
from coordinator.scheduling import heartbeat_replies
from shared.proofs.signing import fingerprint, verify
from shared.protocol.accounts import (
    Benchmark,
    LinkCode,
    Me,
    RegisterReply,
    RunInfo,
    ServerInfo,
    WorkerInfo,
)
from shared.protocol.contributions import UploadInfo, Verdict
from shared.protocol.heartbeat import HeartbeatReply
from shared.protocol.limits import API, HEARTBEAT_S
from shared.protocol.listings import LedgerRow
from shared.protocol.protocol_version import HEADER, PROTOCOL, PROTOCOL_MIN
from shared.protocol.versions import SignedManifest, VersionInfo, VersionManifest
from tests.support.local_coordinator import LocalCoordinator, decode, local_coordinator, refused
from tests.support.served import served


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        yield made


async def test_the_whole_way_on_either_database(tmp_path: Path, database_url: str) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run()
        ann, bob = await home.join("Ann"), await home.join("Bob")
        for seed in range(2):
            assert {(await ann.work(seed)).state, (await bob.work(seed + 9)).state} == {"accepted"}
            assert await home.coordinator.merger.merge_if_due(1)
        assert decode(await ann.get("/runs/tiny"), RunInfo).version == 2
        beat = decode(await ann.post("/workers/heartbeat", {}), HeartbeatReply)
        assert {news.state for news in beat.news} == {"accepted", "merged"}
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_two_volunteers_make_a_version(home: LocalCoordinator) -> None:
    name = await home.start_run()
    ann, bob = await home.join("Ann"), await home.join("Bob")
    first, second = await ann.work(1), await bob.work(2)
    assert (first.state, second.state) == ("accepted", "accepted")
    run = await home.coordinator.runs.queries.info(name)
    assert await home.coordinator.merger.merge_if_due(1)
    merged = await ann.verdict(first.contribution)
    assert (merged.state, merged.version) == ("merged", 1)
    assert decode(await ann.get(f"/runs/{name}"), RunInfo).version == run.version + 1
    me = decode(await ann.get("/workers/me"), Me)
    assert me.earned_micro > 0
    assert (me.pending_micro, me.merged) == (0, 1)
    rows = decode(await ann.get("/me/ledger"), tuple[LedgerRow, ...])
    assert {row.kind for row in rows} == {"pending", "earned"}
    assert await home.coordinator.ledger.check() == ()
    report = await home.coordinator.checks.run()
    assert report.breaches == ()
    assert report.looked_at["versions"] == 2


async def test_what_the_coordinator_says_is_signed(home: LocalCoordinator) -> None:
    name = await home.start_run()
    ann = await home.join("Ann")
    server = decode(await home.client().get(f"{API}/server"), ServerInfo)
    key = bytes.fromhex(server.public_key)
    assert fingerprint(key) == server.fingerprint == home.coordinator.server.link().fingerprint
    signed = decode(await ann.get(f"/runs/{name}/versions/latest"), SignedManifest)
    verify(key, signed.payload.encode(), bytes.fromhex(signed.signature))
    weights = msgspec.json.decode(signed.payload, type=VersionManifest).weights
    blob = await ann.get(f"/blobs/{weights.sha256}")
    assert hashlib.sha256(blob.content).hexdigest() == weights.sha256
    tag = f'"{weights.sha256}"'
    again = await ann.get(f"/runs/{name}/versions/latest", **{"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)


async def test_blobs_come_whole_in_ranges_or_not_at_all(home: LocalCoordinator) -> None:
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


async def test_held_out_data_and_uploads_are_never_served(home: LocalCoordinator) -> None:
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


async def test_a_program_that_became_too_old_is_told_so_by_every_reply(
    home: LocalCoordinator,
) -> None:
    ann = await home.join("Ann")
    for version in ("", str(PROTOCOL), str(PROTOCOL + 1)):
        assert (await ann.get("/workers/me", **{HEADER: version})).status_code == 200
    for _ in range(2):  # the account stays as it is
        refused(await ann.get("/workers/me", **{HEADER: str(PROTOCOL_MIN - 1)}), 426)
        assert (await ann.get("/workers/me")).status_code == 200
    for version in ("one", "-1", "9" * 30):
        refused(await ann.get("/workers/me", **{HEADER: version}), 400)
    # what an old program needs in order to update itself
    assert (await ann.get("/server", **{HEADER: "0"})).status_code == 200


async def test_a_lost_reply_costs_nothing(home: LocalCoordinator) -> None:
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


async def test_who_is_at_work_is_told_with_the_speed_of_the_device_that_works(
    home: LocalCoordinator,
) -> None:
    """The best device of a machine may not be lent, and nobody compares with what does not work."""
    await home.start_run()
    ann = await home.join("Ann")
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    speeds = [
        Benchmark(
            device=device,
            fp32_flops=1e12,
            bf16_flops=1e12,
            step_flops=steps * row.step_flops,
        )
        for device, steps in (("cpu", 3.0), ("cuda:0", 700.0))
    ]
    await ann.post("/workers/benchmark", {"benchmarks": speeds})
    await ann.claim()  # for its cpu
    (told,) = decode(await ann.get("/runs/tiny/workers"), tuple[WorkerInfo, ...])
    assert told.device == "cpu"
    assert told.rate == pytest.approx(3.0)


async def test_a_machine_counts_as_at_work_until_it_was_silent_for_two_minutes(
    home: LocalCoordinator,
) -> None:
    await home.start_run()
    queries, flush = home.coordinator.run_queries, home.coordinator.renewals.flush

    async def counts() -> tuple[int, int]:
        return (await queries.beats())[0].workers, (await queries.info("tiny")).workers

    assert await counts() == (0, 0)
    ann = await home.join("Ann")
    await ann.claim()
    await flush()
    assert await counts() == (1, 1)
    await home.clock.advance(100)
    assert await counts() == (1, 1)
    await home.clock.advance(40)
    assert await counts() == (0, 0)


async def test_heartbeats_bring_news_once(home: LocalCoordinator) -> None:
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


async def test_many_verdicts_are_told_within_seconds(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_replies, "NEWS_MAX", 3)
    await home.start_run()
    ann, bob = await home.join("Ann"), await home.join("Bob")
    for seed in range(3):
        await ann.work(seed)
        await bob.work(seed + 9)
        assert await home.coordinator.merger.merge_if_due(1)
    told: set[tuple[int, str]] = set()
    next_s, since = 0.0, 0
    while next_s < HEARTBEAT_S:
        await home.clock.advance(next_s)
        beat = decode(await ann.post("/workers/heartbeat", {"news_since": since}), HeartbeatReply)
        told |= {(news.contribution, news.state) for news in beat.news}
        assert beat.news_until > since  # never the same verdicts again while others wait
        next_s, since = beat.next_s, beat.news_until
    assert sorted(state for _, state in told) == ["accepted"] * 3 + ["merged"] * 3


async def test_of_too_many_machines_the_ones_that_were_silent_longest_are_forgotten(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_replies, "TOLD_MAX", 2)
    beats = home.coordinator.heartbeats
    workers = [await home.join(name) for name in ("Ann", "Bob", "Cleo")]
    authenticate = home.coordinator.volunteers.authenticate
    ann, bob, cleo = [await authenticate(one.worker_id, one.secret) for one in workers]
    for until, machine in enumerate([ann, bob, ann, cleo], start=1):
        beats.record_told(machine, until)
    assert [beats.told_until(machine) for machine in (ann, bob, cleo)] == [3, 0, 4]


async def test_a_verdict_that_is_committed_late_is_told_among_many_recent_ones(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_replies, "NEWS_MAX", 3)
    await home.start_run()
    ann = await home.join("Ann")
    first = await ann.work()
    t = verdicts_table
    row = await home.coordinator.db.read(
        lambda conn: dict(conn.execute(t.select()).mappings().one())
    )

    async def add(*numbers: int) -> None:
        rows = [row | {"id": number, "message": f"the {number}th"} for number in numbers]
        await home.coordinator.db.write(lambda conn: conn.execute(t.insert(), rows))

    async def told(since: int) -> HeartbeatReply:
        return decode(await ann.post("/workers/heartbeat", {"news_since": since}), HeartbeatReply)

    await add(*range(10, 20))
    since, until = 0, -1
    while since > until:
        until, since = since, (await told(since)).news_until
    assert since == 19
    await add(5)
    await home.clock.advance(2.0)
    beat = await told(since)
    assert "the 5th" in [news.message for news in beat.news]
    assert {news.contribution for news in beat.news} == {first.contribution}


async def test_the_counts_of_an_account_are_exact_whatever_came_since_they_were_added_up(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run()
        ann, bob = await home.join("Ann"), await home.join("Bob")

        async def counts() -> tuple[int, int, int]:
            me = decode(await ann.get("/workers/me"), Me)
            return me.accepted, me.merged, me.rejected

        async def counted() -> tuple[int, int, int]:
            who = ann.volunteer_id
            found = await home.coordinator.db.read(lambda c: work(c, volunteer_id=who))
            mine = found.get(who, WorkTotals())
            return mine.accepted, mine.merged, mine.refused

        assert await counts() == (0, 0, 0)
        for seed in range(1, 7, 2):
            await ann.work(seed)
            assert await counts() == await counted()
            await bob.work(seed + 1)
            assert await home.coordinator.merger.merge_if_due(1)
            assert await counts() == await counted()
        assert (await counts())[:2] == (3, 3)
        lease = await ann.claim()
        begun, data = await ann.begin(lease), b"no update"
        await ann.upload(lease, data)
        await ann.post(f"/tasks/{lease.task}/submit", ann.submission(lease, begun, data))
        assert await counts() == await counted() == (3, 3, 1)


async def test_a_link_code_adds_a_machine(home: LocalCoordinator) -> None:
    ann = await home.join("Ann")
    code = decode(await ann.post("/links"), LinkCode)
    assert code.link.endswith(code.code)
    second = await home.join("Whatever", code=code.code)
    assert decode(await second.get("/workers/me"), Me).nickname == "Ann"


async def test_the_openapi_document_is_the_route_table(home: LocalCoordinator) -> None:
    from coordinator.pages.app import routes as pages
    from shared.protocol.endpoints import ENDPOINTS, V1

    document = (await home.client().get(f"{API}/openapi.json")).json()
    said = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert said == {(endpoint.method, endpoint.full_path) for endpoint in (*ENDPOINTS, *V1)}
    routes: Any = create_app(home.coordinator).routes
    routed = {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}
    for_people = {("GET", route.path) for route in pages(home.coordinator)}
    refusal = {(method, path) for method, path in routed if path == "/v1/{rest:path}"}
    assert said == routed - for_people - refusal
    schemas = document["components"]["schemas"]
    text = msgspec.json.encode(document).decode()
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(schemas)
    assert {"HeartbeatReply", "ErrorBody", "Verdict"} <= named


async def test_health_ready_metrics_and_the_join_page(home: LocalCoordinator) -> None:
    name = await home.start_run()
    client = home.client()
    assert (await client.get("/health")).json()["status"] == "alive"
    assert (await client.get("/ready")).json()["status"] == "ready"
    metrics = (await client.get("/metrics")).text
    assert f'coordinator_run_version{{run="{name}"}} 0.0' in metrics
    assert 'coordinator_computing_seconds_total{process="checks"} 0.0\n' in metrics
    assert 'coordinator_http_requests_total{method="GET",path="/ready",status="200"} 1.0' in metrics
    page = await client.get("/join")
    assert "volunteer join" in page.text
    home.coordinator.stopping.set()
    refused(await client.get("/ready"), 503)


async def test_versions_are_listed_from_a_cursor(home: LocalCoordinator) -> None:
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


async def test_a_served_address_accepts_connections_from_the_first_moment(
    home: LocalCoordinator,
) -> None:
    async with served(home, ticking=False) as url:
        port = int(url.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()  # no turn of the loop in between
