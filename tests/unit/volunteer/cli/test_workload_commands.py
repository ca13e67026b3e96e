"""`volunteer workload new`: a package that passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import BadRequest, Conflict
from tests.support.sources import ROOT
from volunteer.cli.workload_commands import write_package


@pytest.mark.slow
def test_the_package_passes_its_own_tests(tmp_path: Path) -> None:
    write_package("leaf-kind", tmp_path / "leaf-kind")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    result = subprocess.run(
        command,
        cwd=tmp_path / "leaf-kind",
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path / 'leaf-kind'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",  # other tests use the other cores
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 passed" in result.stdout, result.stdout[-3000:] + result.stderr[-1000:]


def test_a_name_that_is_none_or_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    for name in ("", "Leaf", "a b", "../a", "1a", "a_b", "a" * 41):
        with pytest.raises(BadRequest, match="lower-case letters"):
            write_package(name, tmp_path / "new")
    (tmp_path / "leaf").mkdir()
    with pytest.raises(Conflict, match="exists already"):
        write_package("leaf", tmp_path / "leaf")
    assert not list(tmp_path.rglob("*.py"))
