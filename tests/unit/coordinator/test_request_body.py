"""Refusals of requests: each kind of hostile body, and too many requests."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import Settings
from coordinator.rate_limit import KEYS_MAX, Rates
from coordinator.request_body import ClientGone, read_body, read_json, read_message
from coordinator.storage.disk_space import Space
from shared.errors import (
    BadRequest,
    Configuration,
    StorageFull,
    TooLarge,
    TooManyRequests,
    UpgradeRequired,
)
from shared.protocol.contributions import METRICS_MAX, SubmitRequest
from shared.protocol.heartbeat import HeartbeatRequest
from shared.protocol.limits import JSON_BYTES_MAX, JSON_DEPTH_MAX
from tests.support.virtual_clock import VirtualClock


class Request:
    """An ASGI request whose body comes in pieces; says how much was taken."""

    def __init__(
        self, *pieces: bytes, headers: dict[bytes, bytes] | None = None, cut: bool = False
    ) -> None:
        self.scope: dict[str, Any] = {"type": "http", "headers": list((headers or {}).items())}
        self._messages: list[MutableMapping[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces) or cut}
            for i, piece in enumerate(pieces)
        ]
        self.taken = 0

    async def receive(self) -> MutableMapping[str, Any]:
        if not self._messages:
            return {"type": "http.disconnect"}
        message = self._messages.pop(0)
        self.taken += len(message["body"])
        return message


async def test_a_body_in_pieces_is_put_together() -> None:
    request = Request(b"ab", b"", b"cd", headers={b"content-length": b"4"})
    assert await read_body(request.scope, request.receive) == b"abcd"
    assert request.scope["body_read"]


async def test_a_body_of_tiny_pieces_costs_no_more_than_its_size() -> None:
    """Pieces of two bytes are objects of 35: kept one by one they are twenty times the body."""
    left, size = [JSON_BYTES_MAX // 16], JSON_BYTES_MAX // 8

    async def receive() -> MutableMapping[str, Any]:
        left[0] -= 1
        body = left[0].to_bytes(8, "big")[-2:]
        return {"type": "http.request", "body": body, "more_body": left[0] > 0}

    tracemalloc.start()
    try:
        assert len(await read_body({"headers": []}, receive)) == size
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()


async def test_an_announced_giant_is_refused_unread() -> None:
    for length in (str(JSON_BYTES_MAX + 1), "9" * 5000):
        request = Request(b"x", headers={b"content-length": length.encode()})
        with pytest.raises(TooLarge):
            await read_body(request.scope, request.receive)
        assert request.taken == 0


async def test_an_unannounced_giant_is_refused_after_one_limit() -> None:
    request = Request(*[b"x" * 65536] * 4800)  # 300 MB, chunked
    with pytest.raises(TooLarge):
        await read_body(request.scope, request.receive)
    assert request.taken <= JSON_BYTES_MAX + 65536
    assert "body_read" not in request.scope


async def test_compressed_bodies_are_refused() -> None:
    request = Request(b"x", headers={b"content-encoding": b"gzip"})
    with pytest.raises(BadRequest, match="Content-Encoding"):
        await read_body(request.scope, request.receive)


async def test_a_client_that_leaves_is_noticed() -> None:
    request = Request(b"half", cut=True)
    with pytest.raises(ClientGone):
        await read_body(request.scope, request.receive)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b'{"reason": "\xc3\x28"}',
        b'{"unknown": "\xc3\x28"}',
        b"{",
        b"[]",
        b'{"tasks": [{"task": 1, "attempt": 1, "rate": NaN}]}',
        b'{"tasks": [{"task": 1, "attempt": 1, "rate": 1e999}]}',
        b'{"news_since": ' + b"1" * 5000 + b"}",
        b'{"news_since": 9223372036854775808}',
        b'{"news_since": -9999999999999999999}',
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"unknown": ' + b'{"a":[' * 20 + b"]}" * 20 + b"}",
        b'"' + b'\\"' * 500_000,
    ],
    ids=range(16),
)
def test_hostile_json_gets_a_sentence(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read_json(body, HeartbeatRequest)
    assert len(caught.value.message) > 20


def test_honest_json_passes_whatever_its_strings_hold() -> None:
    body = json.dumps(
        {"reason": '[{"' * 200 + "9" * 100, "unknown": {"1" * 30: 0.12345678901234567890123}}
    ).encode()
    assert read_json(body, HeartbeatRequest).reason.startswith('[{"[{"')
    many = b'{"tasks": [' + b",".join([b'{"task": 1, "attempt": 2}'] * 200) + b"]}"
    assert len(read_json(many, HeartbeatRequest).tasks) == 200


documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(document=documents, levels=st.integers(0, 2 * JSON_DEPTH_MAX), as_object=st.booleans())
def test_depth_is_counted_exactly(document: object, levels: int, as_object: bool) -> None:
    def depth(value: object) -> int:
        inner = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else None
        )
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    for _ in range(levels):
        document = {"[": document} if as_object else [document, "]"]
    body = json.dumps(document).encode()
    if depth(document) <= JSON_DEPTH_MAX:
        assert read_json(body, object) == document
    else:
        with pytest.raises(BadRequest, match="deeper"):
            read_json(body, object)


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail_otherwise(body: bytes) -> None:
    try:
        read_json(body, SubmitRequest)
    except BadRequest:
        pass


def test_rates_count_each_key_apart_and_say_when_to_come_back() -> None:
    now = 0.0
    settings = Settings(rate_worker="3/minute", rate_ip="off", rate_register="1/hour")
    rates = Rates(settings, monotonic=lambda: now)
    for _ in range(3):
        rates.hit("worker", "a")
    with pytest.raises(TooManyRequests) as caught:
        rates.hit("worker", "a")
    assert caught.value.retry_after_s == pytest.approx(20)
    rates.hit("worker", "b")
    for _ in range(1000):
        rates.hit("ip", "1.2.3.4")
    now = 20.1
    rates.hit("worker", "a")
    with pytest.raises(TooManyRequests):
        rates.hit("worker", "a")


def test_many_addresses_do_not_fill_the_memory() -> None:
    now = 0.0
    rates = Rates(Settings(rate_ip="2/second"), monotonic=lambda: now)
    for number in range(KEYS_MAX * 2 + 10):
        rates.hit("ip", str(number))
    bucket = rates._buckets["ip"]
    assert bucket is not None
    assert 0 < len(bucket._left) <= KEYS_MAX


def test_a_wrong_rate_is_a_wrong_setting() -> None:
    with pytest.raises(Configuration, match="600/minute"):
        Rates(Settings(rate_ip="many"))


def test_a_full_disk_refuses_and_recovers_by_itself(tmp_path: Path) -> None:
    free = 1000
    space = Space(tmp_path, 500, VirtualClock(), free=lambda _: free)
    space.check()
    space.check(500)
    with pytest.raises(StorageFull):
        space.check(501)
    free = 499
    assert not space.look()
    with pytest.raises(StorageFull) as caught:
        space.check()
    assert caught.value.retry_after_s
    free = 1000
    assert space.look()
    space.check()


def test_replicas_share_a_rate() -> None:
    now = 0.0
    replicas = [Rates(Settings(rate_worker="6/minute"), monotonic=lambda: now) for _ in range(3)]
    for each in replicas:
        each.replicas = 3
    for each in replicas * 2:  # as a balancer sends them
        each.hit("worker", "a")
    for each in replicas:
        with pytest.raises(TooManyRequests):
            each.hit("worker", "a")
    now = 10.0  # one more in ten seconds of them all
    for each in replicas:
        with pytest.raises(TooManyRequests):
            each.hit("worker", "a")
    now = 30.0
    for each in replicas:
        each.hit("worker", "a")


SUBMISSION = b"""{"attempt": 1, "base_version": 0, "codec": "int8", "sha256": "", "size": 0,
    "steps": 1, "samples": 1, "loss_first": 1, "loss_last": 1%s}"""


def test_a_submission_with_more_than_its_task_names_the_field_and_the_remedy() -> None:
    assert read_message(SUBMISSION % b"", SubmitRequest).steps == 1
    with pytest.raises(UpgradeRequired, match='"commitment" of this request: update the program'):
        read_message(SUBMISSION % b', "commitment": {"inner": "", "left": "ab"}', SubmitRequest)


def test_a_submission_has_few_metrics() -> None:
    def metrics(count: int) -> bytes:
        named = json.dumps({str(number): 1.0 for number in range(count)})
        return SUBMISSION % f', "metrics": {named}'.encode()

    assert len(read_message(metrics(METRICS_MAX), SubmitRequest).metrics) == METRICS_MAX
    with pytest.raises(BadRequest):
        read_message(metrics(METRICS_MAX + 1), SubmitRequest)
