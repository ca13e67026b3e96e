"""Workers that do not speak the codec of a run: what is agreed on, and that it is said once."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from coordinator.rules.codec_choice import Agreements, agreed


@pytest.mark.parametrize(
    ("wanted", "spoken", "found"),
    [
        ("int8", {"int8", "float32"}, "int8"),
        ("int4", {"int8", "bf16", "float32"}, "int8"),
        ("topk-int4", {"float32", "bf16"}, "bf16"),
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
