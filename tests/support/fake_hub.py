"""A small server that stands for a model hub."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from typing_extensions import override

TOKEN = "hf_write"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self.server.heard = self.headers["Authorization"] or ""
        self._send(self.server.got(self.path, self.headers["Range"]))

    def do_HEAD(self) -> None:
        self.server.heard = self.headers["Authorization"] or ""
        self._send(self.server.got(self.path, None))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, reply = self.server.answer(self.path, self.headers["Authorization"] or "", body)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a test may look at the output."""


@dataclass(frozen=True)
class Answer:
    """Answer to a GET or a HEAD."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


def _json(status: int, told: object, **headers: str) -> Answer:
    return Answer(
        status, {"Content-Type": "application/json", **headers}, json.dumps(told).encode()
    )


@dataclass
class Repository:
    """Downloadable model: its commits with their files, and the commits of its branches."""

    licence: str = "apache-2.0"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)  # sizes that are told in place of the true
    lost: set[str] = field(default_factory=set)  # files that are listed and not there
    damaged: set[str] = field(default_factory=set)  # files that arrive with other bytes
    answered_as: str = ""  # commit that every revision is answered with

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit the newest one of a branch; its hash."""
        told = "".join(f"{name}{hashlib.sha1(data).hexdigest()}" for name, data in files.items())
        commit = hashlib.sha1(told.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit


class FakeHub(ThreadingHTTPServer):
    """Takes commits of small files; big ones would go elsewhere, which is the library's
    business. Gives models file by file: weights by a redirect to where large files lie.
    """

    @override
    def handle_error(self, *_: object) -> None:
        """Print nothing: a client that went away is no fault, and a command's errors are judged."""

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
        self.models: dict[str, Repository] = {}
        self.heard = ""  # as the token of the last request
        self.fetched: list[str] = []  # paths of files whose bytes were asked for
        self.parts: list[str | None] = []  # ranges of large files that were asked for

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def got(self, path: str, part: str | None) -> Answer:
        """Answer a GET or a HEAD as a hub does."""
        if self.failing:
            self.failing -= 1
            return _json(500, {"error": f"Internal Error of {self.heard}"})
        asked = urlsplit(path).path.strip("/").split("/")
        if asked[0] == "large":
            return self._ranged("/".join(asked[1:]), part)
        name = "/".join(asked[2:4] if asked[:2] == ["api", "models"] else asked[:2])
        model = self.models.get(name)
        if model is None:
            return _json(401, {"error": "Invalid"}, **{"X-Error-Code": "RepoNotFound"})
        if asked[:2] == ["api", "models"]:
            revision = unquote(asked[5]) if len(asked) > 5 else "main"
            return self._listing(name, model, revision)
        return self._file(name, model, unquote(asked[3]), "/".join(asked[4:]))

    def _listing(self, name: str, model: Repository, revision: str) -> Answer:
        commit = model.branches.get(revision, revision)
        files = model.commits.get(commit)
        if files is None:
            return _json(404, {"error": "Invalid"}, **{"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {"rfilename": file, "size": model.listed.get(file, len(data)), "blobId": "0" * 40}
            | (
                {"lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 130}}
                if file.endswith(".safetensors")
                else {}
            )
            for file, data in files.items()
        ]
        told = {"id": name, "modelId": name, "private": False, "siblings": siblings}
        told |= {"sha": model.answered_as or commit, "tags": [f"license:{model.licence}"]}
        return _json(200, told | {"cardData": {"license": model.licence}})

    def _file(self, name: str, model: Repository, revision: str, file: str) -> Answer:
        commit = model.branches.get(revision, revision)
        data = model.commits.get(commit, {}).get(file)
        headers = {"X-Repo-Commit": commit}
        if data is None or file in model.lost:
            return _json(404, {"error": "Invalid"}, **headers, **{"X-Error-Code": "EntryNotFound"})
        if file.endswith(".safetensors"):
            headers |= {"X-Linked-Etag": f'"{_sha256(data)}"', "X-Linked-Size": str(len(data))}
            headers["Location"] = (
                f"http://localhost:{self.server_port}/large/{name}/{commit}/{file}"
            )
            return Answer(302, headers)
        self.fetched.append(file)
        return Answer(200, headers | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data)

    def _ranged(self, path: str, part: str | None) -> Answer:
        owner, name, commit, file = path.split("/")
        model = self.models[f"{owner}/{name}"]
        data = model.commits[commit][file]
        if file in model.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.fetched.append(file)
        self.parts.append(part)
        if part is None:
            return Answer(200, {"Accept-Ranges": "bytes"}, data)
        first = int(part.removeprefix("bytes=").partition("-")[0])
        said = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        return Answer(206, said, data[first:])

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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
