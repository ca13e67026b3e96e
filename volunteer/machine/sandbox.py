"""Sandbox that confines the whole program to its own folders, by the kernel: Landlock and seccomp,
Linux 5.19 and later.

A coordinator sends data, never code. If a faulty parser (ours, PyTorch's or Pillow's) executed such
data, the code could write only to the program's own folders and read none of its owner's documents
or keys. A process and its children stay confined until they end; `sandbox_helper` does the jobs
that need the desktop or the settings.

    read and execute    the system, Python and its packages
    write               profile, downloads, exports, temporary files of its own, devices, caches of
                        GPU drivers, names of threads
    connect             TCP to the ports of the coordinator, of proxies, of HTTPS and of DNS
                        (Landlock 4), no Unix socket by its name
    signals             to itself and its children (Landlock 6)
    system calls        those that the program needs (see system_calls)

See landlock(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from volunteer.machine import sandbox_helper, system_calls

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every architecture
_VERSION = 1 << 0
_PATH_BENEATH, _PORT = 1, 2  # kinds of rules
_NO_NEW_PRIVS = 38  # prctl

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_MOVES, _NET, _SCOPED = 2, 4, 6  # first versions with moves of files, TCP, scopes
_OF_VERSION = (0, 13, 14, 15, 15, 16)  # number of rights that each version of the interface knows
_BIND, _CONNECT = 1 << 0, 1 << 1  # rights on TCP ports
_SCOPES = 1 << 0 | 1 << 1  # abstract Unix sockets, signals
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15  # the last: ioctl

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/proc", "/sys", "/nix",
    "/gnu", "/snap", "/var/lib/dbus",
)  # fmt: skip
_PACKAGE = Path(__file__).resolve().parents[2]
DRIVERS = ("~/.nv", "~/.triton", "~/.cache/miopen", "~/.config/miopen", "~/.cache/AMD")


def support_sentence() -> str:
    """Return a sentence about the sandbox that this system offers."""
    version = landlock_version()
    if version:
        return f"Landlock {version} confines the program to its own folders"
    if platform.system() == "Linux":
        return "this kernel confines nothing (Landlock, Linux 5.19 and later)"
    return "nothing on this system confines the program to its own folders"


def confine(
    writable: Iterable[Path], settings: Path, temporary: Path, ports: Iterable[int] | None
) -> bool:
    """Confine this process and all its children; call it before other threads begin.

    The process may write to the folders `writable` and `temporary` (for temporary files), only read
    `settings`, and connect by TCP only to `ports` (None: any, and it may listen). Return False
    if the system cannot confine the process, or only in part.
    """
    version = landlock_version()
    if not version:
        return False
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    _forget_paths()
    files = (1 << _OF_VERSION[min(version, len(_OF_VERSION) - 1)]) - 1
    net = _BIND | _CONNECT if ports is not None and version >= _NET else 0
    handled = struct.pack("QQQ", files, net, _SCOPES)
    handled = handled[: 24 if version >= _SCOPED else 16 if version >= _NET else 8]
    ruleset = _call(_CREATE, ctypes.create_string_buffer(handled), len(handled), 0)
    if ruleset < 0:
        return False
    try:
        for path in (*_readable(), settings):
            _allow(ruleset, path, _READ & files)
        drivers = (Path(place).expanduser() for place in DRIVERS)
        for path in (*writable, temporary, *drivers, Path("/dev")):
            _allow(ruleset, path, files)
        _allow(ruleset, _threads(), (_READ | _WRITE_FILE | _TRUNCATE) & files)
        for port in set(ports or ()) if net else ():
            rule = ctypes.create_string_buffer(struct.pack("=QQ", _CONNECT, port))
            _call(_ADD, ruleset, _PORT, rule, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        return (
            libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            and _call(_RESTRICT, ruleset, 0) == 0
            and _filter_system_calls()
        )
    finally:
        os.close(ruleset)


def _forget_paths() -> None:
    """Remove the home, the folders above it, and the folder where the program started from the
    import paths; keep the package's own folder.
    """
    places = {Path.home(), *Path.home().parents}
    with contextlib.suppress(OSError):  # a path may have been deleted
        places.add(Path.cwd())
    entries = [entry for entry in sys.path if entry and Path(entry) not in places]
    sys.path[:] = dict.fromkeys([*entries, str(_PACKAGE)])


def _readable() -> Sequence[Path]:
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
    libraries = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    places = [Path(place) for place in (*SYSTEM, *python, *libraries)]
    with contextlib.suppress(OSError):
        places += [place for place in Path("/run").iterdir() if place.name != "user"]
    return places


def _threads() -> Path:
    """Return the directory with the thread names that CUDA writes: /proc, but /proc/self for a user
    who may write core_pattern, which names a program that the kernel runs.
    """
    return Path("/proc/self" if os.access("/proc/sys/kernel/core_pattern", os.W_OK) else "/proc")


def _filter_system_calls() -> bool:
    """Filter the system calls that bypass Landlock; return False if that fails. On processors whose
    calls are not listed, filter nothing and return True.
    """
    if not system_calls.is_supported():
        return True
    try:
        listener = system_calls.install()
    except OSError:
        return False
    if listener is not None:
        sandbox_helper.report_refused_calls(listener)
    return True


def _allow(ruleset: int, path: Path, access: int) -> None:
    """Allow access beneath a path, if the path exists."""
    with contextlib.suppress(OSError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        try:
            if not path.is_dir():
                access &= _FILE_ONLY
            rule = ctypes.create_string_buffer(struct.pack("=Qi", access, place))
            _call(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(place)


def landlock_version() -> int:
    """Return Landlock's version; 0 if it is missing or cannot allow moving files."""
    if platform.system() != "Linux":
        return 0
    version = _call(_CREATE, None, 0, _VERSION)
    return version if version >= _MOVES else 0


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), *arguments))
