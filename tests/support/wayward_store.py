"""S3 server of the tests, and a proxy that adds faults."""

from __future__ import annotations

import http.client
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typing_extensions import override

PIECE_BYTES = 16 << 10


class WaywardStore(ThreadingHTTPServer):
    """Passes requests on to `target`, with the faults that are set."""

    daemon_threads = True

    @override
    def handle_error(self, *_: object) -> None:
        """Print nothing: a client that went away is no fault, and a command's errors are judged."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target.removeprefix("http://")
        self.pause_s = 0.0  # between two pieces of a download
        self.stall = False  # send the half of a download, then nothing
        self.swallow = 0  # requests that end an upload in parts, done but not answered
        self.refuse = False  # to store anything
        self.denied = re.compile("(?!)")  # "METHOD /path" of what is answered with 403
        self.absent = re.compile("(?!)")  # "METHOD /path" of what is answered with 404
        self.absences = -1  # of these answers to come; -1 = without end
        self.seen: list[tuple[str, str]] = []  # method and path
        self._before: list[tuple[re.Pattern[str], Callable[[], None]]] = []

    def before(self, pattern: str, action: Callable[[], None]) -> None:
        """Act once, before a request "METHOD /path" that matches is passed on."""
        self._before.append((re.compile(pattern), action))

    def act(self, line: str) -> None:
        """Do what is to be done before this request."""
        due = [each for each in self._before if each[0].search(line)]
        self._before = [each for each in self._before if each not in due]
        for _, action in due:
            action()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: WaywardStore
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        store = self.server
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        store.seen.append((self.command, self.path))
        store.act(f"{self.command} {self.path}")
        if store.absences and store.absent.search(f"{self.command} {self.path}"):
            store.absences -= store.absences > 0
            self.send_error(404)
            return
        if store.denied.search(f"{self.command} {self.path}"):
            self.send_error(403)
            return
        if store.refuse and self.command in ("PUT", "POST"):
            self.send_error(500)
            return
        inner = http.client.HTTPConnection(store.target, timeout=60)
        inner.request(self.command, self.path, body, dict(self.headers))
        answer = inner.getresponse()
        data = answer.read()
        inner.close()
        if store.swallow and self.command == "POST" and "uploadId=" in self.path:
            store.swallow -= 1
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if answer.chunked:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(data)

    def _send(self, data: bytes) -> None:
        store = self.server
        for start in range(0, len(data), PIECE_BYTES):
            if store.stall and self.command == "GET" and start * 2 > len(data):
                time.sleep(60)
            if self.command == "GET":
                time.sleep(store.pause_s)
            self.wfile.write(data[start : start + PIECE_BYTES])

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    @override
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def wayward_store(target: str) -> Iterator[WaywardStore]:
    """Serve inside the block."""
    store = WaywardStore(target)
    thread = threading.Thread(target=store.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3-compatible server in this process, or the one that TEST_S3_SERVER names, whose key and
    secret are TEST_S3_KEY.
    """
    if given := os.environ.get("TEST_S3_SERVER"):
        yield given
        return
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}" if host == "0.0.0.0" else f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    import boto3  # type: ignore[import-untyped]  # moto brings it

    key = os.environ.get("TEST_S3_KEY", "test")
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": key,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{secrets.token_hex(10)}"
    boto3.client("s3", endpoint_url=s3_server).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/prefix"


@pytest.fixture
def wayward(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[WaywardStore]:
    with wayward_store(os.environ["AWS_ENDPOINT_URL"]) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        yield store
