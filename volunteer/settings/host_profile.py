"""Directory of a profile: one for each machine, because several may share a home directory. It
holds a mark of the machine, by which it is found again after the machine was renamed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from shared.errors import Configuration
from shared.sentences import Sentence

MARK, CURRENT = "machine", "current"  # files of a profile: the mark, and the account in use
_LINUX = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
_MAC = ("ioreg", "-rd1", "-c", "IOPlatformExpertDevice")


def profile_directory(data: Path, name: str, host: str, mark: str | None = None) -> Path:
    """Return the directory of a profile on this machine, which may not exist yet.

    Raises Configuration if this machine had several names, each with an account.
    """
    here = data / f"{name}@{host}"
    if (here / CURRENT).exists():
        return here
    mark = machine_mark() if mark is None else mark
    profiles = [path.parent for path in sorted(data.glob(f"{name}@*/{CURRENT}"))]
    matches = [path for path in profiles if mark and _read(path / MARK) == mark]
    if len(matches) > 1:
        names = ", ".join(path.name for path in matches)
        raise Configuration(
            Sentence(
                "this machine had other names, and several have an account: {names}; rename the "
                "one to keep to {here}, in {data}",
                names=names,
                here=here.name,
                data=data,
            )
        )
    return matches[0] if matches else here


def keep_mark(profile: Path, mark: str | None = None) -> None:
    """Write the machine's mark into a profile without a mark."""
    if not (profile / MARK).exists():
        with suppress(OSError):
            (profile / MARK).write_text(machine_mark() if mark is None else mark, encoding="ascii")


def machine_mark() -> str:
    """Return a hash of the system's machine id, which a new host name does not change; "" if the
    system has no such id.
    """
    identifier = ""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            process = subprocess.run(_MAC, capture_output=True, text=True, timeout=5, check=False)
            identifier = next(
                (line for line in process.stdout.splitlines() if "PlatformUUID" in line), ""
            )
    elif sys.platform == "win32":
        import winreg

        with (
            suppress(OSError),
            winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SOFTWARE\Microsoft\Cryptography") as key,
        ):
            identifier = str(winreg.QueryValueEx(key, "MachineGuid")[0])
    else:
        identifier = next(filter(None, map(_read, _LINUX)), "")
    if not identifier and any(path.exists() for path in _CONTAINER):
        identifier = "container"  # each container has a volume of its own for its directories
    return hashlib.sha256(f"volunteer {identifier}".encode()).hexdigest()[:32] if identifier else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
