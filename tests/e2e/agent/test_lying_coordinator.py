"""A volunteer and a coordinator that lies: no traceback, no endless loop, no memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from typing_extensions import override

from coordinator.http.app import create_app
from shared.errors import VolunteerError
from shared.protocol import endpoints
from shared.protocol.contributions import UploadRequest
from shared.protocol.endpoint import NOTHING, Endpoint
from shared.protocol.endpoints import ENDPOINTS
from shared.protocol.heartbeat import HeartbeatRequest
from shared.protocol.leases import ClaimRequest
from shared.protocol.limits import NEWS_MAX
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import SHORT, FastClock, LocalMachine
from tests.support.lying_coordinator import (
    EXTREMES,
    SHAPELESS,
    Lie,
    LyingCoordinator,
    changed,
    lying_coordinator,
    says,
    shaped,
)
from tests.tui.scenes import ME
from volunteer.cli.exit_codes import remark
from volunteer.cli.manage import farewell_lines
from volunteer.control import events
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.storage.blob_cache import Cache

GROWTH_BYTES = 256 << 20
READ_S = 0.3
WORKED_S = 0.6

ASKED = [e for e in ENDPOINTS if e.auth == "worker" and e.reply is not NOTHING and not e.gives]
ASKED += [endpoints.SERVER, endpoints.CHALLENGE]
SENT: dict[Endpoint[Any], Any] = {
    endpoints.HEARTBEAT: HeartbeatRequest(),
    endpoints.CLAIM: ClaimRequest(claim_id="c" * 32, wait_s=0.0),
}


async def ask(api: Api, endpoint: Endpoint[Any]) -> None:
    """One request, whatever comes back; only our own errors may come out."""
    args = dict.fromkeys(endpoint.parameters, 1)
    with contextlib.suppress(VolunteerError):
        await api.call(endpoint, args, SENT.get(endpoint), timeout_s=READ_S, patience_s=0)


async def test_no_reply_is_more_than_an_error() -> None:
    await no_reply_is_more([*SHAPELESS, *(name for name in EXTREMES if name != "many")])


@pytest.mark.slow
async def test_no_reply_of_many_things_is_more_than_an_error() -> None:
    await no_reply_is_more(["many"])


async def no_reply_is_more(names: Iterable[str]) -> None:
    before = psutil.Process().memory_info().rss
    async with lying_coordinator() as liar:
        client = Client(Address(url=liar.url), clock=FastClock(1.0), rng=random.Random(1))
        client.slack_s = READ_S
        try:
            for name in names:
                # those that only wait do so together
                for asked in [ASKED] if name == "silent" else [[each] for each in ASKED]:
                    liar.lies = {each: SHAPELESS.get(name) or shaped(each, name) for each in asked}
                    began = time.monotonic()
                    await asyncio.gather(*(ask(Api(client), each) for each in asked))
                    assert time.monotonic() - began < 60, (name, asked[0].path)
                assert psutil.Process().memory_info().rss - before < GROWTH_BYTES, name
        finally:
            await client.close()


UPLOADS = [
    {"offset": -5},
    {"offset": 10**15},
    {"offset": 7},
    {"size": 10**15},
    {"size": 0},
    {"upload_id": "a\r\nx: y"},
    {"upload_id": "../../admin"},
    {"complete": True},
]


@pytest.mark.parametrize("lie", UPLOADS, ids=str)
async def test_an_upload_goes_nowhere_else(tmp_path: Path, lie: dict[str, Any]) -> None:
    file = tmp_path / "result"
    file.write_bytes(b"x" * 100)
    honest = {"upload_id": "u", "offset": 0, "size": 100, "complete": False, "expires_at": 1.0}
    request = UploadRequest(task=1, attempt=1, part=0, tries=0, sha256="0" * 64, size=100)
    async with lying_coordinator() as liar:
        liar.lies = {endpoints.UPLOAD: _json(honest | lie), endpoints.UPLOAD_BYTES: _json(honest)}
        client = Client(Address(url=liar.url), clock=FastClock(1.0))
        try:
            transfers = Transfers(Api(client), Cache(tmp_path / "cache", 1 << 30))
            with contextlib.suppress(VolunteerError):
                await asyncio.wait_for(transfers.upload(request, file, lambda done: None), 10)
        finally:
            await client.close()
        assert set(liar.asked) <= {"/api/v1/uploads", "/api/v1/uploads/u"}
        assert sum(liar.asked.values()) <= 3


def _json(value: object) -> Lie:
    return says(msgspec.json.encode(value))


class LiedTo(LocalMachine):
    """A machine whose coordinator is reached over a socket, and lies."""

    liar: LyingCoordinator

    @override
    def connect(self, network: Any = None, clock: Any = None) -> Callable[[Address, str], Client]:
        def made(address: Address, token: str) -> Client:
            return Client(
                Address(url=self.liar.url), clock=clock or FastClock(), rng=random.Random(1),
                token=token,
            )  # fmt: skip

        return made


def news(body: Any) -> Any:
    """Two thousand verdicts with one heartbeat."""
    verdict = {"contribution": 1, "task": 1, "run": "tiny", "state": "accepted", "message": "\x1b"}
    body["news"] = [verdict | {"contribution": n} for n in range(2000)]
    return body


def orders(body: Any) -> Any:
    body["orders"] = [
        {"task": n, "attempt": 1, "order": "cancel", "message": "x" * 500} for n in range(2000)
    ]
    body["next_s"] = -1e308
    return body


def lease(**more: Any) -> Callable[[Any], Any]:
    def change(body: Any) -> Any:
        if body.get("lease"):
            body["lease"] |= more
        return body

    return change


def job(**more: Any) -> Callable[[Any], Any]:
    def change(body: Any) -> Any:
        if body.get("lease"):
            body["lease"]["job"] |= more
        return body

    return change


CHANGES: dict[str, tuple[Endpoint[Any], Callable[[Any], Any]]] = {
    "nothing claimed": (endpoints.CLAIM, lambda body: {}),
    "news": (endpoints.HEARTBEAT, news),
    "orders": (endpoints.HEARTBEAT, orders),
    "chunks": (endpoints.CLAIM, lease(chunks=[10**9, -1])),
    "part_steps": (endpoints.CLAIM, lease(part_steps=-1, pull_every=-1)),
    "finish": (endpoints.CLAIM, lease(finish_by=-1e308, renew_by=1e308, now=1e308)),
    "run": (endpoints.CLAIM, lease(run="../../etc", dataset="../x\r\ny")),
    "steps": (endpoints.CLAIM, job(steps=-1)),
    "batch": (endpoints.CLAIM, job(batch_size=0)),
    "range": (endpoints.CLAIM, job(start=10**12, stop=-5)),
    "workload": (endpoints.CLAIM, job(workload="os")),
    "version": (endpoints.BEGIN, lambda body: body | {"version": 2**31 - 1, "manifest": None}),
    "part": (endpoints.BEGIN, lambda body: body | {"part": 10**6, "tries": 10**6}),
    "verdict": (endpoints.SUBMIT, lambda body: body | {"task": 9}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
async def test_a_volunteer_that_is_lied_to_lives_on(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(SHORT)
        async with (
            home.coordinator.working(),
            lying_coordinator(create_app(home.coordinator)) as liar,
        ):
            machine = LiedTo(tmp_path / "machine", home)
            machine.liar = liar
            await machine.join()
            endpoint, change = CHANGES[name]
            liar.changes = {endpoint: changed(change)}
            before = psutil.Process().memory_info().rss
            async with machine.working() as process:
                with contextlib.suppress(TimeoutError, VolunteerError):
                    await process.ended(WORKED_S)  # raises what ended it
            assert sum(liar.asked.values()) < 1000, liar.asked
            assert len(process.all(events.Judged)) <= 2 * NEWS_MAX
            assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
    failed = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not failed, failed


@pytest.mark.parametrize(
    "link", ["https://h/join#key=a';touch /tmp/x;'", "https://h/\x1b[2J", "; rm -r ~", ""]
)
async def test_what_is_no_link_reaches_no_shell(link: str) -> None:
    async with lying_coordinator() as liar:
        client = Client(Address(url=liar.url), clock=FastClock(1.0), rng=random.Random(1))
        try:
            for text in (link, "https://h:1/join#key=ab+code=CD"):
                reply = {"code": "CD", "link": text, "expires_at": 1.0}
                liar.lies = {endpoints.LINK: says(msgspec.json.encode(reply))}
                if text == link:
                    with contextlib.suppress(VolunteerError):
                        made = (await Api(client).link_code()).link
                        assert all(c.isalnum() or c in ":/#=+._-" for c in made), made
                else:
                    assert (await Api(client).link_code()).link == text
        finally:
            await client.close()


def test_names_from_the_coordinator_control_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remark("a\x1b[2J\u202eb: 0.25 credits for a thousand tokens")
    lines = farewell_lines(replace(ME, nickname="a\x1b[2J\u202eb"), hide=False)
    text = "\n".join([*lines, capsys.readouterr().err])
    assert "0.25 credits" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
