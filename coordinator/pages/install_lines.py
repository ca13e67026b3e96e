"""Install lines for another machine: one for each kind of device and installer."""

from __future__ import annotations

import msgspec

from shared.installation import TORCH
from shared.wheel import Wheel

# Megabytes of the download with all dependencies (measured, 2026-11: `pip download --only-binary
# :all: -d W volunteer-*.whl; du -c W`), and where pip finds torch's build.
_KINDS = (
    ("Processor only", 275, f"--find-links {TORCH}/cpu/torch/"),
    ("NVIDIA GPU", 3090, f"--find-links {TORCH}/cu128/torch/"),
    ("AMD GPU, Linux", 5000, f"--extra-index-url {TORCH}/rocm6.4"),
    ("Apple", 180, ""),
)


class InstallLine(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of machine, with the line for each installer."""

    kind: str
    megabytes: int
    pipx: str

    @property
    def uv(self) -> str:
        """Return the line that runs pipx by uv, since `uv tool install` ignores the hash of an
        address.
        """
        return f"uvx {self.pipx}"


def install_lines(wheel: Wheel, url: str, *, pinned: bool) -> tuple[InstallLine, ...]:
    """Return the lines for a server at `url`; if `pinned`, a hash verifies the program."""
    trust = f"--trusted-host {url.partition('://')[2]}" if pinned else ""
    address = f'"{url}/install/{wheel.name}#sha256={wheel.sha256}"'
    lines = []
    for kind, megabytes, torch in _KINDS:
        options = " ".join(filter(None, (torch, trust)))
        words = ("pipx install", f'--pip-args="{options}"' if options else "", address)
        lines.append(
            InstallLine(kind=kind, megabytes=megabytes, pipx=" ".join(filter(None, words)))
        )
    return tuple(lines)
