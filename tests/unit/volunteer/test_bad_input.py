"""What goes wrong outside of us gets a sentence that says what it was and what to do: links,
versions, clocks, disks, devices.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from typing_extensions import override

from shared.clock import SystemClock
from shared.errors import (
    Configuration,
    StorageFull,
    Unreachable,
    UpgradeRequired,
    VolunteerError,
)
from shared.network.links import parse_link
from shared.protocol import endpoints
from shared.protocol.accounts import ServerInfo
from shared.protocol.protocol_version import PROTOCOL, PROTOCOL_MIN
from shared.workloads.gpt.workload import GptWorkload
from tests.support.local_volunteer import local_machine
from tests.support.virtual_clock import VirtualClock
from tests.tui.pages import SERVER
from volunteer.account.join import probe
from volunteer.agent.claimer import DISK_WAIT_S
from volunteer.cli import exit_codes, start
from volunteer.cli.main import run_command
from volunteer.control import commands, events
from volunteer.files import write_record, write_whole
from volunteer.machine.device_memory import device_lost
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.storage.leases import HeldLease
from volunteer.text import clock_words


@asynccontextmanager
async def answering(
    server: ServerInfo | None, clock: VirtualClock | None = None
) -> AsyncIterator[Any]:
    """A way to connect to a coordinator that says this of itself, or to nobody."""

    def answer(request: httpx.Request) -> httpx.Response:
        if server is None:
            raise httpx.ConnectError("connection refused")
        return httpx.Response(200, stream=httpx.ByteStream(msgspec.json.encode(server)))

    clock = clock or VirtualClock()
    yield lambda address, token: Client(
        address, clock=clock, token=token, transport=httpx.MockTransport(answer)
    )


async def looked_up(link: str, server: ServerInfo | None) -> ServerInfo:
    async with answering(server) as connect:
        return await probe(parse_link(link), connect)


async def test_an_address_of_the_own_machine_that_nobody_answers_at() -> None:
    with pytest.raises(Unreachable) as error:
        await looked_up("http://127.0.0.1:8765/join", None)
    assert str(error.value) == (
        "Nothing answers at 127.0.0.1:8765, an address of this very machine. If the coordinator "
        "runs here, start it with `coordinator serve`, or check the port; else ask your organiser "
        "for a link with an address that reaches their machine."
    )
    with pytest.raises(Unreachable, match=r"^https://train\.example\.org cannot be reached"):
        await looked_up("https://train.example.org", None)


async def retry_in_vain(clock: VirtualClock) -> None:
    """Ask a coordinator that is away, until the patience of a virtual minute ends."""
    async with answering(None, clock) as connect:
        client = start.with_retry_remarks(connect)(
            Address(url="http://127.0.0.1:1", tls_pin=""), ""
        )
        question = asyncio.ensure_future(Api(client).call(endpoints.SERVER, patience_s=60.0))
        async with asyncio.timeout(120):
            while clock.next_at is None:  # it failed, and waits for its next try
                await asyncio.sleep(0)
        await clock.advance(60.0)
        with pytest.raises(Unreachable):
            await question
        await client.close()


async def test_a_join_says_once_that_it_retries(capsys: pytest.CaptureFixture[str]) -> None:
    await retry_in_vain(VirtualClock())
    printed = capsys.readouterr().err
    assert printed.startswith("volunteer: retrying: http://127.0.0.1:1 cannot be reached")
    assert printed.count("retrying") == 1


async def test_a_command_for_scripts_leaves_the_next_one_its_sentences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["pause", "--for", "soon", "--json"]) == exit_codes.EXIT_USAGE
    capsys.readouterr()
    await retry_in_vain(VirtualClock())
    assert "retrying" in capsys.readouterr().err


async def test_a_join_by_a_script_prints_no_retries(capsys: pytest.CaptureFixture[str]) -> None:
    exit_codes.print_errors_as_json(True)
    try:
        await retry_in_vain(VirtualClock())
    finally:
        exit_codes.print_errors_as_json(False)
    assert capsys.readouterr().err == ""  # a script reads one object


async def test_a_version_that_is_too_old_names_the_command_that_updates() -> None:
    newer = replace(SERVER, protocol=PROTOCOL + 2, protocol_min=PROTOCOL + 1)
    with pytest.raises(UpgradeRequired) as error:
        await looked_up("https://train.example.org", newer)
    assert str(error.value).endswith(": `volunteer update`")


async def test_a_coordinator_that_is_too_old_is_named_as_the_one_to_update() -> None:
    older = replace(SERVER, protocol=PROTOCOL_MIN - 1, protocol_min=PROTOCOL_MIN - 1)
    with pytest.raises(Configuration, match="the coordinator is too old for this program"):
        await looked_up("https://train.example.org", older)


@pytest.mark.parametrize(("code", "says"), [(9, "not yet valid"), (10, "has expired")])
async def test_a_certificate_of_another_time_asks_about_the_clock(code: int, says: str) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        wrong = ssl.SSLCertVerificationError()
        wrong.verify_code, wrong.verify_message = code, f"certificate {says}"
        raise httpx.ConnectError("handshake") from wrong

    clock = VirtualClock()
    with pytest.raises(Configuration, match=f"{says}.*is the clock of this machine right"):
        await probe(
            parse_link("https://train.example.org"),
            lambda address, token: Client(
                address, clock=clock, token=token, transport=httpx.MockTransport(refuse)
            ),
        )


@pytest.mark.parametrize(
    ("offset_s", "says"),
    [
        (0.0, ""),
        (-299.0, ""),
        (86_400.0, "the clock of this machine is 1 day behind the coordinator's: set it right"),
        (-86_400.0, "the clock of this machine is 1 day ahead of the coordinator's"),
        (3 * 86_400.0, "3 days behind"),
        (1800.0, "30:00 min behind"),
        (-7200.0, "2:00 h ahead of"),
    ],
)
def test_a_clock_that_is_wrong_is_told(offset_s: float, says: str) -> None:
    assert says in clock_words(offset_s)
    assert bool(says) is bool(clock_words(offset_s))


async def test_with_a_clock_that_is_wrong_by_years_work_goes_on_and_it_is_told(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        told = await process.until(
            events.Notice, lambda e: "the clock of this machine" in e.message
        )
        assert told.level == "warning"
        claimed = await process.until(events.Claimed)
        assert 0 < claimed.finish_by - claimed.at < 100_000  # on the clock of this machine
        assert await process.ended() == 0


class Full(GptWorkload):
    """A workload for whose result there is no room."""

    @override
    def begin(self, *args: Any) -> Any:
        raise StorageFull("no space is left for result.bin: free some and try again")


async def test_a_full_disk_gives_the_task_back_and_says_so(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(lambda name: Full()) as process:
        idle = await process.until(events.Idle, lambda event: event.reason == "disk_full")
        assert idle.message == "no space is left for result.bin: free some and try again"
        assert {event.how for event in process.all(events.TaskEnded)} == {"released"}
        released = process.all(events.TaskEnded)[0].at
        more = await process.until(events.Claimed, lambda event: event.at > released)
        assert more.at - released >= DISK_WAIT_S  # none is held meanwhile, that others could do


def full(path: Path, *_: object, **__: object) -> None:
    raise StorageFull(f"no space is left for {path}: free some and try again")


async def test_a_disk_that_fills_up_while_results_are_judged_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=2) as process:
        await process.until(events.Training)
        monkeypatch.setattr("volunteer.account.profile_directory.write_record", full)
        assert await process.ended() == 0
        assert len(process.all(events.Judged)) >= 2


async def test_a_lease_that_cannot_be_stored_is_given_back_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room_for_leases(path: Path, record: msgspec.Struct) -> None:
        (full if isinstance(record, HeldLease) else write_record)(path, record)

    monkeypatch.setattr("volunteer.storage.leases.write_record", no_room_for_leases)
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        idle = await process.until(events.Idle, lambda event: event.reason == "disk_full")
        assert "free some and try again" in idle.message
        assert any(seen.endswith("/release") for seen in process.network.seen)
        monkeypatch.undo()
        await process.control.do(commands.Retry())
        assert await process.ended() == 0


def test_a_file_for_which_there_is_no_space_is_not_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "config.toml"
    path.write_text("threads = 1\n")
    monkeypatch.setattr("os.open", refused)
    with pytest.raises(StorageFull, match=r"no space is left for .*config\.toml: free some"):
        write_whole(path, b"threads = 2\n")
    assert path.read_text() == "threads = 1\n"


async def test_no_device_that_fits_any_run_says_what_is_missing(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(memory_gb=1e-6) as process:
        idle = await process.until(events.Idle, lambda event: event.reason == "no_fit")
        assert "memory" in idle.message


class Unplugged(GptWorkload):
    """A workload whose device is gone."""

    @override
    def begin(self, *args: Any) -> Any:
        raise RuntimeError("CUDA error: no CUDA-capable device is detected")


async def test_an_unplugged_device_is_asked_after(tmp_path: Path) -> None:
    async with (
        local_machine(tmp_path) as machine,
        machine.working(lambda name: Unplugged()) as process,
    ):
        ended = await process.until(events.TaskEnded)
        assert ended.message == (
            "cpu does not answer any more (CUDA error: no CUDA-capable device is detected): "
            "is it still plugged in, and does its driver work?"
        )


def test_only_a_lost_device_counts_as_one() -> None:
    assert device_lost(RuntimeError("CUDA error: GPU is lost"))
    assert not device_lost(RuntimeError("expected scalar type Float"))
    assert not device_lost(ValueError("no CUDA-capable device"))


def other_server(status: int, body: bytes) -> Any:
    """A way to connect to a web server that is no coordinator."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=httpx.ByteStream(body))

    return lambda address, token: Client(
        address, clock=VirtualClock(), token=token, transport=httpx.MockTransport(answer)
    )


async def test_another_web_server_is_no_coordinator() -> None:
    link = parse_link("http://127.0.0.1:22118/join")
    with pytest.raises(Configuration, match=r"no coordinator answers at http://127.0.0.1:22118"):
        await probe(link, other_server(404, b"<html>File not found</html>"))


async def test_a_key_that_was_cut_is_damaged_and_names_no_other_coordinator() -> None:
    whole = SERVER.fingerprint
    other = whole.replace(whole[0], "b" if whole[0] == "a" else "a")
    for key, sentence in ((whole[:-2], "is damaged; copy the link whole"), (other, "another")):
        link = parse_link(f"http://127.0.0.1:22118/join#key={key}")
        with pytest.raises(VolunteerError, match=sentence):
            async with answering(SERVER) as connect:
                await probe(link, connect)


async def test_a_coordinator_without_tls_is_named_where_the_link_says_https() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        link = parse_link(f"https://127.0.0.1:{port}/join")
        with pytest.raises(Configuration, match="without TLS: a link to it begins with http://"):
            await probe(link, lambda a, t: Client(a, clock=SystemClock(), token=t))
