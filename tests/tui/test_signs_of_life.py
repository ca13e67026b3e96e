"""A command of either program that has shown nothing for three seconds says that it works."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.network.links import JoinLink, format_link
from tests.support.server_process import COORDINATOR
from tests.tui.terminal import Terminal


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_command_of_the_organiser(silent: socket.socket, tmp_path: Path) -> None:
    token = tmp_path / "admin.token"
    token.write_text("a" * 40)
    address = f"http://127.0.0.1:{silent.getsockname()[1]}"
    words = ["status", "--server", address, "--token-file", str(token)]
    with Terminal([*COORDINATOR, *words]) as terminal:
        terminal.see("still working: coordinator status, ")


def test_a_command_of_a_volunteer(silent: socket.socket, tmp_path: Path) -> None:
    link = format_link(JoinLink(url=f"http://127.0.0.1:{silent.getsockname()[1]}"))
    words = [sys.executable, "-m", "volunteer", "join", link]
    with Terminal(words, VOLUNTEER_HOME=str(tmp_path)) as terminal:
        terminal.see("still working: volunteer join, ")
