"""Slips of configuration: a sentence that names both sides refuses each, and no blob is deleted."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from sqlite3 import connect

import pytest

from coordinator.config import Settings
from coordinator.services import opened
from coordinator.upkeep.store_mark import RENEW_S
from shared.errors import Configuration
from tests.support.databases import empty_sqlite
from tests.support.local_coordinator import LocalCoordinator
from tests.support.virtual_clock import VirtualClock

DATABASE = "coordinator.sqlite3"


def of(folder: Path, *, database: str = "", blobs: str = "") -> Settings:
    return Settings(data_dir=str(folder), space_floor_bytes=0, database=database, blobs=blobs)


async def installed(folder: Path) -> None:
    """Make a coordinator with blobs and an early copy of its database."""
    clock = VirtualClock()
    folder.mkdir()
    async with opened(of(folder), clock) as made:
        await made.store_marks.claim()
        await LocalCoordinator(made, clock).start_run()
        await made.db.write(lambda conn: None)
        with (
            closing(connect(folder / DATABASE)) as source,
            closing(connect(folder / "early.db")) as copy,
        ):
            source.backup(copy)
        await clock.advance(4 * RENEW_S)
        await made.store_marks.renew()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two coordinators, `one` and `two`, which know nothing of each other."""
    folder = tmp_path_factory.mktemp("slips")
    for name in ("one", "two"):
        asyncio.run(installed(folder / name))
    return folder


def blobs(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("[0-9a-f]" * 64)}


def emptied(folder: Path) -> Settings:
    (folder / "one" / DATABASE).write_bytes(b"")
    return of(folder / "one")


def lost(folder: Path) -> Settings:
    (folder / "one" / DATABASE).unlink()
    return of(folder / "one")


def renewed(folder: Path) -> Settings:
    (folder / "one" / DATABASE).write_bytes(empty_sqlite())
    return of(folder / "one")


def misspelt(folder: Path) -> Settings:
    return of(folder / "one", database=f"sqlite:///{folder}/one/coordinator.sqlite")


def earlier(folder: Path) -> Settings:
    shutil.copy(folder / "one" / "early.db", folder / "one" / DATABASE)
    return of(folder / "one")


def staging(folder: Path) -> Settings:
    (folder / "staging").mkdir()
    shutil.copy(folder / "one" / "signing.key", folder / "staging")
    shutil.copy(folder / "one" / "early.db", folder / "staging" / DATABASE)
    return of(folder / "staging", blobs=str(folder / "one" / "blobs"))


def trial(folder: Path) -> Settings:
    """A new coordinator with the key and the store of production."""
    (folder / "trial").mkdir()
    shutil.copy(folder / "one" / "signing.key", folder / "trial")
    (folder / "trial" / DATABASE).write_bytes(empty_sqlite())
    return of(folder / "trial", blobs=str(folder / "one" / "blobs"))


def stranger(folder: Path) -> Settings:
    """A new coordinator with the store of production."""
    return of(folder / "new", blobs=str(folder / "one" / "blobs"))


def strange_database(folder: Path) -> Settings:
    return of(folder / "one", database=f"sqlite:///{folder}/two/{DATABASE}")


def strange_store(folder: Path) -> Settings:
    return of(folder / "one", blobs=str(folder / "two" / "blobs"))


def strange_key(folder: Path) -> Settings:
    shutil.copy(folder / "two" / "signing.key", folder / "one")
    return of(folder / "one")


def strange_both(folder: Path) -> Settings:
    """The key of one, the database and the store of another."""
    return of(
        folder / "one",
        database=f"sqlite:///{folder}/two/{DATABASE}",
        blobs=str(folder / "two" / "blobs"),
    )


def no_key(folder: Path) -> Settings:
    (folder / "one" / "signing.key").unlink()
    return of(folder / "one")


def unmounted(folder: Path) -> Settings:
    """An empty volume in the place of the store."""
    (folder / "one" / "blobs").rename(folder / "mounted")
    (folder / "one" / "blobs").mkdir()
    return of(folder / "one")


def above(folder: Path) -> Settings:
    return of(folder / "one", blobs=str(folder / "one"))


def below(folder: Path) -> Settings:
    some = next((folder / "one" / "blobs").glob("??"))
    return of(folder / "one", blobs=str(some))


def copied_without_mark(folder: Path) -> Settings:
    shutil.copytree(folder / "one" / "blobs", folder / "copy")
    (folder / "copy" / "owner").unlink()
    return of(folder / "one", blobs=str(folder / "copy"))


def merged_stores(folder: Path) -> Settings:
    """The store of another copied over this one's."""
    shutil.copytree(folder / "two" / "blobs", folder / "one" / "blobs", dirs_exist_ok=True)
    return of(folder / "one")


def half_a_mark(folder: Path) -> Settings:
    owner = folder / "one" / "blobs" / "owner"
    owner.chmod(0o600)
    owner.write_bytes(owner.read_bytes()[:40])
    return of(folder / "one")


def no_mark(folder: Path) -> Settings:
    (folder / "one" / "blobs" / "owner").unlink()
    (folder / "one" / DATABASE).write_bytes(empty_sqlite())
    return of(folder / "one")


def relative(folder: Path) -> Settings:
    """A relative path, and another working directory than last time."""
    os.chdir(folder)
    return of(folder / "one", blobs="blobs")


NO_DATABASE = (
    r"missing or empty, but .*/one/blobs belongs to the database .*/one/coordinator\.sqlite3"
)
FOREIGN = r"/one/blobs belongs to the database .*/one/coordinator\.sqlite3.*, this is .*/{}"
STRANGE = (
    r"/blobs is the blob store of the key .*/two/coordinator.*, this is .*/slip/one/coordinator"
)
KEY = r"/signing\.key holds the key .*, but the database belongs to the key"
NO_STORE = (
    r"/slip/{} is not the blob store of this database, .*/slip/one/.*, "
    r"which last used .*/one/blobs: give"
)
SLIPS: dict[Callable[[Path], Settings], str] = {
    emptied: NO_DATABASE,
    lost: NO_DATABASE,
    misspelt: NO_DATABASE,
    stranger: NO_DATABASE,
    renewed: FOREIGN.format("slip/one/coordinator.sqlite3"),
    earlier: FOREIGN.format("slip/one/coordinator.sqlite3"),
    staging: FOREIGN.format("slip/staging/coordinator.sqlite3"),
    trial: FOREIGN.format("slip/trial/coordinator.sqlite3"),
    strange_store: STRANGE,
    merged_stores: STRANGE,
    strange_database: KEY,
    strange_key: KEY,
    strange_both: KEY,
    no_key: r"the database belongs to the key .*, which is not here: copy signing\.key",
    unmounted: NO_STORE.format("one/blobs"),
    above: NO_STORE.format("one"),
    below: NO_STORE.format("one/blobs/.."),
    copied_without_mark: NO_STORE.format("copy"),
    relative: NO_STORE.format("blobs"),
    no_mark: r"/one/blobs holds blobs that .*/slip/one/coordinator\.sqlite3 .* does not know",
    half_a_mark: r"the file `owner` of .*/slip/one/blobs cannot be read",
}


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.__name__)
async def test_a_slip_is_refused_and_deletes_no_blob(
    template: Path,
    tmp_path: Path,
    slip: Callable[[Path], Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "slip"
    shutil.copytree(template, folder)
    monkeypatch.chdir(tmp_path)
    settings, before = slip(folder), blobs(folder)
    clock = VirtualClock()
    with pytest.raises(Configuration, match=SLIPS[slip]):
        async with opened(settings, clock) as made:
            await made.store_marks.claim()
    assert len(before) >= 20
    assert blobs(folder) == before
