"""Command `coordinator try`: trains a first model on a folder of texts, in one command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from coordinator.admin.command import NameRequest
from coordinator.cli import datasets
from coordinator.cli.listing import as_json
from coordinator.cli.target import HERE, TargetOptions, call
from coordinator.rules.run_file import NAME_CHARS_MAX
from shared.errors import BadRequest
from shared.files.source_paths import existing_path
from shared.text import counted
from shared.units import DAY_S

RECIPE = "gpt"
INVITE_USES, INVITE_DAYS = 100, 30


def try_folder(
    folder: Annotated[Path, Parameter(help="Folder of texts, or one file.")],
    *,
    name: Annotated[str, Parameter(help="Name of the run and of its dataset.")] = "",
    column: Annotated[str, Parameter(help='Column or key that holds the text ("text").')] = "",
    licence: Annotated[str, Parameter(help="Licence of the texts, e.g. CC-BY-4.0.")] = "",
    where: TargetOptions = HERE,
) -> None:
    """Train a small GPT on a folder of texts: dataset, run file, run, start, and a join link.

    Prints each command that it stands for.
    """
    from coordinator.admin import people_commands, runs

    path = existing_path(folder)
    name = name or _name_of(path)
    file = Path(f"{name}.toml")
    if file.exists():
        raise BadRequest(f"{file} is there already: name the run with --name")
    text = _run_file(name, licence)
    more = [*(["--column", column] if column else []), *(["--licence", licence] if licence else [])]
    _said(where, "dataset", "add", name, "--text", str(folder), *more)
    options = datasets.DatasetOptions(column=column, licence=licence)
    dataset = datasets.build(name, {"text": [path]}, options, where)
    if not where.json:
        datasets.tell_stored(dataset, where)
    _said(where, "run", "create", "--recipe", RECIPE, str(file))
    file.write_text(text, encoding="utf-8")
    _said(where, "run", "create", str(file))
    draft = call(where, runs.create, runs.CreateRun(text=text))
    _said(where, "run", "start", name)
    run = call(where, runs.start, NameRequest(name=name))
    _said(where, "invite", "create", "--uses", str(INVITE_USES), "--days", str(INVITE_DAYS))
    request = people_commands.CreateInvites(uses=INVITE_USES, expires_s=INVITE_DAYS * DAY_S)
    (invite,) = call(where, people_commands.invite_create, request)
    if where.json:
        as_json({"run": run.name, "file": str(file), "link": invite.link})
        return
    for sentence in draft.advice:
        print(f"Beware: {sentence}.")
    print(f'\nThe run "{name}" has started: {counted(draft.run.parameters, "parameter")}.')
    print("Beside `coordinator serve`, on each machine:\n")
    print(f"    volunteer join '{invite.link}'\n    volunteer\n")
    print(
        where.hint(f"Then: `coordinator run show {name}`, `coordinator run export {name} --to DIR`")
    )


def _name_of(path: Path) -> str:
    """Return a name for a run from the name of its folder."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-_.").lower()
    return words[:NAME_CHARS_MAX] or "mine"


def _run_file(name: str, licence: str) -> str:
    """Return the recipe's run file with `name` as the name of the run and of its dataset, without
    the comment lines that show commands.
    """
    import tomlkit

    from coordinator.runs.run_recipe import recipe

    lines = recipe(RECIPE).text.splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(("#   coordinator ", "#\n")))
    document = tomlkit.parse(text)
    document.update({"name": name, "dataset": name} | ({"licence": licence} if licence else {}))
    return tomlkit.dumps(document)


def _said(where: TargetOptions, *words: str) -> None:
    """Print a command that is carried out now."""
    if not where.json:
        print(where.hint(f"`coordinator {shlex.join(words)}`").replace("`", "$ ", 1).rstrip("`"))


def add_to(app: App) -> None:
    app.command(try_folder, name="try")
