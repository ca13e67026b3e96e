"""Run files that cannot work are refused, each with a sentence that names the key."""

from __future__ import annotations

import pytest

from coordinator.plan.plan import plan
from coordinator.rules import run_file
from shared.errors import InvalidPlan, InvalidRunFile

SHORT = 'name = "r"\nworkload = "gpt"\ndataset = "d"\n'


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("validation", "norm_limit = 99999999999999999999999999"),
        ("validation", "norm_limit = -1"),
        ("validation", "loss_limit = -3.0"),
        ("credit", "credits_per_step = 1e12"),
        ("credit", "credits_per_step = 1e308"),
        ("train", "beta2 = 1000"),
        ("train", "clip_norm = -1e308"),
        ("train", "warmup_steps = -1"),
        ("train", "min_lr_ratio = 2.0"),
        ("train", "weight_decay = -1.0"),
        ("evaluation", "budget_seconds = -1e308"),
        ("evaluation", "sample_every = -1"),
        ("task", "batch_size = 9223372036854775808"),
        ("task", "target_seconds = 1e300"),
        ("retention", "every = 99999999999999999999"),
        ("stop", "tokens = 99999999999999999999"),
        ("validation", "norm_room = 0.0"),
        ("trust", "heal_share = 0.0"),
        ("trust", "heal_share = 1.5"),
        ("trust", "auto_rollback = 1"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_its_key(table: str, line: str) -> None:
    with pytest.raises(InvalidRunFile, match=line.partition(" ")[0]):
        run_file.parse(f"{SHORT}[{table}]\n{line}\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "key", ["credit.credits_per_step", "model.dropout", "task.options.c", "weight", "train.beta1"]
)
def test_only_finite_numbers_are_taken(key: str, value: str) -> None:
    with pytest.raises(InvalidRunFile, match=key):
        run_file.parse(f"{SHORT}{key} = {value}\n")


@pytest.mark.parametrize(
    "line",
    [
        f"seed = {'9' * 5000}",
        f"[model]\nn_layer = {'9' * 30}",
        "[model]\nx = " + "[" * 5000 + "]" * 5000,
        "[model]\nx = " + "{a=" * 3000 + "1" + "}" * 3000,
        "[model]\n" + ".".join("a" * 2000) + " = 1",
        "[model]\nx = " + "[" * 40 + "]" * 40,
    ],
    ids=["digits", "64-bit", "arrays", "inline tables", "dotted keys", "forty arrays"],
)
def test_what_is_too_large_or_too_deep_is_a_sentence(line: str) -> None:
    with pytest.raises(InvalidRunFile) as refused:
        run_file.parse(SHORT + line + "\n")
    assert len(str(refused.value)) < 300


def test_many_credits_for_long_tasks_fit_the_ledger() -> None:
    with pytest.raises(InvalidRunFile, match="credits_per_step"):
        run_file.parse(
            SHORT + "[credit]\ncredits_per_step = 1e6\n[task]\nlocal_steps = 5000\n",
        )
    assert run_file.parse(SHORT + "[credit]\ncredits_per_step = 1e4\n").credit.credits_per_step


def test_a_byte_order_mark_is_no_part_of_the_file() -> None:
    assert run_file.parse("\ufeff" + SHORT).name == "r"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('naem = "r"\nworkload = "gpt"\n', '"naem".*did you mean "name"'),
        (SHORT + "SEED = 3\n", 'did you mean "seed"'),
        (SHORT + "[TRAIN]\nlr = 1.0\n", 'did you mean "train"'),
        (SHORT + "[train]\nWARMUP_STEPS = 1\n", 'did you mean "warmup_steps"'),
    ],
)
def test_a_misspelt_key_gets_the_nearest_one(text: str, says: str) -> None:
    with pytest.raises(InvalidRunFile, match=says):
        run_file.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        SHORT + '"a\\u001b[31m" = 1\n',
        SHORT + '[train]\noptimizer = "x\\u001b[2J"\n',
        SHORT + '[stop]\ndate = "\\u001b[2J"\n',
    ],
)
def test_control_characters_are_escaped(text: str) -> None:
    with pytest.raises(InvalidRunFile) as refused:
        run_file.parse(text)
    assert str(refused.value).isprintable()


def test_control_characters_of_a_plan_are_escaped() -> None:
    for raw in ({"a\x1b": 1}, {"table": "\x1b[2J"}, {"preset": "\x1b[2J"}):
        with pytest.raises(InvalidPlan) as refused:
            plan(raw)
        assert str(refused.value).isprintable()
