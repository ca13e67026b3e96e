"""Measurement of a version on the task suites of its run, in the process of evaluations."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from coordinator.compute import Stop
from coordinator.database import datasets
from coordinator.database.evaluations import last_version
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from shared.errors import BadRequest, VolunteerError
from shared.workloads.data.chat_template import ChatFrame
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.task_suite import read_suite
from shared.workloads.generation.suite_score import SuiteTally, score

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.runs import RunRow

BUDGET_S = 300.0  # time for all suites of one version
SLOTS = 8  # answers that are generated at once


class SuiteFile(msgspec.Struct, frozen=True, kw_only=True):
    """Suite and the place of its file: a hash in the store, or a path on this machine."""

    name: str
    file: str


class SuiteOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a version by suite, and the reasons why some are missing."""

    scores: dict[str, SuiteTally]
    failures: dict[str, str]


def due(conn: Connection, run: RunRow, version: int) -> tuple[SuiteFile, ...]:
    """Return the suites on which a version has to be measured now, by hash."""
    settings = definition(run).file.evaluation
    if not settings.suites:
        return ()
    last = last_version(conn, run.id)
    ends = run.state == "completed" and version == run.head
    passed = last is not None and 0 < settings.suites_every <= version - last
    if last is not None and not (passed or (ends and version > last)):
        return ()
    rows = [datasets.by_name(conn, name) for name in settings.suites]
    return tuple(SuiteFile(name=row.name, file=row.manifest.heldout[0].sha256) for row in rows)


def measure_suites(
    stop: Stop, run: RunRow, weights: Path, data: LocalData, suites: tuple[SuiteFile, ...]
) -> SuiteOutcome:
    """Measure a weights file on suites, each for an equal part of the remaining time. Raises
    BadRequest for a workload that answers no prompts.
    """
    about = definition(run)
    config, workload = about.file.model, about.workload
    files = {name: data.asset(name) for name in workload.files(config)}
    whole = workload.whole(config, read_weights(weights, about), files)
    tokenizer = data.asset("tokenizer").read_bytes()
    decoder = workload.decoder(config, whole, tokenizer, SLOTS, "cpu")
    if decoder is None:
        raise BadRequest(f"runs of the workload {about.file.workload} do not answer prompts")
    frame = ChatFrame.of(data.manifest)
    scores: dict[str, SuiteTally] = {}
    failures: dict[str, str] = {}
    ends = monotonic() + BUDGET_S
    for number, file in enumerate(suites):
        budget = max(0.0, ends - monotonic()) / (len(suites) - number)
        try:
            suite = read_suite(Path(file.file).read_bytes(), file.name)
            scores[file.name] = score(decoder, suite, budget, stop, frame)
        except VolunteerError as error:
            failures[file.name] = error.message
        if stop():
            break
    return SuiteOutcome(scores=scores, failures=failures)
