"""check, backup and restore, and what a mistyped place gets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import resource
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Settings
from coordinator.http.app import opened
from coordinator.storage.s3 import S3Blobs
from coordinator.upkeep.backup import BackupList
from coordinator.upkeep.stored_backups import StorePlace
from shared.proofs.signing import SigningKey
from tests.support.command_line import Run, worked

READING = [
    ("check",),
    ("run", "list"),
    ("run", "start", "tiny"),
    ("dataset", "list"),
    ("task", "list", "--failed"),
    ("invite", "create"),
    ("volunteer", "list"),
]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_mistyped_data_directory_is_named_and_not_made(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    said = run(*words, "--data-dir", tmp_path / "typo")
    assert (said.code, said.out) == (78, "")
    assert f"there is no coordinator in {tmp_path / 'typo'}" in said.err
    assert "--data-dir" in said.err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_saved_from_an_empty_or_mistyped_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("typo", "empty"):
        said = run("backup", tmp_path / "saved", "--data-dir", tmp_path / name)
        assert (said.code, said.out) == (78, "")
        assert f"there is no coordinator in {tmp_path / name}" in said.err
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_a_database_alone_is_enough_to_look_but_not_to_sign(
    run: Run, tmp_path: Path, database_url: str
) -> None:
    place = ("--database", database_url, "--data-dir", tmp_path / "none")
    for noun in ("run", "volunteer", "invite"):
        said = run(noun, "list", *place)
        assert (said.code, said.err) == (0, "")
    signing = [["invite", "create"], ["check"], ["backup", str(tmp_path / "saved")]]
    for words in signing:
        said = run(*words, *place)
        assert (said.code, said.out) == (78, "")
        assert "signing.key" in said.err
        assert "--data-dir" in said.err
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "saved").exists()


def test_a_database_without_tables_is_named_without_its_password(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/typo.db"
    said = run("run", "list", "--database", url, "--data-dir", tmp_path / "none")
    assert (said.code, said.out) == (78, "")
    assert f"there is no coordinator in {url}" in said.err
    assert list(tmp_path.iterdir()) == []


def test_check_finds_what_is_broken(here: Run, busy: Path, run: Run) -> None:
    assert "all is well" in here("check").out
    victim = next(
        path for path in sorted((busy / "blobs").glob("??/*")) if path.stat().st_size > 5000
    )
    victim.chmod(0o600)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    said = run("check", "--data-dir", busy)
    assert said.code == 1
    assert f"the blob {victim.name} is damaged" in said.out
    victim.unlink()
    again = json.loads(run("check", "--data-dir", busy, "--json").out)
    assert any(victim.name in breach for breach in again["breaches"])


def test_check_looks_into_the_pages_of_the_database(here: Run, busy: Path, run: Run) -> None:
    file = busy / "coordinator.sqlite3"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(file.read_bytes())
    data[36:40] = (int.from_bytes(data[36:40], "big") + 3).to_bytes(4, "big")  # its free pages
    file.write_bytes(data)
    said = run("check", "--data-dir", busy)
    assert said.code == 1
    assert "the database file is damaged: Main freelist: size is 0" in said.out


def test_a_backup_brings_everything_back(here: Run, busy: Path, run: Run, tmp_path: Path) -> None:
    saved = json.loads(here("backup", tmp_path / "saved", "--json").out)
    assert saved["blobs"] > 0
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "saved" / "keys").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    new = tmp_path / "new"
    restored = run("restore", tmp_path / "saved", "--data-dir", new)
    assert restored.code == 0, restored.err
    assert run("check", "--data-dir", new).code == 0
    for words in (("run", "show", "tiny"), ("volunteer", "list"), ("dataset", "list")):
        before, after = (run(*words, "--data-dir", place).out for place in (busy, new))
        assert after.replace(str(new), str(busy)) == before
    asyncio.run(worked(new, "Cleo", "Dan"))  # life goes on: numbering, leases, merges
    assert "tiny  running  gpt             2" in run("run", "list", "--data-dir", new).out
    twice = run("restore", tmp_path / "saved", "--data-dir", new)
    assert twice.code == 78
    assert f"{new}/coordinator.sqlite3 is not empty" in twice.err


@pytest.mark.parametrize("part", ["backup.json", "tables/tasks.jsonl", "keys/signing.key", "blobs"])
def test_a_damaged_backup_restores_nothing(
    here: Run, busy: Path, run: Run, tmp_path: Path, part: str
) -> None:
    here("backup", tmp_path / "saved")
    victim = tmp_path / "saved" / part
    if victim.is_dir():
        victim = next(path for path in victim.glob("??/*"))
    victim.chmod(0o600)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    said = run("restore", tmp_path / "saved", "--data-dir", tmp_path / "new")
    assert said.code == 78
    assert not (tmp_path / "new" / "coordinator.sqlite3").exists()


@pytest.mark.parametrize("change", [{"revision": "9999"}, {"format": 2}])
def test_a_backup_of_a_newer_version_restores_nothing(
    here: Run, busy: Path, run: Run, tmp_path: Path, change: dict[str, Any]
) -> None:
    saved = tmp_path / "saved"
    here("backup", saved)
    listed = json.loads((saved / "backup.json").read_bytes()) | change
    payload = json.dumps(listed).encode()
    signature = SigningKey.load(busy / "signing.key").sign(payload).hex()
    for name, data in (("backup.json", payload), ("backup.sig", signature.encode())):
        (saved / name).chmod(0o600)
        (saved / name).write_bytes(data)
    restored = run("restore", saved, "--data-dir", tmp_path / "new")
    assert restored.code == 78
    assert "restore it with the version that made it" in restored.err
    assert not (tmp_path / "new" / "coordinator.sqlite3").exists()


def test_a_backup_goes_into_the_other_database(
    here: Run, busy: Path, run: Run, tmp_path: Path, database_url: str
) -> None:
    here("backup", tmp_path / "saved")
    if database_url.startswith("sqlite"):
        database_url = f"sqlite:///{tmp_path}/elsewhere.sqlite3"
    place = ("--data-dir", tmp_path / "new", "--database", database_url)
    restored = run("restore", tmp_path / "saved", *place)
    assert restored.code == 0, restored.err
    assert "all is well" in run("check", *place).out
    before, after = here("run", "show", "tiny").out, run("run", "show", "tiny", *place).out
    hints = re.compile(r" --(data-dir|database) [^ `]+")
    assert hints.sub("", after) == hints.sub("", before)

    async def goes_on() -> None:
        settings = Settings(data_dir=str(tmp_path / "new"), database=database_url)
        async with opened(settings) as coordinator:
            made = await coordinator.volunteers.invites.create(["Cleo"])
            assert made[0].id == 1
            await coordinator.runs.pause("tiny")

    asyncio.run(goes_on())
    assert "all is well" in run("check", *place).out


def occupied(folder: Path) -> int:
    """Return the bytes of the files below a folder, each counted once."""
    found = [path.stat() for path in folder.rglob("*")]
    return sum({each.st_ino: each.st_size for each in found}.values())


def test_backups_in_a_row_share_blobs_and_are_drilled(
    here: Run, busy: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = tmp_path / "row"
    assert here("backup", row, "--keep", "2").code == 0
    assert os.getpriority(os.PRIO_PROCESS, 0) == 15  # submissions come first
    first = occupied(row)
    assert here("backup", row, "--keep", "2").code == 0
    again = list(row.glob("*/blobs/*/*"))
    assert len({path.stat().st_ino for path in again}) * 2 == len(again)
    assert occupied(row) - first < first  # rows alone: this run is all rows
    done = here("backup", row, "--keep", "2")
    assert "Deleted" in done.out
    listed = json.loads(run("backup", "list", row, "--json").out)
    assert [each["path"] for each in listed] == sorted(map(str, row.iterdir()))
    assert len(listed) == 2
    one = Path(listed[-1]["path"])
    assert json.loads(run("backup", "list", one, "--json").out) == listed[-1:]
    wrong = run("backup", "gs://bucket/row", "--keep", "1", "--data-dir", busy)
    assert (wrong.code, "in s3://bucket/prefix" in wrong.err) == (2, True), wrong
    assert f"{one} is a backup itself" in run("backup", one, "--keep", "2", "--data-dir", busy).err
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in ("~/row", row):
        assert "is whole" in run("backup", "verify", words).out
    drilled = run("backup", "drill", row)
    assert drilled.code == 0, drilled.err
    assert "tiny at version" in drilled.out
    assert "no breaches" in drilled.out
    (row / "2025-12-31T000000").mkdir()  # of a process that was killed
    signature = (one / "backup.sig").read_bytes()
    (one / "backup.sig").write_bytes(b"00")
    assert run("backup", "prune", row, "--keep", "1").code != 0  # the one that stays is damaged
    assert len([*row.iterdir()]) == 3
    (one / "backup.sig").write_bytes(signature)
    assert "2025-12-31" in run("backup", "prune", row, "--keep", "1").out
    assert [str(path) for path in row.iterdir()] == [listed[-1]["path"]]


@contextlib.contextmanager
def small_disk() -> Iterator[None]:
    """Let no file inside the block grow beyond 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_no_half_of_a_backup(run: Run, busy: Path, tmp_path: Path) -> None:
    held = sqlite3.connect(busy / "coordinator.sqlite3")
    held.execute("SELECT count(*) FROM meta").fetchone()  # the files beside the database are there
    for words in ((tmp_path / "one",), (tmp_path / "row", "--keep", "2")):
        with small_disk():
            said = run("backup", *words, "--data-dir", busy)
        assert (said.code, f"no space is left for {words[0]}" in said.err) == (75, True), said
    held.close()
    assert occupied(tmp_path / "row") == 0
    assert not (tmp_path / "one").exists()


def test_a_repeated_backup_outlives_a_full_disk(
    run: Run, busy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, waits = contextlib.ExitStack(), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        disk.close()  # somebody made room
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    with disk:
        disk.enter_context(small_disk())
        said = run("backup", tmp_path / "row", "--every", "6h", "--json", "--data-dir", busy)
    assert (said.code, "next try after 6h" in said.err) == (130, True), said
    assert json.loads(said.out)["rows"] > 0


def test_a_shared_blob_is_read_once(
    here: Run, busy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, read, digest = tmp_path / "row", Counter[str](), hashlib.file_digest

    def counted(file: BufferedReader, name: str) -> hashlib._Hash:
        read[Path(file.name).name] += 1
        return digest(file, name)

    assert here("backup", row, "--keep", "2").code == 0
    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert here("backup", row, "--keep", "2").code == 0
    blobs = {path.name for path in row.glob("*/blobs/*/*")}
    assert blobs
    assert {read[name] for name in blobs} == {1}


def test_what_rots_in_a_row_is_found_and_not_handed_on(
    here: Run, busy: Path, run: Run, tmp_path: Path
) -> None:
    row = tmp_path / "row"
    assert here("backup", row, "--keep", "7").code == 0
    victim = next(row.glob("*/blobs/*/*"))
    victim.chmod(0o600)
    victim.write_bytes(bytes(victim.stat().st_size))
    assert run("backup", "verify", row).code == 78
    assert run("backup", "drill", row).code == 78
    assert here("backup", row, "--keep", "7").code == 0
    assert run("backup", "verify", row).code == 0
    for words in (("list", tmp_path / "nowhere"), ("verify", tmp_path), ("drill", tmp_path)):
        assert run("backup", *words).code == 2
    for every in ("often", "0d", "999999999d", "0" * 5000 + "1d"):
        assert run("backup", row, "--every", every).code == 2


def test_backups_in_a_store_share_blobs_and_are_drilled(
    busy: Path, run: Run, tmp_path: Path, s3_url: str
) -> None:
    row = f"{s3_url}/backups"
    assert "holds no complete backup" in run("backup", "verify", row).err
    there = ("--data-dir", busy)
    first = json.loads(run("backup", row, "--json", *there).out)
    assert first["path"].startswith(row)
    stored = asyncio.run(sizes(row))
    for _ in range(2):
        assert run("backup", row, "--keep", "2", *there).code == 0
    again = asyncio.run(sizes(row))
    assert len([key for key in again if key.endswith("backup.json")]) == 2
    assert {key for key in stored if len(key) == 67} == {key for key in again if len(key) == 67}
    listed = json.loads(run("backup", "list", row, "--json").out)
    assert len(listed) == 2
    assert first["path"] not in [each["path"] for each in listed]
    assert f"{row} is whole" in run("backup", "verify", row).out
    drilled = run("backup", "drill", row)
    assert (drilled.code, "no breaches" in drilled.out) == (0, True), drilled
    assert f"Restored {row} of" in drilled.out
    back = tmp_path / "back"
    assert run("restore", row, "--data-dir", back).code == 0
    assert run("check", "--data-dir", back).code == 0
    assert listed[0]["path"] in run("backup", "prune", row, "--keep", "1").out
    asyncio.run(rot(row))
    damaged = run("backup", "verify", row)
    assert damaged.code == 78, damaged


def test_one_backup_of_a_store_is_had_by_its_name(
    busy: Path, run: Run, tmp_path: Path, s3_url: str
) -> None:
    row, there = f"{s3_url}/backups", ("--data-dir", busy)
    older, newer = (json.loads(run("backup", row, "--json", *there).out) for _ in range(2))
    key = f"{newer['path'].rpartition('/')[2]}/keys/signing.key"
    asyncio.run(put(row, {key: b"not what was saved"}))
    assert run("backup", "verify", row).code == 78
    assert run("backup", "verify", older["path"]).code == 0
    assert run("backup", "drill", f"{older['path']}/").code == 0
    assert run("restore", older["path"], "--data-dir", tmp_path / "back").code == 0
    assert json.loads(run("backup", "list", older["path"], "--json").out) == [older]
    for words in (("prune", older["path"]), (older["path"], *there)):
        said = run("backup", *words)
        assert (said.code, "names one backup" in said.err) == (2, True), said
    absent = run("backup", "verify", f"{row}/2001-01-01T000000")
    assert (absent.code, "2001-01-01T000000 holds no complete" in absent.err) == (2, True)


def test_pruning_a_store_leaves_what_no_backup_listed(
    busy: Path, run: Run, tmp_path: Path, s3_url: str
) -> None:
    row, there = f"{s3_url}/backups", ("--data-dir", busy)
    others = {f"{'ab' * 32:.2}/{'ab' * 32}": b"a blob", "notes/backup.json": b"{}"}
    asyncio.run(put(row, others))
    old = json.loads(run("backup", row, "--json", *there).out)
    before = asyncio.run(sizes(row))
    asyncio.run(worked(busy, "Cleo", "Dan"))
    assert run("backup", row, *there).code == 0
    asyncio.run(put(row, {f"{old['path'].rpartition('/')[2]}/backup.sig": b"00"}))  # damaged
    assert old["path"] in run("backup", "prune", row, "--keep", "1").out
    after = asyncio.run(sizes(row))
    assert others.keys() <= after.keys()
    assert {key for key in before if len(key) == 67} <= after.keys()
    assert run("backup", "verify", row).code == 0


def test_blobs_that_only_the_pruned_backup_lists_go(
    busy: Path, run: Run, tmp_path: Path, s3_url: str
) -> None:
    row, there = f"{s3_url}/backups", ("--data-dir", busy)
    assert run("backup", row, *there).code == 0
    first = asyncio.run(sizes(row))
    other = tmp_path / "other"
    assert run("restore", row, "--data-dir", other).code == 0
    with contextlib.closing(sqlite3.connect(other / "coordinator.sqlite3")) as database:
        gone = database.execute("SELECT sha256 FROM blobs ORDER BY sha256 LIMIT 1").fetchone()[0]
        database.execute("DELETE FROM blobs WHERE sha256 = ?", (gone,))
        database.commit()
    assert run("backup", row, "--data-dir", other).code == 0
    assert run("backup", "prune", row, "--keep", "1").code == 0
    blobs = {key for key in first if len(key) == 67}
    assert blobs - asyncio.run(sizes(row)).keys() == {f"{gone[:2]}/{gone}"}


def test_a_blob_that_goes_while_a_backup_is_made_is_copied_again(
    busy: Path, run: Run, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, there = f"{s3_url}/backups", ("--data-dir", busy)
    finish = StorePlace.finish

    async def late(self: StorePlace, folder: Path, listed: BackupList, payload: bytes) -> None:
        await self._store.delete(min(listed.blobs), "asked")
        if lost:
            await self._blobs.delete(min(listed.blobs), "asked")
        await finish(self, folder, listed, payload)

    monkeypatch.setattr(StorePlace, "finish", late)
    lost = False
    assert run("backup", row, *there).code == 0
    assert run("backup", "verify", row).code == 0
    lost = True
    said = run("backup", row, *there)
    assert (said.code != 0, "back up once more" in said.err) == (True, True), said
    assert len(json.loads(run("backup", "list", row, "--json").out)) == 1


@pytest.mark.parametrize(
    ("folder", "words"),
    [("{busy}/saved", "lies in the data directory"), ("s3:/bucket/x", "in s3://bucket/prefix")],
)
def test_a_backup_needs_a_place_of_its_own(
    folder: str, words: str, busy: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("backup", folder.format(busy=busy), "--data-dir", busy)
    assert (said.code, words in said.err) == (2, True), said
    assert not (busy / "saved").exists()
    assert not (tmp_path / "s3:").exists()


def test_the_store_of_the_blobs_takes_no_backup(busy: Path, run: Run, s3_url: str) -> None:
    place = ("--data-dir", busy, "--blobs", f"{s3_url}/")
    owner = (busy / "blobs" / "owner").read_bytes()
    asyncio.run(put(s3_url, {"owner": owner}))
    said = run("backup", s3_url, *place)
    assert (said.code, "name another prefix" in said.err) == (2, True), said
    assert asyncio.run(sizes(s3_url)) == {"owner": len(owner)}
    assert "--keep must be at least 1" in run("backup", s3_url, "--keep", "-1", *place).err


async def put(url: str, objects: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        store = S3Blobs(url, Path(scratch))
        for key, data in objects.items():
            await store.put_object(key, data, len(data))


async def sizes(url: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        store = S3Blobs(url, Path(scratch))
        return {each["path"]: each["size"] async for each in store.objects(None)}


async def rot(url: str) -> None:
    """Change the bytes of the largest blob of a store."""
    found = await sizes(url)
    key = max((key for key in found if len(key) == 67), key=found.__getitem__)
    with tempfile.TemporaryDirectory() as scratch:
        await S3Blobs(url, Path(scratch)).put_object(key, bytes(found[key]), found[key])


def test_a_restore_over_something_names_it_and_changes_nothing(
    busy: Path, run: Run, tmp_path: Path
) -> None:
    assert run("backup", tmp_path / "copy", "--data-dir", busy).code == 0
    before = run("run", "list", "--json", "--data-dir", busy).out
    said = run("restore", tmp_path / "copy", "--data-dir", busy)
    assert (said.code, said.out) == (78, "")
    assert f"{busy / 'coordinator.sqlite3'} is not empty" in said.err
    assert run("run", "list", "--json", "--data-dir", busy).out == before


@pytest.mark.parametrize("where", ["folder", "store"])
def test_backups_of_two_coordinators_in_one_place_are_not_pruned(
    busy: Path, run: Run, tmp_path: Path, s3_url: str, where: str
) -> None:
    row = str(tmp_path / "row") if where == "folder" else f"{s3_url}/backups"
    assert run("run", "list", "--data-dir", busy).code == 0
    assert run("backup", row, "--keep", "9", "--data-dir", busy).code == 0
    other = tmp_path / "other"
    assert run("invite", "list", "--data-dir", other).code == 78
    assert run("migrate", "--data-dir", other).code == 0
    SigningKey.load_or_create(other / "signing.key")
    assert run("backup", row, "--keep", "9", "--data-dir", other).code == 0
    said = run("backup", "prune", row, "--keep", "1")
    assert (said.code, "backups of several coordinators" in said.err) == (1, True), said
    assert len(json.loads(run("backup", "list", row, "--json").out)) == 2
