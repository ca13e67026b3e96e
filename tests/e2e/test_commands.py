"""The organiser's commands, run as words on a command line in this process, on a data directory of their own."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import logging
import shlex
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from PIL import Image
from safetensors.numpy import load_file

from coordinator.app import opened
from coordinator.cli import main
from coordinator.commands import COMMANDS
from coordinator.config import Settings
from shared.links import parse_link
from shared.workloads.pictures import digit_pictures
from tests.e2e.processes import Process
from tests.house import RUN, house


@dataclass(frozen=True)
class Said:
    """What a command wrote and ended with."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line."""

    def words(*words: str | Path) -> Said:
        monkeypatch.setattr("sys.argv", ["coordinator", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, written.out, written.err)

    return words


@pytest.fixture
def here(run: Run, tmp_path: Path) -> Run:
    """Run a command on the data directory of this test; it must succeed."""

    def words(*words: str | Path) -> Said:
        said = run(*words, "--data-dir", tmp_path / "data")
        assert said.code == 0, said.err
        assert said.err == ""
        return said

    return words


def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        text = "".join(f"{a} plus {number} is {a + number};\n" for a in range(60))
        (folder / f"{number}.txt").write_text(text)
    return folder


async def worked(data_dir: Path, *names: str) -> None:
    """A merged version by two volunteers, as if a server had run."""
    async with house(data_dir) as home:
        for name in names:
            worker = await home.join(name)
            assert (await worker.work(seed=zlib.crc32(name.encode()))).state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)
        await home.coordinator.queue.flush()


@pytest.fixture
def busy(here: Run, tmp_path: Path) -> Path:
    """A data directory in which a run has made a version."""
    here(
        "dataset",
        "add",
        "sums",
        "--text",
        corpus(tmp_path),
        "--vocab-size",
        "300",
        "--licence",
        "CC0-1.0",
    )
    (tmp_path / "run.toml").write_text(RUN)
    here("run", "create", tmp_path / "run.toml")
    here("run", "start", "tiny")
    asyncio.run(worked(tmp_path / "data", "Ann", "Bob"))
    return tmp_path / "data"


def json_lines(tmp_path: Path) -> Path:
    """A file with two lines that are no documents."""
    path = tmp_path / "notes.jsonl"
    lines = [json.dumps({"text": f"{n} plus 1 is {n + 1}; " * 20}) for n in range(80)]
    lines[4], lines[40] = "{broken", '{"title": "no text"}'
    path.write_text("\n".join(lines))
    return path


def test_every_line_that_is_left_out_is_named_and_kept_in_the_listing(
    run: Run, tmp_path: Path
) -> None:
    path, place = json_lines(tmp_path), ("--data-dir", tmp_path / "data")
    said = run("dataset", "add", "notes", "--text", path, "--vocab-size", "300", *place)
    assert said.code == 0
    assert f"left out: {path} line 5: JSON is malformed" in said.err
    assert f"left out: {path} line 41: Object missing required field `text`" in said.err
    assert "2 left out" in said.out
    listed = run("dataset", "list", *place).out.splitlines()
    assert "LEFT OUT" in listed[0]
    shown = json.loads(run("dataset", "list", "--json", *place).out)[0]
    assert [sentence.partition(":")[0] for sentence in shown["skipped"]] == [
        f"{path} line 5",
        f"{path} line 41",
    ]
    again = run("dataset", "add", "notes", "--text", path, "--vocab-size", "300", *place, "--json")
    assert json.loads(again.out)["skipped"] == shown["skipped"]


def test_a_file_without_one_good_line_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    path, place = tmp_path / "bad.jsonl", ("--data-dir", tmp_path / "data")
    path.write_text("{broken\n" * 30)
    said = run("dataset", "add", "notes", "--text", path, json_lines(tmp_path), *place)
    assert (said.code, said.out) == (2, "")
    assert f"{path}: none of its 30 lines" in said.err
    assert run("dataset", "list", *place).out.startswith("No dataset yet")


@pytest.mark.parametrize("name", ["a/b", "", "..", ".hidden", "-x", "two words", "a" * 65, "a%2fb"])
def test_a_dataset_name_that_fits_no_path_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    place = ("--data-dir", tmp_path / "data")
    said = run("dataset", "add", "--text", json_lines(tmp_path), *place, "--", name)
    assert (said.code, said.out) == (2, "")
    assert "the name of a dataset must be 1 to 64 letters, digits" in said.err
    assert not (tmp_path / "data").exists()


def test_a_run_from_text_to_files(here: Run, busy: Path, tmp_path: Path) -> None:
    datasets = json.loads(here("dataset", "list", "--json").out)
    assert [(d["name"], d["licence"]) for d in datasets] == [("sums", "CC0-1.0")]
    assert datasets[0]["heldout"] > 0
    listed = here("run", "list").out.splitlines()
    assert listed[0].split()[:4] == ["NAME", "STATE", "WORKLOAD", "VERSION"]
    assert listed[1].split()[:4] == ["tiny", "running", "gpt", "1"]
    shown = json.loads(here("run", "show", "tiny", "--json").out)
    assert [version["contributions"] for version in shown["versions"]] == [0, 2]
    assert "paused at version 1" in here("run", "pause", "tiny").out
    assert "running at version 1" in here("run", "resume", "tiny").out
    assert "running at version 2" in here("run", "rollback", "tiny", "--to", "0").out
    assert "completed" in here("run", "stop", "tiny").out
    done = json.loads(
        here("run", "export", "tiny", "--version", "1", "--to", tmp_path / "out", "--json").out
    )
    assert done["version"] == 1
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "tok_emb.weight" in tensors or any("tok_emb" in name for name in tensors)


def test_the_report_of_a_class_opens_in_a_spreadsheet(here: Run, busy: Path) -> None:
    (busy.parent / "names").write_text("=HYPERLINK()\n")
    here("invite", "create", "--names", busy.parent / "names")
    rows = list(csv.DictReader(io.StringIO(here("run", "report", "tiny", "--csv").out)))
    by_name = {row["nickname"] or row["label"]: row for row in rows}
    assert set(by_name) == {"Ann", "Bob", "'=HYPERLINK()"}  # never a formula
    assert by_name["Ann"]["merged"] == "1"
    assert float(by_name["Ann"]["credits_earned"]) > 0
    assert "Ann" in here("run", "report", "tiny").out


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


def test_a_draft_has_no_version_yet(here: Run, tmp_path: Path) -> None:
    here("dataset", "add", "sums", "--text", corpus(tmp_path), "--vocab-size", "300")
    (tmp_path / "run.toml").write_text(RUN)
    made = json.loads(here("run", "create", tmp_path / "run.toml", "--json").out)
    assert made["version"] is None
    listed = here("run", "list").out.splitlines()[1]
    assert listed.split()[:4] == ["tiny", "draft", "gpt", "-"]
    assert json.loads(here("run", "list", "--json").out)[0]["version"] is None
    shown = here("run", "show", "tiny").out
    assert "version   none yet" in shown
    assert json.loads(here("run", "show", "tiny", "--json").out)["run"]["version"] is None
    here("run", "start", "tiny")
    assert json.loads(here("run", "show", "tiny", "--json").out)["run"]["version"] == 0


def test_a_class_with_one_name_twice_is_refused(run: Run, here: Run, tmp_path: Path) -> None:
    here("migrate")
    (tmp_path / "class.csv").write_text("name\nAnn\nBob\nAnn\n")
    said = run(
        "invite", "create", "--names", tmp_path / "class.csv", "--data-dir", tmp_path / "data"
    )
    assert (said.code, said.out) == (2, "")
    assert '"Ann" (number 1) and "Ann" (number 3)' in said.err


def test_invites_are_links_shown_once(here: Run, tmp_path: Path) -> None:
    here("migrate")
    (tmp_path / "class.csv").write_text("mail,Name\nann@x,Ann\nbob@x,Bob Ünal\n,\n")
    rows = list(
        csv.DictReader(io.StringIO(here("invite", "create", "--names", tmp_path / "class.csv").out))
    )
    assert [row["name"] for row in rows] == ["Ann", "Bob Ünal"]
    codes = [parse_link(row["link"]).code for row in rows]
    assert len(set(codes)) == 2
    assert parse_link(rows[0]["link"]).fingerprint
    listed = here("invite", "list").out
    assert "Bob Ünal" in listed
    assert not any(code in listed for code in codes)
    assert "withdrawn" in here("invite", "revoke", "1").out
    single = here("invite", "create", "--count", "3", "--days", "7").out.splitlines()
    assert len(single) == 3


def test_volunteers_can_be_looked_after(here: Run, busy: Path, run: Run) -> None:
    assert "Ann" in here("volunteer", "list").out
    assert "accepted" in here("volunteer", "show", "ann").out
    assert "banned" in here("volunteer", "ban", "Ann").out
    assert json.loads(here("volunteer", "show", "Ann", "--json").out)["person"]["state"] == "banned"
    here("volunteer", "unban", "Ann")
    assert "Anna is renamed" in here("volunteer", "rename", "Ann", "Anna").out
    assert parse_link(here("volunteer", "reissue", "Anna").out).code
    assert "forgotten" in here("volunteer", "forget", "Anna").out
    assert "Anna" not in here("volunteer", "list").out
    assert here("check").code == 0  # the ledger still balances
    nobody = run("volunteer", "ban", "Nobody", "--data-dir", busy)
    assert (nobody.code, nobody.out) == (1, "")


def test_a_number_that_no_failed_task_has_is_said(run: Run, busy: Path) -> None:
    said = run("task", "requeue", "999", "--data-dir", busy)
    assert (said.code, said.out) == (1, "")
    assert "has the number 999" in said.err
    assert run(*the_next(said.err)).code == 0


@pytest.mark.parametrize("words", [("run", "export", "tiny", "--to"), ("backup",)], ids=" ".join)
def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(
    run: Run, busy: Path, words: tuple[str, ...]
) -> None:
    (busy.parent / "file").write_text("")
    for there in (busy.parent / "file", busy.parent / "file" / "below"):
        said = run(*words, there, "--data-dir", busy)
        assert (said.code, said.out) == (2, "")
        assert f"the folder {there} cannot be made for the " in said.err
        assert "name one where you may write" in said.err


def the_next(said: str) -> list[str]:
    """The words, behind the program, of the command that a sentence names."""
    return shlex.split(said.split("`")[1])[1:]


def test_a_command_that_is_named_works_as_printed(run: Run, here: Run) -> None:
    here("migrate")
    assert run(*the_next(here("invite", "list").out)).code == 0
    assert run(*the_next(here("run", "list").out)).code == 0


def test_the_example_is_one_command(run: Run, here: Run) -> None:
    assert "running" in run(*the_next(here("run", "create", "--example").out)).out
    assert here("task", "list", "--failed").out == "No task has failed for good.\n"
    assert "0 tasks wait again" in here("task", "requeue", "--all").out


def test_a_bad_run_file_names_the_nearest_key(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\nworkload = "gpt"\n[task]\nlocal_setps = 3\n')
    said = run("run", "create", tmp_path / "run.toml", "--data-dir", tmp_path / "data")
    assert said.code == 2
    assert 'did you mean "local_steps"?' in said.err


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
        assert run(*words, "--data-dir", new).out == run(*words, "--data-dir", busy).out
    asyncio.run(worked(new, "Cleo", "Dan"))  # life goes on: numbering, leases, merges
    assert "tiny  running  gpt             2" in run("run", "list", "--data-dir", new).out
    twice = run("restore", tmp_path / "saved", "--data-dir", new)
    assert twice.code == 1
    assert "new, empty place" in twice.err


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
    assert run("run", "show", "tiny", *place).out == here("run", "show", "tiny").out

    async def goes_on() -> None:
        settings = Settings(data_dir=str(tmp_path / "new"), database=database_url)
        async with opened(settings) as coordinator:
            made = await coordinator.volunteers.invites.create(["Cleo"])
            assert made[0].id == 1
            await coordinator.runs.pause("tiny")

    asyncio.run(goes_on())
    assert "all is well" in run("check", *place).out


def test_afar_is_as_here(here: Run, busy: Path, run: Run, tmp_path: Path) -> None:
    here(
        "invite", "create"
    )  # a listing of nothing names the command that makes one, from there or from here
    with Process(busy, "--port", "0") as server:
        place = ("--server", server.link, "--token-file", server.token_file)
        same: list[tuple[str, ...]] = [
            ("run", "list"),
            ("run", "show", "tiny", "--json"),
            ("run", "report", "tiny", "--csv"),
            ("dataset", "list"),
            ("volunteer", "list"),
            ("volunteer", "show", "Ann"),
            ("task", "list", "--failed"),
            ("invite", "list"),
            ("check",),
        ]
        for words in same:
            afar, local = run(*words, *place), here(*words)
            assert (afar.code, afar.out) == (0, local.out), afar.err
        added = run(
            "dataset", "add", "far", "--text", tmp_path / "text", "--vocab-size", "300", *place
        )
        assert added.code == 0, added.err
        bad = run("dataset", "add", "bad", "--text", json_lines(tmp_path), *place)
        assert "left out: notes.jsonl line 5: JSON is malformed" in bad.err
        assert str(busy) not in bad.err
        manifests = json.loads(here("dataset", "list", "--json").out)
        assert manifests[0]["skipped"][0].startswith("notes.jsonl line 5: ")
        far, sums = sorted(manifests[1:], key=lambda d: d["name"])
        assert (far["items"], far["size"]) == (sums["items"], sums["size"])
        fetched = run("run", "export", "tiny", "--version", "1", "--to", tmp_path / "far", *place)
        assert fetched.code == 0, fetched.err
        here("run", "export", "tiny", "--version", "1", "--to", tmp_path / "near")
        assert {p.name for p in (tmp_path / "near").iterdir()} == {
            p.name for p in (tmp_path / "far").iterdir()
        }
        near, far_away = (
            load_file(tmp_path / place / "model.safetensors") for place in ("near", "far")
        )
        assert all((far_away[name] == tensor).all() for name, tensor in near.items())
        for word in ("backup", "restore"):
            assert run(word, tmp_path / "b", *place).code == 2
        (tmp_path / "wrong").write_text("x" * 43)
        wrong = run("run", "list", "--server", server.link, "--token-file", tmp_path / "wrong")
        assert (wrong.code, wrong.out) == (78, "")


def test_images_keep_their_classes_on_the_way_to_a_server(run: Run, tmp_path: Path) -> None:
    for number, picture in enumerate(digit_pictures()):
        if number < 200:
            folder = tmp_path / "digits" / f"the digit {picture.label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.pixels).save(folder / f"{number}.png")
    (tmp_path / "digits" / "the digit 3" / "torn.png").write_bytes(b"no picture")
    words = ("dataset", "add", "digits", "--images", tmp_path / "digits", "--size", "16", "--json")
    near = run(*words, "--data-dir", tmp_path / "near")
    with Process(tmp_path / "data", "--port", "0") as server:
        far = run(*words, "--server", server.link, "--token-file", server.token_file)
    here, there = (json.loads(said.out) for said in (near, far))
    assert there["meta"] == here["meta"]
    assert (there["meta"]["classes"], there["meta"]["classes_from"]) == (10, "folders")
    assert [sentence.split(": ", 1)[1] for sentence in here["skipped"]] == [
        sentence.split(": ", 1)[1] for sentence in there["skipped"]
    ]
    assert there["skipped"][0].startswith("torn.png: ")


def test_every_command_of_the_registry_is_typed() -> None:
    for name, command in COMMANDS.items():
        assert command.name == name
        assert command.request.__struct_config__.forbid_unknown_fields
