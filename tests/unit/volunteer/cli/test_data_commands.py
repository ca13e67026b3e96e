"""`volunteer data`: what a person is shown before anything is sent, and mistakes at its prompt."""

from __future__ import annotations

from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import msgspec
import pytest
from typing_extensions import override

from shared.errors import Conflict, Internal, TooManyRequests, VolunteerError
from shared.proofs.signing import SigningKey, identity_payload
from shared.protocol.accounts import PrivacySpent
from shared.protocol.base import ErrorBody
from shared.protocol.members import MemberData
from shared.workloads.base import ChunkRef, DatasetManifest
from volunteer.account.membership import MemberTerms, OwnSources
from volunteer.account.profile_directory import Identity, Profile
from volunteer.cli.data_commands import _Addition, data_lines
from volunteer.cli.main import run_command
from volunteer.i18n.catalogue import LanguageChoice, use
from volunteer.settings.settings import directories
from volunteer.storage.own_data import OwnData, OwnRecord

TERMS = MemberTerms(licence="CC-BY-4.0", quorum=5)
NOISE = PrivacySpent(
    epsilon=1.5,
    planned=8.0,
    budget=8.0,
    delta=1e-5,
    merges=3,
    merges_max=40,
    noise=1.2,
    clip=1.0,
)


def record(kind: str) -> OwnRecord:
    chunk = ChunkRef(sha256="ab" * 32, size=5_000, items=2_500)
    manifest = DatasetManifest(name="ward", kind=kind, licence="", source="", chunks=(chunk,))
    numbers = MemberData(samples=1234, items=56_789, heldout=99)
    return OwnRecord(run="ward", build="b", manifest=manifest, numbers=numbers, at=0.0)


@pytest.mark.parametrize(("kind", "noun"), [("tokens", "words"), ("images", "pictures")])
def test_a_person_reads_what_will_be_sent_without_words_of_the_trade(
    tmp_path: Path, kind: str, noun: str
) -> None:
    text = "\n".join(data_lines(record(kind), tmp_path, TERMS))
    assert noun in text
    assert "how much there is: 1,234, 56,789, 99" in text
    assert str(tmp_path) in text
    assert "ab" * 32 not in text
    for word in ("token", "gradient", "loss", "sample", "weights", "epoch", "batch", "training"):
        assert word not in text.lower()


def test_a_person_reads_the_terms_before_agreeing(tmp_path: Path) -> None:
    def shown(terms: MemberTerms) -> str:
        return "\n".join(data_lines(record("tokens"), tmp_path, terms))

    mixed = shown(TERMS)
    assert "published under CC-BY-4.0" in mixed
    assert "mixes the changes of 5 machines" in mixed
    assert "No noise is added" in mixed
    several = shown(MemberTerms(quorum=5, least=2))
    assert "of 2 accounts at least." in several
    assert "even of yours alone" not in several
    alone = shown(MemberTerms(licence="", quorum=1, privacy=NOISE))
    assert "may hold your changes alone" in alone
    assert "epsilon 8 over the whole run" in alone
    assert "No noise" not in alone
    assert "published under no licence stated" in alone


@pytest.mark.parametrize("language", ["de", "es"])
def test_the_numbers_are_in_every_language(tmp_path: Path, language: str) -> None:
    english = data_lines(record("tokens"), tmp_path, TERMS)
    use(LanguageChoice(language=language, locale=language))
    try:
        translated = data_lines(record("tokens"), tmp_path, TERMS)
    finally:
        use(LanguageChoice())
    assert "56.789" in "\n".join(translated)
    assert not set(english) & set(translated)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["add", "ward"], 2, "name the files or folders"),
        (["add", "ward", "absent", "--yes"], 2, "there is no file or folder"),
        (["add", "ward", "."], 78, "joined no coordinator yet"),
        (["add", "ward", ".", "--json"], 2, "--json asks nothing: add --yes"),
        (["add", "ward", ".", "--yes"], 78, "joined no coordinator yet"),
        (["list"], 78, "joined no coordinator yet"),
        (["remove", "ward"], 78, "joined no coordinator yet"),
    ],
)
def test_a_mistake_is_a_sentence_and_a_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert run_command(["data", *words]) == code
    assert sentence in capsys.readouterr().err


class Refusing(BaseHTTPRequestHandler):
    """A coordinator that proves its key, and refuses everything else with one error."""

    key: ClassVar[SigningKey]
    error: ClassVar[VolunteerError]

    def do_GET(self) -> None:
        nonce = self.path.partition("nonce=")[2]
        proof = self.key.sign(identity_payload(nonce)).hex()
        self._reply(200, msgspec.json.encode({"proof": proof}))

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = type(self.error)
        body = ErrorBody(
            code=kind.code,
            message="not now",
            request_id="r",
            retry_after_s=self.error.retry_after_s,
        )
        self._reply(kind.status, msgspec.json.encode(body))

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("X-Request-Id", "r")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (TooManyRequests("", retry_after_s=1000.0), True),
        (Internal("", retry_after_s=1000.0), True),
        (Conflict(""), False),
    ],
)
def test_own_data_outlive_a_coordinator_in_trouble_and_go_when_the_run_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: VolunteerError, stays: bool
) -> None:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path))
    Refusing.key, Refusing.error = SigningKey.new(), error
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        identity = Identity(
            url=f"http://127.0.0.1:{server.server_port}",
            tls_pin="",
            public_key=Refusing.key.public_key.hex(),
            fingerprint="",
            server="",
            volunteer_id="v",
            worker_id="w",
            secret="s",
            nickname="a",
            registered=True,
        )
        profile = Profile(directories().profile)
        profile.use(identity)
        own = OwnData(profile.home(identity).own_data)
        with own.building("ward") as target:
            added = own.use(msgspec.structs.replace(record("tokens"), build=target.folder.name))
        addition = _Addition("ward", OwnSources(paths=[]), "")
        with nullcontext() if stays else pytest.raises(type(error)):
            assert addition._declare(added) is False
        server.shutdown()
    assert bool(own.records()) is stays


@pytest.mark.parametrize("words", [["data", "list"], ["runs"], ["usage"]])
def test_an_account_that_was_refused_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    """A nickname that the coordinator does not take leaves the account stored, not registered."""
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path))
    identity = Identity(
        url="http://127.0.0.1:1",
        tls_pin="",
        public_key="00" * 32,
        fingerprint="",
        server="",
        volunteer_id="v",
        worker_id="w",
        secret="s",
        nickname="a",
    )
    Profile(directories().profile).use(identity)
    assert run_command(words) == 78
    assert "`volunteer join LINK`" in capsys.readouterr().err
