"""The screens in every language: each string in the catalogue, nothing cut, changed at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from shared.protocol import endpoints
from tests.support.words import KEYWORDS, PROGRAM
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import LEADERS, SIZES, SMALL, Snapshot, picture, prepared, settle
from tests.tui.steps import PAGE, walk
from volunteer.control import commands
from volunteer.i18n.catalogue import LanguageChoice, _, choose, current, languages, use
from volunteer.tui import keys
from volunteer.tui.agent_view import AgentView
from volunteer.tui.appearance import Look
from volunteer.tui.onboarding.screen import STEPS, step_line
from volunteer.tui.screens.dashboard import Dashboard
from volunteer.tui.screens.help import help_lines
from volunteer.tui.screens.history import History
from volunteer.tui.screens.runs import RunsPage
from volunteer.tui.text import ROLES, UNICODE
from volunteer.tui.widgets.panel import Scene
from volunteer.tui.widgets.plot import Chart, Series, plot

SHIPPED = [name for name in languages() if name != "en"]
SHORT = 24  # cells of a label; what is longer is a sentence, which may be cut
SPOKEN = [
    *sorted((PROGRAM / "tui").rglob("*.py")),
    *(PROGRAM / name for name in ("headless.py", "text.py")),
    *sorted((PROGRAM / "cli").glob("*.py")),
    *(PROGRAM / "service" / name for name in ("service.py", "uninstall.py")),
    *sorted((PROGRAM / "settings").glob("*.py")),
    *(PROGRAM / "control" / name for name in ("event_sentences.py",)),
    PROGRAM / "machine" / "policy.py",
]
# Strings that look like words of a screen and are none.
NO_WORDS = {
    "volunteer",  # the name of the program
    "Name",  # ids of steps
    "Join",
    "of a checkout",  # diagnostics are for the organiser
    "you resume",  # values of the control, shown by no screen
    "you start",
    "share solved",  # a measure, shown by its name
    "Begin",  # titles of the help, which is English
    "Watch",
    "Steer",
    "Use what you earned",
    "Look after",
    "the priority could not be lowered",  # a log
    "Cache",  # a folder
    "Mbit/s",
    "list of names",  # a type
    "volunteer join '{}'",
    "{}FLOP/s",
    "NFKD",
    "Panel",
    "Model: {}",  # the licence and the card of an exported model, which are English
    "Trained by volunteers.",
    "`pip install {}`",
    "the program `volunteer`",
    "In this folder, with {}:",
    ", on whose held-out part the loss was {} and is {}",
    "- trained further on the data of one member{}",
    "- it may repeat parts of those data: whoever may not read them may not have it",
}


@pytest.fixture(autouse=True)
def _english_again() -> Iterator[None]:
    yield
    use(LanguageChoice())


def _written(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)


def unwrapped(tree: ast.Module) -> Iterator[str]:
    """Yield the strings that look like words of a screen and are not looked up."""
    above: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(tree):
        above |= dict.fromkeys(ast.iter_child_nodes(node), node)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.JoinedStr | ast.Constant) and above.get(node)):
            continue
        if isinstance(node, ast.Constant) and not isinstance(node.value, str):
            continue
        parent = above[node]
        if isinstance(parent, ast.JoinedStr | ast.FormattedValue | ast.Expr | ast.Compare):
            continue  # a part of a longer one, a format, a docstring
        if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in KEYWORDS:
            continue
        text = _written(node)
        first = isinstance(parent, ast.Tuple) and len(parent.elts) == 2 and parent.elts[0] is node
        role = parent.elts[1] if isinstance(parent, ast.Tuple) and first else None
        span = isinstance(role, ast.Constant) and role.value in ROLES
        words = re.search(r"[A-Za-z]{2,} +[A-Za-z(]", text) or re.match(r"[A-Z][a-z]{2,}", text)
        if (words or (span and re.search(r"[A-Za-z]{3,}", text))) and not _technical(node, above):
            yield text.strip()


def _technical(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Return True within types, styles and names of classes."""
    while node in above:
        parent = above[node]
        if isinstance(parent, ast.AnnAssign) and node is parent.annotation:
            return True
        if isinstance(parent, ast.Assign | ast.AnnAssign):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if names & {"CSS", "DEFAULT_CSS", "AUTO_FOCUS", "NAME", "BINDINGS"}:
                return True
        if isinstance(parent, ast.Call) and getattr(parent.func, "attr", "") == "query_one":
            return True
        if isinstance(parent, ast.Subscript | ast.arg):
            return True
        if isinstance(parent, ast.keyword) and parent.arg in ("id", "classes", "help"):
            return True
        if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in (
            *("Binding", "cast", "TypeVar", "getattr", "compile", "escape"),
        ):
            return True
        node = parent
    return False


@pytest.mark.parametrize("file", SPOKEN, ids=lambda file: str(file.relative_to(PROGRAM)))
def test_every_string_of_a_screen_is_in_the_catalogue(file: Path) -> None:
    found = set(unwrapped(ast.parse(file.read_text(encoding="utf-8")))) - NO_WORDS
    assert not found, f"not looked up by _() or N_(): {sorted(found)}"


def labels() -> set[str]:
    """Return the short translations in use."""
    found = {form for forms in current().messages.values() for form in forms}
    return {text for text in found if "{" not in text and cell_len(text) <= SHORT}


def cut(text: str, known: set[str]) -> list[str]:
    """Return the labels that a screen shows only a part of."""
    starts = re.findall(r"([^\s│╭╰╮╯─…][^│╭╰╮╯─…]*)…", text)
    shown = [re.split(r"\s{2,}| [●○✓✗◌‖▶] ", start)[-1].strip(" ●○✓✗◌‖▶") for start in starts]
    return [
        start
        for start in shown
        if len(start) >= 3 and any(label.startswith(start) for label in known)
    ]


@pytest.mark.parametrize("language", SHIPPED)
async def test_no_label_is_cut_on_any_page_at_any_size(engine: FakeEngine, language: str) -> None:
    use(choose(language))
    known = labels()
    found: dict[str, list[str]] = {}
    async with opened(prepared(engine), scenes.filled(), look=Look(language=language)) as (app, p):
        for name, size in {"60x16": SMALL, **SIZES}.items():
            await p.resize_terminal(*size)
            for page in keys.PAGES:
                app.action_page(page.name)
                await p.pause()
                await settle(app, p)
                if missing := cut(screen_text(app), known):
                    found[f"{page.name} at {name}"] = missing
    assert not found


@pytest.mark.parametrize("language", ["en", *SHIPPED])
async def test_every_page_has_its_name_at_80_columns(engine: FakeEngine, language: str) -> None:
    use(choose(language))
    look = Look(language=language)
    async with opened(prepared(engine), scenes.filled(), look=look, size=(80, 24)) as (app, p):
        await settle(app, p)
        head = screen_text(app).splitlines()[0]
    assert [_(page.title) for page in keys.PAGES if f"{page.key} {_(page.title)}" not in head] == []


@pytest.mark.parametrize("language", SHIPPED)
def test_labels_are_shorter_than_their_columns(language: str) -> None:
    """The names before a value stand in columns of nine cells."""
    use(choose(language))
    names = {
        *("state", "speed", "pace", "memory", "load", "heat", "power", "duty"),
        *("total", "today", "pending", "at stake", "owed", "rank", "work"),
        *("version", "progress", "helpers", "my part", "model", "licence", "traffic", "session"),
        *("balance", "earned", "spent", "held", "check", "number", "weight"),
    }
    told = {name: current().messages["", name][0] for name in names}
    assert {name: word for name, word in told.items() if cell_len(word) > 8} == {}
    verdicts = ("received", "checking", "accepted", "merged", "paid", "not needed", "rejected")
    words = {name: current().messages["", name][0] for name in verdicts}
    assert {name: word for name, word in words.items() if cell_len(word) > 10} == {}


@pytest.mark.parametrize("language", SHIPPED)
@pytest.mark.parametrize("page", ["dashboard", "settings"])
def test_screen(engine: FakeEngine, text_compare: Snapshot, page: str, language: str) -> None:
    use(choose(language))
    assert picture(engine, text_compare, page, size=(120, 36), look=Look(language=language))


@pytest.mark.parametrize("language", SHIPPED)
async def test_what_a_coordinator_says_of_itself_stands_apart_from_its_names(
    engine: FakeEngine, language: str
) -> None:
    use(choose(language))
    async with opened(prepared(engine), look=PAGE) as (app, pilot):
        await walk(app, pilot, engine, "found")
        text = screen_text(app)
    for name, value in (("key", "tm5x-"), ("runs", "stdlib-gpt"), ("contact", "lab@")):
        assert re.search(f"{re.escape(_(name))} +{value}", text), text


@pytest.mark.parametrize("language", SHIPPED)
def test_the_help_cuts_no_key_and_no_name(language: str) -> None:
    use(choose(language))
    scene = Scene(view=AgentView(), now=scenes.NOW)
    own = [*Dashboard.ACTIONS, *RunsPage.ACTIONS, *History.ACTIONS]
    for line in help_lines(own, scene, 76):
        if len(line) == 3:
            assert line[0][0].endswith(" ")
            assert line[1][0] == "" or line[1][0].endswith(" "), line


@pytest.mark.parametrize("language", languages())
def test_the_steps_of_the_first_start_have_their_names_in_80_columns(language: str) -> None:
    use(choose(language))
    scene = Scene(view=AgentView(), now=scenes.NOW)
    for at in range(len(STEPS)):
        text = "".join(part for part, _role in step_line(at, scene, 76))
        assert all(_(step.TITLE) in text for step in STEPS), text
        assert cell_len(text) <= 76


@pytest.mark.parametrize("language", SHIPPED)
def test_the_labels_of_an_axis_have_the_signs_of_the_language(language: str) -> None:
    use(choose(language))
    chart = Chart(series=(Series(points=((0, 3.2), (10, 3.9)), role="curve"),))
    text = "".join(part for line in plot(chart, 40, 9, UNICODE) for part, _role in line)
    assert re.search(r"\d,\d┤", text), text


RIGHT_TO_LEFT = ("نور الهدى", "אביגיל", "أحمد_7", "דוד (test)")


def with_names_from_right_to_left(engine: FakeEngine) -> FakeEngine:
    rows = tuple(
        replace(row, nickname=RIGHT_TO_LEFT[n] if n < len(RIGHT_TO_LEFT) else row.nickname)
        for n, row in enumerate(LEADERS)
    )
    prepared(engine).answers[endpoints.LEADERBOARD] = rows
    return engine


async def test_names_from_right_to_left_break_no_column(engine: FakeEngine) -> None:
    with_names_from_right_to_left(engine)
    async with opened(engine, scenes.filled(), look=Look(page="leaderboard")) as (app, pilot):
        await settle(app, pilot)
        rows = screen_text(app).splitlines()
        pay = [(row, found) for row in rows if (found := re.search(r"\d\.\d\d  ━", row))]
        assert len(pay) >= 5
        assert len({cell_len(row[: found.end()]) for row, found in pay}) == 1
        assert {name for name in RIGHT_TO_LEFT for row, _ in pay if name in row} == {*RIGHT_TO_LEFT}


async def test_the_next_language_is_seen_at_once_and_kept(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=Look(page="settings")) as (app, p):
        await settle(app, p)
        assert "When to work" in screen_text(app)
        for words in ("When to work", "Wann gearbeitet wird", "Cuándo trabajar"):
            app.action_language()
            await settle(app, p)
            assert words in screen_text(app)
        await p.press("1")
        await settle(app, p)
        assert "Pérdida" in screen_text(app)
    kept = [c.changes for c in engine.asked if isinstance(c, commands.SetSettings)]
    assert kept == [{"language": name} for name in ("en", "de", "es")]


async def test_what_is_wrong_with_a_language_is_told_at_the_start(engine: FakeEngine) -> None:
    look = Look(notice=choose("xx").problem)
    async with opened(prepared(engine), scenes.filled(), look=look, size=(120, 36)) as (app, _p):
        assert 'there is no language "xx": English is used' in screen_text(app)
