"""Another coordinator at the address of the one that was joined gets no secret and ends nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typing_extensions import override

from coordinator.accounts.server_identity import ServerAddress
from shared.clock import SystemClock
from shared.errors import BadSignature, InvalidName, Unauthorized, Unreachable
from shared.network.links import format_link, parse_link
from shared.proofs import proof_of_work
from tests.support.account_rows import newcomer
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine, Network, local_machine
from tests.support.served import served
from volunteer.control import commands, events
from volunteer.net.client import ApiCall, Client
from volunteer.net.tls import Address

ANOTHER = "another coordinator answers at"


class Heard(httpx.AsyncBaseTransport):
    """A transport to a coordinator, under its name, that records what is sent."""

    def __init__(self, inner: httpx.AsyncBaseTransport, host: str = "") -> None:
        self.inner, self.host = inner, host
        self.paths: list[str] = []
        self.secrets: list[str] = []

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        request.headers["host"] = self.host or request.headers["host"]
        if "authorization" in request.headers:
            self.secrets.append(request.url.path)
        return await self.inner.handle_async_request(request)


async def test_a_volunteer_waits_for_the_coordinator_that_it_joined(tmp_path: Path) -> None:
    async with (
        local_machine(tmp_path) as machine,
        local_coordinator(tmp_path / "another") as another,
        machine.working() as process,
    ):
        await process.until(events.Claimed)
        process.network.cut = True
        await process.until(events.Connection, lambda event: not event.online)
        heard = Heard(another.transport)
        process.network.inner = heard
        process.network.cut = False
        said = await process.until(events.Connection, lambda event: ANOTHER in event.message)
        assert not said.online
        process.network.inner = machine.home.transport
        async with process.eventually():
            while (await machine.home.coordinator.volunteers.show("Ann")).person.work.accepted < 2:
                await process.tick()
        assert heard.secrets == []
        # the head of the record is public, and its signature says whose it is
        assert set(heard.paths) - {"/api/v1/record/head"} == {"/api/v1/server"}
        assert not process.all(events.Stopped)


async def test_it_waits_at_its_start_too_and_at_a_401_without_a_lost_connection(
    tmp_path: Path,
) -> None:
    async with (
        local_machine(tmp_path) as machine,
        local_coordinator(tmp_path / "another") as another,
        machine.working() as process,
    ):
        heard = Heard(another.transport)
        process.network.inner = heard
        status = process.control.status
        assert (status.nickname, status.server) == ("Ann", "coordinator")  # known from its files
        await process.until(events.Connection, lambda event: ANOTHER in event.message)
        assert heard.secrets == []
        process.network.inner = machine.home.transport
        await process.until(events.Claimed)
        process.network.inner = another.transport  # a balancer with two coordinators
        many = len(process.told)
        async with process.eventually():
            while not any(
                isinstance(event, events.Connection) and ANOTHER in event.message
                for event in process.told[many:]
            ):
                await process.tick()
        assert not process.all(events.Stopped)


async def test_a_new_connection_that_is_not_encrypted_is_asked_before_its_first_secret(
    tmp_path: Path,
) -> None:
    heard = bytearray()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(1 << 16))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    question = ApiCall(method="GET", path="/workers/me", reply=dict[str, Any], patience_s=0.0)
    async with local_coordinator(tmp_path) as home:
        async with served(home, ticking=False) as url:
            key = (await home.coordinator.server.info()).public_key
            address = Address(url=url, public_key=key)
            client = Client(address, clock=SystemClock(), token="w-1.secret")
            with pytest.raises(Unauthorized, match="damaged"):
                await client.call(question)
        # The connection was idle when it was closed: no error has told of it.
        port = int(url.rpartition(":")[2])
        async with await asyncio.start_server(take, "127.0.0.1", port, reuse_address=True):
            with pytest.raises(Unreachable, match=ANOTHER):
                await client.call(question)
        await client.close()
    assert heard.startswith(b"GET /api/v1/server?nonce=")
    assert b"secret" not in heard
    assert b"uthorization" not in heard


@pytest.mark.parametrize(
    ("own", "forged"),
    [
        ("https://home.example", "https://else.example"),
        ("https://home.example", "https://home.example:8443"),
        ("https://home.example", f"https://home.example/join#pin={'ab' * 32}"),
        (f"https://home.example/join#pin={'cd' * 32}", f"https://10.0.0.1/join#pin={'ab' * 32}"),
        (f"https://home.example/join#pin={'cd' * 32}", "https://home.example"),
    ],
)
async def test_a_server_that_passes_requests_on_to_the_coordinator_gets_no_secret(
    own: str, forged: str, tmp_path: Path
) -> None:
    link = parse_link(own)
    url = "https://home.example"
    async with local_coordinator(
        tmp_path / "home", url=url, open=True, proof_of_work_bits=8
    ) as home:
        server = home.coordinator.server
        await server.set_address(ServerAddress(url=link.url, tls_pin=link.tls_pin))
        key = server.link().fingerprint
        joined, newcomer = LocalMachine(tmp_path / "a", home), LocalMachine(tmp_path / "b", home)
        ann = commands.Join(link=format_link(server.link()), name="Ann")
        assert (await joined.engine().control.do(ann)).created
        separator = "+" if "#" in forged else "/join#"
        for machine in (joined, newcomer):
            network = Network(home.transport)
            network.inner = relay = Heard(home.transport, "home.example")
            theirs = commands.Join(link=f"{forged}{separator}key={key}", name="")
            with pytest.raises(BadSignature, match="does not serve at https://"):
                await machine.engine(network).control.do(theirs)
            assert (relay.secrets, relay.paths) == ([], ["/api/v1/server"])
        again = await joined.engine().control.do(ann)
        assert (again.nickname, again.created) == ("Ann", False)


async def test_a_name_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house", open=True, proof_of_work_bits=8) as home:
        ann = LocalMachine(tmp_path / "ann", home)
        await ann.join("Ann")
        bob = LocalMachine(tmp_path / "bob", home)
        for name, why in (("Ann", '"Ann 2" is free'), ("\u05d0\u05d1\u05d2 RLO", "one script")):
            network = Network(home.transport)
            with pytest.raises(InvalidName, match=why):
                await bob.join(name, network)
            assert not [seen for seen in network.seen if seen.endswith("/register")]
        network = Network(home.transport)
        assert (await bob.join("Bob", network)).nickname == "Bob"
        assert sum(seen.endswith("/challenge") for seen in network.seen) == 1


class Overtaken(Network):
    """A transport to a coordinator where others take each name while its proof is computed."""

    def __init__(self, home: LocalCoordinator) -> None:
        super().__init__(home.transport)
        self.home, self.taken = home, list[str]()

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/register") and not self.taken:
            self.taken.append(msgspec.json.decode(request.content)["nickname"])
            other, house = newcomer(self.taken[0]), self.home.coordinator.volunteers
            given = await house.challenge(other.volunteer_id, "")
            nonce = proof_of_work.solve(given.challenge, given.bits, lambda _: True)
            proof = newcomer(self.taken[0], challenge=given.challenge, nonce=f"{nonce:x}")
            assert (await house.register(proof)).created
        return await super().handle_async_request(request)


@pytest.mark.parametrize("name", ["", "Ann"])
async def test_one_proof_is_enough_whatever_becomes_of_the_name(name: str, tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house", open=True, proof_of_work_bits=8) as home:
        machine = LocalMachine(tmp_path / "machine", home)
        network = Overtaken(home)
        if name:
            with pytest.raises(InvalidName, match="is free"):
                await machine.join(name, network)
        else:
            joined = await machine.join("", network)
            assert joined.nickname.startswith("volunteer-")
            assert joined.nickname != network.taken[0]
        assert sum(seen.endswith("/challenge") for seen in network.seen) == 1
