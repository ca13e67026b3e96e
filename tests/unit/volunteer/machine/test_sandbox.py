"""Try what a confined program may still do, in a process of its own beside real ones to reach."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from volunteer.account.profile_directory import Identity, Profile
from volunteer.machine import sandbox, system_calls

CODE = """
import asyncio, ctypes, os, resource, signal, socket, sys, threading
from pathlib import Path
from volunteer.cli import start
from volunteer.settings import settings

home, run, victim, known, other = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
places = settings.directories()
listener = start._confine(settings.Settings(), places, screen=True)
from volunteer.control.local_socket import listen
from volunteer.machine import sandbox_helper, priority, sandbox, system_calls
import tempfile

listed = system_calls.listed_calls() if system_calls.is_supported() else ()
numbers = {name: number for name, number, _ in listed}

own, key, config = places.profile, home / ".ssh" / "id", places.config / "config.toml"

def unix(address, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_UNIX, kind) as made:
        made.connect(address)

def pair(address):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.connect(address)

def tcp(port):
    socket.create_connection(("127.0.0.1", port), 5).close()

def multipath(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262) as made:
        made.connect(("127.0.0.1", port))

def fast_open(port, message):
    with socket.socket() as made:
        if message:
            made.sendmsg([b"x"], [], 0x20000000, ("127.0.0.1", port))
        else:
            made.sendto(b"x", 0x20000000, ("127.0.0.1", port))

def listen_unbound():
    with socket.socket() as made:
        made.listen()
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), "nobody can connect"

libc = ctypes.CDLL(None, use_errno=True)

def libc_call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def in_thread(act):
    began = threading.Thread(target=act)
    began.start()
    began.join()

for name, act in (
    ("write own", lambda: (own / "new").write_text("x")),
    ("move own", lambda: (own / "new").replace(own / "receipts")),
    ("link own", lambda: (own / "link").hardlink_to(own / "receipts")),
    ("read own", lambda: (own / "receipts").read_text()),
    ("export", lambda: (home / "volunteer" / "card.txt").write_text("x")),
    ("import", lambda: __import__("torch")),
    ("null", lambda: Path("/dev/null").write_text("x")),
    ("temporary", lambda: tempfile.TemporaryFile().close()),
    ("child", lambda: os.kill(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60"), signal.SIGKILL)),
    ("coordinator", lambda: tcp(known)),
    ("resolve", lambda: socket.getaddrinfo("localhost", 80)),
    ("serve", lambda: listener.listen()),
    ("read config", lambda: config.read_text()),
    ("save", lambda: sandbox_helper.do(settings.save, config, {"threads": 3})),
    ("name a thread", lambda: Path(f"/proc/self/task/{os.getpid()}/comm").write_text("trainer")),
    ("lower", lambda: in_thread(priority.lower_thread)),
    ("crash handler", lambda: open("/proc/sys/kernel/core_pattern", "a").close()),
    ("read other", lambda: key.read_text()),
    ("list other", lambda: list(key.parent.iterdir())),
    ("write other", lambda: key.write_text("mine")),
    ("delete other", lambda: key.unlink()),
    ("bus", lambda: unix(str(run / "bus"))),
    ("bus by a pair", lambda: pair(str(run / "datagrams"))),
    ("abstract", lambda: unix("\\0" + str(run))),
    ("unit", lambda: (run / "systemd" / "evil.service").write_text("x")),
    ("runtime files", lambda: list(run.iterdir())),
    ("kill", lambda: os.kill(victim, signal.SIGKILL)),
    ("write config", lambda: config.write_text("sandbox = false")),
    ("replace config", lambda: (own / "link").rename(config)),
    ("other port", lambda: tcp(other)),
    ("bind", lambda: socket.create_server(("127.0.0.1", 0))),
    ("shared temporary", lambda: (home.parent / "planted").write_text("x")),
    ("type", lambda: __import__("fcntl").ioctl(0, 0x5412, b"x")),
    ("MPTCP", lambda: multipath(other)),
    ("SCTP", lambda: socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET, 132)),
    ("packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    ("fast open", lambda: fast_open(other, False)),
    ("fast open by a message", lambda: fast_open(other, True)),
    ("listen unbound", listen_unbound),
    ("limit", lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (0, 0))),
    ("priority", lambda: os.setpriority(os.PRIO_PROCESS, victim, 19)),
    ("affinity", lambda: os.sched_setaffinity(victim, {0})),
    ("trace", lambda: libc_call("ptrace", 16, victim, 0, 0)),
    ("user namespace", lambda: libc_call("unshare", 0x10000000)),
    ("memory of others", lambda: libc_call("process_vm_readv", victim, 0, 0, 0, 0, 0)),
    ("keyring", lambda: libc_call("syscall", numbers["keyctl"], 0, -3, 1)),
    ("kernel program", lambda: libc_call("syscall", numbers["bpf"], 0, 0, 0)),
    ("times", lambda: os.utime(key, (0, 0))),
    ("owner", lambda: os.chown(key, os.getuid(), os.getgid())),
    ("acl", lambda: os.setxattr(key, "user.x", b"x")),
    ("start path", lambda: (home / "document.txt").read_text()),
    ("free", lambda: sandbox_helper.do(settings.save, config, {"sandbox": False})),
    ("job", lambda: sandbox_helper.do(os.getcwd)),
    ("mode", lambda: key.chmod(0o644)),
):
    try:
        act()
        print(name, "done", sep="=")
    except Exception as error:
        print(name, type(error).__name__, sep="=")
from volunteer.machine.presence import run_here
print("program", repr(sandbox_helper.do(run_here, ["id"])), sep="=")
print("home on sys.path", str(home) in sys.path, sep="=")

async def refused():
    names = []
    async for name in sandbox_helper.refused_calls():
        names.append(name)
        if name == "setxattr":  # the last
            return names

if system_calls.is_supported() and sandbox.landlock_version():
    print("calls=", *asyncio.run(asyncio.wait_for(refused(), 30)))
"""
HELD = sandbox.landlock_version()
REFUSED = {
    "a: sockets of other programs": ("bus", "bus by a pair"),
    "b: their files in the runtime directory": ("unit", "runtime files"),
    "d: its own settings": ("write config", "replace config", "free"),
    "f: temporary files of others": ("shared temporary",),
    "files of its owner": ("read other", "list other", "write other", "delete other", "start path"),
    "its terminal, and more": ("type", "acl", "job", "crash handler", "owner"),
    "TCP past Landlock": ("MPTCP", "SCTP", "fast open", "fast open by a message"),
    "listening without a port": ("listen unbound",),
    "limits of other programs": ("limit", "priority", "affinity"),
    "memory of other programs": ("trace", "memory of others"),
    "rare parts of the kernel": ("user namespace", "keyring", "kernel program", "packets"),
}
UNKNOWN = {"ptrace", "unshare", "process_vm_readv", "keyctl", "bpf", "setxattr"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Outcome of each act of a confined process, and the state of what it tried to reach."""
    with ExitStack() as held:
        base = Path(held.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        home, run = base / "home", base / "run"
        for path in (home / ".ssh", run / "systemd"):
            path.mkdir(parents=True)
        key = home / ".ssh" / "id"
        key.write_text("key")
        key.chmod(0o600)
        (home / "document.txt").write_text("private")
        (home / "probe.py").write_text(CODE)
        kinds = (
            (str(run / "bus"), socket.SOCK_STREAM),
            (str(run / "datagrams"), socket.SOCK_DGRAM),
            ("\0" + str(run), socket.SOCK_STREAM),
        )
        for address, kind in kinds:
            made = held.enter_context(socket.socket(socket.AF_UNIX, kind))
            made.bind(address)
            if kind == socket.SOCK_STREAM:
                made.listen()
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "ab"]
        known, other = (server.getsockname()[1] for server in servers)
        victim = held.enter_context(subprocess.Popen(["sleep", "600"]))
        held.callback(victim.kill)
        environ = {
            **{name: value for name, value in os.environ.items() if name != "TMPDIR"},
            "HOME": str(home), "XDG_RUNTIME_DIR": str(run), "VOLUNTEER_HOME": str(home / "data"),
        }  # fmt: skip
        _joined(home / "data", f"http://127.0.0.1:{known}", environ)
        process = subprocess.run(
            [sys.executable, "probe.py", *map(str, (home, run, victim.pid, known, other))],
            capture_output=True, text=True, check=False, timeout=120, env=environ, cwd=home,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        outcome = dict(line.split("=", 1) for line in process.stdout.splitlines())
        outcome["victim"] = str(victim.poll())
        outcome["key"] = f"{key.read_text()} {stat.S_IMODE(key.stat().st_mode):o}"
        outcome["age"] = "changed" if key.stat().st_mtime == 0 else "unchanged"
        outcome["config"] = (home / "data" / "config.toml").read_text()
        yield outcome


def _joined(base: Path, url: str, environ: dict[str, str]) -> None:
    from volunteer.settings import settings

    identity = Identity(
        url=url, tls_pin="", public_key="ab" * 32, fingerprint="", server="Lab", volunteer_id="v",
        worker_id="w", secret="s", nickname="Ann", registered=True,
    )  # fmt: skip
    places = settings.directories(environ)
    Profile(places.profile).use(identity)
    (base / "config.toml").write_text("# mine\n")


def test_a_confined_program_does_its_work(found: dict[str, str]) -> None:
    acts = (
        "write own", "move own", "link own", "read own", "export", "import", "null", "temporary",
        "child", "coordinator", "resolve", "serve", "read config", "save", "name a thread", "lower",
    )  # fmt: skip
    assert {act: found[act] for act in acts} == dict.fromkeys(acts, "done")
    assert found["config"] == "# mine\nthreads = 3\n"


@pytest.mark.skipif(not HELD, reason="this kernel confines nothing")
@pytest.mark.parametrize("hole", REFUSED)
def test_a_hole_is_closed(found: dict[str, str], hole: str) -> None:
    assert "done" not in {found[act] for act in REFUSED[hole]}, found


@pytest.mark.skipif(HELD < 6, reason="this kernel knows no scopes")
def test_a_confined_program_signals_no_other_and_reaches_no_abstract_socket(
    found: dict[str, str],
) -> None:
    assert (found["kill"], found["victim"]) == ("PermissionError", "None")
    assert found["abstract"] == "PermissionError"


@pytest.mark.skipif(HELD < 4, reason="this kernel knows no rules for ports")
def test_a_confined_program_connects_to_its_coordinator_only(found: dict[str, str]) -> None:
    assert found["other port"] == found["bind"] == "PermissionError"


@pytest.mark.skipif(not HELD, reason="this kernel confines nothing")
def test_a_key_stays_private_and_the_home_is_not_imported_from(found: dict[str, str]) -> None:
    assert found["key"] == "key 600"
    assert found["age"] == "unchanged"
    assert found["home on sys.path"] == "False"
    assert found["program"] == "''"  # no other programs are run outside


@pytest.mark.skipif(
    not (HELD and system_calls.is_supported()), reason="this system filters no calls"
)
def test_a_call_that_is_not_listed_is_absent_and_named(found: dict[str, str]) -> None:
    assert {found["trace"], found["keyring"], found["user namespace"]} == {"OSError"}  # ENOSYS
    assert set(found["calls"].split()) >= UNKNOWN


def test_what_a_system_offers_is_a_sentence() -> None:
    assert "confine" in sandbox.support_sentence()
