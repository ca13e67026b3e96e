"""A small server that stands for a model hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_write"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, reply = self.server.answer(self.path, self.headers["Authorization"] or "", body)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a test may look at what else is printed."""


class FakeHub(ThreadingHTTPServer):
    """Takes commits of small files; big ones would go elsewhere, which is the library's
    business.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.full = False
        self.token = TOKEN  # that may write
        self.answering = threading.Event()  # cleared: requests wait
        self.answering.set()
        self.asked = threading.Event()
        self.failing = 0  # so many requests are answered with 500
        self.visible: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, token: str, body: bytes) -> tuple[int, object]:
        self.asked.set()
        self.answering.wait()
        if self.failing:
            self.failing -= 1
            return 500, {"error": "Internal Error"}
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.visible[name] = asked["visibility"]
            return 200, {"url": f"{self.url}/{name}"}
        if self.full:
            return 507, {"error": "your storage is full"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return 200, {"files": modes}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
            return 200, {
                "commitUrl": f"{self.url}/ann/tiny/commit/{0:040}",
                "commitOid": "0" * 40,
                "success": True,
            }
        return 404, {"error": f"nothing at {path}"}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on a free port of loopback."""
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.answering.set()
        server.shutdown()
        thread.join()
        server.server_close()
