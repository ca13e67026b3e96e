"""Workers that do not speak the codec of a run: what is agreed on, and that it is said once."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from coordinator.plan.plan import plan
from coordinator.rules import codec_choice
from coordinator.rules.codec_choice import Agreements, agreed, grantable


@pytest.mark.parametrize(
    ("wanted", "spoken", "found"),
    [
        ("int8", {"int8", "float32"}, "int8"),
        ("int4", {"int8", "bf16", "float32"}, "int8"),
        ("topk-2bit", {"float32", "bf16"}, "bf16"),
        ("int8", {"float32"}, "float32"),
        ("int8", {"ternary"}, ""),
        ("int8", set(), "int8"),
        ("float32", {"float32", "float32-zstd"}, "float32-zstd"),
        ("bf16", {"float32", "bf16", "bf16-zstd"}, "bf16-zstd"),
        ("bf16", {"float32", "bf16"}, "bf16"),  # of an earlier version
        ("bf16", {"float32", "float32-zstd"}, "float32-zstd"),
        ("float32", set(), "float32"),
    ],
)
def test_the_best_codec_that_both_speak_is_agreed_on(
    wanted: str, spoken: set[str], found: str
) -> None:
    assert agreed(wanted, spoken) == found


def test_another_codec_is_said_once_for_each_worker_and_run() -> None:
    structlog.reset_defaults()  # a server of another test may have set a level
    agreements = Agreements(structlog.get_logger("codecs"))
    with capture_logs() as said:
        for _ in range(3):
            agreements.note("ann", "r", "int4", "bf16")
            agreements.note("ann", "s", "int4", "bf16")
            agreements.note("bob", "r", "int8", "int8")
            agreements.note("bob", "s", "bf16", "bf16-zstd")
    assert [(line["worker"], line["run"], line["granted"]) for line in said] == [
        ("ann", "r", "bf16"),
        ("ann", "s", "bf16"),
    ]


def test_an_upload_may_be_in_any_codec_that_a_lease_may_have_named() -> None:
    found = grantable(plan({"preset": "fedavg", "codec": "int4"}))
    assert found == {"int4", "int8", "bf16", "float32", "bf16-zstd", "float32-zstd"}
    phased = plan(
        {
            "preset": "fedavg",
            "phases": [{"until_versions": 3, "overrides": {"codec": "int4"}}],
            "codec": "bf16",
        }
    )
    assert grantable(phased) == found


def test_what_was_told_is_forgotten_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec_choice, "TOLD_MAX", 2)
    said: list[str] = []

    class Log:
        def info(self, event: str, *, run: str, worker: str, wanted: str, granted: str) -> None:
            said.append(f"{event} {run} {worker} {wanted} {granted}")

    agreements = Agreements(Log())
    for worker in ("ann", "bob", "ann", "cyd", "ann"):
        agreements.note(worker, "r", "int8", "bf16")
    assert said == [
        f"codec negotiated down r {worker} int8 bf16" for worker in ("ann", "bob", "cyd", "ann")
    ]
