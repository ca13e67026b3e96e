"""Credits are taken back from the command line: on a data directory, and on a running server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sqlalchemy import Connection

from coordinator.config import Settings
from coordinator.database.ledger import spending
from coordinator.http.app import opened
from tests.support.command_line import Run
from tests.support.forkserver import ForkServer
from tests.support.server_process import Process


def earned(here: Run, name: str) -> int:
    person = json.loads(here("volunteer", "show", name, "--json").out)["person"]
    return int(person["earned_micro"])


async def spent(folder: Path, name: str) -> None:
    """Let an account have bought something with a part of what it earned."""
    async with opened(Settings(data_dir=str(folder))) as coordinator:
        found = next(p for p in await coordinator.volunteers.list() if p.nickname == name)

        def buy(conn: Connection) -> None:
            spending.hold(conn, found.volunteer_id, "h", 10, "an answer", 2.0)
            spending.settle(conn, found.volunteer_id, "h", 10, 3.0)

        await coordinator.db.write(buy)


def test_what_was_paid_for_one_contribution_is_taken_back_once(
    here: Run, busy: Path, run: Run
) -> None:
    place = ("--data-dir", busy)
    assert (earned(here, "Ann") > 0, earned(here, "Bob") > 0) == (True, True)
    done = here("contribution", "reverse", "1", "--reason", "an overheated machine").out
    assert done.startswith("1 contribution of ")
    assert done.rstrip().endswith(" earned.")
    assert 0 in (earned(here, "Ann"), earned(here, "Bob"))
    for number, why in (("1", "was taken back already"), ("99", "there is no contribution 99")):
        said = run("contribution", "reverse", number, "--reason", "again", *place)
        assert (said.code, said.out) == (1, "")
        assert why in said.err
    said = run("contribution", "reverse", "2", "--reason", " ", *place)
    assert (said.code, said.out) == (2, "")
    assert "give a reason" in said.err
    assert here("check").code == 0


def test_a_volunteer_is_reversed_since_an_instant(here: Run, busy: Path, run: Run) -> None:
    words = ("volunteer", "reverse", "Ann", "--reason", "copies")
    said = run(*words, "--since", "yesterday", "--data-dir", busy)
    assert (said.code, said.out) == (2, "")
    assert '--since: "yesterday" is not a time such as 2026-12-24T18:00' in said.err
    assert "Nothing was left" in here(*words, "--since", "2100-01-01").out
    asyncio.run(spent(busy, "Ann"))
    done = here(*words, "--since", "2001-01-01").out
    assert done.startswith("1 contribution of Ann reversed: ")
    assert "of it was spent and is owed now" in done
    assert " owed)" in here("volunteer", "show", "Ann").out
    assert "Nothing was left" in here(*words, "--since", "2001-01-01T12:00:00").out
    assert run(*words, "--data-dir", busy).code != 0  # since when is not for us to guess
    assert earned(here, "Ann") == 0
    assert here("check").code == 0


@pytest.mark.parametrize("afar", [False, True], ids=["here", "afar"])
def test_a_ban_with_a_reversal_suspends_too_and_is_lifted(
    here: Run, busy: Path, run: Run, afar: bool, fork_server: ForkServer
) -> None:
    if not afar:
        _ban(here, here, busy, run)
        return
    with Process(busy, "--port", "0", command=fork_server) as server:
        place = ("--server", server.link, "--token-file", server.token_file)

        def there(*words: object) -> object:
            said = run(*words, *place)
            assert said.code == 0, said.err
            return said

        _ban(here, there, busy, run)  # type: ignore[arg-type]


def _ban(here: Run, told: Run, busy: Path, run: Run) -> None:
    said = run("volunteer", "ban", "Ann", "--reverse", "--data-dir", busy)
    assert (said.code, said.out) == (2, "")
    assert "give a reason" in said.err
    first, second = told(
        "volunteer", "ban", "Ann", "--reverse", "--reason", "copies"
    ).out.splitlines()
    assert first == "Ann is banned."
    assert second.startswith("1 contribution of Ann reversed: ")
    shown = here("volunteer", "show", "Ann").out
    assert "suspended: copies" in shown
    told("volunteer", "unban", "Ann")
    done = told("volunteer", "unsuspend", "Ann", "--reason", "a mistake").out
    assert done == "Ann is no longer suspended.\n"
    again = run("volunteer", "unsuspend", "Ann", "--reason", "a mistake", "--data-dir", busy)
    assert (again.code, again.out) == (1, "")
    assert "Ann is not suspended" in again.err
    assert earned(here, "Ann") == 0
    assert here("check").code == 0
