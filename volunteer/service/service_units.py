"""Service definitions: a systemd unit, a launchd property list, a Windows task. Pure.

The service is not restarted after exit status 78 (wrong configuration, a ban, a refused version) or
2 (wrong usage).
"""

from __future__ import annotations

import plistlib
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from shared.errors import Configuration
from shared.sentences import Sentence
from shared.text import escaped

NAME = "volunteer"
LABEL = "org.volunteer.worker"  # name for launchd
STOP_S = 45  # from the stop signal to the kill: enough to release the task
NO_RESTART = (2, 78)
END = Sentence("end it: `volunteer service remove`")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """User and paths of a service."""

    program: tuple[str, ...]  # command that starts the volunteer
    home: Path
    system: str = sys.platform
    uid: int = 0
    machine: bool = False  # True: started with the machine, and run by a user of its own
    environment: Mapping[str, str] = {}
    join: str = ""  # join link of a machine's service
    groups: tuple[str, ...] = ()  # groups of this machine that may use a GPU
    removing: bool = False  # only the names of the files matter


class ServiceFile(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    data: bytes
    secret: bool = False


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Files and commands of a service, and its description for people."""

    files: tuple[ServiceFile, ...]
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    hints: tuple[str, ...]
    log: tuple[str, ...] = ()  # command that follows the log; () if a window shows the log


def describe(target: Target) -> Service:
    """Return the service for a system. Raises Configuration for an unknown system."""
    if target.system == "linux":
        return _systemd_machine(target) if target.machine else _systemd_user(target)
    if target.machine:
        raise Configuration(Sentence("a service for the whole machine needs systemd"))
    if target.system == "darwin":
        return _launchd(target)
    if target.system == "win32":
        return _windows(target)
    raise Configuration(
        Sentence(
            "services are not supported on {system}: start `volunteer --no-ui` there",
            system=target.system,
        )
    )


_UNIT = """\
[Unit]
Description=Volunteer: lends this machine to train a model
StartLimitIntervalSec=0
{after}
[Service]
Type=exec
ExecStart={command}
{environment}# The first SIGTERM finishes what is quick and gives the task back; the second ends at once.
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={stop}
Restart=on-failure
RestartSec=30
# Started again these would end the same way: 2 a slip in the command, 78 a ban, a version that is refused, a setting.
RestartPreventExitStatus={no_restart}

# Never in the way of anything else.
CPUWeight=20
IOWeight=20
OOMScoreAdjust=500

# It needs the network, its own directories and the GPU, and nothing else.
NoNewPrivileges=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077
{hardening}
[Install]
WantedBy={wanted}
"""

_MACHINE_HARDENING = """\
DynamicUser=yes
{groups}StateDirectory=volunteer
StateDirectoryMode=0700
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
PrivateTmp=yes
RemoveIPC=yes
"""


def _systemd_user(target: Target) -> Service:
    path = target.home / ".config" / "systemd" / "user" / f"{NAME}.service"
    unit = _unit(target, wanted_by="default.target")
    control = ("systemctl", "--user")
    return Service(
        files=(ServiceFile(path=path, data=unit.encode()),),
        start=((*control, "daemon-reload"), (*control, "enable", "--now", NAME)),
        stop=((*control, "disable", "--now", NAME), (*control, "daemon-reload")),
        log=("journalctl", "--user", "-fu", NAME),
        hints=(
            Sentence(
                "watch it: `volunteer`, `volunteer status`, or `journalctl --user -fu volunteer`"
            ),
            Sentence("keep it running after logout: `loginctl enable-linger`"),
            END,
        ),
    )


def _systemd_machine(target: Target) -> Service:
    program = Path(target.program[0])
    if not target.removing and any(
        program.is_relative_to(place) for place in ("/home", "/root", target.home)
    ):
        raise Configuration(
            Sentence(
                "{program} lies in a home directory, which a service of the machine cannot read: "
                "install volunteer in a virtual environment below /opt and run this from there",
                program=program,
            )
        )
    secret = Path("/etc") / NAME / "join.env"
    if not target.removing and not target.join and not secret.exists():
        raise Configuration(
            Sentence(
                "a service of the machine joins by itself: add --join with your link (it is stored "
                "readable for root only)"
            )
        )
    path = Path("/etc/systemd/system") / f"{NAME}.service"
    groups = f"SupplementaryGroups={' '.join(target.groups)}\n" if target.groups else ""
    target = msgspec.structs.replace(
        target, environment={**target.environment, "VOLUNTEER_HOME": "/var/lib/volunteer"}
    )
    unit = _unit(
        target,
        wanted_by="multi-user.target",
        after="After=network-online.target\nWants=network-online.target\n",
        hardening=_MACHINE_HARDENING.format(groups=groups),
        secret=secret,
    )
    files = [ServiceFile(path=path, data=unit.encode())]
    if target.join or target.removing:
        line = f"VOLUNTEER_JOIN={_checked(target.join)}\n"
        files.append(ServiceFile(path=secret, data=line.encode(), secret=True))
    return Service(
        files=tuple(files),
        start=(("systemctl", "daemon-reload"), ("systemctl", "enable", "--now", NAME)),
        stop=(("systemctl", "disable", "--now", NAME), ("systemctl", "daemon-reload")),
        log=("journalctl", "-fu", NAME),
        hints=(
            Sentence("watch it: `journalctl -fu volunteer`"),
            Sentence("end it: `volunteer service remove --system`"),
        ),
    )


def _unit(
    target: Target,
    *,
    wanted_by: str,
    after: str = "",
    hardening: str = "",
    secret: Path | None = None,
) -> str:
    lines = [
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in target.environment.items()
    ]
    if secret is not None:
        lines.append(f"EnvironmentFile=-{secret}\n")
    return _UNIT.format(
        after=after,
        command=" ".join(_quoted(word).replace("$", "$$") for word in target.program),
        environment="".join(lines),
        stop=STOP_S,
        no_restart=" ".join(map(str, NO_RESTART)),
        hardening=hardening,
        wanted=wanted_by,
    )


def _quoted(word: str) -> str:
    """Quote a word of a unit file, with specifiers escaped."""
    word = _checked(word).replace("%", "%%")
    plain = all(c.isalnum() or c in "/._-=:+@%#~," for c in word)
    return word if plain else '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _checked(word: str) -> str:
    if any(not c.isprintable() for c in word):
        raise Configuration(
            Sentence('"{word}" cannot be written into a service file', word=escaped(word))
        )
    return word


# launchd restarts after every failure, so the shell turns the exit statuses of NO_RESTART into
# success. A signal may arrive before the shell knows its child.

_LAUNCHD_SCRIPT = """\
ended=
trap 'ended=1; kill -TERM "$child" 2>/dev/null' TERM INT
"$@" & child=$!
test -z "$ended" || kill -TERM "$child" 2>/dev/null
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
case "$code" in {no_restart}) exit 0 ;; esac
exit "$code"
"""


def _launchd(target: Target) -> Service:
    path = target.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    log = str(target.home / "Library" / "Logs" / f"{NAME}.log")
    script = _LAUNCHD_SCRIPT.format(no_restart="|".join(map(str, NO_RESTART)))
    plist = {
        "Label": LABEL,
        "ProgramArguments": ["/bin/sh", "-c", script, NAME, *target.program],
        "EnvironmentVariables": dict(target.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    place = f"gui/{target.uid}"
    return Service(
        files=(ServiceFile(path=path, data=plistlib.dumps(plist)),),
        start=(("launchctl", "bootstrap", place, str(path)),),
        stop=(("launchctl", "bootout", f"{place}/{LABEL}"),),
        log=("tail", "-f", log),
        hints=(
            Sentence(
                "watch it: `volunteer`, `volunteer status`, or `tail -f {log}`",
                log=shlex.quote(log),
            ),
            Sentence("macOS does not shorten that file: remove it when it is large"),
            END,
        ),
    )


# Windows: a task that starts when its owner logs on.

_TASK = """\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.4" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo><Description>Volunteer: lends this machine to train a model</Description></RegistrationInfo>
  <Triggers><LogonTrigger><Enabled>true</Enabled></LogonTrigger></Triggers>
  <Principals><Principal id="Author"><LogonType>InteractiveToken</LogonType><RunLevel>LeastPrivilege</RunLevel></Principal></Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Hidden>true</Hidden>
    <Priority>7</Priority>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{command}</Command>
      <Arguments>{arguments}</Arguments>
    </Exec>
  </Actions>
</Task>
"""


def _windows(target: Target) -> Service:
    # The task restarts only at the next log-on: Windows' own restarts cannot tell exit statuses
    # apart.
    path = target.home / "AppData" / "Local" / NAME / "task.xml"
    program, *arguments = target.program
    sets = [f'set "{name}={value}"' for name, value in target.environment.items()]
    if any(c in text for text in (*sets, *target.program) for c in "%^&|<>\n\r"):
        raise Configuration(
            Sentence("a path with one of % ^ & | < > cannot be used in a Windows task")
        )
    line = " && ".join([*sets, subprocess.list2cmdline([program, *arguments])])
    data = _TASK.format(command="cmd.exe", arguments=escape(f'/d /s /c "{line}"'))
    return Service(
        files=(ServiceFile(path=path, data=data.encode("utf-16")),),
        start=(
            ("schtasks", "/Create", "/TN", NAME, "/XML", str(path), "/F"),
            ("schtasks", "/Run", "/TN", NAME),
        ),
        stop=(("schtasks", "/Delete", "/TN", NAME, "/F"),),
        hints=(
            Sentence("watch it: `volunteer` or `volunteer status`"),
            Sentence("its window opens when you log on: closing it ends it until the next time"),
            END,
        ),
    )
