"""CPU seconds of `volunteer --help` and `coordinator --help`, and whether they load what they must
not.

    python -m tests.benchmarks.bench_start --json start.json

User and system time of a process of its own, interpreter included, as the kernel counts it; the
median of runs that take turns, after one that compiles. "python" is the bare interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

GOAL_S = 0.5
FORBIDDEN = ("torch", "textual")
PROGRAM = """
import sys
sys.argv = ["{program}", "--help"]
try:
    {start}
finally:
    sys.stderr.write(" ".join(name for name in {forbidden} if name in sys.modules))
"""
# what the commands begin with, without the end of the process, which says nothing of what was
# loaded
START = {
    "volunteer": "from volunteer.cli.main import run_command; run_command(['--help'])",
    "coordinator": "from coordinator.cli.main import main; main()",
}


def program(name: str) -> list[str]:
    if name == "python":
        return [sys.executable, "-c", "pass"]
    return [
        sys.executable,
        "-c",
        PROGRAM.format(program=name, start=START[name], forbidden=FORBIDDEN),
    ]


def spent(command: list[str]) -> tuple[float, str]:
    """CPU seconds of a command and what it wrote to stderr."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr
    said = child.stderr.read()
    child.stderr.close()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} ended with {child.returncode}: {said}")
    return usage.ru_utime + usage.ru_stime, said


def measure(repeats: int) -> list[dict[str, Any]]:
    names = ("python", "volunteer", "coordinator")
    times: dict[str, list[float]] = {name: [] for name in names}
    loaded = dict.fromkeys(names, "")
    for turn in range(repeats + 1):
        for name in names:
            seconds, loaded[name] = spent(program(name))
            if turn:
                times[name].append(seconds)
    return [
        {
            "program": name,
            "cpu_s": round(statistics.median(times[name]), 3),
            "cpu_s_max": round(max(times[name]), 3),
            "loaded": loaded[name],
            "goal": GOAL_S,
            "reached": statistics.median(times[name]) < GOAL_S and not loaded[name],
        }
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.repeats)
    print("--help        CPU s     most   goal  reached  torch, textual loaded")
    for row in rows:
        print(
            f"{row['program']:<12} {row['cpu_s']:6.3f}  {row['cpu_s_max']:6.3f}  <{row['goal']:4}"
            f"  {row['reached']!s:<7}  {row['loaded'] or 'no'}"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
