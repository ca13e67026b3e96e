"""`volunteer workload new`: a package that passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from shared.errors import BadRequest, Conflict
from shared.workloads.base import load
from tests.support.sources import ROOT
from volunteer.cli.main import run_command
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


def test_the_command_writes_a_package_that_can_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["workload", "new", "leaf-kind"]) == 0
    model = Path("leaf-kind/volunteer_leaf_kind/model.py")
    assert f"next: change {model}, then `pip install -e leaf-kind`" in capsys.readouterr().out
    assert run_command(["workload", "new", "leaf-kind"]) == 1
    monkeypatch.chdir("leaf-kind")
    wheel = build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert load("leaf-kind").name == "leaf-kind"


def test_a_name_that_is_none_or_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="gpt is a workload of this machine"):
        write_package("gpt", tmp_path / "gpt")
    assert not (tmp_path / "gpt").exists()
    for name in ("", "Leaf", "a b", "../a", "1a", "a_b", "a" * 41):
        with pytest.raises(BadRequest, match="lower-case letters"):
            write_package(name, tmp_path / "new")
    (tmp_path / "leaf").mkdir()
    with pytest.raises(Conflict, match="exists already"):
        write_package("leaf", tmp_path / "leaf")
    assert not list(tmp_path.rglob("*.py"))
