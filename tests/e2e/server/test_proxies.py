"""Proxies of the environment: volunteers and organisers go through them, and messages name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.admin import runs
from coordinator.admin.command import EmptyRequest
from coordinator.admin.remote_server import RemoteServer
from shared.clock import SystemClock
from shared.errors import Configuration, Unreachable
from shared.network.links import parse_link
from shared.network.proxy import proxy_of, without_credentials
from shared.protocol import endpoints
from shared.protocol.accounts import ServerInfo
from tests.e2e.conftest import Forked
from tests.support.certificates import certificate
from tests.support.connect_proxy import connect_proxy
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.reply_errors import decode_reply
from volunteer.net.tls import Address

URL = "https://train.example.org:8765"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def asked(address: Address) -> ServerInfo:
    client = Client(address, clock=SystemClock())
    try:
        return await Api(client).call(endpoints.SERVER, patience_s=0)
    finally:
        await client.close()


def test_the_variables_are_read_as_other_programs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_of(URL) == ""
    monkeypatch.setenv("all_proxy", "10.0.0.1:3128")
    assert proxy_of(URL) == "http://10.0.0.1:3128"
    monkeypatch.setenv("HTTPS_PROXY", "socks5h://ann:secret@10.0.0.2")
    assert proxy_of(URL) == "socks5h://ann:secret@10.0.0.2"
    assert without_credentials(proxy_of(URL)) == "socks5h://10.0.0.2"
    assert proxy_of("https://127.0.0.1:8765") == ""
    monkeypatch.setenv("NO_PROXY", ".example.org")
    assert proxy_of(URL) == ""


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "http"])
async def test_a_proxy_where_nothing_listens_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", f"{scheme}://ann:secret@127.0.0.1:9")
    with pytest.raises(Unreachable, match=f"through the proxy {scheme}://127.0.0.1:9: ") as said:
        await asked(Address(url=URL))
    assert "secret" not in said.value.message


async def test_a_proxy_of_an_unknown_kind_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks4://127.0.0.1:9")
    with pytest.raises(Configuration, match=r"the proxy socks4://127.0.0.1:9 cannot be used"):
        await asked(Address(url=URL))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("407 Proxy Authentication Required", "asks for a name and a password"),
        ("403 Forbidden", "403 Forbidden"),
        ("511 Network Authentication Required", "511"),
    ],
)
async def test_what_a_proxy_refuses_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, answer: str, said: str
) -> None:
    with connect_proxy(answer=answer) as (place, _):
        monkeypatch.setenv("HTTPS_PROXY", place)
        with pytest.raises(Unreachable, match=f"through the proxy http://{place}: .*{said}"):
            await asked(Address(url=URL))


def test_the_page_of_a_portal_is_told_from_a_reply() -> None:
    with pytest.raises(Unreachable, match="log in first"):
        decode_reply(b"<!doctype html><title>Welcome</title>", ServerInfo)


async def test_volunteer_and_organiser_go_through_a_proxy_with_a_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forked: Forked
) -> None:
    pem, pin = certificate(tmp_path)
    with forked(
        tmp_path / "data", "--port", "0", "--tls-cert", str(pem), "--tls-key", str(pem)
    ) as server:
        key = parse_link(server.link).fingerprint
        with connect_proxy(server.port, password="ann:s@cret") as (place, proxy):
            monkeypatch.setenv("HTTPS_PROXY", f"http://ann:s%40cret@{place}")
            info = await asked(Address(url=URL, tls_pin=pin))
            assert info.fingerprint == key
            remote = RemoteServer.of(f"{URL}/join#key={key}+pin={pin}", server.token_file)
            assert remote.call(runs.listing, EmptyRequest()) == ()
            assert {line.rpartition(" ")[0] for line in proxy.asked} == {
                "CONNECT train.example.org:8765"
            }
            monkeypatch.setenv("HTTPS_PROXY", f"http://{place}")
            remote = RemoteServer.of(f"{URL}/join#key={key}+pin={pin}", server.token_file)
            with pytest.raises(Unreachable, match=f"through the proxy http://{place}: .*407"):
                remote.call(runs.listing, EmptyRequest())
    monkeypatch.setenv("HTTPS_PROXY", "socks4://127.0.0.1:9")
    with pytest.raises(Configuration, match=r"the proxy socks4://127.0.0.1:9 cannot be used"):
        RemoteServer.of(f"{URL}/join#key={key}+pin={pin}", server.token_file)
