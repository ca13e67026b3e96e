"""Identities: private, stored before they are used, one for each coordinator, one instance at a
time.
"""

from __future__ import annotations

import errno
import stat
import subprocess
import sys
from io import FileIO
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from shared.errors import (
    BadRequest,
    BadSignature,
    Configuration,
    Forbidden,
    InvalidName,
    StorageFull,
)
from shared.protocol.accounts import ServerInfo
from shared.protocol.contributions import Verdict
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import LocalMachine, Network
from tests.support.sources import ROOT
from volunteer.account.instance_lock import ProfileAtWork, instance_lock
from volunteer.account.profile_directory import VERDICTS_KEPT, Home, Identity, Profile, new_identity
from volunteer.control import commands
from volunteer.engine import Engine
from volunteer.headless import status_lines
from volunteer.service.service_units import NO_RESTART
from volunteer.settings.settings import directories
from volunteer.tui.agent_view import initial_view


def server(key: str = "ab" * 32, name: str = "home") -> ServerInfo:
    return ServerInfo(
        name=name,
        software="0",
        protocol=1,
        protocol_min=1,
        protocol_min_next=1,
        public_key=key,
        fingerprint="f",
        invite_only=False,
        contact="",
        now=0.0,
        runs=(),
    )


def identity(key: str = "ab" * 32, nickname: str = "Ann") -> Identity:
    return new_identity(
        server(key), url="http://127.0.0.1:1", tls_pin="", nickname=nickname, code=""
    )


@pytest.mark.parametrize("text", [b"../x", b"\xff\xfe\x00", b"x" * 5000])
def test_a_damaged_name_of_the_account_is_told(tmp_path: Path, text: bytes) -> None:
    profile = Profile(tmp_path / "p")
    (profile.path / "current").write_bytes(text)
    with pytest.raises(Configuration, match="current is damaged"):
        profile.current()


def test_a_secret_is_private_and_long(tmp_path: Path) -> None:
    profile = Profile(tmp_path / "p")
    made = identity()
    profile.use(made)
    assert profile.current() == made
    files = [path for path in (tmp_path / "p").rglob("*") if path.is_file()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert len(bytes.fromhex(made.secret)) * 8 >= 128
    assert made.secret != identity().secret


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    profile.use(identity())
    path = next(tmp_path.rglob("identity.json"))
    path.chmod(0o644)
    with pytest.raises(Configuration, match="chmod 600"):
        profile.current()


def test_each_coordinator_has_its_own_identity(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    one, two = identity("ab" * 32), identity("cd" * 32)
    profile.use(one)
    profile.use(two)
    assert profile.current() == two
    assert profile.identity_of(server("ab" * 32)) == one
    assert profile.home(one).path != profile.home(two).path


def test_an_account_that_works_is_replaced_only_by_a_registered_one(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    one, two = msgspec.structs.replace(identity("ab" * 32), registered=True), identity("cd" * 32)
    profile.use(one)
    profile.use(two)
    assert profile.current() == one
    assert profile.identity_of(server("cd" * 32)) == two  # kept: a lost reply makes no second one
    profile.use(msgspec.structs.replace(two, registered=True))
    assert profile.current() == msgspec.structs.replace(two, registered=True)
    profile.use(msgspec.structs.replace(two, registered=False, nickname="again"))
    assert profile.current() == msgspec.structs.replace(two, registered=False, nickname="again")


def test_a_damaged_profile_is_a_sentence(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    assert profile.current() is None
    (tmp_path / "current").write_text("../../etc")
    with pytest.raises(Configuration, match="join again"):
        profile.current()
    profile.use(identity())
    path = next(tmp_path.rglob("identity.json"))
    path.write_bytes(b'{"secret": 3}')
    with pytest.raises(Configuration, match=r"damaged.*move that file away, ask your organiser"):
        profile.current()


def test_damaged_memory_keeps_nobody_from_working(tmp_path: Path) -> None:
    (tmp_path / "memory.json").write_bytes(b"\x00")
    assert Home(tmp_path).memory.consents == ()
    assert (tmp_path / "memory.json.damaged").exists()


def test_verdicts_are_remembered_once_and_not_for_ever(tmp_path: Path) -> None:
    home = Home(tmp_path)
    many = tuple(
        Verdict(contribution=n, task=n, run="r", state="accepted") for n in range(VERDICTS_KEPT + 9)
    )
    home.remember_verdicts(many, 400)
    merged = msgspec.structs.replace(many[50], state="merged")
    home.remember_verdicts((merged,), 300)
    kept = Home(tmp_path).memory
    assert len(kept.verdicts) == VERDICTS_KEPT
    assert kept.verdicts[-1] == merged
    assert kept.news_until == 400


def test_one_instance_at_a_time(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from volunteer.account.instance_lock import instance_lock\n"
        "with instance_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == b"held"
        with (
            pytest.raises(ProfileAtWork, match=f"process {other.pid}") as told,
            instance_lock(profile.path),
        ):
            pass
        assert told.value.exit_code not in NO_RESTART  # a service tries again
        other.kill()  # a crash leaves no lock behind
        other.wait()
    with instance_lock(profile.path):
        pass


# Joining.


async def test_joining_again_keeps_the_account(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house") as home:
        machine = LocalMachine(tmp_path / "machine", home)
        first = await machine.join("Ann")
        again = await machine.join("Somebody else")
        assert (first.created, again.created) == (True, False)
        assert (first.nickname, again.nickname) == ("Ann", "Ann")
        assert len(await home.coordinator.volunteers.list()) == 1


async def test_a_process_that_has_not_connected_yet_knows_name_coordinator_and_key(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "house") as home:
        machine = LocalMachine(tmp_path / "machine", home)
        await machine.join("Ann")
        network = Network(home.transport)
        network.cut = True
        said = status_lines(machine.engine(network).control.status)
        assert said[0].startswith(
            f'"Ann" at {home.coordinator.settings.name} (http://127.0.0.1:1), '
        )
        assert said[0].endswith("offline: not connected yet")


async def test_a_lost_reply_makes_no_second_account(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house") as home:
        machine = LocalMachine(tmp_path / "machine", home)
        network = Network(home.transport)
        network.lose("/register")
        joined = await machine.join("Ann", network)
        assert joined.nickname == "Ann"
        assert sum("/register" in seen for seen in network.seen) == 2
        assert len(await home.coordinator.volunteers.list()) == 1


async def test_a_link_that_names_another_key_is_refused_before_anything_is_told(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "house") as home:
        machine = LocalMachine(tmp_path / "machine", home)
        network = Network(home.transport)
        control = machine.engine(network).control
        with pytest.raises(BadSignature, match="another coordinator answers"):
            await control.do(
                commands.Join(link="http://127.0.0.1:1/join#key=aaaa-aaaa-aaaa-aaaa-aaaa-aaaa")
            )
        assert network.seen == ["GET /api/v1/server"]
        with pytest.raises(BadRequest):
            await control.do(commands.Join(link="not a link at all"))


async def test_a_name_that_is_taken_comes_with_one_that_is_free(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house") as home:
        await LocalMachine(tmp_path / "one", home).join("Ann")
        second = LocalMachine(tmp_path / "two", home)
        with pytest.raises(InvalidName, match="free"):
            await second.join("Ann")
        assert (await second.join("Bob")).nickname == "Bob"
        nobody = await LocalMachine(tmp_path / "three", home).join("")
        assert nobody.nickname.startswith("volunteer-")


async def test_without_an_invite_the_door_stays_shut(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house", invite_only=True) as home:
        with pytest.raises(Forbidden, match="invitation"):
            await LocalMachine(tmp_path / "machine", home).join("Ann")


def test_a_restarted_volunteer_still_knows_what_became_of_its_contributions(tmp_path: Path) -> None:
    places = directories({"VOLUNTEER_HOME": str(tmp_path)})
    profile, made = Profile(places.profile), identity()
    assert Engine(places).control.status.verdicts == ()
    profile.use(made)
    merged = Verdict(contribution=1, task=2, run="r", state="merged", version=3, at=5.0)
    profile.home(made).remember_verdicts((merged,), 1)
    status = Engine(places).control.status
    assert status.verdicts == (merged,)
    assert initial_view(status).models["r"].mine == {3}  # marked on the curve
    (places.profile / "current").write_text("../elsewhere")
    assert Engine(places).control.status.verdicts == ()  # `run` says what is wrong


class Full(FileIO):
    """A file on a disk that is full."""

    @override
    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


def test_a_full_disk_is_told_when_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", lambda self, mode, **_: Full(str(self), "a+"))
    with pytest.raises(StorageFull, match="no space is left for"), instance_lock(tmp_path):
        pass
