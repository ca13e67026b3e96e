"""Recipes: commented example run files, as TOML files in this folder."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import msgspec

from shared.errors import BadRequest, why
from shared.files.deletions import delete_file
from shared.nearest_name import hint

_SUFFIX = ".toml"
_FOLDER = files("coordinator.runs") / "recipes"


class RunRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Run file to copy; `about` is the first line of its comments."""

    name: str
    about: str
    text: str


def recipes() -> tuple[RunRecipe, ...]:
    """Return every recipe, by name."""
    recipe_files = (file for file in _FOLDER.iterdir() if file.name.endswith(_SUFFIX))
    return tuple(
        _read(file.name.removesuffix(_SUFFIX))
        for file in sorted(recipe_files, key=lambda file: file.name)
    )


def recipe(name: str) -> RunRecipe:
    """Return one recipe. Raises BadRequest with the nearest name for an unknown name."""
    names = [item.name for item in recipes()]
    if name not in names:
        raise BadRequest(f'there is no recipe "{name[:64]}": {hint(name, names)}')
    return _read(name)


def write_recipe(name: str, file: Path | None) -> Path:
    """Write a recipe as a new file, by default NAME.toml in the present folder.

    Raises BadRequest if the file exists, or cannot be written; a partly written file is removed.
    """
    text, path = recipe(name).text, file or Path(f"{name}{_SUFFIX}")
    place = path.expanduser()
    try:
        target = place.open("x", encoding="utf-8")
    except FileExistsError:
        raise BadRequest(f"{path} is there already: name another file") from None
    except OSError as error:
        raise _unwritten(path, error) from error
    try:
        with target:
            target.write(text.replace("THIS_FILE", os.fspath(path)))
    except OSError as error:
        delete_file(place, "scratch")
        raise _unwritten(path, error) from error
    return path


def _unwritten(path: Path, error: OSError) -> BadRequest:
    return BadRequest(f"{path} cannot be written: {why(error)}")


def _read(name: str) -> RunRecipe:
    text = (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    first = text.partition("\n")[0].removeprefix("#").strip()
    return RunRecipe(name=name, about=first, text=text)
