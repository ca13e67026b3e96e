"""Templates and the files beside them: read once from the package, every value escaped."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import Any

import jinja2

from coordinator.pages import words
from coordinator.pages.game_boards import board
from shared.text import counted, credit, printable, size

KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
TAG_CHARS = 12


def _read(name: str) -> str | None:
    found = files(__package__).joinpath("templates", name)
    return found.read_text(encoding="utf-8") if found.is_file() else None


@lru_cache(maxsize=1)
def static_files() -> dict[str, bytes]:
    """Every file of the folder `static`, by name."""
    return {
        item.name: item.read_bytes()
        for item in files(__package__).joinpath("static").iterdir()
        if item.name.rpartition(".")[2] in KINDS
    }


@lru_cache(maxsize=16)
def static_url(name: str) -> str:
    """Address of a file beside the templates, another one whenever its content is."""
    return f"/static/{name}?{hashlib.sha256(static_files()[name]).hexdigest()[:TAG_CHARS]}"


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The templates, with what they may call."""
    found = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read),
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "amount": words.amount,
        "loss": words.loss,
        "ago": words.ago,
        "hours": words.hours,
        "iso": words.iso,
        "day": words.day,
        "sample": words.plain,
        "board": board,
        "text": printable,
        "credits": credit,
        "counted": counted,
        "size": size,
    }
    found.globals["static"] = static_url
    return found


def render(template: str, **values: Any) -> str:
    """Return a page, or another document, as text."""
    return environment().get_template(template).render(**values)
