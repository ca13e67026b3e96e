"""Advice on run files that are valid and still a bad idea."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from coordinator.plan.plan import plan
from coordinator.plan.plan_tables import Plan
from coordinator.plan.presets import PRESETS
from coordinator.rules.advice import (
    alone,
    brief_games,
    few_learnt,
    long_dialogues,
    padded,
    too_large,
    unsteady,
)
from shared.protocol.accounts import Device
from shared.workloads.base import TrainSettings


def warnings(whole: Plan, *, optimizer: Literal["muon", "adamw"] = "muon") -> tuple[str, ...]:
    return unsteady(whole, TrainSettings(optimizer=optimizer), trained=False)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_get_no_advice(preset: str) -> None:
    assert warnings(plan({"preset": preset})) == ()


def test_an_outer_rate_that_was_unsteady_is_named_with_the_range() -> None:
    (sentence,) = warnings(plan({"preset": "diloco", "lr": 1.4}))
    assert "up to lr 0.9 and opposed it at 1.4" in sentence
    assert warnings(plan({"preset": "fedavg", "lr": 1.4})) == ()


def test_outer_momentum_from_random_weights_wants_muon() -> None:
    whole = plan({"preset": "diloco"})
    (sentence,) = warnings(whole, optimizer="adamw")
    assert 'set [train] optimizer = "muon"' in sentence
    assert unsteady(whole, TrainSettings(optimizer="adamw"), trained=True) == ()
    assert warnings(plan({"preset": "fedavg"}), optimizer="adamw") == ()


def test_a_run_that_no_device_can_hold_names_the_largest_and_what_makes_it_smaller() -> None:
    card = Device(id="cuda:0", kind="cuda", name="RTX", memory_bytes=6 << 30)
    machine = Device(id="cpu", kind="cpu", name="Ryzen", memory_bytes=16 << 30)
    (said,) = too_large(12 << 30, [card, machine])
    assert "needs about 12.9 GB of a GPU or 21.5 GB of a computer's memory" in said
    assert "the largest, Ryzen, has 17.2 GB" in said
    assert 'train = "lora"' in said
    assert too_large(5 << 30, [card]) == ()
    assert too_large(9 << 30, [card, machine]) == ()  # the computer has room for it
    assert too_large(12 << 30, []) == ()  # nobody is online: nothing is known


@pytest.mark.parametrize(
    ("table", "count"),
    [
        ({"lr": 1.4, "momentum": 0.5}, 1),  # both bounds themselves
        ({"lr": 1.4, "momentum": 0.49}, 0),
        ({"lr": 1.39}, 0),
    ],
)
def test_advice_begins_at_what_was_measured(table: dict[str, Any], count: int) -> None:
    assert len(warnings(plan({"preset": "diloco", **table}))) == count


def test_only_devices_that_can_work_count_as_room() -> None:
    card = Device(id="cuda:0", kind="cuda", name="R" * 90, memory_bytes=6 << 30)
    broken = Device(id="cuda:1", kind="cuda", name="H200", memory_bytes=1 << 40, problem="driver")
    unknown = Device(id="cuda:2", kind="cuda", name="old", memory_bytes=0)
    assert too_large(6 << 30, [card]) == ()  # exactly
    assert too_large(6 << 30, [unknown]) == ()
    assert too_large(6 << 30, [broken]) == ()
    (said,) = too_large((6 << 30) + 1, [card, broken, unknown])
    assert f"the largest, {'R' * 79}…, has 6.44 GB" in said


def test_few_learnt_tokens_are_told() -> None:
    assert few_learnt("talk", 0.4) == ()
    (rare,) = few_learnt("talk", 0.0118)
    assert rare == '1.2% of the tokens of "talk" are learnt'


def test_dialogues_that_exceed_the_context_are_counted() -> None:
    assert long_dialogues("talk", 64, [20, 64, 65]) == ()  # a window of 64 has 65 tokens
    (sentence,) = long_dialogues("talk", 64, [20, 65, 66, 300])
    assert sentence.startswith(
        '2 of the 4 dialogues of "talk" exceed the context of 64 tokens, the longest with 300: '
    )


def test_windows_that_stay_half_empty_are_told() -> None:
    assert padded(10, 99, 901) == ()
    (sentence,) = padded(10, 99, 600)
    assert sentence.startswith("40% of the windows of 99 tokens stay empty")


def test_learners_of_games_with_few_steps_are_named_with_what_they_lost() -> None:
    (said,) = brief_games("game", 40)
    assert "local_steps = 40" in said
    assert "lost to version 0" in said
    assert brief_games("game", 100) == ()
    assert brief_games("problem", 8) == ()


def test_versions_of_one_members_change_alone_are_named() -> None:
    (sentence,) = alone(plan({"preset": "fedavg", "quorum": 1}), noise=False)
    assert "each version is one member's change alone" in sentence
    for keys in ({"quorum": 5}, {"quorum": 1, "quorum_share": 0.6}, {"deadline_seconds": 0}):
        (sentence,) = alone(plan({"preset": "fedavg", **keys}), noise=False)
        assert "min_contributions = 1: a version may be one member's change alone" in sentence
        assert alone(plan({"preset": "fedavg", **keys}), noise=True) == ()
    several: dict[str, object] = {"preset": "fedavg", "quorum": 5, "min_contributions": 2}
    assert alone(plan(several), noise=False) == ()
    assert alone(plan({"preset": "fedavg", "quorum": 1}), noise=True) == ()
