"""README and docs name only what exists: commands, settings, endpoints, functions, files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, get_type_hints

import msgspec
import pytest
from cyclopts import App

from tests.support.sources import PACKAGES, ROOT, modules

MODULES = {"volunteer": "volunteer.settings.settings", "coordinator": "coordinator.config"}
PROGRAMS = ("volunteer", "coordinator")
SETTINGS = {
    "coordinator": ROOT / "docs" / "settings.md",
    "volunteer": ROOT / "docs" / "volunteer-settings.md",
}
API = "/api/v1"


@cache
def _pages() -> tuple[Path, ...]:
    return (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))


def _text(path: Path) -> str:
    assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------- commands


def _code(page: Path) -> Iterator[str]:
    """Every line of a fenced block and every inline code span of a page."""
    text = _text(page)
    fence = re.compile(r"^( *)```.*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    for block in fence.finditer(text):
        yield from re.sub(r"\\\n\s*", " ", block[2]).splitlines()
    yield from re.findall(r"`([^`\n]+)`", fence.sub("", text))


def _commands() -> Iterator[tuple[Path, str]]:
    """Every use of our two programs in the documentation, as the words after the prompt."""
    for page in _pages():
        for line in _code(page):
            words = re.sub(r"^\s*(\$ )?(\w+=\S+ )*", "", line)
            if re.match(rf"({'|'.join(PROGRAMS)}) +[-a-z]", words):
                yield page, words


def _variants(words: str) -> Iterator[list[str]]:
    """The command lines that a line stands for: `pause|resume RUN [--json]` stands for two."""
    words = re.split(r"\s(?:\||&&|[#;&>])\s|\s{2,}|;", words)[0]
    tokens = re.sub(r"\[|\]|\.\.\.|…|,", " ", words).split()
    for choice in itertools.product(*(token.split("|") for token in tokens)):
        yield list(choice)


def _problem(app: App, tokens: list[str]) -> str:
    """Return the mistake in a documented command line; empty if there is none."""
    chain, apps, rest = app.parse_commands(tokens)
    if chain and chain[-1].startswith("-"):  # --help and --version are commands to cyclopts
        return ""
    here = apps[-1]
    options = {
        token.partition("=")[0] for token in rest if re.fullmatch(r"--?[a-z][\w=.-]*", token)
    }
    known = {*here.help_flags, *app.help_flags, *app.version_flags}
    if here.default_command is not None:
        arguments = here.assemble_argument_collection(parse_docstring=False)
        known |= {name for argument in arguments for name in argument.names}
    elif rest and not rest[0].startswith("-"):
        return f'there is no command "{rest[0]}"'
    elif not rest and here is app:
        return "names no command"
    if here is app and rest and not rest[0].startswith("-") and rest[0].islower():
        return f'there is no command "{rest[0]}"'
    unknown = sorted(options - known)
    return f"there is no option {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_documented_commands_exist(program: str) -> None:
    app: App = import_module(f"{program}.cli.main").app
    wrong, seen = [], 0
    for page, words in _commands():
        name, *_ = words.split()
        for tokens in _variants(words) if name == program else ():
            seen += 1
            if problem := _problem(app, tokens[1:]):
                wrong.append(f"{page.relative_to(ROOT)}: `{' '.join(tokens)}`: {problem}")
    assert not wrong, "\n".join(wrong)
    assert seen, f"the documentation never shows how to use {program}"


def _all_commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in app:
        if not name.startswith("-") and app[name].show:
            yield from _all_commands(app[name], (*path, name))
    if path and app.default_command is not None:
        yield path


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_is_documented(program: str) -> None:
    app: App = import_module(f"{program}.cli.main").app
    shown = {
        " ".join(variant)
        for _, words in _commands()
        for variant in _variants(words)
        if variant[0] == program
    }
    missing = [
        " ".join((program, *path))
        for path in _all_commands(app)
        if not any(re.match(rf"{' '.join((program, *path))}\b", line) for line in shown)
    ]
    assert not missing, "README and docs never show: " + ", ".join(missing)


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", _text(ROOT / "Makefile"), re.MULTILINE))
    named = {
        (page.name, match[1])
        for page in _pages()
        for line in _code(page)
        if (match := re.match(r"\s*(?:\$ )?make ([a-z-]+)", line))
    }
    wrong = sorted((page, target) for page, target in named if target not in targets)
    assert not wrong, f"there is no such make target: {wrong}"


# ---------------------------------------------------------------------------------------- settings


def _documented_settings(page: Path) -> set[str]:
    """First cells of the tables whose first column is headed by the word setting."""
    names, inside = set(), False
    for line in _text(page).splitlines():
        if not line.startswith("|"):
            inside = False
        elif re.match(r"\|\s*\**setting", line, re.IGNORECASE):
            inside = True
        elif inside and (match := re.match(r"\|\s*`(?:--)?([\w.-]+)`", line)):
            names.add(match[1].replace("-", "_"))
    return names


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_are_documented_and_documented_settings_exist(program: str) -> None:
    struct = import_module(MODULES[program]).Settings
    fields = {field.name for field in msgspec.structs.fields(struct)}
    page = SETTINGS[program]
    documented = _documented_settings(page)
    assert documented == fields, (
        f"{page.relative_to(ROOT)} (tables headed `| setting | ...`) lacks"
        f" {sorted(fields - documented)} and has {sorted(documented - fields)} that do not exist"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_has_a_sentence_of_help(program: str) -> None:
    struct = import_module(MODULES[program]).Settings
    for name, hint in get_type_hints(struct, include_extras=True).items():
        metas = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
        help_text = next((m.description for m in metas if m.description), "")
        assert help_text.endswith("."), f"{program} setting {name} needs a description, a sentence"


# --------------------------------------------------------------------------------------- endpoints


def _shape(path: str) -> str:
    """A path without its prefix, query and the names of its parameters."""
    path = path.partition("?")[0].rstrip("/") or "/"
    return re.sub(r"\{[^}]*\}", "{}", path.removeprefix(API)) or "/"


def _route_table() -> set[tuple[str, str]]:
    """(method, path) of every endpoint in the tables of coordinator/routes."""
    import coordinator.http.routes

    below = walk_packages(coordinator.http.routes.__path__, "coordinator.http.routes.")
    modules = [coordinator.http.routes, *(import_module(found.name) for found in below)]
    values = [value for module in modules for value in vars(module).values()]
    return {endpoint for value in values for endpoint in _endpoints(value)}


def _endpoints(value: Any) -> Iterator[tuple[str, str]]:
    items: Iterable[Any] = value if isinstance(value, tuple | list) else (value,)
    for item in items:
        path, method = getattr(item, "path", None), getattr(item, "method", None)
        if isinstance(path, str) and path.startswith("/") and isinstance(method, str):
            yield method.upper(), _shape(path)


def test_documented_endpoints_are_the_route_table() -> None:
    named = re.findall(
        r"\b(GET|POST|PUT|PATCH|DELETE)`?[\s|]+`?(/[^\s`|)]*)", _text(ROOT / "docs" / "http-api.md")
    )
    documented = {(method, _shape(path)) for method, path in named}
    table = _route_table()
    assert table, "no tuple of endpoints (with .method and .path) found in coordinator/routes"
    assert documented == table, (
        f"docs/http-api.md lacks {sorted(table - documented)}"
        f" and has {sorted(documented - table)} that do not exist"
    )


# ------------------------------------------------------------------------------------ architecture

ARCHITECTURE = ROOT / "docs" / "architecture.md"


def _exists(name: str) -> bool:
    """Return True if a dotted name is a module, or leads on from one by attributes."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        if ".".join(words[:end]) not in modules():
            continue
        value: Any = import_module(".".join(words[:end]))
        try:
            for word in words[end:]:
                value = getattr(value, word)
        except AttributeError:
            return False
        return True
    return False


def test_functions_named_in_the_architecture_exist() -> None:
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`", _text(ARCHITECTURE))
    assert len(named) > 40
    assert [name for name in named if not _exists(name)] == []


def test_files_named_where_a_new_thing_goes_exist() -> None:
    section = _text(ROOT / "CONTRIBUTING.md").partition("## Where a new thing goes")[2]
    named = re.findall(r"`([\w.-]+/[\w./-]*)`", section.partition("\n## ")[0])
    assert len(named) > 30
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_tree_of_the_architecture_is_the_tree() -> None:
    block = _text(ARCHITECTURE).partition("## The tree")[2].split("```")[1]
    path: list[str] = []
    shown = set()
    for line in block.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.split("/")[0].strip()]
        shown.add(".".join(path))
    real = {name for name, file in modules().items() if file.name == "__init__.py"}
    assert shown == real, f"missing {sorted(real - shown)}, gone {sorted(shown - real)}"


# ------------------------------------------------------------------------------------------- links


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in _pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ +(.+?) *$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_index_leads_to_every_page() -> None:
    index = _text(ROOT / "docs" / "index.md")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in pages if page != "index.md" and f"]({page}" not in index]
    assert not missing, f"docs/index.md has no link to {missing}"
