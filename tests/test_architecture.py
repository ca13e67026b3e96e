"""The house as a failing test: who may import whom, how big things may grow, what may never appear.

DESIGN's section "The house" in words is pyproject.toml's `[tool.importlinter]` in rules; both are
checked here, and again by reading the syntax trees, which also see what only runs inside functions.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from coordinator.config import TABLE as coordinator_settings
from coordinator.plan.plan_tables import Plan
from coordinator.rules.run_file import RunFile
from tests.support import house
from tests.support.sources import (
    PACKAGES,
    ROOT,
    docstrings,
    imports,
    loaded_by,
    modules,
    tree,
    within,
)
from volunteer.settings.settings import TABLE as volunteer_settings

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Packages that the design names. A missing one fails by name.
HOUSE = {
    "shared": "protocol tensors workloads.gpt workloads.dcgan workloads.gomoku"
    " workloads.causal_lm workloads.data workloads.training",
    "coordinator": "cli demo top http.routes pages admin services intake upkeep experience merging"
    " scheduling accounts runs database.engine database.tables database.ledger database.migrations"
    " database.monitoring rules"
    " aggregation plan storage simulate",
    "volunteer": "cli engine agent headless service tui.screens tui.widgets tui.onboarding tui.play"
    " tui.terminal account training machine net control settings storage",
}

# package -> the only places that may import it
GATES = {
    "textual": ("volunteer.tui",),
    "rich": ("volunteer.tui", "coordinator.top"),
    "sqlalchemy": ("coordinator.database",),
    "alembic": ("coordinator.database",),
    "starlette": ("coordinator.http", "coordinator.v1", "coordinator.pages"),
    "uvicorn": ("coordinator.http",),
    "httpx": (
        "volunteer.net",
        "coordinator.inference.upstream_engine",
        "coordinator.admin.remote_server",
    ),
    "PIL": ("shared.workloads.data", "coordinator.runs"),
    "platformdirs": ("volunteer.settings.settings", "coordinator.config"),
}

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
FOLDER_MODULES_MAX = 26
LONE_MODULE_LINES_MIN = 40  # a module with a single importer is not shorter
# What is too big today, with its size: it may only shrink, and leaves the list when it fits.
TOO_BIG: dict[str, int] = {}

# Counts over the three packages, the tests and packaging that may only shrink, never grow.
ONLY_SHRINKS = {
    "lines over 100 columns": 66,  # diagrams, tables and markup
    "docstrings that begin with a noun clause": 63,  # all of them in tests
    "settings of coordinator, volunteer, run file and plan": 179,
    "first lines that name no thing": 33,
    "functions with a pronoun or participle as a name": 40,
    "lines of the product with Any": 527,
}
LINE_COLUMNS_MAX = 100
# Names that more than one class, or more than one file, of the product has. They only get fewer.
REPEATED_NAMES_MAX = {"classes": 5, "files": 26}
NOUN_CLAUSE = re.compile(
    r"(What|Whatever|Whether|Who|Whoever|How|Where|When|Why)\b(?!.*\?)|See the module"
)
# A first line that begins with a preposition or a pronoun, or in which a pronoun stands for a noun.
WEAK_START = re.compile(
    r"(About|Above|After|Against|Among|Around|As|At|Before|Behind|Below|Beside|Besides|Between"
    r"|Beyond|By|During|For|From|In|Inside|Into|Like|Near|Of|On|Out|Outside|Over|Past|Per|Since|So"
    r"|Than|Through|To|Under|Until|Unless|Up|Upon|Via|With|Within|Without|I|You|He|She|It|Its|We"
    r"|They|This|That|These|Those|Their|There|Here|Somebody|Something|Anybody|Anything|Nobody"
    r"|Nothing|None|Everybody|Everything|All that|All of|Both|Either|Neither|Such|See)\b(?! `)"
)
WEAK_WORDS = re.compile(r"\b(what|whatever|who|whoever|whom|those|of it|of them|beside|goes? on)\b")
# Words that name no thing: a local name or a parameter says the noun, `task`, `row`, `reply`.
NAMELESS = (
    "found said each known held wanted given made told its their theirs asked kept taken seen"
    " chosen others these those such what whose it them both had got learnt shown been gone"
    " due own ours mine yours whoever whatever nothing something anything everything somebody"
    " nobody everybody every alike begun handed reached sealed stored fewer yet already"
)
GLOSSARY = ROOT / "docs" / "architecture.md"

# Modules that read objects out of bytes, or code out of text.
FORBIDDEN_MODULES = (
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
)
FORBIDDEN_CALLS = ("eval", "exec", "compile", "__import__")
FORBIDDEN_ATTRIBUTES = (
    "torch.load",
    "torch.save",
    "torch.hub",
    "torch.jit.load",
    "os.system",
    "os.popen",
)
FORBIDDEN_NAMES = frozenset(name.rpartition(".")[2] for name in FORBIDDEN_ATTRIBUTES)


@pytest.fixture(autouse=True, scope="module")
def _no_trees_are_left() -> Iterator[None]:
    """A million nodes of syntax would be walked by the garbage collector in every later test."""
    yield
    tree.cache_clear()


# ------------------------------------------------------------------------------- who imports whom


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_of_the_design_exists(package: str) -> None:
    missing = [name for name in HOUSE[package].split() if f"{package}.{name}" not in modules()]
    assert not missing, f"{package} still lacks: {', '.join(missing)}"


def test_import_rules_are_kept() -> None:
    command = ["-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    said = result.stdout.rpartition("Broken contracts")[2] + result.stderr
    assert result.returncode == 0, said[-4000:]


def test_neither_side_knows_the_other_even_in_type_annotations() -> None:
    wrong = [
        str(found)
        for found in imports()
        for package in PACKAGES
        if within(found.imported, package)
        and not within(found.importer, package)
        and package != "shared"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", GATES)
def test_gate(package: str) -> None:
    wrong = [
        str(found)
        for found in imports()
        if within(found.imported, package)
        and found.when != "typing"
        and not within(found.importer, *GATES[package])
    ]
    assert not wrong, f"only {' and '.join(GATES[package])} may import {package}:\n" + "\n".join(
        wrong
    )


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if found.when != "typing" and found.imported in graph and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_the_picture_of_the_house_is_drawn_from_its_imports() -> None:
    drawn = (ROOT / "docs" / "images" / "house.svg").read_text("utf-8")
    assert drawn == house.picture(), "run: python -m tests.support.house docs/images/house.svg"


# -------------------------------------------------------------------- what starting up may cost


def _loaded(*arguments: str) -> set[str]:
    """Names of all modules that a fresh Python has imported when it ends, however it ends."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == 0, result.stdout[-1000:] + "\n".join(said[-30:])
    return set(re.findall(r"^import time:.*\|\s*(\S+)$", result.stderr, re.MULTILINE))


LIGHT = {
    "shared.workloads.causal_lm.workload": ("torch", "transformers"),
    "volunteer.__main__": ("torch", "textual", "cyclopts"),  # before the first paint
    "volunteer.cli.main": ("torch", "textual", "sqlalchemy"),
    "coordinator.cli.main": ("torch", "textual", "sqlalchemy.ext.asyncio", "uvicorn"),
    "volunteer.headless": ("torch", "textual"),
    "volunteer.control.control": ("torch", "textual"),
    "volunteer.agent.agent": ("torch", "textual"),
    "volunteer.cli.start": ("torch", "textual", "httpx", "numpy"),  # before the first paint
    "volunteer.tui.app": ("torch",),
    "coordinator.top.watch": ("torch", "sqlalchemy", "numpy"),  # before the first paint
    "shared.protocol.endpoints": ("torch", "numpy"),
    "shared.workloads.base": ("torch",),
}


@pytest.mark.parametrize("module", LIGHT)
def test_importing_is_light(module: str) -> None:
    heavy = _loaded("-c", f"import {module}") & set(LIGHT[module])
    assert not heavy, f"importing {module} loads {', '.join(sorted(heavy))}"


@pytest.mark.parametrize("program", ["volunteer.__main__", "coordinator.cli.main"])
def test_help_loads_neither_torch_nor_textual(program: str) -> None:
    start = f"import sys; sys.argv = ['it', '--help']; from {program} import main; main()"
    assert not _loaded("-c", start) & {"torch", "textual", "sqlalchemy.ext.asyncio"}


@pytest.mark.parametrize("module", ["volunteer.cli.main", "coordinator.cli.main"])
def test_no_command_line_reaches_torch_at_import(module: str) -> None:
    assert module in modules(), f"{module} is missing"
    assert not loaded_by(module) & {"torch", "textual"}


# ------------------------------------------------------------------------------------------ size


def _sizes() -> dict[str, int]:
    """Lines of every file and function that is over its limit."""
    over = {}
    for name, path in modules().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES_MAX:
            over[name] = lines
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    over[f"{name}:{node.name}"] = length
    return over


def test_files_and_functions_stay_small() -> None:
    grown = {name: size for name, size in _sizes().items() if size > TOO_BIG.get(name, 0)}
    assert not grown, (
        f"split these (limits {FILE_LINES_MAX} and {FUNCTION_LINES_MAX} lines): {grown}"
    )


def test_the_list_of_what_is_too_big_only_shrinks() -> None:
    now = _sizes()
    smaller = {name: now.get(name, 0) for name, size in TOO_BIG.items() if now.get(name, 0) < size}
    assert not smaller, f"lower or remove these in TOO_BIG: {smaller}"
    assert len(TOO_BIG) <= 5


def _sources() -> list[Path]:
    beside = [path for name in ("tests", "packaging") for path in (ROOT / name).rglob("*.py")]
    return [*modules().values(), *sorted(beside)]


def _long_lines() -> int:
    return sum(
        len(line) > LINE_COLUMNS_MAX
        for path in _sources()
        for line in path.read_text(encoding="utf-8").splitlines()
    )


def _untyped_lines() -> int:
    return sum(
        re.search(r"\bAny\b", line) is not None
        for path in modules().values()
        for line in path.read_text(encoding="utf-8").splitlines()
    )


def _noun_clauses() -> int:
    documented = [text for path in _sources() for text in docstrings(path)]
    return sum(bool(NOUN_CLAUSE.match(text)) for text in documented)


def _nameless() -> int:
    """Count the first lines of docstrings, of product and `tests/support`, that name no thing."""
    support = sorted((ROOT / "tests" / "support").rglob("*.py"))
    paths = (*modules().values(), *support)
    lines = [text.splitlines()[0] for path in paths for text in docstrings(path)]
    return sum(bool(WEAK_START.match(line) or WEAK_WORDS.search(line)) for line in lines)


def _nameless_functions() -> int:
    """Count the functions of the product that have a parameter or a local name of `NAMELESS`."""
    nameless = set(NAMELESS.split())
    functions = (
        node
        for path in modules().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sum(bool(_local_names(function) & nameless) for function in functions)


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    signature = function.args
    parameters = (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)
    assigned = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    stores = {node.id for node in assigned if isinstance(node.ctx, ast.Store)}
    return stores | {parameter.arg for parameter in parameters}


def _settings() -> int:
    """Return how many settings people may choose, the workloads' own left out."""
    tables = (coordinator_settings.names, volunteer_settings.names)
    return sum(map(len, tables)) + sum(map(_keys, (RunFile, Plan)))


def _keys(kind: Any) -> int:
    """Return how many keys a table has, with those of the tables in it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return sum(_keys(field.type) for field in msgspec.structs.fields(kind))
    return max([1, *map(_keys, get_args(kind))])


def test_what_is_counted_only_shrinks() -> None:
    """Lower the bound in ONLY_SHRINKS with the change that makes a count smaller."""
    now = {
        "lines over 100 columns": _long_lines(),
        "docstrings that begin with a noun clause": _noun_clauses(),
        "settings of coordinator, volunteer, run file and plan": _settings(),
        "first lines that name no thing": _nameless(),
        "functions with a pronoun or participle as a name": _nameless_functions(),
        "lines of the product with Any": _untyped_lines(),
    }
    assert now.keys() == ONLY_SHRINKS.keys()
    grown = {name: (count, ONLY_SHRINKS[name]) for name, count in now.items()}
    assert all(count <= bound for count, bound in grown.values()), f"now, bound: {grown}"


def _glossary(kind: str) -> set[str]:
    """Return what the second column of the glossary names after the word `kind`, in backticks."""
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    parts = [part for cell in cells for part in re.split(r"\b(?=wire |table )", cell)]
    named = [part for part in parts if part.startswith(f"{kind} ")]
    return {name for part in named for name in re.findall(r"`(\w+)`", part)}


def test_the_glossary_holds_every_table() -> None:
    from coordinator.database.tables.schema import metadata

    assert _glossary("table") == {table.name for table in metadata.sorted_tables}


def test_the_glossary_holds_every_class_of_the_wire() -> None:
    shown = GLOSSARY.read_text(encoding="utf-8").partition("## Glossary")[2]
    missing = [
        node.name
        for name, path in modules().items()
        if within(name, "shared.protocol")
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if f"`{node.name}`" not in shown
    ]
    assert not missing, f"docs/architecture.md does not explain {missing}"


def test_folders_stay_small() -> None:
    folders = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    crowded = {str(f.relative_to(ROOT)): n for f, n in folders.items() if n > FOLDER_MODULES_MAX}
    assert not crowded, f"more than {FOLDER_MODULES_MAX} modules in one folder: {crowded}"
    alone = [str(f.relative_to(ROOT)) for f, n in folders.items() if n == 1]
    assert alone == ["coordinator/database/migrations/versions"], "join a folder of one module"


def test_a_package_says_in_one_sentence_what_it_holds() -> None:
    for path in (p for p in modules().values() if p.name == "__init__.py"):
        body = tree(path).body
        assert ast.get_docstring(tree(path)), f"{path} says nothing"
        assert len(body) == 1, f"{path} holds code"


def test_no_fragment_has_a_module_of_its_own() -> None:
    """A short module with a single importer belongs into that importer."""
    importers: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        if found.imported in importers and found.imported != found.importer:
            importers[found.imported].add(found.importer)
    fragments = [
        f"{name} ({lines} lines, only for {min(importers[name])})"
        for name, path in modules().items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(importers[name]) == 1
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) < LONE_MODULE_LINES_MIN
    ]
    assert not fragments, "join these with their importer:\n" + "\n".join(fragments)


# --------------------------------------------------------------------------- what may never appear


def _forbidden(path: Path) -> list[str]:
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(node.lineno, name) for name in names if within(name, *FORBIDDEN_MODULES)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in FORBIDDEN_CALLS:
                found.append((node.lineno, f"{node.func.id}("))
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            if (name := ast.unparse(node)) in FORBIDDEN_ATTRIBUTES:
                found.append((node.lineno, name))
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            value = ast.unparse(node.value)
            found += [] if value == "False" else [(node.value.lineno, f"{node.arg}={value}")]
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in found]


def test_nothing_from_outside_can_become_code() -> None:
    files = [*modules().values(), *(ROOT / "packaging").rglob("*.py")]
    found = [line for path in files for line in _forbidden(path)]
    assert not found, "\n".join(found)


def test_pages_run_no_text_as_code() -> None:
    pages = [p for p in (ROOT / "coordinator").rglob("*") if p.suffix in (".js", ".html")]
    wrong = re.compile(r"\beval\(|new Function\(|document\.write\(|\.innerHTML\s*=")
    found = [str(p.relative_to(ROOT)) for p in pages if wrong.search(p.read_text(encoding="utf-8"))]
    assert not found, f"text becomes code or markup in {found}"


# ------------------------------------------------------------------------------------- the package


def test_console_scripts_and_workloads_can_be_loaded() -> None:
    project = PROJECT["project"]
    targets = [
        *project["scripts"].values(),
        *project["entry-points"]["volunteer.workloads"].values(),
    ]
    for target in targets:
        module, _, attribute = target.partition(" [")[0].partition(":")
        assert hasattr(import_module(module), attribute), f"{target} does not exist"


def test_the_wheel_holds_the_packages_with_their_data_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    strangers = [
        n for n in names if not n.startswith(tuple(f"{p}/" for p in (*PACKAGES, "volunteer-")))
    ]
    assert not [n for n in strangers if ".dist-info/" not in n]
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
        here = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert not here - set(names), f"not in the wheel: {sorted(here - set(names))}"


# ----------------------------------------------------------------------------------------- names


def _repeated_classes() -> list[str]:
    """Names of classes that two places of the product define."""
    found = Counter(
        node.name
        for path in modules().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, times in found.items() if times > 1)


def _repeated_files() -> list[str]:
    """Names of files that two folders of the product have, `__init__.py` left out."""
    found = Counter(path.name for path in modules().values() if path.name != "__init__.py")
    return sorted(name for name, times in found.items() if times > 1)


def test_a_name_finds_one_class_and_one_file() -> None:
    """Lower the bound in REPEATED_NAMES_MAX with the rename that makes a list shorter."""
    now = {"classes": _repeated_classes(), "files": _repeated_files()}
    longer = {kind: names for kind, names in now.items() if len(names) > REPEATED_NAMES_MAX[kind]}
    assert not longer, f"name these by their noun (bounds {REPEATED_NAMES_MAX}): {longer}"
