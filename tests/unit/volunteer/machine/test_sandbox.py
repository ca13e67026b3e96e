"""Try what a confined program may still do, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from volunteer.machine import sandbox

CODE = """
import sys
from pathlib import Path
from volunteer.machine import sandbox

own, other = Path(sys.argv[1]), Path(sys.argv[2])
print("confined", sandbox.confine([own, own / "not there"]))
for name, act in (
    ("write own", lambda: (own / "new").write_text("x")),
    ("move own", lambda: (own / "new").replace(own / "deep" / "moved")),
    ("link own", lambda: (own / "link").hardlink_to(own / "deep" / "moved")),
    ("read own", lambda: (own / "deep" / "moved").read_text()),
    ("read other", lambda: (other / "secret").read_text()),
    ("list other", lambda: list(other.iterdir())),
    ("write other", lambda: (other / "secret").write_text("mine")),
    ("make other", lambda: (other / "planted").write_text("mine")),
    ("delete other", lambda: (other / "secret").unlink()),
    ("import", lambda: __import__("torch")),
    ("null", lambda: Path("/dev/null").write_text("x")),
):
    try:
        act()
        print(name, "done")
    except OSError as error:
        print(name, type(error).__name__)
"""
HELD = sandbox.offered().startswith("Landlock")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder of the program and one of its owner; temporary files lie beside both."""
    own, other, temporary = tmp_path / "own", tmp_path / "other", tmp_path / "tmp"
    for path in (own / "deep", other, temporary):
        path.mkdir(parents=True)
    (other / "secret").write_text("key")
    monkeypatch.setenv("TMPDIR", str(temporary))
    return own, other


def outcome(own: Path, other: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(own), str(other)],
        capture_output=True, text=True, check=True, timeout=120, env=dict(os.environ),
    )  # fmt: skip
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


def test_a_confined_program_has_its_own_folders_and_no_others(places: tuple[Path, Path]) -> None:
    found = outcome(*places)
    for act in ("write own", "move own", "link own", "read own", "import", "null"):
        assert found[act] == "done"
    refused = ("read other", "list other", "write other", "make other", "delete other")
    if HELD:
        assert found["confined"] == "True"
        assert {found[act] for act in refused} == {"PermissionError"}
        assert (places[1] / "secret").read_text() == "key"
    else:
        assert found["confined"] == "False"


def test_what_a_system_offers_is_a_sentence() -> None:
    assert "confine" in sandbox.offered()
