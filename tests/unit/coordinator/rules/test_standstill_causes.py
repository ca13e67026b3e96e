"""Why a run does not go on: each cause by its facts alone, and their order."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.rules import standstill_causes as rules
from coordinator.rules.standstill_causes import (
    EpisodeFacts,
    MergeFacts,
    OutcomeFacts,
    PauseFacts,
    PresenceFacts,
    ProofFacts,
    RunFacts,
    standstill,
)
from shared.protocol.base import Cause

NOW = 1_800_000_000.0
GIB = 1 << 30
WELL = RunFacts(
    name="gpt", state="running", now=NOW, version=7, workload="gpt", needs_bytes=GIB,
    machines=PresenceFacts(online=3, fitting=3, at_work=2, largest=4 * GIB, largest_name="RTX"),
    made_at=NOW - 600, watched_since=NOW - 7200, usual_s=100.0, stalled_s=900.0,
)  # fmt: skip
BAD = OutcomeFacts(count=3, machines=2, commonest="warm_size lies below 3", since=NOW - 60)
# In the order in which they are tried: facts that stop a run, and what the answer must say.
CAUSES: tuple[tuple[Cause, dict[str, Any], str], ...] = (
    (
        Cause.PAUSED,
        {"state": "paused", "pause": PauseFacts(reason="new data", at=NOW)},
        "paused by its organiser: new data",
    ),
    (Cause.CLOSED, {"closed": "3 kB are free"}, "accepts nothing new: 3 kB are free"),
    (Cause.NO_SERVER, {"served": False}, "no server is running"),
    (
        Cause.MERGE_FAILS,
        {"merge": MergeFacts(failed=True, message="no space")},
        "the merge to version 8 fails: no space",
    ),
    (Cause.FAILING, {"failures": BAD}, "3 tasks failed, on 2 machines: warm_size lies below 3"),
    (
        Cause.NOTHING_TEACHES,
        {"episodes": EpisodeFacts(unit="problem", made=100, taught=0.001)},
        "nothing teaches: 0.1% of the 100 newest problems",
    ),
    (
        Cause.NO_FIT,
        {"machines": replace(WELL.machines, fitting=0, at_work=0), "needs_bytes": 40 * GIB},
        "none of the 3 machines here fits: it needs about 42.9 GB of a GPU",
    ),
    (
        Cause.NOBODY,
        {"machines": PresenceFacts(last_seen=NOW - 90)},
        "last machine was seen 1:30 min",
    ),
    (
        Cause.NO_DATA,
        {"machines": PresenceFacts(online=3, fitting=3, keepers=0)},
        "nobody with data for it is here, of 3 machines online",
    ),
    (
        Cause.PROOF,
        {"proofs": ProofFacts(count=2, provers="made by this server", since=NOW - 45)},
        "2 contributions wait for proof, for 45 s: made by this server",
    ),
    (
        Cause.MERGE_DUE,
        {"merge": MergeFacts(due=True, waits_since=NOW - 61)},
        "its merge is due since 1:01 min and does not begin",
    ),
    (
        Cause.COMPANY,
        {"made_at": NOW - 901, "merge": MergeFacts(members=1, waits_since=NOW - 1)},
        "no version for 15:01 min: its merge waits for an update of another member",
    ),
    (Cause.STALLED, {"made_at": NOW - 901}, "no version for 15:01 min, with 2 machines at work"),
)


def cause(**changes: Any) -> Cause | None:
    answer = standstill(replace(WELL, **changes))
    return None if answer is None else answer.cause


def test_a_run_that_goes_on_has_no_answer() -> None:
    assert standstill(WELL) is None
    for state in ("draft", "completed", "failed"):
        assert cause(state=state, served=False, failures=BAD) is None


@pytest.mark.parametrize(("expected", "facts", "words"), CAUSES, ids=[row[0] for row in CAUSES])
def test_each_cause_is_named_by_its_facts(
    expected: Cause, facts: dict[str, Any], words: str
) -> None:
    answer = standstill(replace(WELL, **facts))
    assert answer is not None
    assert answer.cause == expected
    assert words in answer.message
    assert answer.cause in rules.HANDLING


def test_of_two_causes_the_earlier_one_is_named() -> None:
    for place, (first, facts, _) in enumerate(CAUSES):
        for later, others, _ in CAUSES[place + 1 :]:
            if facts.keys() & others.keys():
                continue
            assert cause(**others, **facts) == first, (first, later)


def test_every_cause_is_handled() -> None:
    assert rules.HANDLING.keys() == set(Cause)


def test_a_run_that_paused_itself_is_told_as_a_fault() -> None:
    assert cause(state="paused", pause=PauseFacts(actor="run", reason="refused")) == Cause.AT_FAULT
    assert rules.HANDLING[Cause.AT_FAULT].patience_s == 0.0
    assert rules.HANDLING[Cause.PAUSED].patience_s is None


def test_one_failure_that_nobody_tries_again_is_named() -> None:
    once = replace(BAD, count=1, machines=1, commonest="the loss is no longer a number")
    assert cause(failures=once) is None
    answer = standstill(replace(WELL, failures=replace(once, stuck=True)))
    assert answer is not None
    assert answer.cause == Cause.FAILING
    assert "its last task failed, on 1 machine: the loss is no longer" in answer.message


def test_what_happens_more_often_is_named() -> None:
    two, four = replace(BAD, count=2), replace(BAD, count=4)
    assert cause(failures=two) is None
    assert cause(refusals=two) is None
    assert cause(failures=two, refusals=replace(BAD, count=1)) == Cause.FAILING
    assert cause(failures=two, refusals=four) == Cause.REFUSED


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"episodes": EpisodeFacts(made=100, taught=0.0, learning=1)}, None),
        ({"episodes": EpisodeFacts(made=100, taught=0.02)}, None),
        ({"episodes": EpisodeFacts(made=63, taught=0.0)}, None),
        ({"machines": PresenceFacts(online=1, fitting=0, at_work=1)}, None),
        ({"machines": PresenceFacts(online=1, workload=False)}, Cause.NO_FIT),
        ({"machines": PresenceFacts(paused=2)}, Cause.NOBODY),
        ({"machines": PresenceFacts(online=2, fitting=1)}, None),  # they work for other runs
        ({"proofs": ProofFacts(count=1, since=NOW - 19)}, None),
        (
            {"proofs": ProofFacts(count=1, since=NOW - 90), "merge": MergeFacts(ready=1)},
            None,
        ),
        ({"merge": MergeFacts(due=True, waits_since=NOW - 59)}, None),
        ({"merge": MergeFacts(due=True, waits_since=NOW - 90, under_way=True)}, None),
        ({"made_at": NOW - 901, "watched_since": NOW - 10}, None),  # resumed, or served again
        ({"made_at": NOW - 9000, "stalled_s": 0.0}, None),
        ({"made_at": NOW - 901, "usual_s": 400.0}, None),
        ({"merge": MergeFacts(members=1, waits_since=NOW - 1)}, None),  # another may be at work
        ({"made_at": NOW - 901, "merge": MergeFacts(members=2)}, Cause.STALLED),
        ({"made_at": NOW - 2001, "usual_s": 400.0}, Cause.STALLED),
    ],
)
def test_what_only_looks_like_a_standstill_is_none(
    facts: dict[str, Any], expected: Cause | None
) -> None:
    assert cause(**facts) == expected
