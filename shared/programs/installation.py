"""Installation of this program: which installer made it, and the command lines that change it.

No command line names our own package, which is in no package index: each names an address, or
packages of others.
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


def installer() -> str:
    """Return the installer that manages this environment: "pipx", "pip", or "uv"; "uv" too if pip
    is missing.
    """
    if Path(sys.prefix, "pipx_metadata.json").exists():
        return "pipx"
    if Path(sys.prefix, "uv-receipt.toml").exists() or not importlib.util.find_spec("pip"):
        return "uv"
    return "pip"


def pip_command() -> list[str]:
    """Return the words of a command that runs pip in this environment, before pip's subcommand."""
    if installer() == "pipx":
        return ["pipx", "runpip", Path(sys.prefix).name]
    return ["uv", "pip"] if installer() == "uv" else [sys.executable, "-m", "pip"]


def install_command(*words: str) -> list[str]:
    """Return the words of the command that installs `words` into this environment."""
    target = ("--python", sys.executable) if pip_command()[0] == "uv" else ()
    return [*pip_command(), "install", *target, *words]


def command_line(words: list[str]) -> str:
    """Return a command as a line to paste, in double quotes, which mean the same to every shell."""
    return " ".join(f'"{word}"' if re.search(r"[^\w./:=@+-]", word) else word for word in words)


def find_torch(build: str) -> list[str]:
    """Return the options with which an installer finds a build of torch, whose version an extra of
    this package pins. The build for macOS is on PyPI and needs no options.
    """
    folder = TORCH_FOLDERS.get(build)
    if folder is None:
        return []
    if build == "rocm":  # this build depends on other packages of the same index
        return ["--extra-index-url", f"{TORCH}/{folder}"]
    return ["--find-links", f"{TORCH}/{folder}/torch/"]


def torch_line(build: str) -> str:
    """Return the command line that replaces torch by another build, such as "cuda"."""
    return command_line(install_command("--force-reinstall", *_packages(build), *find_torch(build)))


def extra_line(extra: str) -> str:
    """Return the command line that installs the packages of an extra."""
    return command_line(install_command(*_packages(extra)))


def _packages(extra: str) -> list[str]:
    """Return the requirements of an extra; in a source tree that was never installed, the words
    that install the tree with the extra.
    """
    try:
        requirements = distribution(PROJECT).requires or []
    except PackageNotFoundError:
        requirements = []
    matches = (match for requirement in requirements if (match := _REQUIREMENT.match(requirement)))
    packages = [match[1].strip() for match in matches if match[2] == extra]
    return packages or ["-e", f".[{extra}]"]


def missing_extra_error(feature: str, extra: str) -> Configuration:
    """Return the error that `feature` needs an extra that is not installed."""
    return Configuration(f"{feature} needs the extra `{extra}`: `{extra_line(extra)}`")


def removal_line() -> str:
    """Return the line that removes the program."""
    if installer() == "pipx":
        return command_line(["pipx", "uninstall", Path(sys.prefix).name])
    if Path(sys.prefix, "uv-receipt.toml").exists():
        return command_line(["uv", "tool", "uninstall", Path(sys.prefix).name])
    return command_line([*pip_command(), "uninstall", PROJECT])


def in_source_tree() -> bool:
    """Return True if the program runs from its source tree."""
    try:
        origin = json.loads(distribution(PROJECT).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return True
    return bool(origin.get("dir_info", {}).get("editable"))
