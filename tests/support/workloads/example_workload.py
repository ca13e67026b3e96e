"""The workloads of docs/workload.md: their files from the page, built as a wheel and installed."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import numpy as np
from hatchling.build import build_wheel

from shared.workloads.data.image_files import write_png
from shared.workloads.data.image_sources import digit_pictures
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


def write_digits(path: Path, count: int) -> Path:
    """Pictures of digits in folders by digit."""
    for number, picture in zip(range(count), digit_pictures(), strict=False):
        folder = path / picture.label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(write_png(np.asarray(picture.pixels)))
    return path
