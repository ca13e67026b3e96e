"""The size of a micro-batch begins where earlier work on the device came to."""

from __future__ import annotations

from shared.workloads.training.micro_batch import MicroBatchPace

FAST_S = 0.001


def grown(pace: MicroBatchPace) -> int:
    """The size that quick work comes to."""
    for _ in range(40):
        pace.record(pace.micro, FAST_S * pace.micro)
    return pace.micro


def test_work_begins_with_the_size_that_was_good_before() -> None:
    pace = MicroBatchPace(16, 1e12, "cpu")
    assert pace.micro == 1  # a guess for a slow core
    pace.begin_with(8, most=False, room=0)
    assert pace.micro == 8
    assert grown(pace) == 16


def test_a_size_that_memory_set_is_not_passed_again() -> None:
    pace = MicroBatchPace(16, 1e12, "cuda:0")
    assert pace.micro == 16
    pace.begin_with(4, most=True, room=0)
    assert pace.micro == 4
    assert grown(pace) == 4


def test_another_batch_limits_what_is_remembered() -> None:
    pace = MicroBatchPace(4, 1e12, "cpu")
    pace.begin_with(16, most=True, room=0)
    assert pace.micro == 4


def test_memory_that_is_left_limits_what_a_micro_batch_keeps() -> None:
    pace = MicroBatchPace(16, 1e12, "cpu")
    pace.begin_with(0, most=False, room=1000)
    assert pace.micro == 1
    for _ in range(2):
        pace.record(1, FAST_S, kept_bytes=100)
    assert pace.micro == 5  # the way back takes as much again
