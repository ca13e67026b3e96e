"""Command `workload new`: a package with a small CNN on pictures to change, and its test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shared.errors import BadRequest, Conflict
from shared.sentences import Sentence
from shared.workloads.base import installed
from shared.workloads.derived.new_package import package_texts
from volunteer.cli.json_output import print_json
from volunteer.cli.options import Json
from volunteer.i18n.catalogue import _

workload = App(name="workload", help="Bring a model of your own.")

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@workload.command
def new(
    name: Annotated[str, Parameter(help="Name of the workload, as run files write it.")],
    *,
    json: Json = False,
) -> int:
    """Write a package with a small model to change, and its test, into a new folder."""
    files = write_package(name, Path(name))
    if json:
        return print_json({"files": [str(file) for file in files]})
    for file in files:
        print(file)
    model = next(file for file in files if file.name == "model.py")
    print(
        _(
            "next: change {file}, then `pip install -e {name}` and `pytest {name}`",
            file=model,
            name=name,
        )
    )
    return 0


def write_package(name: str, folder: Path) -> list[Path]:
    """Write a package into a new folder; return its files. Raises BadRequest, Conflict."""
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise BadRequest(
            Sentence(
                'the name of a workload is lower-case letters and digits, with "-" within, not'
                ' "{name}"',
                name=name[:60],
            )
        )
    if name in installed():
        raise Conflict(
            Sentence("{name} is a workload of this machine: choose another name", name=name)
        )
    if folder.exists():
        raise Conflict(Sentence("{folder} exists already: choose another name", folder=str(folder)))
    texts = package_texts(name)
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return [folder / path for path in texts]
