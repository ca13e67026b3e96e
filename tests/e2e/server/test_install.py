"""The program from the server that asks for it: its wheel by pip, pipx and uv in empty
environments, a wrong hash refused; and updates, which go back where the new version does not start.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import shlex
import ssl
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution, requires, version
from io import BytesIO
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shared.programs.wheel import Wheel, own_wheel
from tests.support.certificates import certificate
from tests.support.server_process import Process

pytestmark = pytest.mark.slow

SITE = Path(pytest.__file__).parent.parent
UNCHECKED = ssl._create_unverified_context()


def pack(folder: Path, name: str, *, whole: bool = False) -> None:
    """A wheel of an installed package, whole or with nothing in it."""
    found = distribution(name)
    stem = f"{name.replace('-', '_')}-{found.version}"
    file = f"{stem}-py3-none-any.whl"
    page = folder / "simple" / re.sub(r"[-_.]+", "-", name).lower() / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{file}">{file}</a>')
    with zipfile.ZipFile(folder / file, "w") as wheel:
        for path in found.files or [] if whole else []:
            if ".." not in path.parts and "RECORD" not in path.name and path.suffix != ".pyc":
                wheel.write(str(found.locate_file(path)), str(path))
        if not whole:
            extra = "Provides-Extra: asyncio\n" if name == "sqlalchemy" else ""
            said = f"Metadata-Version: 2.1\nName: {name}\nVersion: {found.version}\n{extra}"
            wheel.writestr(f"{stem}.dist-info/METADATA", said)
            kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{stem}.dist-info/WHEEL", kind)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def needs(name: str) -> set[str]:
    """Names of the packages that a package needs here."""
    lines = [Requirement(line) for line in requires(name) or []]
    return {
        each.name for each in lines if each.marker is None or each.marker.evaluate({"extra": ""})
    }


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an empty machine whose index is a folder."""
    home = tmp_path_factory.mktemp("machine")
    index = home / "index"
    index.mkdir()
    running = {"pipx"}.union(*map(needs, {"pipx"} | needs("pipx")))
    for name in running:
        pack(index, name, whole=True)
    for name in needs("volunteer") - running:
        pack(index, name)
    own = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return kept | {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:{own}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_COMPILE": "0",  # so pip spells yes: most of the modules are never imported
        "UV_DEFAULT_INDEX": (index / "simple").as_uri(),
        "UV_TOOL_DIR": str(home / "tools"),
        "UV_TOOL_BIN_DIR": str(home / "bin"),
        "UV_CACHE_DIR": str(home / "cache"),
        "UV_PYTHON": sys.executable,
        "PIPX_HOME": str(home / "pipx"),
        "PIPX_BIN_DIR": str(home / "bin"),
        "VOLUNTEER_HOME": str(home / "state"),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A coordinator with a certificate that no authority knows."""
    folder = tmp_path_factory.mktemp("server")
    pem, _ = certificate(folder)
    options = ("--port", "0", "--tls-cert", str(pem), "--tls-key", str(pem))
    with Process(folder / "data", *options) as process:
        yield process


def line(server: Process, installer: str, agent: str = "Macintosh") -> str:
    """The line of /join for a visitor's system that stands first; macOS needs no index of torch."""
    asked = urllib.request.Request(f"{server.url}/join", headers={"user-agent": agent})
    page = urllib.request.urlopen(asked, context=UNCHECKED).read().decode()
    first = html.unescape(re.findall(r"data-install[^>]*>([^<]+)<", page)[0])
    return first if installer == "uv" else first.replace("uvx ", "")


def run(
    command: list[str], machine: dict[str, str], **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=machine["HOME"],
        env=machine | more,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def damaged(line: str) -> str:
    return re.sub(r"sha256=(\w)", lambda found: f"sha256={'0' if found[1] != '0' else '1'}", line)


@pytest.mark.parametrize("installer", ["uv", "pipx"])
def test_the_line_of_the_page_installs_the_program(
    server: Process, machine: dict[str, str], installer: str
) -> None:
    pasted = line(server, installer)
    program = Path(machine["HOME"], "bin", "volunteer")
    wrong = run(["sh", "-c", damaged(pasted)], machine)
    assert wrong.returncode
    assert "sha256" in wrong.stdout + wrong.stderr
    assert not program.exists()
    done = run(["sh", "-c", pasted], machine)
    assert done.returncode == 0, done.stderr
    (packages,) = Path(machine["HOME"]).glob("pipx/venvs/*/lib/*/site-packages")
    (packages / "zz.pth").write_text(f"{SITE}\n")
    for name in ("volunteer", "coordinator"):
        asked = run([name, "--version"], machine)
        assert asked.stdout.strip() == version("volunteer"), asked.stderr
    assert run(["pipx", "uninstall", "volunteer"], machine).returncode == 0


def test_a_missing_build_of_torch_installs_nothing_else(
    server: Process, machine: dict[str, str]
) -> None:
    """The index of this machine has torch, but not the build for NVIDIA's cards."""
    pasted = line(server, "pipx").replace("[mac]", "[cuda]")
    done = run(["sh", "-c", pasted], machine)
    assert done.returncode
    assert "torch==2.13.0+cu130" in done.stdout + done.stderr
    assert not Path(machine["HOME"], "bin", "volunteer").exists()


def test_pip_takes_the_wheel_and_refuses_another(
    server: Process, machine: dict[str, str], tmp_path: Path
) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], machine)
    python = str(tmp_path / "env" / "bin" / "python")
    for change, code in ((damaged, 1), (str, 0)):
        *_, options, address = shlex.split(change(line(server, "pipx")).partition(" && ")[0])
        trust = options.removeprefix("--pip-args=").split()
        pip = [sys.executable, "-m", "pip", "--python", python, "install", *trust, address]
        done = run(pip, machine)
        assert done.returncode == code, done.stderr
        assert ("sha256" in done.stderr) == bool(code)


def environment(folder: Path, machine: dict[str, str], wheel: Wheel) -> Path:
    """The Python of an environment that has a wheel."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], machine)
    python = folder / "bin" / "python"
    found = next(folder.glob("lib/*/site-packages"))
    (found / "zz.pth").write_text(f"{SITE}\n")
    file = folder / wheel.name
    file.write_bytes(wheel.data)
    done = run(
        [str(python), "-m", "pip", "install", "--no-deps", "--ignore-installed", str(file)], machine
    )
    assert done.returncode == 0, done.stderr
    return python


def other(name: str, text: str) -> Wheel:
    """Our wheel with another text in one file, and no record of hashes: installers ask for none."""
    out = BytesIO()
    with zipfile.ZipFile(BytesIO(own_wheel().data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.namelist():
            data = old.read(entry)
            if entry == name:
                data = text.encode()
            new.writestr(entry, data)
    data = out.getvalue()
    return Wheel(name=own_wheel().name, data=data, sha256=hashlib.sha256(data).hexdigest())


def test_an_update_brings_the_coordinators_version(
    server: Process, machine: dict[str, str], tmp_path: Path
) -> None:
    python = environment(tmp_path / "env", machine, other("volunteer/py.typed", "older\n"))
    volunteer = [str(python), "-m", "volunteer"]
    home = {"VOLUNTEER_HOME": str(tmp_path / "state")}
    joined = run([*volunteer, "join", server.link, "--name", "mia"], machine, **home)
    assert joined.returncode == 0, joined.stderr
    done = run([*volunteer, "update"], machine, **home)
    assert done.returncode == 0, done.stderr
    assert "is installed" in done.stdout
    again = run([*volunteer, "update"], machine, **home)
    assert "this is the version" in again.stdout
    asked = "from shared.programs.wheel import own_wheel as w; print(w().sha256)"
    assert run([str(python), "-c", asked], machine).stdout.strip() in line(server, "pipx")


def test_a_version_that_does_not_start_is_taken_back(
    machine: dict[str, str], tmp_path: Path
) -> None:
    broken = other("volunteer/engine.py", "raise RuntimeError('it does not start')\n")
    pem, _ = certificate(tmp_path)
    its = environment(tmp_path / "serving", machine, broken)
    volunteer = [str(environment(tmp_path / "env", machine, own_wheel())), "-m", "volunteer"]
    home = {"VOLUNTEER_HOME": str(tmp_path / "state")}
    command = [str(its), "-P", "-c", "from coordinator.cli.main import main; main()"]
    options = ("--port", "0", "--tls-cert", str(pem), "--tls-key", str(pem))
    with Process(tmp_path / "data", *options, command=command) as server:
        joined = run([*volunteer, "join", server.link, "--name", "mia"], machine, **home)
        assert joined.returncode == 0, joined.stderr
        done = run([*volunteer, "update"], machine, **home)
    assert done.returncode == 75
    assert "it does not start" in done.stderr
    assert "installed again" in done.stderr
    assert run([*volunteer, "--version"], machine).returncode == 0
