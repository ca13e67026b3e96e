"""Foreign text and JSON in the answers of commands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from volunteer.cli import main, start
from volunteer.control.commands import Joined

HOSTILE = "Evil\x1b[31m\x1b]0;pwn\x07 \u202eCo"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the links that were joined with; a coordinator with a hostile name answers."""
    links: list[str] = []

    async def join(directories: Any, link: str, name: str) -> Joined:
        links.append(link)
        return Joined(
            server=HOSTILE,
            url="http://127.0.0.1:1",
            fingerprint="AB-CD",
            nickname="ann",
            created=True,
        )

    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path))
    monkeypatch.setattr(start, "join_now", join)
    return links


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_coordinators_name_cannot_steer_the_terminal(
    joined: list[str], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert main.run_command(["join", "127.0.0.1:1", *more]) == 0
    said = capsys.readouterr().out
    assert "Evil" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


def test_a_link_without_quotes_arrives_in_pieces(joined: list[str]) -> None:
    assert main.run_command(["join", "http://127.0.0.1:1/join#key=AB-", "CD", "--name", "ann"]) == 0
    assert "".join(joined[0].split()) == "http://127.0.0.1:1/join#key=AB-CD"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["pause", "cpu"], {"ordered": "pause", "device": "cpu", "ends_at": None}),
        (
            ["pause", "--until", "login"],
            {"ordered": "pause", "device": "", "ends_at": None, "until": "login"},
        ),
        (["resume"], {"ordered": "resume", "device": ""}),
        (["finish"], {"ordered": "finish", "then_stop": False}),
        (["stop", "--save"], {"ordered": "stop", "how": "save"}),
    ],
)
def test_orders_answer_machines_too(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    answer: dict[str, object],
) -> None:
    class Obedient:
        async def do(self, command: object) -> None: ...

    @asynccontextmanager
    async def attach(endpoint: Path, clock: object) -> AsyncIterator[Obedient]:
        yield Obedient()

    monkeypatch.setattr("volunteer.control.local_socket.attach", attach)
    assert main.run_command([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
