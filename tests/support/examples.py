"""Examples of tests of properties: few by default, all in the thorough profile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from coordinator.database.engine.open_database import Database

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
EXAMPLES = {"fast": 25, "thorough": 100}  # of a test that names no number


def examples(thorough: int) -> int:
    """Return the number of examples for this profile, of a test with `thorough` in all."""
    return thorough if PROFILE == "thorough" else max(10, thorough // 4)


def try_on_database(
    url: str, machine: Callable[[asyncio.Runner, Database], RuleBasedStateMachine]
) -> None:
    """Run a state machine over one database, examples of 30 steps: 15 in all, and half as many on
    PostgreSQL, where a step takes twice the time. An example takes 0.4 s.
    """
    count = 15 if url.startswith("sqlite") else 8
    with asyncio.Runner() as runner:
        db = runner.run(Database.open(url))
        try:
            run_state_machine_as_test(
                lambda: machine(runner, db),  # type: ignore[arg-type]  # any factory will do
                settings=settings(
                    max_examples=examples(count),
                    stateful_step_count=30,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(db.close())
