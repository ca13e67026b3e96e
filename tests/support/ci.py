"""Run every test; rerun each failure alone, and name it.

Tests that start real servers and kill them share a machine with strangers. So what failed runs
again in one process, at most twice, and has to pass then. Each such test is named at the end: with
the reason that `tests/timing_sensitive.toml` gives for it, or loudly where there is none, for then
it hides a race.

    python -m tests.support.ci
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ROOT / "tests" / "timing_sensitive.toml"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
RESULTS = ROOT / "build" / "ci-results.xml"
TARGET = "test-all"
TURNS = 2  # at most so often is run again what failed
AGAIN = "--last-failed --last-failed-no-failures none"

# Runs the tests with these arguments of pytest, alone or not; returns the exit status.
Make = Callable[[str, bool], int]


@dataclass
class Result:
    """Outcome of the tests: passes, reruns, and final failures."""

    passed: int = 0
    again: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    status: int = 0


def reasons(path: Path = KNOWN) -> dict[str, str]:
    """Return the reason of each timing-sensitive test by `file::function`."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["tests"])


def reason(test: str, known: Mapping[str, str]) -> str:
    """Return why a test, named with its parameters, may need another turn; "" if none is known."""
    return known.get(test.partition("[")[0], "")


def run(make: Make, last_failed: Path = LAST_FAILED, results: Path = RESULTS) -> Result:
    """Run the tests, and rerun each failure alone until it passes or the turns are used up."""
    result = Result()
    last_failed.unlink(missing_ok=True)  # an earlier run on this machine is not this one
    results.unlink(missing_ok=True)
    result.status = make(f"--junitxml={relative(results)}", False)
    result.passed = passed(results)
    for turn in range(1, TURNS + 1):
        result.failed = failed(last_failed)
        if not result.status or not result.failed:  # an internal error names no test
            break
        result.again += [test for test in result.failed if test not in result.again]
        say(f"turn {turn} of {TURNS}: alone, what failed:", *result.failed)
        results.unlink(missing_ok=True)
        result.status = make(f"{AGAIN} --junitxml={relative(results)}", True)
        result.passed += passed(results)
    result.failed = failed(last_failed) if result.status else []
    return result


def relative(path: Path) -> str:
    """Return a path as seen from the root: a folder above may have a space in its name."""
    return os.path.relpath(path, ROOT)


def failed(last_failed: Path) -> list[str]:
    """Return the ids of the tests that failed last, as pytest keeps them."""
    return sorted(json.loads(last_failed.read_bytes())) if last_failed.exists() else []


def passed(results: Path) -> int:
    """Count the tests that passed in a JUnit file; 0 if pytest wrote none."""
    if not results.exists():
        return 0
    cases = ElementTree.parse(results).iter("testcase")
    return sum(
        not {child.tag for child in case} & {"failure", "error", "skipped"} for case in cases
    )


def summary(result: Result, known: Mapping[str, str]) -> list[str]:
    """Return the lines that name each test that was run again, and why it may be."""
    lines = [f"run again: {len(result.again)}" + "".join(f"\n  {test}" for test in result.again)]
    for test in result.again:
        why = reason(test, known)
        if test in result.failed:
            lines.append(f"FAILED {TURNS} more times alone: {test}")
        elif why:
            lines.append(f"known: {test}: {why}")
        else:
            lines.append(
                f"!!! UNEXPLAINED: {test}\n"
                "!!! failed once and passed alone, and no reason is known.\n"
                "!!! Find the race and mend it, or write the reason into"
                f" {KNOWN.relative_to(ROOT)}."
            )
    return lines


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def make(arguments: str, alone: bool) -> int:
    """Run the tests by make; their output goes to ours."""
    words = ["make", "--no-print-directory", TARGET, f"PYTEST_ARGS={arguments}"]
    command = [*words, "WORKERS=0"] if alone else words
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode


def main() -> int:
    began = time.monotonic()
    RESULTS.parent.mkdir(exist_ok=True)
    result = run(make)
    say(*summary(result, reasons()))
    counts = f"{len(result.failed)} failed, " if result.failed else ""
    counts += f"{result.passed} passed"
    say(f"{f' {counts} in {time.monotonic() - began:.2f}s ':=^80}")
    return int(bool(result.status))


if __name__ == "__main__":
    sys.exit(main())
