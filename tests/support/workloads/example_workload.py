"""The workload of docs/workload.md: its files from the page, built as a wheel and installed."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

from hatchling.build import build_wheel

from tests.support.sources import ROOT

PAGE = ROOT / "docs" / "workload.md"
_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """Every file that the page shows, by its path in the package."""
    return {match[1]: match[2] for match in _FILE.finditer(PAGE.read_text(encoding="utf-8"))}


def install(path: Path) -> Path:
    """A directory as `pip install --target` makes it, entry point and all."""
    source, site = path / "source", path / "site"
    for name, text in files().items():
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    before = Path.cwd()
    os.chdir(source)  # what a build backend expects (PEP 517)
    try:
        wheel = build_wheel(str(path))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(path / wheel) as archive:
        archive.extractall(site)
    return site
