"""The organiser's commands, run as words on a command line in this process, on a data directory of
their own.
"""

from __future__ import annotations

import csv
import io
import json
import re
import socket
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from coordinator.cli.main import app
from coordinator.http.routes.operations import COMMANDS
from shared.network.links import parse_link
from shared.programs.usage_errors import OF_THE_OTHER
from tests.support.command_line import Run, corpus, json_lines, the_next
from tests.support.forkserver import ForkServer
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process
from volunteer.cli.main import app as volunteer_app


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
    back = here("run", "rollback", "tiny", "--to", "0").out
    assert "running at version 2, which is version 0 again" in back
    assert "completed" in here("run", "stop", "tiny", "--yes").out
    done = json.loads(
        here("run", "export", "tiny", "--version", "1", "--to", tmp_path / "out", "--json").out
    )
    assert done["version"] == 1
    at = json.loads(here("run", "export", "tiny@0", "--to", tmp_path / "first", "--json").out)
    assert (at["run"], at["version"]) == ("tiny", 0)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "tok_emb.weight" in tensors or any("tok_emb" in name for name in tensors)


def test_a_run_shows_what_its_checks_found_and_cost(here: Run, busy: Path) -> None:
    assert "checks" not in here("run", "show", "tiny").out  # none was made
    with closing(sqlite3.connect(busy / "coordinator.sqlite3")) as rows, rows:
        rows.execute("UPDATE contributions SET train_s = 50, checked_s = 1.25")
        rows.execute(
            "INSERT INTO recomputes (contribution_id, run_id, task_id, volunteer_id, worker_id,"
            " state, owner, attempt, lease_until, work, flops, kind, result, measured, message,"
            " seed, drawn_at)"
            " SELECT id, run_id, task_id, volunteer_id, worker_id, 'done', '', 1, 0, '{}', 1,"
            " 'cpu', 'passed', '{}', '', 0, 0 FROM contributions"
        )
    shown = here("run", "show", "tiny").out
    assert "done again: 2 passed; 2.5 s beside 100.0 s of accepted work (2.5%)" in shown
    cost = json.loads(here("run", "show", "tiny", "--json").out)["checks"]
    assert (cost["drawn"]["passed"], cost["checked_s"], cost["share"]) == (2, 2.5, 0.025)


def test_a_run_shows_its_loss_in_bits_a_byte(here: Run, busy: Path) -> None:
    assert "bits a byte" not in here("run", "show", "tiny").out  # nothing is measured yet
    with closing(sqlite3.connect(busy / "coordinator.sqlite3")) as rows, rows:
        for version, bits in ((0, 3.25), (1, 2.5)):
            told = json.dumps({"bits_per_byte": bits})
            rows.execute(
                "UPDATE evaluations SET state = 'done', loss = 2, metrics = ? WHERE version = ?",
                (told, version),
            )
    assert "2.5000 (first 3.2500)" in here("run", "show", "tiny").out


def test_the_report_of_a_class_opens_in_a_spreadsheet(here: Run, busy: Path) -> None:
    (busy.parent / "names").write_text("=HYPERLINK()\n")
    here("invite", "create", "--names", busy.parent / "names")
    rows = list(csv.DictReader(io.StringIO(here("run", "report", "tiny", "--csv").out)))
    by_name = {row["nickname"] or row["label"]: row for row in rows}
    assert set(by_name) == {"Ann", "Bob", "'=HYPERLINK()"}  # never a formula
    assert by_name["Ann"]["merged"] == "1"
    assert float(by_name["Ann"]["credits_earned"]) > 0
    assert "Ann" in here("run", "report", "tiny").out


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
    code = here("invite", "create", "--qr").out.splitlines()
    assert "█▀▀▀▀▀█" in code[2] or "▄▄▄▄▄" in code[2]
    assert parse_link(code[0]).code


def test_volunteers_can_be_looked_after(here: Run, busy: Path, run: Run) -> None:
    assert "Ann" in here("volunteer", "list").out
    assert "accepted" in here("volunteer", "show", "ann").out
    assert "banned" in here("volunteer", "ban", "Ann").out
    assert json.loads(here("volunteer", "show", "Ann", "--json").out)["person"]["state"] == "banned"
    here("volunteer", "unban", "Ann")
    assert "Anna is renamed" in here("volunteer", "rename", "Ann", "Anna").out
    assert parse_link(here("volunteer", "reissue", "Anna").out).code
    assert "forgotten" in here("volunteer", "forget", "Anna", "--yes").out
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


def test_a_command_that_is_named_works_as_printed(run: Run, here: Run) -> None:
    here("migrate")
    assert run(*the_next(here("invite", "list").out)).code == 0


def test_every_command_that_is_named_is_about_the_same_coordinator(
    run: Run, here: Run, tmp_path: Path
) -> None:
    here("migrate")
    more, data = f"--data-dir {tmp_path / 'data'}", ("--data-dir", tmp_path / "data")
    status = run("status", *data).out
    refused = [run("top", *data).err, run("volunteer", "show", "Eve", *data).err]
    for said in (status, *refused):
        commands = commands_in(said)
        assert commands
        assert [name for name in commands if not name.endswith(more)] == []
    assert len(commands_in(status)) >= 3


def test_a_file_that_is_no_token_is_named_and_not_shown(run: Run, tmp_path: Path) -> None:
    key = tmp_path / "signing.key"
    key.write_text("-----BEGIN PRIVATE KEY-----\nMC4CAQAw\n-----END PRIVATE KEY-----\n")
    said = run("run", "list", "--server", "http://127.0.0.1:9", "--token-file", key)
    assert said.code == 78
    assert f"the file {key} holds no token: name the file admin.token" in said.err
    assert "MC4CAQAw" not in said.err


def test_options_that_name_two_coordinators_or_none_are_refused(
    run: Run, here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("migrate")
    data, token = ("--data-dir", tmp_path / "data"), ("--token-file", tmp_path / "token")
    both = run("run", "list", *data, "--server", "http://127.0.0.1:9", *token)
    assert (both.code, both.out) == (2, "")
    assert "--data-dir and --server name two coordinators" in both.err
    # an unset variable of a script must not lead the command to this machine's coordinator
    empty = run("run", "list", "--server", "", *token)
    assert (empty.code, empty.err) == (
        2,
        "coordinator: --server is empty: name a running server, or leave it out\n",
    )
    unset = run("run", "list", "--data-dir", "")
    assert (unset.code, "--data-dir is empty: name a place" in unset.err) == (2, True)
    alone = run("run", "list", *data, *token)
    assert (alone.code, "--token-file is for --server" in alone.err) == (2, True)
    monkeypatch.setenv("COORDINATOR_SERVER", "http://127.0.0.1:9")
    typed = run("run", "list", *data)
    assert (typed.code, "No run yet" in typed.out) == (0, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("announce", "hello", "--withdraw", "1"), "or --withdraw with a number"),
        (("announce", "--run", "tiny"), "--run and --until are for a new sentence"),
        (("invite", "create", "--names", "x.csv", "--count", "3"), "leave --count and --qr out"),
        (("invite", "create", "--json", "--qr"), "leave --qr out"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    run: Run, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    refused = run(*words, "--data-dir", tmp_path / "data")
    assert (refused.code, refused.out) == (2, "")
    assert sentence in refused.err
    assert not (tmp_path / "data").exists()


def test_a_version_is_named_once(run: Run, busy: Path, tmp_path: Path) -> None:
    place = ("--data-dir", busy, "--to", tmp_path / "out")
    refused = run("run", "export", "tiny@1", "--version", "0", *place)
    assert (refused.code, "give the version once: tiny@1" in refused.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_lost_reply_is_no_reason_to_repeat_a_command(run: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_nothing() -> None:
            connection, _ = server.accept()
            with connection:
                while b"reason" not in connection.recv(1 << 16):
                    pass  # the request arrives whole; its reply is lost

        thread = threading.Thread(target=answer_nothing, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        words = ("grant", "Ann", "5", "--reason", "thanks")
        lost = run(*words, "--server", url, "--token-file", token)
        thread.join(10)
    assert (lost.code, lost.out) == (1, "")
    assert "may have taken effect: look before you repeat it" in lost.err


def test_a_file_without_its_option_is_told_which_options_take_files(run: Run) -> None:
    said = run("dataset", "add", "sums", "texts.txt")
    assert (said.code, said.out) == (2, "")
    assert '"texts.txt" needs an option before it: --text, --chat, --images, ' in said.err
    assert '"x" is one word too many' in run("run", "list", "x").err
    assert '"8931" needs an option before it: --port' in run("serve", "8931").err
    assert '"members" needs an option before it: --workload' in run("demo", "members").err
    assert "there is no option -p: did you mean --port?" in run("serve", "-p", "9000").err
    assert "did you mean `coordinator run start small`?" in run("run", "small", "start").err


def test_a_command_that_another_subject_or_program_has_is_led_there(
    run: Run, tmp_path: Path
) -> None:
    data = tmp_path / "my data"
    said = run("start", "tiny", "--data-dir", data).err
    assert f"did you mean `coordinator run start tiny --data-dir '{data}'`?" in said
    assert "did you mean `volunteer join`?" in run("join", "http://x/join#key=y").err
    for command in OF_THE_OTHER["volunteer"]:
        assert command in app
    for command in OF_THE_OTHER["coordinator"]:
        assert command in volunteer_app
        assert command not in app


def test_an_address_with_the_wrong_scheme_is_told_the_right_one(
    run: Run, busy: Path, fork_server: ForkServer
) -> None:
    with Process(busy, "--port", "0", command=fork_server) as server:
        url = server.url.replace("http://", "https://")
        said = run("run", "list", "--server", url, "--token-file", server.token_file)
    assert (said.code, said.out) == (78, "")
    assert "answers without TLS: an address of it begins with http://" in said.err


def test_an_empty_database_beside_the_files_of_another_is_not_made_silently(
    run: Run, here: Run, tmp_path: Path
) -> None:
    here("migrate")
    here("invite", "create")
    (tmp_path / "data" / "coordinator.sqlite3").rename(tmp_path / "lost")
    said = run("migrate", "--data-dir", tmp_path / "data")
    assert (said.code, said.out) == (78, "")
    assert "is missing or empty, but " in said.err
    assert not (tmp_path / "data" / "coordinator.sqlite3").exists()
    assert "is a new one now" in here("migrate", "--take-over").out


def commands_in(said: str) -> list[str]:
    return re.findall(r"`(coordinator [^`]*)`", said)


@pytest.mark.slow
def test_the_example_is_one_command_and_named_where_there_is_no_run(run: Run, here: Run) -> None:
    here("migrate")
    words = the_next(here("run", "list").out)
    assert words[:3] == ["run", "create", "--example"]
    assert "running" in run(*the_next(run(*words).out)).out
    assert here("task", "list", "--failed").out == "No task has failed for good.\n"
    assert "0 tasks queued again" in here("task", "requeue", "--all").out


def test_a_bad_run_file_names_the_nearest_key(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\nworkload = "gpt"\n[task]\nlocal_setps = 3\n')
    said = run("run", "create", tmp_path / "run.toml", "--data-dir", tmp_path / "data")
    assert said.code == 2
    assert 'did you mean "local_steps"?' in said.err


def evaluated(shown: str) -> bool:
    """Return True if no version of a run waits for its evaluation."""
    states = {version["evaluation"] for version in json.loads(shown)["versions"]}
    return not states & {"waiting", "running"}


def test_afar_is_as_here(
    here: Run, busy: Path, run: Run, tmp_path: Path, fork_server: ForkServer
) -> None:
    here(
        "invite", "create"
    )  # a listing of nothing names the command that makes one, from there or from here
    with Process(busy, "--port", "0", command=fork_server) as server:
        place = ("--server", server.link, "--token-file", server.token_file)
        while not evaluated(run("run", "show", "tiny", "--json", *place).out):
            pass  # the server measures versions meanwhile, which the two outputs would differ by
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


def test_every_command_of_the_organiser_refuses_unknown_fields() -> None:
    for name, command in COMMANDS.items():
        assert command.name == name
        assert command.request.__struct_config__.forbid_unknown_fields


def test_migrate_says_whether_the_database_was_empty(here: Run) -> None:
    assert here("migrate").out.endswith("sqlite3 was empty and is a new one now\n")
    assert here("migrate").out.endswith("sqlite3 is up to date\n")


def test_migrate_says_what_it_signed_after_a_recovery(here: Run) -> None:
    here("migrate")
    assert "signed for the volunteers: no runs, 0 rows" in here("migrate", "--recovered").out
    assert "signed" not in here("migrate").out


def test_migrate_refuses_a_server_and_leaves_this_machine_as_it_is(
    run: Run, tmp_path: Path
) -> None:
    data = tmp_path / "other"
    refused = run("migrate", "--server", "http://127.0.0.1:9", "--data-dir", data)
    assert refused.code == 2
    assert "leave --server out" in refused.err
    assert not data.exists()


def test_a_date_that_has_passed_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN + '[stop]\ndate = "2020-01-01"\n', encoding="utf-8")
    refused = run("run", "create", file, "--data-dir", tmp_path / "data")
    assert refused.code == 2
    assert "has passed: choose a later one" in refused.err


def test_starting_a_paused_run_names_resume(here: Run, run: Run, busy: Path) -> None:
    here("run", "pause", "tiny")
    refused = run("run", "start", "tiny", "--data-dir", busy)
    assert "`coordinator run resume tiny" in refused.err


def test_a_full_disk_refuses_a_run_with_a_sentence(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "full.toml"
    file.write_text("space_floor_bytes = 4_000_000_000_000_000\n", encoding="utf-8")
    full = run("run", "create", "--example", "--config", file, "--data-dir", tmp_path / "data")
    assert full.code == 75
    assert full.err.count("\n") == 1
    assert "free some" in full.err
