"""README and docs name what exists: commands, options, settings, endpoints, make targets, files."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from cyclopts import App

from coordinator.http.routes.handlers import HANDLERS
from coordinator.plan.plan_tables import Plan
from coordinator.rules.health import AlertKind
from coordinator.rules.run_file import RunFile
from shared.protocol.endpoints import ENDPOINTS
from tests.support.endpoint_tables import tables
from tests.support.sources import ROOT
from tests.support.workloads import example_workload

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
    """Return the problem of a documented command line; empty if there is none."""
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


def _settings(program: str) -> dict[str, str]:
    """The help of every setting."""
    table = import_module(MODULES[program]).TABLE
    return {row.name: row.help for row in table.rows()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_are_documented_and_documented_settings_exist(program: str) -> None:
    fields = set(_settings(program))
    page = SETTINGS[program]
    documented = _documented_settings(page)
    assert documented == fields, (
        f"{page.relative_to(ROOT)} (tables headed `| setting | ...`) lacks"
        f" {sorted(fields - documented)}"
        f" and has {sorted(documented - fields)} that do not exist"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_has_a_sentence_of_help(program: str) -> None:
    for name, help_text in _settings(program).items():
        assert help_text.endswith("."), f"{program} setting {name} needs a description, a sentence"


def test_sections_of_run_files_are_documented_key_by_key() -> None:
    """The table with a column for the section holds each key of its sections, and no other."""
    documented: dict[str, list[str]] = {}
    rows = re.findall(
        r"^\| `\[(\w+)\]` \| (`[^|]+) \|", _text(ROOT / "docs" / "run-files.md"), re.MULTILINE
    )
    for section, keys in rows:
        if re.fullmatch(r"(`\w+`(, )?)+", keys):  # other tables of sections show values
            documented.setdefault(section, []).extend(re.findall(r"`(\w+)`", keys))
    sections = ("validation", "credit", "evaluation", "trust", "retention", "page")
    hints = get_type_hints(RunFile)
    assert {name: sorted(keys) for name, keys in documented.items()} == {
        name: sorted(hints[name].__struct_fields__) for name in sections
    }


def test_tables_below_the_heading_of_a_section_hold_its_keys() -> None:
    hints = get_type_hints(RunFile) | {"plan": Plan}
    for name in ("task", "train", "plan", "serve"):
        text = _section(ROOT / "docs" / "run-files.md", re.compile(rf"## `\[{name}\]`"))
        cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
        keys = [key for cell in cells for key in re.findall(r"\w+", cell)]
        assert sorted(keys) == sorted(hints[name].__struct_fields__), name


# --------------------------------------------------------------------------------------- endpoints


def test_documented_endpoints_are_the_list_of_endpoints() -> None:
    page = _text(ROOT / "docs" / "http-api.md")
    assert page == tables(page), (
        "run `python -m tests.support.endpoint_tables docs/http-api.md`, which writes its tables"
    )
    for endpoint in ENDPOINTS:
        assert f"| {endpoint.method} `{endpoint.path}` |" in page


def test_endpoints_named_in_prose_exist() -> None:
    named = re.findall(
        r"\b(GET|POST|PUT|PATCH|DELETE)`?[\s|]+`?(/[^\s`|)]*)", _text(ROOT / "docs" / "http-api.md")
    )
    assert set(named) <= {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}


def test_every_endpoint_has_a_handler() -> None:
    assert set(HANDLERS) == set(ENDPOINTS)


# ------------------------------------------------------------------------------------ architecture

ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGES = ("shared", "coordinator", "volunteer")


def _named(path: str) -> object:
    """Return the module, class, function or method of a dotted path. Raises AttributeError."""
    parts = path.split(".")
    modules = [n for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n]))]
    return reduce(getattr, parts[modules[0] :], import_module(".".join(parts[: modules[0]])))


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of its parent, or the parent is no package
        return False


def test_paths_of_the_architecture_exist() -> None:
    paths = re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`", _text(ARCHITECTURE))
    wrong = []
    for path in paths:
        try:
            _named(path)
        except AttributeError as error:
            wrong.append(f"{path}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(paths) > 40, "the ways of the architecture name functions"


def _tree() -> set[str]:
    """Folders of the drawn tree as paths: each line stands two columns deeper than its parent."""
    drawn: set[str] = set()
    parents: list[str] = []
    block = _text(ARCHITECTURE).split("```")[1]
    for indent, name in re.findall(r"^( *)(\w+)/", block, re.MULTILINE):
        parents[len(indent) // 2 :] = [name]
        drawn.add("/".join(parents))
    return drawn


def test_every_package_stands_in_the_tree_of_the_architecture() -> None:
    packages = {
        init.parent.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for init in (ROOT / package).rglob("__init__.py")
    }
    assert _tree() == packages


def test_no_noun_of_the_glossary_stands_twice() -> None:
    glossary = _text(ARCHITECTURE).partition("## Glossary")[2]
    nouns = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[1:]  # behind the head
    assert [noun for noun, count in Counter(map(str.lower, nouns)).items() if count > 1] == []
    assert nouns == sorted(nouns, key=str.lower), "the glossary is in the order of the alphabet"


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


def test_the_indexes_lead_to_every_page() -> None:
    docs = ROOT / "docs"
    for index, below in (("index.md", "*.md"), ("decisions/index.md", "decisions/*.md")):
        text = _text(docs / index)
        pages = [page.relative_to((docs / index).parent) for page in docs.glob(below)]
        missing = [page for page in pages if page.name != "index.md" and f"]({page}" not in text]
        assert not missing, f"docs/{index} has no link to {missing}"
    assert "](decisions/index.md)" in _text(docs / "index.md")


def test_files_that_a_new_thing_takes_exist() -> None:
    rows = re.findall(r"^\|.*\|$", _text(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    paths = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.\w+)`", "\n".join(rows))
    known = {file.name for file in (ROOT / "volunteer" / "settings").iterdir()}
    wrong = [path for path in paths if not (ROOT / path).exists() and path not in known]
    assert paths
    assert not [path for path in wrong if path not in ("row.line", "codec-NAME.hex")], wrong


# ------------------------------------------------------------------------------------------- words

GUIDES_MAX, PATH_MAX, SECURITY_MAX = 29_100, 1_700, 2_000


def _words(text: str) -> int:
    return len(text.split())


def _section(page: Path, heading: re.Pattern[str]) -> str:
    """The text below the heading that begins as told, up to the next one of its rank."""
    found: list[str] = []
    rank = ""
    for line in _text(page).splitlines():
        hashes = (re.match(r"#+ ", line) or [""])[0]
        if rank and hashes and len(hashes) <= len(rank):
            break
        if rank:
            found.append(line)
        elif heading.match(line):
            rank = hashes
    assert rank, f"{page.relative_to(ROOT)} has no heading {heading.pattern}"
    return "\n".join(found)


def _marked_path(title: str) -> Iterator[str]:
    """Texts of a path of the index: a section, or a page up to its second heading."""
    index = ROOT / "docs" / "index.md"
    steps = _text(index).partition(f"**{title}**")[2].partition("\n\nLeave")[0]
    for target in re.findall(r"^\d\. \[[^]]+\]\(([^)]+)\)", steps, re.MULTILINE):
        path, _, anchor = target.partition("#")
        page = index.parent / path
        if anchor:
            words = r"\W+".join(anchor.split("-"))
            yield _section(page, re.compile(rf"#+ {words}$", re.IGNORECASE))
        else:
            yield _text(page).partition("\n## ")[0]


def test_guides_keep_their_budget() -> None:
    """Words as `wc -w` counts them; decisions and changes are history, http-api is generated."""
    pages = (page for page in _pages() if page.parent.name != "decisions")
    left_out = {"http-api.md", "CHANGELOG.md", "SECURITY.md"}
    guides = [page for page in pages if page.name not in left_out]
    guides.append(ROOT / "packaging" / "README.md")
    total = sum(_words(_text(page)) for page in guides)
    assert total <= GUIDES_MAX
    assert _words(_text(ROOT / "docs" / "security.md")) <= SECURITY_MAX


def test_the_path_of_an_organiser_is_short() -> None:
    texts = list(_marked_path("Run a project with your own data"))
    assert len(texts) == 5
    assert all(map(_words, texts))
    assert sum(map(_words, texts)) <= PATH_MAX


# ------------------------------------------------------------------------------------- installing


def test_nobody_is_sent_to_a_name_that_the_project_does_not_own() -> None:
    bare = re.compile(
        r"\b(pipx|pip3?|uvx?)\b[^\n`]*?\b(install|upgrade|run|download)\b[^\n`]*?"
        r"(?<![\w./@:-])volunteer(?![\w./-])(?!\s+@)"
    )
    folders = ("shared", "coordinator", "volunteer", "docs", "packaging", "README.md")
    files = [path for name in folders for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    kinds = {".py", ".md", ".html", ".po", ".ipynb", ".yaml", ".service", ".js"}
    read = [p for p in files if p.is_file() and (p.suffix in kinds or "Container" in p.name)]
    assert len(read) > 500
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in read
        for match in bare.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_what_the_workload_of_the_page_imports_exists() -> None:
    """Its own tests build a wheel and are slow; a renamed class is seen here at once."""
    page = _text(ROOT / "docs" / "workload.md")
    found = re.findall(r"^ *from (volunteer[.]workload) import (.+)$", page, re.MULTILINE)
    names = [f"{module}.{name}" for module, given in found for name in given.split(", ")]
    assert names
    for name in names:
        _named(name)


def test_models_of_ones_own_are_short() -> None:
    """Lines of the author's own: neither blank ones nor the packaging."""
    files = example_workload.files()
    declared = files["volunteer_own/__init__.py"].split("\n\n\n")
    for name, class_of, most in (("cnn", declared[1], 20), ("writer", declared[2], 30)):
        text = f"{declared[0]}\n{class_of}\n{files[f'volunteer_own/{name}.py']}"
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= most, name


def test_every_kind_of_alert_has_its_row() -> None:
    rows = re.findall(r"^\| `([a-z ]+)` \|", _text(ROOT / "docs" / "monitoring.md"), re.MULTILINE)
    assert sorted(rows) == sorted(get_args(AlertKind))
