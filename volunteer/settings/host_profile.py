"""Directory of a profile, one for each machine because home directories may be shared; the
machine's mark finds it again after a change of name.
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
    """Write the machine's mark into a new profile; without it a renamed machine is unknown."""
    if not (profile / MARK).exists():
        with suppress(OSError):
            (profile / MARK).write_text(machine_mark() if mark is None else mark, encoding="ascii")


def machine_mark() -> str:
    """Return a hashed mark that stays when the machine is renamed; "" if there is none."""
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
        identifier = "container"  # a container's directories are a volume of its own
    return hashlib.sha256(f"volunteer {identifier}".encode()).hexdigest()[:32] if identifier else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
