"""Profiles of machines whose name changes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared.errors import Configuration
from volunteer.settings import settings as config
from volunteer.settings.host_profile import CURRENT, keep_mark, machine_mark, profile_directory


def joined(data: Path, name: str, mark: str) -> Path:
    """A profile with an account, made by a machine with this mark."""
    profile = data / name
    profile.mkdir(parents=True)
    (profile / CURRENT).write_text("1234")
    keep_mark(profile, mark)
    return profile


def test_a_machine_with_another_name_finds_its_account(tmp_path: Path) -> None:
    mine = joined(tmp_path, "default@ada-laptop", "m1")
    joined(tmp_path, "default@other", "m2")
    joined(tmp_path, "second@ada-laptop", "m1")
    assert profile_directory(tmp_path, "default", "dhcp-17-203", "m1") == mine
    assert profile_directory(tmp_path, "default", "ada-laptop", "m1") == mine


def test_machines_that_share_a_home_keep_their_accounts_apart(tmp_path: Path) -> None:
    joined(tmp_path, "default@node1", "m1")
    assert profile_directory(tmp_path, "default", "node2", "m2").name == "default@node2"
    assert profile_directory(tmp_path, "default", "node2", "").name == "default@node2"


def test_two_that_could_be_meant_are_named(tmp_path: Path) -> None:
    joined(tmp_path, "default@home", "m1")
    joined(tmp_path, "default@office", "m1")
    with pytest.raises(
        Configuration, match=r"default@home, default@office; rename .* default@cafe"
    ):
        profile_directory(tmp_path, "default", "cafe", "m1")


def test_the_name_of_the_machine_is_no_part_of_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not machine_mark():
        pytest.skip("nothing on this machine outlives its name")
    environ = {"VOLUNTEER_HOME": str(tmp_path)}
    monkeypatch.setattr(socket, "gethostname", lambda: "ada-laptop.fritz.box")
    first = config.directories(environ)
    (first.profile / CURRENT).write_text("1234")
    monkeypatch.setattr(socket, "gethostname", lambda: "dhcp-17-203")
    found = config.directories(environ)
    assert (found.profile, found.cache) == (first.profile, first.cache)
    assert (first.former_host, found.former_host) == ("", "ada-laptop")
