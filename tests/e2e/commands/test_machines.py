"""Machines as people have them: every situation ends in a result or a sentence."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
SITUATIONS: dict[str, tuple[dict[str, str], str, tuple[str, ...]]] = {
    "plain": ({}, "", ALL),
    "no locale": ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "", ALL),
    "latin-1": ({"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0", "LANGUAGE": "de"}, "", ALL),
    "a zone with a change": ({"TZ": "Europe/Berlin"}, "", DATED),
    "an unknown zone": ({"TZ": "Nowhere/At_All"}, "", DATED),
    "no home": ({"HOME": "/nonexistent"}, "", ALL),
    "a home that is read-only": (
        {}, 'mount --bind "$PLACE" "$PLACE" && mount -o remount,bind,ro "$PLACE"', ALL
    ),
    "a disk of 64 MB": ({}, 'mount -t tmpfs -o size=64m none "$PLACE"', ALL),
    "a disk of 200 kB": ({}, 'mount -t tmpfs -o size=200k none "$PLACE"', ALL),
    "no shared memory": ({}, "mount --bind /proc/self/fdinfo /dev/shm", BUSY),
    "few open files": ({}, "ulimit -n 64", ALL),
    "2 GB of addresses": ({}, "ulimit -v 2000000", ALL),
    "a proxy that is not there": ({"ALL_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}, "", WIRED),
    "a proxy without a scheme": ({"HTTP_PROXY": "127.0.0.1:9", "NO_PROXY": ""}, "", WIRED),
    "a proxy by SOCKS": ({"ALL_PROXY": "socks5h://127.0.0.1:9", "NO_PROXY": ""}, "", WIRED),
    "a proxy with an odd word": ({"HTTPS_PROXY": "http://ü:p@ss:w@[::1", "NO_PROXY": ""}, "", WIRED),
    "odd settings": ({"VOLUNTEER_THREADS": "many", "COORDINATOR_PORT": "-1"}, "", ALL),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_machine(name: str, tmp_path: Path) -> None:
    environment, before, these = SITUATIONS[name]
    commands = [each for each in COMMANDS if each.startswith(these)]
    place = tmp_path / "Jörg Müller"
    place.mkdir()
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n + 1}\n" for n in range(9000)))
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    surroundings |= {"HOME": str(place), "PLACE": str(place)} | environment
    lines = [before] if before else []
    lines += ['cd "$PLACE"', "set +e"]
    for number, command in enumerate(commands):
        program, *words = shlex.split(command.replace("TEXT", str(tmp_path / "text.txt")))
        line = shlex.join([str(PROGRAMS / program), *words])
        lines.append(
            f"timeout 100 {line} > {tmp_path}/{number}.out 2> {tmp_path}/{number}.err < /dev/null"
        )
        lines.append(f"echo $? > {tmp_path}/{number}.code")
    namespace = ["unshare", "-rm"] if "mount" in before else []
    if namespace and (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], check=False).returncode
    ):
        pytest.skip("no namespaces here")
    subprocess.run([*namespace, "bash", "-c", "\n".join(lines)], env=surroundings, check=False)
    for number, command in enumerate(commands):
        said = (tmp_path / f"{number}.err").read_text(errors="replace")
        code = int((tmp_path / f"{number}.code").read_text())
        assert "Traceback" not in said, (command, said)
        assert code in OUTCOMES, (command, code, said)
