"""An S3-speaking server with faults, in front of a good one."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE_BYTES = 16 << 10


class WaywardStore(ThreadingHTTPServer):
    """Passes requests on to `target`, with the faults that are set."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target.removeprefix("http://")
        self.pause_s = 0.0  # between two pieces of a download
        self.stall = False  # send the half of a download, then nothing
        self.swallow = 0  # requests that end an upload in parts, done but not answered
        self.refuse = False  # to store anything
        self.seen: list[tuple[str, str]] = []  # method and path

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
