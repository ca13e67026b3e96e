"""Installation of this program: which installer made it, and the command lines that change it.

No command asks a package index for our own name: each names an address, or packages of others.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from shared.errors import Configuration
from shared.programs.wheel import PROJECT

TORCH = "https://download.pytorch.org/whl"  # builds of torch, one folder each
TORCH_FOLDERS = {"cpu": "cpu", "cuda": "cu130", "cuda126": "cu126", "rocm": "rocm7.2"}
_REQUIREMENT = re.compile(r"([^;]+);.*\bextra == ['\"]([\w-]+)['\"]")


def tool() -> str:
    """Return the tool that manages this environment: "pipx", "uv" (also without pip) or "pip"."""
    if Path(sys.prefix, "pipx_metadata.json").exists():
        return "pipx"
    if Path(sys.prefix, "uv-receipt.toml").exists() or not importlib.util.find_spec("pip"):
        return "uv"
    return "pip"


def pip() -> list[str]:
    """Return the words that run pip in this environment, up to pip's subcommand."""
    if tool() == "pipx":
        return ["pipx", "runpip", Path(sys.prefix).name]
    return ["uv", "pip"] if tool() == "uv" else [sys.executable, "-m", "pip"]


def installing(*words: str) -> list[str]:
    """Return the command that installs into this environment, as words."""
    target = ("--python", sys.executable) if pip()[0] == "uv" else ()
    return [*pip(), "install", *target, *words]


def line(words: list[str]) -> str:
    """Return a command as it is pasted: double quotes mean the same to every shell."""
    return " ".join(f'"{word}"' if re.search(r"[^\w./:=@+-]", word) else word for word in words)


def find_torch(build: str) -> list[str]:
    """Return the options with which an installer finds a build of torch: an extra of the package
    pins its version. PyPI has the one of macOS.
    """
    folder = TORCH_FOLDERS.get(build)
    if folder is None:
        return []
    if build == "rocm":  # brings packages of its own
        return ["--extra-index-url", f"{TORCH}/{folder}"]
    return ["--find-links", f"{TORCH}/{folder}/torch/"]


def torch_line(build: str) -> str:
    """Return the command line that replaces torch by another build, such as "cuda"."""
    return line(installing("--force-reinstall", *_packages(build), *find_torch(build)))


def extra_line(extra: str) -> str:
    """Return the command line that installs the packages of an extra."""
    return line(installing(*_packages(extra)))


def _packages(extra: str) -> list[str]:
    """Return the requirements of an extra; in a tree that was never installed, the tree with it."""
    try:
        requirements = distribution(PROJECT).requires or []
    except PackageNotFoundError:
        requirements = []
    matches = (match for requirement in requirements if (match := _REQUIREMENT.match(requirement)))
    packages = [match[1].strip() for match in matches if match[2] == extra]
    return packages or ["-e", f".[{extra}]"]


def lacking(feature: str, extra: str) -> Configuration:
    """Return the error that `feature` needs an extra that is not installed."""
    return Configuration(f"{feature} needs the extra `{extra}`: `{extra_line(extra)}`")


def removal_line() -> str:
    """Return the line that removes the program."""
    if tool() == "pipx":
        return line(["pipx", "uninstall", Path(sys.prefix).name])
    if Path(sys.prefix, "uv-receipt.toml").exists():
        return line(["uv", "tool", "uninstall", Path(sys.prefix).name])
    return line([*pip(), "uninstall", PROJECT])


def in_source_tree() -> bool:
    """Return True if the program runs from its source tree."""
    try:
        origin = json.loads(distribution(PROJECT).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return True
    return bool(origin.get("dir_info", {}).get("editable"))
