"""Install lines: one build of torch each, the tested one, and the visitor's system first."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from coordinator.accounts.install_lines import installations, message, visitor_system
from shared.programs.installation import TORCH_FOLDERS
from shared.programs.wheel import Wheel

ROOT = Path(__file__).parents[3]
WHEEL = Wheel(name="volunteer-0.1.0-py3-none-any.whl", data=b"", sha256="ab" * 32)
URL = "https://192.168.1.17:8765"
BUILDS = [line.build for one in installations(WHEEL, URL, pinned=True) for line in one.lines]


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return found


@pytest.mark.parametrize("build", sorted({*BUILDS, *TORCH_FOLDERS}))
def test_each_build_pins_the_torch_that_was_tested(build: str) -> None:
    constraints = (ROOT / "packaging" / "constraints.txt").read_text()
    tested = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    assert tested is not None
    folder = TORCH_FOLDERS.get(build)
    assert extras()[build] == [f"torch=={tested[1]}{f'+{folder}' if folder else ''}"]


def test_a_line_names_its_build_its_place_and_the_hash_of_the_program() -> None:
    linux, windows, mac = installations(WHEEL, URL, pinned=True)
    assert [one.system for one in (linux, windows, mac)] == ["linux", "windows", "mac"]
    uvx, pipx, install, options, package = shlex.split(linux.lines[0].line.partition(" && ")[0])
    assert (uvx, pipx, install) == ("uvx", "pipx", "install")
    assert options == (
        "--pip-args=--find-links https://download.pytorch.org/whl/cpu/torch/"
        " --trusted-host 192.168.1.17:8765"
    )
    assert package == f"volunteer[cpu] @ {URL}/install/{WHEEL.name}#sha256={WHEEL.sha256}"
    assert "--pip-args" not in installations(WHEEL, "https://x.org", pinned=False)[2].lines[0].line


def test_the_program_is_found_in_the_same_terminal_where_the_shell_can_do_that() -> None:
    linux, windows, mac = installations(WHEEL, URL, pinned=False)
    for one in (linux, mac):
        assert one.path == ""
        for line in (one.uv, *(card.line for card in one.lines)):
            assert line.endswith(' && export PATH="$HOME/.local/bin:$PATH"')
    assert windows.path == "uvx pipx ensurepath"
    assert not [card.line for card in windows.lines if "&&" in card.line]


@pytest.mark.parametrize(
    ("agent", "system"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", "linux"),
        ("Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/140.0", "windows"),
        ("Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15", "mac"),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15", "phone"),
        ("Mozilla/5.0 (Linux; Android 15; Pixel 9) Chrome/140.0 Mobile Safari/537.36", "phone"),
        ("curl/8.0", "linux"),
        ("", "linux"),
    ],
)
def test_the_visitors_system_is_read_from_its_browser(agent: str, system: str) -> None:
    assert visitor_system(agent.encode()) == system


def test_a_message_speaks_of_the_warning_only_where_a_browser_warns() -> None:
    link = f"{URL}/join#key=k"
    own = message("Lab", link, "uvx pipx install x", pinned=True)
    assert own[1:3] == ["  uvx pipx install x", f"  volunteer join '{link}'"]
    assert "certificate" in own[-1]
    assert "certificate" not in "".join(message("Lab", link, "", pinned=False))
