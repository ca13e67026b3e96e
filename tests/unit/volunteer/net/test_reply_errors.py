"""Why a connection failed, in words: what people read when the coordinator cannot be reached."""

from __future__ import annotations

import socket

import httpx
import pytest

from shared.clock import SystemClock
from shared.errors import Conflict, Unreachable
from shared.protocol import endpoints
from shared.protocol.inference import OpenAiError
from tests.e2e.conftest import free_port
from volunteer.i18n.catalogue import LanguageChoice, choose, shown, use
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.reply_errors import openai_error, reason, refusal
from volunteer.net.tls import Address


def caused(outer: Exception, inner: BaseException) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            caused(httpx.ConnectError("x"), socket.gaierror(-2, "Name not known")),
            "cannot be resolved",
        ),
        (caused(httpx.ConnectError("x"), OSError(113, "No route to host")), "no route to host"),
        (caused(httpx.ReadError(""), ConnectionResetError(104, "reset")), "interrupted"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "name or service not known"),
        (httpx.ConnectError("All connection attempts failed"), ""),
        (
            caused(httpx.ConnectError("x"), ExceptionGroup("all", [ConnectionRefusedError(111)])),
            "connection refused",
        ),
    ],
)
def test_a_cause_is_said_without_numbers(error: Exception, said: str) -> None:
    clause = reason(error)
    assert said in clause
    assert "Errno" not in clause
    assert bool(clause) == bool(said)


async def test_nobody_listens() -> None:
    address = Address(url=f"http://127.0.0.1:{free_port()}")
    client = Client(address, clock=SystemClock())
    with pytest.raises(Unreachable, match="connection refused") as caught:
        await Api(client).call(endpoints.SERVER, patience_s=0)
    await client.close()
    assert "Errno" not in caught.value.message


def test_a_refusal_without_words_is_said_by_its_code() -> None:
    storage = b'{"code": "storage_full", "message": ""}'
    quota = OpenAiError(message="", type="", code="insufficient_quota")
    use(choose("de"))
    try:
        full = refusal("lab", 507, {}, storage).message
        assert (full, shown(full)) == (
            "No space is left on the disk.",
            "die Platte des Koordinators ist voll",
        )
        other = refusal("lab", 409, {}, b'{"code": "conflict", "message": ""}')
        assert isinstance(other, Conflict)
        assert other.message == Conflict().message
        assert shown(other.message) != other.message
        assert shown(openai_error(429, quota).message) == "dafür reichen die Credits nicht"
    finally:
        use(LanguageChoice())
