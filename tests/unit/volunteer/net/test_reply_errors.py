"""Why a connection failed, in words: what people read when the coordinator cannot be reached."""

from __future__ import annotations

import socket

import httpx
import msgspec
import pytest

from shared.clock import SystemClock
from shared.errors import BY_CODE, Conflict, Unreachable, VolunteerError
from shared.protocol import endpoints
from shared.protocol.contributions import SubmitReply, UploadInfo
from shared.protocol.inference import OpenAiError
from tests.e2e.conftest import free_port
from volunteer.agent.submitter import REFUSALS
from volunteer.i18n.catalogue import LanguageChoice, choose, translated, use
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.reply_errors import connection_failure, decode_reply, openai_error, refusal
from volunteer.net.retry import is_temporary
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
    clause = connection_failure(error)
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
    storage = b'{"code": "storage_full", "message": "", "request_id": "r"}'
    quota = OpenAiError(message="", type="", code="insufficient_quota")
    use(choose("de"))
    try:
        full = refusal("lab", 507, {}, storage).message
        assert (full, translated(full)) == (
            "No space is left on the disk. (request r)",
            "die Platte des Koordinators ist voll",
        )
        other = refusal("lab", 409, {}, b'{"code": "conflict", "message": "", "request_id": "r"}')
        assert isinstance(other, Conflict)
        assert other.message == Conflict().message
        assert translated(other.message) != other.message
        assert translated(openai_error(429, quota).message) == "dafür reichen die Credits nicht"
    finally:
        use(LanguageChoice())


FOREIGN = {
    "nothing": b"",
    "a page": b"<html><title>404 Not Found</title></html>",
    "half a page": b"<html><ti",
    "a store": b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>",
    "half an answer": b'{"code": "unknown_task", "message": "there is no ta',
    "a gateway": b'{"code": "not_found", "message": "no route"}',
    "a gateway of our words": b'{"code": "unknown_task", "message": "no route"}',
    "another gateway": b'{"message": "no route", "request_id": "1c"}',
    "an API": b'{"error": {"message": "no", "type": "x", "param": null, "code": "not_found"}}',
    "numbers": b'{"code": 404, "message": "no", "request_id": "1c"}',
    "an array": b"[]",
    "another status": b'{"code": "gone", "message": "no", "request_id": "1c"}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_no_answer_of_a_proxy_store_or_portal_drops_work(name: str) -> None:
    """It is no answer of the coordinator, whatever its status: the request is repeated."""
    for status in range(300, 600):
        if name == "another status" and status // 100 == 4:
            continue
        error = refusal("lab", status, {}, FOREIGN[name])
        assert isinstance(error, Unreachable), (status, error)
        assert type(error) not in REFUSALS
        assert is_temporary(error)


WHOLE = {
    UploadInfo: UploadInfo(upload_id="a" * 32, offset=1, size=2, complete=False, expires_at=1.5),
    SubmitReply: SubmitReply(
        task=3,
        run="r",
        contribution=7,
        state="rejected",
        reason="norm",
        message="no",
        credits_micro=0,
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_no_answer_that_was_cut_or_came_from_elsewhere_with_success_drops_work(
    kind: type[UploadInfo | SubmitReply],
) -> None:
    whole = msgspec.json.encode(WHOLE[kind])
    assert decode_reply(whole, kind) == WHOLE[kind]
    for data in (*(whole[:stop] for stop in range(len(whole))), *FOREIGN.values()):
        with pytest.raises(VolunteerError) as caught:
            decode_reply(data, kind)
        assert type(caught.value) not in REFUSALS


def test_only_refusals_of_the_coordinator_itself_drop_work() -> None:
    dropped = set()
    for code, kind in BY_CODE.items():
        body = msgspec.json.encode({"code": code, "message": "no", "request_id": "1c"})
        error = refusal("lab", kind.status, {}, body)
        if not is_temporary(error) and type(error) in REFUSALS:
            dropped.add(code)
    assert dropped == {
        "bad_request", "cancelled", "conflict", "forbidden", "gone", "invalid_frame", "too_large",
        "unknown_task",
    }  # fmt: skip
