"""Advice on run files that are valid and still a bad idea."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.plan.plan import plan
from coordinator.rules import run_file
from coordinator.rules.advice import advice, too_large
from shared.protocol.accounts import Device

SAMPLES = 1_000_000


def given(wants: dict[str, Any], **tables: Any) -> tuple[str, ...]:
    file = run_file.parse('name = "a"\nworkload = "gpt"\n')
    stop = msgspec.structs.replace(file.stop, **tables)
    file = msgspec.structs.replace(file, stop=stop, plan=wants)
    return advice(file, plan(wants), SAMPLES)


@pytest.mark.parametrize("preset", ["fedavg", "diloco", "fedavgm", "async-diloco", "fedadam"])
def test_presets_with_room_get_no_advice(preset: str) -> None:
    assert given({"preset": preset}, versions=400) == ()
    assert given({"preset": preset}) == ()  # without an end


def test_an_outer_rate_that_was_unsteady_is_named_with_the_range() -> None:
    (said,) = given({"preset": "diloco", "lr": 1.4})
    assert "up to 0.9, and turned back at 1.4" in said
    assert given({"preset": "fedavg", "lr": 1.4}) == ()


def test_outer_momentum_from_nothing_is_told_to_begin_with_averaging() -> None:
    (said,) = given({"preset": "diloco", "phases": []})
    assert "after some versions of plain averaging" in said


def test_a_run_that_ends_in_its_warm_up_is_told_so() -> None:
    (said,) = given({"preset": "diloco"}, versions=20)
    assert "about 20 versions, the first 20" in said
    assert '"diloco" itself never begins' in said
    (said,) = given({"preset": "diloco"}, versions=35)
    assert "is left 5 of them" in said
    assert given({"preset": "diloco"}, versions=80) == ()
    assert given({"preset": "fedavg"}, versions=4) == ()


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
