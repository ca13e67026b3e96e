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
    assert "up to lr 0.9 and opposed it at 1.4" in said
    assert given({"preset": "fedavg", "lr": 1.4}) == ()


def test_outer_momentum_from_nothing_is_told_to_begin_with_averaging() -> None:
    (said,) = given({"preset": "diloco", "phases": []})
    assert "than runs that began with plain averaging" in said


def test_a_run_that_ends_in_its_warm_up_is_told_so() -> None:
    (said,) = given({"preset": "diloco"}, versions=20)
    assert "about 20 versions, the first 20" in said
    assert '"diloco" itself never begins' in said
    (said,) = given({"preset": "diloco"}, versions=35)
    assert "is left 5 of them" in said
    assert given({"preset": "diloco"}, versions=80) == ()
    assert given({"preset": "fedavg"}, versions=4) == ()


@pytest.mark.parametrize(
    ("preset", "says"),
    [
        ("diloco", "[plan] has 10 local steps in some phases instead of the 200 of [task]"),
        ("sparseloco", "[plan] has 10 local steps instead of the 200 of [task]"),
        ("fedavg", ""),
    ],
)
def test_local_steps_that_the_plan_overrides_are_told(preset: str, says: str) -> None:
    text = 'name = "a"\nworkload = "gpt"\n[task]\nlocal_steps = {}\n'
    for steps, told in ((200, bool(says)), (10, False)):
        file = run_file.parse(text.format(steps))
        said = advice(file, plan({"preset": preset}), 0)
        assert [sentence.partition(":")[0] for sentence in said] == [says] * told


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
    ("wants", "said"),
    [
        ({"preset": "diloco", "lr": 1.4, "momentum": 0.5}, 1),  # both bounds themselves
        ({"preset": "diloco", "lr": 1.4, "momentum": 0.49}, 0),
        ({"preset": "diloco", "lr": 1.39}, 0),
        ({"preset": "diloco", "lr": 0.5, "momentum": 0.5, "phases": []}, 1),
        ({"preset": "diloco", "lr": 0.5, "momentum": 0.49, "phases": []}, 0),
        ({"preset": "diloco", "lr": 1.4, "phases": []}, 2),
    ],
)
def test_advice_begins_at_what_was_measured(wants: dict[str, Any], said: int) -> None:
    assert len(given(wants)) == said


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        (40, ""),  # a quarter of them is left
        (39, "about 39 versions, the first 30 of them"),
        (39, "is left 9 of them"),
        (31, "is left 1 of them"),
        (30, "itself never begins"),
    ],
)
def test_a_run_is_told_how_much_of_its_plan_is_left(versions: int, says: str) -> None:
    said = given({"preset": "diloco"}, versions=versions)
    assert (said == ()) == (not says)
    assert says in "".join(said)


def test_only_devices_that_can_work_count_as_room() -> None:
    card = Device(id="cuda:0", kind="cuda", name="R" * 90, memory_bytes=6 << 30)
    broken = Device(id="cuda:1", kind="cuda", name="H200", memory_bytes=1 << 40, problem="driver")
    unknown = Device(id="cuda:2", kind="cuda", name="old", memory_bytes=0)
    assert too_large(6 << 30, [card]) == ()  # exactly
    assert too_large(6 << 30, [unknown]) == ()
    assert too_large(6 << 30, [broken]) == ()
    (said,) = too_large((6 << 30) + 1, [card, broken, unknown])
    assert f"the largest, {'R' * 79}…, has 6.44 GB" in said


@pytest.mark.parametrize(("size", "versions"), [(1, ""), (16, ""), (64, "about 33 versions")])
def test_tokens_are_counted_by_the_size_of_a_sample(size: int, versions: str) -> None:
    file = run_file.parse('name = "a"\nworkload = "gpt"\n')
    stop = msgspec.structs.replace(file.stop, tokens=10**6)
    wants = {"preset": "diloco"}
    file = msgspec.structs.replace(file, stop=stop, plan=wants)
    said = advice(file, plan(wants), SAMPLES, size)
    assert (said == ()) == (not versions)
    assert versions in "".join(said)
