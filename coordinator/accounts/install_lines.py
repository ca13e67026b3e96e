"""Install lines for another machine: one for each kind of card, by the system that it runs."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from shared.programs.installation import find_torch
from shared.programs.wheel import PROJECT, Wheel

System = Literal["linux", "windows", "mac", "phone"]

# By system, the build of torch (an extra of the package, which pins it), and the megabytes of the
# download with all dependencies (measured, 2026-11: `pip download --only-binary :all: -d W
# volunteer-*.whl; du -c W`).
_KINDS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "linux": (
        ("No card, or another one", "cpu", 275),
        ("NVIDIA GPU", "cuda", 3090),
        ("AMD GPU", "rocm", 5000),
    ),
    "windows": (("No card, or another one", "cpu", 275), ("NVIDIA GPU", "cuda", 3090)),
    "mac": (("Apple", "mac", 180),),
}
_NAMES = {"linux": "Linux", "windows": "Windows", "mac": "macOS"}
# Lets this terminal find the programs of uv and pipx; on Windows a new terminal finds them.
_FOUND = 'export PATH="$HOME/.local/bin:$PATH"'
_SHELL_UV = f"curl -LsSf https://astral.sh/uv/install.sh | sh && {_FOUND}"
_WINDOWS_UV = 'powershell -c "irm https://astral.sh/uv/install.ps1 | iex"'
_PATH_LINE = "uvx pipx ensurepath"
_PHONE = re.compile(rb"Android|iPhone|iPad|Mobile")
_SYSTEMS: tuple[tuple[re.Pattern[bytes], System], ...] = (
    (_PHONE, "phone"),
    (re.compile(rb"Windows"), "windows"),
    (re.compile(rb"Macintosh|Mac OS X"), "mac"),
)


class InstallLine(msgspec.Struct, frozen=True, kw_only=True):
    """Shell line that installs the program for one kind of graphics card: uv runs pipx (`uvx
    pipx`). Where pipx is installed, `uvx` can be left out.
    """

    kind: str
    build: str  # build of torch, as an extra of the package
    megabytes: int
    line: str


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """Install lines of one system, the line for machines without a card first."""

    system: str
    name: str
    uv: str  # the line that installs uv
    path: str  # the line after which a new terminal finds the program; "" where it is found at once
    lines: tuple[InstallLine, ...]


def installations(wheel: Wheel, url: str, *, pinned: bool) -> tuple[Installation, ...]:
    """Return the lines for a server at `url`, by system; if `pinned`, only a hash verifies the
    program. pipx is run by uv, since `uv tool install` ignores the hash of an address.
    """
    trust = f"--trusted-host {url.partition('://')[2]}" if pinned else ""
    address = f"{url}/install/{wheel.name}#sha256={wheel.sha256}"
    return tuple(
        Installation(
            system=system,
            name=_NAMES[system],
            uv=_WINDOWS_UV if system == "windows" else _SHELL_UV,
            path=_PATH_LINE if system == "windows" else "",
            lines=tuple(
                InstallLine(
                    kind=kind,
                    build=build,
                    megabytes=megabytes,
                    line=_line(system, build, trust, address),
                )
                for kind, build, megabytes in kinds
            ),
        )
        for system, kinds in _KINDS.items()
    )


def _line(system: str, build: str, trust: str, address: str) -> str:
    options = " ".join([*find_torch(build), *filter(None, [trust])])
    arguments = f'--pip-args="{options}" ' if options else ""
    line = f'uvx pipx install {arguments}"{PROJECT}[{build}] @ {address}"'
    return line if system == "windows" else f"{line} && {_PATH_LINE} >/dev/null && {_FOUND}"


def visitor_system(agent: bytes) -> System:
    """Return the system that a browser's User-Agent names; Linux for an unknown User-Agent."""
    return next((system for pattern, system in _SYSTEMS if pattern.search(agent)), "linux")


def message(server: str, link: str, install: str, *, pinned: bool) -> list[str]:
    """Return the lines of a message that invites people, with the commands that they paste."""
    pinned_line = (
        "A browser warns of the server's own certificate; the link carries its fingerprint, and "
        "`volunteer` trusts no other."
    )
    return [
        f"{server} trains a model with volunteers: open the link on a computer, or paste there:",
        *([f"  {install}"] if install else []),
        f"  volunteer join '{link}'",
        *([pinned_line] if pinned else []),
    ]
