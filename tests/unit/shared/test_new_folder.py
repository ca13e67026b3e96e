"""A new folder is filled with all of its files, or it is as it was."""

from __future__ import annotations

import errno
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
        assert [path.name for path in to.iterdir()] == [unfinished.name]
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


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "no space"), RuntimeError(f"I/O error (os error {errno.ENOSPC})")],
)
def test_a_full_disk_is_a_sentence(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(StorageFull, match="no space is left"), new_folder(tmp_path / "o", "it"):
        raise error
    assert not (tmp_path / "o").exists()
