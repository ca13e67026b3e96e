"""Mutation testing of the pure rules, in pieces: each survivor is listed with its change.

    make mutants                     every piece of tests/mutants.toml
    make mutants MODULE=plan         one piece
    make mutants MODULE=plan MUTANTS_ARGS=--again     after changes of its tests: from the beginning
    make mutants MODULE=plan MUTANTS_ARGS=--report    run nothing, judge what is known
    make mutants MUTANTS_ARGS='--day 17'     a tenth of one piece, as `.ci/run` does each day

A piece has a folder below build/mutants with a copy of the tree, in which mutmut changes functions
of the piece's files and runs the piece's tests. Beside mutmut's own changes each operand of `and`
and `or` is dropped once. A run that was stopped resumes, and repeats what it knows of functions
that have changed. Survivors that change no behaviour stand in tests/mutants.toml with their
reasons, and are not counted. The exit code is 1 where a smaller share of the mutants that were
tried was killed than the piece demands: nine in ten unless it says less, which may only rise.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
CODE = ("shared", "coordinator", "volunteer", "packaging")
LEAST = 0.90
# The wording of a sentence that stands alone on its line is no behaviour.
WORDING = (
    r"""^\s*(["'])(?:(?!\1).)* (?:(?!\1).)*\1[,)\s]*$""",
    r"""raise \w+\((["'])(?:(?!\1).)* (?:(?!\1).)*\1\)""",
)
UNTRIED = "not checked"
# mutmut's command line, with one more change: an operand of `and` or `or` alone; `show` takes names
MUTMUT = """
import sys
from libcst import BooleanOperation
from mutmut.mutation.mutators import mutation_operators
mutation_operators.append(
    (BooleanOperation, lambda node: (node.left.deep_clone(), node.right.deep_clone()))
)
from mutmut.__main__ import cli
for name in sys.argv[2:] if sys.argv[1] == "show" else ():
    cli(["show", name], standalone_mode=False)
if sys.argv[1] != "show":
    cli()
"""
KILLED = ("killed", "timeout", "segfault", "suspicious", "caught by type check")


class Equivalent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mutation that no test can notice."""

    function: str  # as mutmut names it, without the number
    change: str  # "what stands there => what it became"
    why: str


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files that are changed, and the tests that should notice."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    args: tuple[str, ...] = ()  # more for pytest
    least: float = LEAST  # share that must be killed
    slow: bool = False  # a day tries one mutant of each function, not a tenth of all
    equivalent: tuple[Equivalent, ...] = ()


class Survivor(msgspec.Struct, frozen=True, kw_only=True):
    """A mutant that no test killed."""

    name: str
    status: str
    change: str

    @property
    def function(self) -> str:
        return self.name.rpartition("__mutmut_")[0]


def pieces() -> dict[str, Piece]:
    """Return the pieces by name."""
    table = tomllib.loads((ROOT / "tests/mutants.toml").read_text())
    return msgspec.convert(table, dict[str, Piece])


def prepare(name: str, piece: Piece, *, again: bool) -> Path:
    """Make or refresh the folder of a piece."""
    folder = ROOT / "build/mutants" / name
    if again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for part in (*CODE, "tests", "docs", "README.md"):
        if not (folder / part).is_symlink():
            (folder / part).symlink_to(ROOT / part)
    quoted = {
        "source_paths": ["shared", "coordinator", "volunteer"],
        "only_mutate": piece.files,
        "do_not_mutate_patterns": WORDING,
        "also_copy": ["packaging", "docs", "README.md"],
        "pytest_add_cli_args": [
            *piece.args,
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
            "-o",
            "tmp_path_retention_policy=none",  # each mutant would leave its files for days
        ],
        "pytest_add_cli_args_test_selection": piece.tests,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in quoted.items()]
    lines += ['process_isolation = "forkserver"', "use_git_change_detection = false"]
    lines += ["use_setproctitle = false", 'on_dependency_change = "ignore"']
    project = (ROOT / "pyproject.toml").read_text()
    text = "\n".join((project, "[tool.mutmut]", *lines, ""))
    target = folder / "pyproject.toml"
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    return folder


def mutmut(folder: Path, *args: str, shown: bool = False) -> str:
    """Run the tool in a folder; return its output."""
    command = [sys.executable, "-P", "-c", MUTMUT, *args]
    done = subprocess.run(
        command, cwd=folder, check=False, text=True, stdout=None if shown else subprocess.PIPE
    )
    if done.returncode:
        print(*(done.stdout or "").splitlines()[-40:], sep="\n")
        raise SystemExit(f"mutants: `mutmut {' '.join(args)}` ended with {done.returncode}")
    return done.stdout or ""


def statuses(folder: Path) -> dict[str, str]:
    """Return the status of each mutant."""
    found = {}
    for line in mutmut(folder, "results", "--all", "true").splitlines():
        name, colon, status = line.strip().partition(": ")
        if colon:
            found[name] = status
    return found


def changes(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the lines that differ in each of these mutants."""
    shown = mutmut(folder, "show", *names) if names else ""
    changes = {}
    for text in re.split("(?m)^# ", shown)[1:]:
        head, *lines = text.splitlines()
        old, new = (
            " ".join(line[1:].strip() for line in lines if re.match(sign, line))
            for sign in ("-(?![-+]{2})", r"\+(?![-+]{2})")
        )
        changes[head.partition(": ")[0]] = f"{old} => {new}"
    return changes


def judge(name: str, piece: Piece, folder: Path) -> bool:
    """Print the survivors of a piece. Return True if few enough survived."""
    found = statuses(folder)
    counts = Counter(found.values())
    alive = [mutant for mutant, status in found.items() if status not in (*KILLED, UNTRIED)]
    left = [
        Survivor(name=mutant, status=found[mutant], change=change)
        for mutant, change in changes(folder, alive).items()
    ]
    excused = {(each.function, each.change): each for each in piece.equivalent}
    seen = {(each.function, each.change) for each in left}
    for each in left:
        if (each.function, each.change) not in excused:
            print(f"{each.status}: {each.name}\n    {each.change}")
    gone = [why for key, why in excused.items() if key not in seen and not counts[UNTRIED]]
    for why in gone:
        print(f"excused, and killed: {why.function}\n    {why.change}")
    killed = sum(counts[status] for status in KILLED)
    known = sum((each.function, each.change) in excused for each in left)
    tried = len(found) - known - counts[UNTRIED]
    share = killed / max(1, tried)
    said = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print(f"{name}: {killed} of {tried} killed, {share:.1%} ({said}; {known} equivalent)")
    return share >= piece.least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PIECE", help="pieces (default: all)")
    parser.add_argument("--again", action="store_true", help="from the beginning")
    parser.add_argument("--report", action="store_true", help="run nothing, only judge")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once (default 2)")
    parser.add_argument("--day", type=int, default=0, help="a tenth of one piece, by this day")
    args = parser.parse_args()
    table = pieces()
    if unknown := [name for name in args.names if name not in table]:
        raise SystemExit(f"mutants: there is no piece {', '.join(unknown)}; {', '.join(table)}")
    names, some = args.names or [*table], []
    if args.day:
        names = [names[args.day % len(names)]]
        some = [f"*__mutmut_{'' if table[names[0]].slow else '*'}{args.day % 10}"]
    good = True
    for name in names:
        print(f"== {name}", flush=True)
        folder = prepare(name, table[name], again=args.again)
        if not args.report:
            run = ("run", "--max-children", str(args.jobs), *some)
            mutmut(folder, *run, shown=sys.stdout.isatty())
        good = judge(name, table[name], folder) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
