"""Ends and second lives of runs: delete, extend, fork, diff; each asks before it does anything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from coordinator.config import Settings
from coordinator.http.app import opened
from tests.support.command_line import Run, worked


def actions(here: Run) -> list[str]:
    return [line["action"] for line in json.loads(here("record", "list", "--json").out)]


def test_nothing_is_done_without_yes(run: Run, here: Run, busy: Path) -> None:
    there = ("--data-dir", busy)
    here("run", "stop", "tiny", "--yes")
    before = here("run", "list").out, actions(here)
    assert run("run", "stop", "tiny", *there).err.endswith(
        "only a running or paused one is stopped\n"
    )
    assert 'no run called "nobody"' in run("run", "stop", "nobody", *there).err
    assert run("volunteer", "forget", "nobody", *there).out == ""
    for words in (
        ("run", "delete", "tiny"),
        ("run", "extend", "tiny", "--versions", "900"),
        ("run", "fork", "again", "--from", "tiny@0"),
    ):
        said = run(*words, *there)
        assert (said.code, "say --yes" in said.out) == (1, True), said
    assert (here("run", "list").out, actions(here)) == before


def test_a_run_is_deleted_and_only_its_record_stays(run: Run, here: Run, busy: Path) -> None:
    there = ("--data-dir", busy)
    assert "ends it" in run("run", "delete", "tiny", "--yes", *there).err
    assert "delete those first" in run("dataset", "delete", "sums", "--yes", *there).err
    here("run", "stop", "tiny", "--yes")
    said = here("run", "delete", "tiny", "--yes").out
    assert "its name is free" in said
    assert "tiny" not in here("run", "list").out
    assert run("run", "show", "tiny", *there).code == 1
    here("dataset", "delete", "sums", "--yes")
    assert "sums" not in here("dataset", "list").out
    assert {"run.delete", "dataset.delete"} <= set(actions(here))
    assert here("check").code == 0
    assert asyncio.run(swept(busy)) > 0
    assert run("check", *there).code == 0  # it says that the clock was ahead
    people = json.loads(run("volunteer", "list", "--json", *there).out)
    assert people[0]["earned_micro"] > 0


async def swept(folder: Path) -> int:
    async with opened(Settings(data_dir=str(folder))) as coordinator:
        coordinator.clock.offset_s = 10 * 86_400.0  # type: ignore[attr-defined]
        return await coordinator.upkeep.sweep()


def test_a_completed_run_is_extended_and_goes_on(run: Run, here: Run, busy: Path) -> None:
    there = ("--data-dir", busy)
    wrong = run("run", "extend", "tiny", "--date", "soon", *there)
    assert (wrong.code, '"soon" is no ISO 8601 date' in wrong.err) == (2, True), wrong
    assert "say what to extend to" in run("run", "extend", "tiny", "--yes", *there).err
    assert "end at once" in run("run", "extend", "tiny", "--versions", "1", "--yes", *there).err
    here("run", "stop", "tiny", "--yes")
    extended = here("run", "extend", "tiny", "--versions", "900", "--yes").out
    assert "ends at version 900 instead of" in extended
    assert "runs again" in extended
    asyncio.run(worked(busy, "Cleo", "Dan"))
    assert "tiny  running  gpt             2" in here("run", "list").out
    assert here("check").code == 0


def test_only_a_paused_run_is_resumed(run: Run, here: Run, busy: Path) -> None:
    def refused(name: str) -> str:
        said = run("run", "resume", name, "--data-dir", busy)
        assert said.code == 1
        return said.err

    assert 'the run "tiny" is running' in refused("tiny")
    here("run", "pause", "tiny")
    here("run", "resume", "tiny")
    here("run", "stop", "tiny", "--yes")
    assert "is completed: `coordinator run extend" in refused("tiny")
    here("run", "fork", "again", "--from", "tiny@1", "--yes")
    assert "is draft: `coordinator run start" in refused("again")
    stopped = run("run", "stop", "again", "--yes", "--data-dir", busy)
    assert (stopped.code, "run delete" in stopped.err) == (1, True), stopped
    assert actions(here).count("run.resume") == 1


def test_a_fork_begins_from_a_version_with_the_file_of_its_run(
    run: Run, here: Run, busy: Path
) -> None:
    there = ("--data-dir", busy)
    for source, why in (
        ("tiny", "must look like"),
        ("tiny@99", "no version 99"),
        ("x@1", "no run"),
    ):
        assert why in run("run", "fork", "again", "--from", source, "--yes", *there).err
    here("run", "fork", "again", "--from", "tiny@1", "--yes")
    here("run", "start", "again")
    rows = {
        row["key"]: row for row in json.loads(here("run", "diff", "tiny", "again", "--json").out)
    }
    assert rows["train.init_from"]["second"] == "tiny@1"
    assert rows.keys() <= {"train.init_from", "(version)", "(tokens)", "(loss)"}
    assert asyncio.run(weights(busy, "tiny", 1)) == asyncio.run(weights(busy, "again", 0))
    draft = here("run", "fork", "third", "--from", "tiny@0", "--yes").out
    here("run", "stop", "tiny", "--yes")
    assert 'the draft "third" begins from it' in run("run", "delete", "tiny", *there).out
    assert "run start third" in draft
    assert "goes" in here("run", "delete", "third", "--yes").out
    assert here("check").code == 0


async def weights(folder: Path, run: str, version: int) -> bytes:
    """Return the bytes of the tensors of a version."""
    from coordinator.database import runs, versions

    async with opened(Settings(data_dir=str(folder))) as coordinator:
        row = await coordinator.db.read(
            lambda conn: versions.get(conn, runs.by_name(conn, run).id, version)
        )
        data = (await coordinator.blobs.local(row.master_sha256)).read_bytes()
        return data[8 + int.from_bytes(data[:8], "little") :]
