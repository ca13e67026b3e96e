"""A new folder is filled with all of its files, or it is as it was."""

from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from shared.errors import BadRequest, Conflict, StorageFull
from shared.files.new_folder import new_folder


def fill(to: Path, error: type[BaseException]) -> None:
    """Write one file, and fail."""
    with new_folder(to, "the export") as unfinished:
        (unfinished / "one").write_text("1")
        raise error


@pytest.mark.parametrize("made", [False, True])
def test_files_arrive_together(tmp_path: Path, made: bool) -> None:
    to = tmp_path / "a" / "out"
    if made:
        to.mkdir(parents=True)
    with new_folder(to, "the export") as unfinished:
        (unfinished / "one").write_text("1")
        (unfinished / "two").write_text("2")
        assert unfinished.parent == to
        assert not {"one", "two"} & {path.name for path in to.iterdir()}
    assert sorted(path.name for path in to.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_failure_leaves_nothing_and_takes_nothing(
    tmp_path: Path, made: bool, error: type[BaseException]
) -> None:
    to = tmp_path / "out"
    if made:
        to.mkdir()
    with pytest.raises(error):
        fill(to, error)
    assert to.exists() == made
    assert not made or not any(to.iterdir())


def test_a_folder_with_files_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("1")
    with pytest.raises(Conflict, match="is not empty"), new_folder(tmp_path, "the export"):
        pytest.fail("the block must not run")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(BadRequest, match="cannot be made"), new_folder(tmp_path / "file", "it"):
        pytest.fail("the block must not run")


FILL = """
import sys
from pathlib import Path
from shared.files.new_folder import new_folder

with new_folder(Path(sys.argv[1]), "the export") as unfinished:
    (unfinished / "half").write_text("1")
    print("at work", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_never_in_the_way(tmp_path: Path) -> None:
    """A live one keeps its folder to itself; files of a dead one are deleted, and told."""
    to = tmp_path / "out"
    told: list[str] = []
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", FILL, to], stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        with (
            pytest.raises(Conflict, match="another command is writing the export"),
            again(to, told),
        ):
            pytest.fail("the block must not run")
        assert len(list(to.glob(".unfinished-*/half"))) == 1
    finally:
        process.kill()
        process.communicate()
    assert list(to.glob(".unfinished-*/half"))
    with again(to, told) as unfinished:
        (unfinished / "one").write_text("1")
    assert [path.name for path in to.iterdir()] == ["one"]
    assert told == [f"What an earlier command had left unfinished in {to} was deleted."]
    with pytest.raises(Conflict, match="is not empty"), again(to, told):
        pytest.fail("the block must not run")


def again(to: Path, told: list[str]) -> AbstractContextManager[Path]:
    return new_folder(to, "the export", tell=lambda sentence: told.append(str(sentence)))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "no space"), RuntimeError(f"I/O error (os error {errno.ENOSPC})")],
)
def test_a_full_disk_is_a_sentence(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(StorageFull, match="no space is left"), new_folder(tmp_path / "o", "it"):
        raise error
    assert not (tmp_path / "o").exists()
