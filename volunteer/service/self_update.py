"""Update to the coordinator's version of the program, and the way back if it does not start."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from shared.errors import BadSignature, Configuration, NotFound, Unavailable, VolunteerError
from shared.programs.installation import in_source_tree, install_command
from shared.programs.wheel import PROJECT, own_wheel
from shared.proofs.signing import verify_text
from shared.protocol import endpoints
from shared.protocol.accounts import ServerInfo, SignedWheel
from shared.sentences import Sentence
from shared.text import printable
from volunteer.net.api import Api

BYTES_MAX = 64 << 20
INSTALL_S, START_S = 1800.0, 120.0
_NAME = re.compile(rf"{PROJECT}-[0-9A-Za-z.+!]{{1,60}}-py3-none-any\.whl")
_START = (
    "import volunteer.cli.main, volunteer.engine, volunteer.tui.app, volunteer.training.trainer"
)


async def fetch_update(api: Api, public_key: str) -> tuple[str, bytes] | None:
    """Return name and bytes of the coordinator's verified wheel; None if it is installed already.

    Raises BadSignature, NotFound if the coordinator has none, Configuration if this program cannot
    be replaced.
    """
    if in_source_tree():
        raise Configuration(Sentence("the program runs from a source tree: update that"))
    server = await api.call(endpoints.SERVER, patience_s=30.0)
    wheel = _verified_wheel(server, public_key)
    if wheel.sha256 == own_wheel().sha256:
        return None
    data = await api.wheel(wheel)
    if hashlib.sha256(data).hexdigest() != wheel.sha256:
        raise BadSignature(Sentence("the package is not the one that the coordinator signed"))
    return wheel.name, data


def _verified_wheel(server: ServerInfo, public_key: str) -> SignedWheel:
    if server.public_key != public_key:
        raise BadSignature(Sentence("the coordinator shows another key than when you joined"))
    wheel = server.wheel
    if server.install:
        line = printable(server.install)
        raise NotFound(Sentence("the organiser installs the program by: {line}", line=line))
    if wheel is None:
        raise NotFound(Sentence("this coordinator has no package to give: ask your organiser"))
    verify_text(public_key, wheel.signed, wheel.signature)
    if not _NAME.fullmatch(wheel.name) or not 0 < wheel.size <= BYTES_MAX:
        raise BadSignature(Sentence("the package is not the one that the coordinator signed"))
    return wheel


def install_wheel(name: str, data: bytes) -> None:
    """Install a wheel in place of this program. If it does not start, restore the old wheel and
    raise Unavailable.
    """
    old = own_wheel()
    with tempfile.TemporaryDirectory() as folder:
        new, old_wheel = Path(folder, name), Path(folder, "before", old.name)
        old_wheel.parent.mkdir()
        new.write_bytes(data)
        old_wheel.write_bytes(old.data)
        try:
            _run(install_command("--force-reinstall", "--no-deps", str(new)), INSTALL_S)
            # Dependencies that only the new version has; torch stays the build that it is.
            _run(install_command(str(new), f"torch=={version('torch')}"), INSTALL_S)
            _run([sys.executable, "-c", _START], START_S)
        except VolunteerError as error:
            _run(install_command("--force-reinstall", "--no-deps", str(old_wheel)), INSTALL_S)
            raise Unavailable(
                Sentence(
                    "the new version does not start ({problem}); the one before is installed again",
                    problem=error.message,
                )
            ) from error


def _run(command: list[str], seconds: float) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise Configuration(Sentence("{program} is not found", program=command[0]))
    try:
        process = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(Sentence("it takes longer than it may")) from error
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines() or [str(process.returncode)]
        raise Unavailable(printable(lines[-1], 300))
