"""The service of each system: what is written, that it starts and stops, and that a ban is no
reason to start again.
"""

from __future__ import annotations

import plistlib
import signal
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shared.errors import Configuration
from volunteer.service.service import install, remove, target_here
from volunteer.service.service_units import Service, Target, describe

LINK = "https://host:8765/join#key=AB:CD+pin=00+code=x%20y$z"


def service(tmp_path: Path, **changes: object) -> Service:
    given: dict[str, object] = {
        "program": ("/opt/volunteer/bin/volunteer", "--no-ui"),
        "home": tmp_path,
        "system": "linux",
    }
    return describe(Target(**(given | changes)))  # type: ignore[arg-type]


def lines(found: Service) -> list[str]:
    return found.files[0].data.decode().splitlines()


# ----------------------------------------------------------------------------------------- systemd


def test_the_users_unit_is_hardened_and_does_not_start_again_after_a_ban(tmp_path: Path) -> None:
    said = lines(service(tmp_path, environment={"VOLUNTEER_PROFILE": "night"}))
    for line in (
        "ExecStart=/opt/volunteer/bin/volunteer --no-ui",
        "Environment=VOLUNTEER_PROFILE=night",
        "Restart=on-failure",
        "RestartPreventExitStatus=2 78",
        "StartLimitIntervalSec=0",  # a coordinator may be away for longer than ten starts
        "NoNewPrivileges=yes",
        "UMask=0077",
        "WantedBy=default.target",
    ):
        assert line in said
    assert not any(line.startswith("DynamicUser") for line in said)


def test_awkward_paths_cannot_change_the_unit(tmp_path: Path) -> None:
    program = ('/my "tools"/100%/$HOME/v', "--no-ui")
    said = lines(service(tmp_path, program=program))
    assert r'ExecStart="/my \"tools\"/100%%/$$HOME/v" --no-ui' in said
    with pytest.raises(Configuration, match="cannot be written"):
        service(tmp_path, program=("/a\nExecStartPre=/bin/evil", "--no-ui"))


def test_the_machines_unit_has_a_user_of_its_own_and_keeps_the_link_from_others(
    tmp_path: Path,
) -> None:
    found = service(tmp_path, machine=True, join=LINK, groups=("render",))
    said = lines(found)
    for line in ("DynamicUser=yes", "SupplementaryGroups=render", "ProtectHome=yes"):
        assert line in said
    assert "Environment=VOLUNTEER_HOME=/var/lib/volunteer" in said
    assert LINK not in found.files[0].data.decode()
    assert found.files[1].secret
    assert found.files[1].data.decode() == f"VOLUNTEER_JOIN={LINK}\n"


def test_the_machines_unit_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(Configuration, match="--join"):
        service(tmp_path, machine=True)
    with pytest.raises(Configuration, match="a home directory"):
        service(tmp_path, machine=True, join=LINK, program=("/home/me/bin/volunteer",))


# ----------------------------------------------------------------------------- launchd and Windows


def test_launchd_gets_a_property_list(tmp_path: Path) -> None:
    found = service(tmp_path, system="darwin", uid=501)
    wanted = plistlib.loads(found.files[0].data)
    assert wanted["KeepAlive"] == {"SuccessfulExit": False}
    assert wanted["ProgramArguments"][-2:] == ["/opt/volunteer/bin/volunteer", "--no-ui"]
    assert found.start[0][:3] == ("launchctl", "bootstrap", "gui/501")


@pytest.mark.parametrize(("status", "seen"), [(0, 0), (1, 1), (2, 0), (75, 75), (78, 0)])
def test_launchd_is_told_that_a_ban_is_an_end(tmp_path: Path, status: int, seen: int) -> None:
    program = ("/bin/sh", "-c", f"exit {status}")
    wanted = plistlib.loads(service(tmp_path, system="darwin", program=program).files[0].data)
    assert subprocess.run(wanted["ProgramArguments"], check=False).returncode == seen


def test_launchd_lets_the_volunteer_end_in_its_own_way(tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    script = f"trap 'echo well > {mark}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    found = service(tmp_path, system="darwin", program=("/bin/sh", "-c", script))
    wanted = plistlib.loads(found.files[0].data)
    with subprocess.Popen(wanted["ProgramArguments"], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 0
    assert mark.read_text() == "well\n"


def test_launchd_loses_no_signal_that_comes_while_the_volunteer_starts(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    found = service(
        tmp_path, system="darwin", program=("/bin/sh", "-c", "echo ready; exec sleep 60")
    )
    shell, option, script, *program = plistlib.loads(found.files[0].data)["ProgramArguments"]
    late = script.replace("child=$!", f"until [ -e {sent} ]; do sleep 0.01; done; child=$!", 1)
    assert late != script
    with subprocess.Popen([shell, option, late, *program], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGTERM)
        sent.touch()
        try:
            assert running.wait() == 128 + signal.SIGTERM
        finally:
            running.kill()


def test_windows_gets_a_task(tmp_path: Path) -> None:
    found = service(
        tmp_path,
        system="win32",
        program=("C:\\Program Files\\v\\volunteer.exe", "--no-ui"),
        environment={"VOLUNTEER_HOME": "D:\\v"},
    )
    task = ElementTree.fromstring(found.files[0].data.decode("utf-16").partition("?>")[2])
    space = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"
    arguments = task.findtext(f"{space}Actions/{space}Exec/{space}Arguments")
    assert arguments == (
        '/d /s /c "set "VOLUNTEER_HOME=D:\\v" && "C:\\Program Files\\v\\volunteer.exe" --no-ui"'
    )
    with pytest.raises(Configuration, match="cannot be used in a Windows task"):
        service(tmp_path, system="win32", program=("C:\\a&b\\volunteer.exe",))


def test_other_systems_are_told_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(Configuration, match="volunteer --no-ui"):
        service(tmp_path, system="plan9")
    with pytest.raises(Configuration, match="needs systemd"):
        service(tmp_path, system="darwin", machine=True)


# --------------------------------------------------------------------------------------- doing it


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that writes down how it was called."""
    log = tmp_path / "calls"
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$FAILS" = "$2" ] && echo "${{SAYS:-broken}}" >&2 && '
        "exit 1\nexit 0\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return log


def test_installed_and_removed(tmp_path: Path, commands: Path) -> None:
    found = service(tmp_path / "home")
    install(found)
    unit = tmp_path / "home" / ".config" / "systemd" / "user" / "volunteer.service"
    assert "ExecStart=" in unit.read_text()
    assert commands.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now volunteer",
    ]
    install(found)  # again: the running one ends first
    assert commands.read_text().splitlines()[2:] == [
        "--user disable --now volunteer",
        "--user daemon-reload",
        "--user enable --now volunteer",
    ]
    assert remove(found)
    assert not unit.exists()
    assert commands.read_text().splitlines()[5:] == [
        "--user disable --now volunteer",
        "--user daemon-reload",
    ]
    assert not remove(found)  # a second time there is nothing to do


def test_what_the_system_says_is_told(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "enable")
    with pytest.raises(Configuration, match="enable --now volunteer` failed: broken"):
        install(service(tmp_path))


def test_where_no_systemd_serves_the_user_it_says_what_to_do(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "daemon-reload")
    monkeypatch.setenv("SAYS", "Failed to connect to bus: No medium found")
    with pytest.raises(Configuration, match=r"No medium found\. .*log in as this user"):
        install(service(tmp_path))


def test_without_the_systems_program_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Configuration, match="could not be run"):
        install(service(tmp_path))


def test_a_service_uses_the_folders_of_the_shell_that_installed_it(tmp_path: Path) -> None:
    moved = {"XDG_DATA_HOME": "/disk/data", "XDG_CACHE_HOME": "/disk/cache"}
    target = target_here(environ=moved | {"PATH": "/bin"})
    assert "Environment=XDG_DATA_HOME=/disk/data" in lines(
        service(tmp_path, environment=target.environment)
    )
    assert target.environment == moved
    assert target_here(machine=True, environ=moved).environment == {}


def test_the_service_starts_the_profile_it_was_made_from() -> None:
    target = target_here(profile="night", environ={"VOLUNTEER_HOME": "/data/v", "HOME": "/h"})
    assert target.environment == {"VOLUNTEER_HOME": "/data/v", "VOLUNTEER_PROFILE": "night"}
    assert target.program[-1] == "--no-ui"
