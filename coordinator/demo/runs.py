"""Runs of the demo: real, and small enough for two or three minutes on two cores.

The run file of each lies in `files`; the number of volunteers sets its quorum.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import tomlkit

from coordinator.runs.example import Put, standard_library
from shared.errors import InvalidRunFile
from shared.workloads.base import DatasetManifest, is_here

_FILES = files("coordinator.demo") / "files"
VOCABULARY = 1024
DIGITS_SIZE = 16  # pixels
EXAMPLE_FILES = 150  # source files that are the example of members' data
DIGITS_HELD_OUT = 0.11  # leaves 1,599 digits: 50 steps of 32 in one pass


class DemoRun(msgspec.Struct, frozen=True, kw_only=True):
    """Run of the demo."""

    name: str
    toml: str
    prompt: str = ""
    minutes: float = 2.0  # minutes of training
    preparing: str  # text shown while the run is prepared
    build: Callable[[Put], DatasetManifest] | None = None  # None = the run needs no dataset
    members_files: tuple[tuple[Path, ...], ...] = ()  # files that each volunteer keeps


class _DemoKind(msgspec.Struct, frozen=True, kw_only=True):
    """Duration, dataset and opening text of a demo; its run file is `files/WORKLOAD.toml`."""

    preparing: str
    minutes: float = 2.0
    build: Callable[[Put], DatasetManifest] | None = None
    at_members: bool = False


def _texts(put: Put) -> DatasetManifest:
    return standard_library(put, VOCABULARY)


def _example(put: Put) -> DatasetManifest:
    """Build the example of members' data: the first part of the standard library's source."""
    from shared.workloads.data.text_dataset import build_text

    return build_text(
        "example",
        _source()[:EXAMPLE_FILES],
        put,
        vocab_size=VOCABULARY,
        licence="PSF-2.0",
        source="a part of the Python standard library of this machine",
    )


def _source() -> list[Path]:
    from shared.workloads.data.documents import standard_library_files

    return sorted(standard_library_files())


def _members_files(members: int) -> tuple[tuple[Path, ...], ...]:
    """Return the files that are not in the example, divided into a part for each member. A part
    consists of neighbouring folders, so that members have different subjects.
    """
    paths = _source()[EXAMPLE_FILES:]
    edges = [len(paths) * part // members for part in range(members + 1)]
    return tuple(tuple(paths[start:stop]) for start, stop in pairwise(edges))


def _digits(put: Put) -> DatasetManifest:
    from shared.workloads.data.image_dataset import build_images
    from shared.workloads.data.image_sources import digit_pictures

    return build_images(
        "digits",
        digit_pictures(),
        put,
        size=DIGITS_SIZE,
        channels=1,
        heldout_share=DIGITS_HELD_OUT,
        licence="CC-BY-4.0" if is_here("sklearn") else "CC0-1.0",
        source="Alpaydin and Kaynak 1998, as scikit-learn ships it"
        if is_here("sklearn")
        else "digits of a font, drawn on this machine",
    )


_SOURCES = "building a dataset from the Python standard library's own source"
DEMOS: dict[str, _DemoKind] = {
    "gpt": _DemoKind(preparing=_SOURCES, build=_texts),
    "dcgan": _DemoKind(
        preparing="building a dataset of digits, and a judge that knows them", build=_digits
    ),
    "gomoku": _DemoKind(preparing="setting up a board of 6 x 6", minutes=3.0),
    # Shorter than two minutes, since building the tokenizer and loading the libraries take time
    # too.
    "causal-lm": _DemoKind(preparing=_SOURCES, build=_texts, minutes=1.5),
    "rollouts": _DemoKind(preparing="setting up problems to sort", minutes=3.0),
    "members": _DemoKind(
        preparing="building the example of data that members keep", build=_example, at_members=True
    ),
}


def demo_run(workload: str, volunteers: int) -> DemoRun:
    """Return the demo of a workload. Raises InvalidRunFile for one without a demo."""
    if workload not in DEMOS:
        raise InvalidRunFile(
            f'there is no demo of "{workload}"; there is one of: {", ".join(DEMOS)}'
        )
    kind, volunteers = DEMOS[workload], max(1, volunteers)
    file: Any = tomlkit.parse((_FILES / f"{workload}.toml").read_text(encoding="utf-8"))
    if "plan" in file:
        file["plan"]["quorum"] = volunteers
    # a pass ends with its last task, so each volunteer gets an equal part
    if kind.build is _digits:
        file["task"]["local_steps"] = max(1, int(file["task"]["local_steps"]) // volunteers)
    return DemoRun(
        name=str(file["name"]),
        toml=tomlkit.dumps(file),
        prompt=str(file.get("evaluation", {}).get("prompt", "")),
        minutes=kind.minutes,
        preparing=kind.preparing,
        build=kind.build,
        members_files=_members_files(volunteers) if kind.at_members else (),
    )
