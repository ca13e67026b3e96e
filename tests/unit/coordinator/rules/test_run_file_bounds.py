"""Run files that cannot work are refused, each with a sentence that names the key."""

from __future__ import annotations

import pytest

from coordinator.plan.plan import plan
from coordinator.rules import run_file
from shared.errors import InvalidPlan, InvalidRunFile
from shared.files.toml_text import DEEP_MAX

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
        ("trust", "recompute = 1.5"),
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


@pytest.mark.parametrize("name", ["a", "7", "a" * 64, "a.b-c_d", "éa"])
def test_a_name_that_fits_a_path_is_kept(name: str) -> None:
    assert run_file.fits_a_path(name)
    assert run_file.parse(SHORT.replace('"r"', f'"{name}"')).name == name


@pytest.mark.parametrize("name", ["", "a" * 65, ".a", "-a", "_a", "a/b", "a b", "aX\u0000"])
def test_any_other_name_is_refused(name: str) -> None:
    assert not run_file.fits_a_path(name)


@pytest.mark.parametrize(
    "text",
    [
        SHORT + "[task]\nmin_steps = 7\nmax_steps = 7\n",
        SHORT + '[stop]\ndate = "2027-01-31T18:00"\n',
        SHORT + '[stop]\ndate = "2027-01-31"\n',
        SHORT + "[credit]\ncredits_per_step = 1e5\n[task]\nmax_steps = 10000\n",
        SHORT + f"seed = {2**63 - 1}\n[model]\na = {2**63 - 1}\nb = {-(2**63)}\n",
    ],
)
def test_what_lies_on_a_bound_is_a_run_file(text: str) -> None:
    run_file.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[task]\nmin_steps = 8\nmax_steps = 7\n",
            "[task] needs 1 <= min_steps <= max_steps",
        ),
        (
            '[stop]\ndate = "' + "x" * 60 + '"\n',
            f'[stop] date "{"x" * 40}…" is no ISO 8601 date: write it like 2027-01-31T18:00',
        ),
        (
            "[credit]\ncredits_per_step = 1e5\n[task]\nlocal_steps = 10001\nmax_steps = 5\n"
            "min_steps = 5\n",
            "[credit] credits_per_step = 100000 pays more than 1000000000 credits for one task: "
            "lower it, or lower [task] local_steps and max_steps",
        ),
        (f"[model]\na = {2**63}\n", "model.a is too large: whole numbers have 64 bits"),
        (f"[model]\na = {-(2**63) - 1}\n", "model.a is too large: whole numbers have 64 bits"),
        ("[model]\na = [[1.0, inf]]\n", "model.a = inf is not a finite number"),
    ],
)
def test_what_lies_beyond_a_bound_reads_why(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRunFile) as error:
        run_file.parse(SHORT + text)
    assert error.value.message == sentence


def test_tables_may_nest_so_deep_and_no_deeper() -> None:
    deep = DEEP_MAX - 2  # beside [model] and its key
    run_file.parse(SHORT + "[model]\na = " + "[" * deep + "]" * deep + "\n")
    with pytest.raises(InvalidRunFile) as error:
        run_file.parse(SHORT + "[model]\na = " + "[" * (deep + 1) + "1" + "]" * (deep + 1) + "\n")
    assert error.value.message == (f"model.a nests more than {DEEP_MAX} tables or lists")


@pytest.mark.parametrize("key", ["name", "workload"])
def test_a_line_that_is_needed_is_named(key: str) -> None:
    text = "\n".join(line for line in SHORT.splitlines() if not line.startswith(key))
    with pytest.raises(InvalidRunFile) as error:
        run_file.parse(text)
    assert error.value.message == f'the run file needs a line {key} = "..."'


def test_the_tiers_of_answers_grow_with_what_was_earned() -> None:
    tiers = [
        (tier.credits, tier.requests_per_minute, tier.tokens, tier.tokens_waiting)
        for tier in run_file.parse(SHORT).serve.tiers
    ]
    assert tiers == [
        (0, 30, 256, 2048),
        (10_000, 60, 512, 4096),
        (100_000, 120, 1024, 8192),
        (1_000_000, 300, 2048, 16384),
    ]
