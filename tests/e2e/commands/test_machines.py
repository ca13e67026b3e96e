"""Machines as people have them: every situation ends in a result or a sentence."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer

PROGRAMS = Path(sys.executable).parent
LINK = "http://127.0.0.1:9/join#key=AAAA"
COMMANDS = [
    "coordinator settings",
    "coordinator migrate",
    "coordinator run create --recipe gpt Läufe.toml",
    "coordinator dataset add corpus --text TEXT --licence CC0-1.0",
    "coordinator status",
    "coordinator backup Sicherung",
    "volunteer settings",
    "volunteer status",
    f"volunteer join {LINK} --name Zoë",
    "volunteer --no-ui --max-tasks 1",
    "volunteer pause --until 02:30",
    "volunteer uninstall --yes",
]
OUTCOMES = {0, 1, 2, 73, 75, 78}
ALL = ("",)
# The others have nothing to do with dates, with other machines, or with processes of their own.
DATED = (
    "coordinator migrate",
    "coordinator status",
    "coordinator backup",
    "volunteer status",
    "volunteer pause",
)
WIRED = ("coordinator status", "volunteer status", "volunteer join", "volunteer --no-ui")
BUSY = ("coordinator run create", "coordinator dataset add", "volunteer --no-ui")
# The words before the commands run in a mount namespace, where $PLACE is the folder of the test.
# None: only the environment differs, in what Python does not read when it starts, so that the fork
# server runs the commands.
SITUATIONS: dict[str, tuple[dict[str, str], str | None, tuple[str, ...]]] = {
    "plain": ({}, "", ALL),
    "no locale": ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "", ALL),
    "latin-1": ({"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0", "LANGUAGE": "de"}, "", ALL),
    "a zone with a change": ({"TZ": "Europe/Berlin"}, None, DATED),
    "an unknown zone": ({"TZ": "Nowhere/At_All"}, None, DATED),
    "no home": ({"HOME": "/nonexistent"}, None, ALL),
    "a home that is read-only": (
        {}, 'mount --bind "$PLACE" "$PLACE" && mount -o remount,bind,ro "$PLACE"', ALL
    ),
    "a disk of 64 MB": ({}, 'mount -t tmpfs -o size=64m none "$PLACE"', ALL),
    "a disk of 200 kB": ({}, 'mount -t tmpfs -o size=200k none "$PLACE"', ALL),
    "no shared memory": ({}, "mount --bind /proc/self/fdinfo /dev/shm", BUSY),
    "few open files": ({}, "ulimit -n 64", ALL),
    "2 GB of addresses": ({}, "ulimit -v 2000000", ALL),
    "a proxy that is not there": ({"ALL_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}, None, WIRED),
    "a proxy without a scheme": ({"HTTP_PROXY": "127.0.0.1:9", "NO_PROXY": ""}, None, WIRED),
    "a proxy by SOCKS": ({"ALL_PROXY": "socks5h://127.0.0.1:9", "NO_PROXY": ""}, None, WIRED),
    "a proxy with an odd word": ({"HTTPS_PROXY": "http://ü:p@ss:w@[::1", "NO_PROXY": ""}, None, WIRED),
    "odd settings": ({"VOLUNTEER_THREADS": "many", "COORDINATOR_PORT": "-1"}, None, ALL),
}  # fmt: skip


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of the test, which lies in shared memory where there is some."""
    if name != "no shared memory":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_machine(name: str, folder: Path, fork_server: ForkServer) -> None:
    environment, before, these = SITUATIONS[name]
    commands = [each for each in COMMANDS if each.startswith(these)]
    place = folder / "Jörg Müller"
    place.mkdir()
    (folder / "text.txt").write_text("".join(f"{n} and {n + 1}\n" for n in range(9000)))
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    surroundings |= {"HOME": str(place), "PLACE": str(place)} | environment
    lines = [shlex.split(each.replace("TEXT", str(folder / "text.txt"))) for each in commands]
    if before is None:
        ended = [forked(fork_server, line, surroundings, place) for line in lines]
    else:
        ended = by_shell(before, lines, surroundings, folder)
    for command, (code, said) in zip(commands, ended, strict=True):
        assert "Traceback" not in said, (command, said)
        assert code in OUTCOMES, (command, code, said)


def forked(
    fork_server: ForkServer, line: Sequence[str], surroundings: Mapping[str, str], place: Path
) -> tuple[int, str]:
    """Run a command in a process of the fork server; its exit code and its errors."""
    with fork_server.piped(line, surroundings, place) as process:
        _, said = process.communicate()
        return process.wait(100), said


def by_shell(
    before: str, lines: Sequence[Sequence[str]], surroundings: Mapping[str, str], path: Path
) -> list[tuple[int, str]]:
    """Run commands behind words of the shell; the exit code and the errors of each."""
    script = [*([before] if before else []), 'cd "$PLACE"', "set +e"]
    for number, (program, *words) in enumerate(lines):
        line = shlex.join([str(PROGRAMS / program), *words])
        out = f"{path}/{number}"
        script.append(f"timeout 100 {line} > {out}.out 2> {out}.err < /dev/null")
        script.append(f"echo $? > {out}.code")
    namespace = ["unshare", "-rm"] if "mount" in before else []
    if namespace and (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], check=False).returncode
    ):
        pytest.skip("no namespaces here")
    subprocess.run([*namespace, "bash", "-c", "\n".join(script)], env=surroundings, check=False)
    files = [path / str(number) for number in range(len(lines))]
    return [
        (
            int(file.with_suffix(".code").read_text()),
            file.with_suffix(".err").read_text("utf-8", "replace"),
        )
        for file in files
    ]
