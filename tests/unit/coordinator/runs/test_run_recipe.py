"""A recipe is written whole or not at all, so that the next try finds nothing in its way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coordinator.runs.run_recipe import write_recipe
from shared.errors import BadRequest


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
def test_a_recipe_that_finds_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    import resource

    file = tmp_path / "mine.toml"
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, most))
    try:
        with pytest.raises(BadRequest, match="cannot be written"):
            write_recipe("dcgan", file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not file.exists()
    assert write_recipe("dcgan", file) == file
    with pytest.raises(BadRequest, match="is there already"):
        write_recipe("dcgan", file)
