"""Set up every test: one torch thread, no real user directories, no deadlines of hypothesis."""

from __future__ import annotations

import gc
import os
import shutil
import sys

# before torch loads: several test processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start share what Python compiled, whatever who runs the tests prefers: a
# server that compiles every module again takes a quarter longer to start.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from shared.programs import gc_freeze
from tests.support.examples import EXAMPLES, PROFILE

pytest_plugins = [
    "tests.support.databases",  # real servers
    "tests.support.lock_order",
    "tests.support.wayward_store",
]

for profile, count in EXAMPLES.items():
    settings.register_profile(profile, deadline=None, print_blob=True, max_examples=count)
settings.load_profile(PROFILE)

RAM_DISK = Path("/dev/shm")
RAM_DISK_BYTES = 2 << 30  # that are free

GARBAGE = 50_000  # new objects until the collector looks at the young ones; Python's own is 700

# A rich traceback, with its variables, takes 0.2 s.
_renderer = structlog.get_config()["processors"][-1]
assert isinstance(_renderer, structlog.dev.ConsoleRenderer)
_renderer.exception_formatter = structlog.dev.plain_traceback


def pytest_configure() -> None:
    """Put the directories of tests on a RAM disk that has room and lets programs run: a coordinator
    syncs its files 50 times in a test, and waits some 5 ms each time for a disk that is busy.
    """
    if not os.access(RAM_DISK, os.W_OK) or os.statvfs(RAM_DISK).f_flag & os.ST_NOEXEC:
        return
    if shutil.disk_usage(RAM_DISK).free > RAM_DISK_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(RAM_DISK))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import every test without the garbage collector, which then never walks what was imported:
    half the time of collecting, and a fifth of that of the tests, went into walking it again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc_freeze.freeze()
        gc.set_threshold(GARBAGE)
        gc.enable()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Use two processes for each core: tests wait for other processes, timers and the disk more
    than half of their time.
    """
    cores = yield
    return cores if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else 2 * cores


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long: at the end no process waits for another's. Whole
    servers, which wait half of their time, take turns with what computes. PostgreSQL is quick in
    the contracts; whole servers and models of a database that use it are slow ones.
    """
    for item in items:
        callspec = getattr(item, "callspec", None)
        whole = "e2e" in item.path.parts or item.path.stem.endswith("_model")
        if whole and callspec is not None and "postgresql" in callspec.id:
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    files = dict.fromkeys((item.path, "e2e" in item.path.parts) for item in items)
    places: dict[Path, float] = {}
    for e2e in (True, False):
        group = [path for path, is_e2e in files if is_e2e == e2e]
        places |= {path: number / len(group) for number, path in enumerate(group)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(autouse=True, scope="module")
def _nothing_left() -> Iterator[None]:
    """Collect the garbage of a file behind it: what it left open is told there, in no other file,
    and open files do not pile up until the collector comes by.
    """
    yield
    gc.collect()
    gc_freeze.freeze()


@pytest.fixture(autouse=True)
def _log_as_found() -> Iterator[None]:
    """A test that sets up the log leaves the others' as it was."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _memory_as_found() -> Iterator[None]:
    """A command that a test runs here may limit the memory of its process, which is the tests'; a
    thread that begins beyond such a limit never tells, and who started it waits for ever.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    if resource.getrlimit(resource.RLIMIT_DATA) != before:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture(autouse=True)
def _priority_as_found() -> Iterator[None]:
    """A volunteer without a screen lowers the priority of its process: the tests behind it in this
    worker would give way to those of all other workers, up to their limits of time.
    """
    if sys.platform == "win32":
        yield
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    now = os.getpriority(os.PRIO_PROCESS, 0)
    assert now == before, "the test lowers its worker: set VOLUNTEER_PRIORITY=normal"


@pytest.fixture(autouse=True, scope="session")
def _own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that a test starts may read or write the settings and data of who runs the tests."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "DATA", "STATE", "CACHE"):
            patch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
        for name in [n for n in os.environ if n.startswith(("VOLUNTEER_", "COORDINATOR_"))]:
            patch.delenv(name)
        yield
