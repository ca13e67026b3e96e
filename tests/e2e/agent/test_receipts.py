"""Receipts and the record end to end: a real server over HTTP, a volunteer that kept one receipt,
and an organiser who rewrites the database.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from coordinator.config import Settings
from shared.proofs.signing import SigningKey
from shared.protocol.accounts import ServerInfo
from shared.protocol.transparency import continues
from shared.protocol.versions import SignedManifest, VersionManifest, chunks_digest
from shared.workloads.base import DatasetManifest
from tests.support.forkserver import ForkServer
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine
from tests.support.server_process import Process
from volunteer.account.profile_directory import Identity, Profile
from volunteer.agent import receipt_keeper
from volunteer.cli.main import run_command
from volunteer.control import events
from volunteer.settings.settings import directories
from volunteer.storage.manifests import verified_manifest

ENTRIES = 4  # two contributions: pending and earned each
LATER = (
    "INSERT INTO record (at, actor, action, subject, detail) VALUES (2e9, 'organiser', 'x', '', '')"
)


@dataclass
class Account:
    """An account on this machine that has earned, and the commands of its owner."""

    capsys: pytest.CaptureFixture[str]
    profile: Profile
    identity: Identity

    def run(self, *words: str) -> tuple[int, str, str]:
        code = run_command(["receipts", *words])
        said = self.capsys.readouterr()
        return code, said.out, said.err

    def at(self, url: str) -> None:
        self.profile.use(msgspec.structs.replace(self.identity, url=url))

    @property
    def folder(self) -> Path:
        return self.profile.home(self.identity).receipts


@pytest.fixture(scope="module")
def earned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Identity]:
    """A data directory with a version by two accounts, and the identity of one of them."""
    path = tmp_path_factory.mktemp("earned") / "coordinator"

    async def work() -> Identity:
        async with local_coordinator(path) as home:
            await home.start_run(RUN)
            ann, bob = await home.join("Ann"), await home.join("Bob")
            for seed, worker in enumerate((ann, bob)):
                await worker.work(seed=seed)
            assert await home.coordinator.merger.merge_if_due(1)
            server: ServerInfo = await home.coordinator.server.info()
            return Identity(
                url="",
                tls_pin="",
                public_key=server.public_key,
                fingerprint=server.fingerprint,
                server=server.name,
                volunteer_id=ann.volunteer_id,
                worker_id=ann.worker_id,
                secret=ann.secret,
                nickname="Ann",
                registered=True,
            )

    return path, asyncio.run(work())


@pytest.fixture
def data_dir(earned: tuple[Path, Identity], tmp_path: Path) -> Path:
    shutil.copytree(earned[0], tmp_path / "coordinator")
    return tmp_path / "coordinator"


@pytest.fixture
def ann(
    earned: tuple[Path, Identity],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Account:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "home"))
    account = Account(capsys, Profile(directories().profile), earned[1])
    account.at("http://127.0.0.1:9")
    return account


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who does not wait 15 s for a coordinator that cannot be reached."""
    monkeypatch.setattr("volunteer.net.api.ASK_S", 2.0)


@pytest.fixture
def serve(data_dir: Path, ann: Account, fork_server: ForkServer) -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def start() -> Process:
        process = Process(data_dir, "--port", "0", command=fork_server).__enter__()
        started.append(process)
        ann.at(process.url)
        return process

    yield start
    for process in started:
        process.__exit__()


def head(server: Process) -> dict[str, Any]:
    signed = httpx.get(f"{server.url}/api/v1/record/head").json()
    tree: dict[str, Any] = json.loads(signed["payload"])["tree"]
    return tree


def sealed(server: Process, size: int = ENTRIES) -> dict[str, Any]:
    """Wait until the record has so many entries."""
    until = time.monotonic() + 120
    while (found := head(server))["size"] < size:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


def rewrite(data_dir: Path, *statements: str) -> None:
    """Change the record as an organiser with the database in hands would, and seal it anew."""
    connection = sqlite3.connect(data_dir / "coordinator.sqlite3")
    with connection:
        for table in ("events", "postings", "record", "merkle_leaves", "merkle_nodes"):
            for what in ("update", "delete"):
                connection.execute(f"DROP TRIGGER IF EXISTS {table}_no_{what}")
        for statement in statements:
            connection.execute(statement)
        connection.execute("DELETE FROM meta WHERE key = 'tree'")
        connection.execute("DELETE FROM merkle_leaves")
        connection.execute("DELETE FROM merkle_nodes")
    connection.close()


def test_a_receipt_is_fetched_once_and_verified_with_and_without_a_server(
    serve: Callable[[], Process], ann: Account, impatient: None
) -> None:
    code, out, err = ann.run("verify")
    assert (code, out) == (75, "no receipts yet: each payment for your work brings one\n")
    assert "the present record was not checked" in err
    server = serve()
    sealed(server)
    for _ in range(2):
        code, out, err = ann.run("verify")
        assert (code, err) == (0, "")
        assert out == "1 receipt verified; the coordinator's record still holds them\n"
    assert server.stop() == 0
    assert ann.run("verify", "--offline") == (0, "1 receipt verified\n", "")
    code, out, _ = ann.run("verify", "--json")
    found = json.loads(out)
    assert (code, found["receipts"], found["history"], found["heads"]) == (75, 1, "", 1)


@pytest.mark.parametrize(
    ("statements", "sentence"),
    [
        pytest.param(
            ["UPDATE events SET at = at + 1 WHERE id = 1"],
            "signed two different records",
            id="an instant",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["UPDATE events SET at = at + 1 WHERE id = 1", LATER],
            "its record no longer begins with",
            id="an instant and later lines",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["UPDATE record SET actor = 'nobody'", LATER],
            "its record no longer begins with",
            id="the record",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["DELETE FROM postings WHERE event_id = 4", "DELETE FROM events WHERE id = 4"],
            "entries that it signed on",
            id="a payment removed",
        ),
    ],
)
def test_who_kept_one_receipt_notices_a_rewritten_history(
    serve: Callable[[], Process],
    ann: Account,
    data_dir: Path,
    statements: list[str],
    sentence: str,
) -> None:
    server = serve()
    before = sealed(server)
    assert ann.run("verify")[0] == 0
    assert server.stop() == 0
    rewrite(data_dir, *statements)
    server = serve()
    sealed(server, before["size"] - 1)
    code, out, err = ann.run("verify")
    assert (code, err) == (1, "")
    assert "wrong: the coordinator" in out
    assert "rewrote its history" in out
    assert sentence in out
    assert "1 receipt verified\n" in out  # which are the evidence
    code, out, _ = ann.run("verify", "--json")
    assert code == 1
    assert "rewrote its history" in json.loads(out)["history"]
    assert server.stop() == 0
    assert ann.run("verify", "--offline")[0] in (0, 1)
    code, out, _ = ann.run("accept")
    assert (code, out.startswith("set aside in ")) == (0, True)
    server = serve()
    assert ann.run("verify")[0] == 0


def test_a_damaged_or_foreign_receipt_is_wrong(
    serve: Callable[[], Process], ann: Account, tmp_path: Path
) -> None:
    sealed(serve())
    assert ann.run("verify")[0] == 0
    path = ann.folder / "receipts.jsonl"
    signed = json.loads(path.read_text())
    said = json.loads(signed["payload"])
    said["credits_micro"] += 1
    path.write_text(json.dumps(signed | {"payload": json.dumps(said)}) + "\n")
    code, out, _ = ann.run("verify", "--offline")
    assert code == 1
    assert "wrong: a receipt: the signature does not fit" in out
    assert "1 of 1 receipt wrong" in out
    # Signed by a key that is not the coordinator's.
    other = SigningKey.load_or_create(tmp_path / "other.key")
    payload = signed["payload"]
    forged = {"payload": payload, "signature": other.sign(payload.encode()).hex()}
    path.write_text(json.dumps(forged) + "\n{torn")
    assert ann.run("verify", "--offline")[0] == 1


def test_proofs_are_served_to_everybody_and_refused_in_a_sentence(
    serve: Callable[[], Process], ann: Account
) -> None:
    server = serve()
    size = sealed(server)["size"]
    api = f"{server.url}/api/v1/record"
    proof = httpx.get(f"{api}/consistency", params={"old": 1, "new": size}).json()
    assert proof["size"] == size
    refused = httpx.get(f"{api}/consistency", params={"old": 1, "new": size + 1})
    assert refused.status_code == 404
    assert f"the record has {size} entries now" in refused.json()["message"]
    for query, status in (("old=9&new=99999", 404), ("old=0&new=1", 404), ("old=x&new=1", 400),
                          ("", 400), (f"old={10**30}&new={10**31}", 400)):  # fmt: skip
        refused = httpx.get(f"{api}/consistency?{query}")
        assert refused.status_code in (status, 404), (query, refused.text)
        assert refused.json()["message"]
    assert httpx.get(f"{server.url}/api/v1/me/receipts").status_code == 401


def test_wrong_words_get_a_sentence(ann: Account) -> None:
    assert ann.run("verify", "now")[0] == 2
    assert ann.run("delete")[0] == 2
    ann.folder.mkdir(parents=True)
    (ann.folder / "seen.json").write_text("{")
    (ann.folder / "receipts.jsonl").write_bytes(b"\xff\xfe\n{}\n")
    assert ann.run("verify", "--offline") == (
        0,
        "no receipts yet: each payment for your work brings one\n",
        "",
    )


async def test_a_volunteer_at_work_fetches_receipts_and_alerts_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(SHORT)
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.work(tasks=1)
            async with machine.working() as process:
                book = process.engine._agent  # made by `run`
                async with process.eventually():
                    while book is None or not book.store.receipts.last:
                        await home.coordinator.transparency.seal()
                        await asyncio.sleep(0.02)
                        book = process.engine._agent
                    while not book.store.receipts.signed_heads.heads:
                        await asyncio.sleep(0.02)
                await process.kill()
        settings: Settings = home.coordinator.settings
    rewrite(settings.directory, "UPDATE events SET at = at + 1 WHERE id = 1")
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.transparency.seal()
        async with home.coordinator.working():
            machine.home = home
            monkeypatch.setattr(receipt_keeper, "CHECK_S", 1.0)
            async with machine.working() as process:
                told = await process.until(events.Notice, lambda said: said.level == "error")
                assert "the coordinator rewrote its history" in told.message
                assert "as evidence" in told.message
                await process.heartbeats(6)  # the record is checked again meanwhile
                alerts = [said for said in process.all(events.Notice) if said.level == "error"]
                assert alerts == [told]


async def test_every_manifest_names_the_head_and_an_old_one_is_signed_again(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(RUN)
        await home.coordinator.transparency.seal()
        ann, bob = await home.join("Ann"), await home.join("Bob")
        for seed, worker in enumerate((ann, bob)):
            await worker.work(seed=seed)
        assert await home.coordinator.merger.merge_if_due(1)
        key = home.coordinator.key.public_key.hex()

        async def latest() -> tuple[SignedManifest, VersionManifest]:
            reply = await ann.get("/runs/tiny/versions/latest")
            signed = msgspec.json.decode(reply.content, type=SignedManifest)
            return signed, verified_manifest(signed, key)

        signed, manifest = await latest()
        assert manifest.tree is not None
        assert manifest.tree.size > 0
        proof = await home.coordinator.transparency.consistency(
            manifest.tree.size, manifest.tree.size
        )
        assert continues(manifest.tree, manifest.tree, proof)
        dataset = await home.coordinator.datasets.manifest(manifest.dataset)  # as volunteers get it
        assert manifest.chunks_sha256 == chunks_digest(dataset)
        await home.clock.advance(86_400.0)
        assert await latest() == (signed, manifest)
        await home.clock.advance(20 * 86_400.0)
        again, renewed = await latest()
        assert again.signature != signed.signature
        assert renewed.expires_at > home.clock.now() + 86_400.0
        assert msgspec.structs.replace(renewed, expires_at=manifest.expires_at) == manifest


async def test_a_dataset_or_a_version_that_is_not_the_signed_one_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(SHORT)
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join()
            datasets, queries = home.coordinator.datasets, home.coordinator.runs.queries
            true_data, true_manifest = datasets.manifest, queries.manifest

            async def other(name: str) -> DatasetManifest:
                return msgspec.structs.replace(await true_data(name), meta={"dtype": "other"})

            monkeypatch.setattr(datasets, "manifest", other)
            async with machine.working() as process:
                ended = await process.until(events.TaskEnded)
                assert 'the dataset "sums" is not the one of version 0' in ended.message
            monkeypatch.setattr(datasets, "manifest", true_data)
            async with machine.working() as process, process.eventually():
                while (await queries.info("tiny")).version < 3:
                    await asyncio.sleep(0.05)

            async def first(name: str, version: int | None = None) -> SignedManifest:
                return await true_manifest(name, 0)

            monkeypatch.setattr(queries, "manifest", first)
            async with machine.working() as process:
                ended = await process.until(
                    events.TaskEnded, lambda end: "offers version 0" in end.message
                )
                assert "had signed version" in ended.message
