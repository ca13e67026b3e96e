"""Run files: short ones work, wrong ones say what to write instead."""

from __future__ import annotations

import pytest

from coordinator.rules import run_file
from shared.errors import InvalidRunFile

SHORT = 'name = "r"\nworkload = "gpt"\ndataset = "d"\n'


def test_a_file_of_three_lines_has_a_default_for_everything_else() -> None:
    run = run_file.parse(SHORT)
    assert (run.steps, run.train.lr, run.validation.norm_limit) == (30, 3e-4, 6.0)


def test_what_is_stored_reads_back_the_same() -> None:
    run = run_file.parse(SHORT + "[model]\nn_layer = 4\n[plan]\npreset = 'fedavg'\nquorum = 3\n")
    assert run_file.decode(run_file.encode(run)) == run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name =", "not TOML"),
        ('workload = "gpt"', 'name = "..."'),
        (SHORT + "lerning_rate = 1", "unknown key"),
        (SHORT + "[train]\nlearning_rate = 1.0", "lr"),
        (SHORT + "[task]\nlocal_step = 5", 'did you mean "local_steps"'),
        (SHORT + "[task]\nlocal_steps = -1", "at least 0"),
        (SHORT + '[task]\nlocal_steps = "many"', "local_steps"),
        (SHORT + "[train]\nlr = -1.0", "train.lr: expected a number above 0"),
        (SHORT + "[train]\nlr = nan", "train.lr = nan is not a finite number"),
        ('name = "../etc"\nworkload = "gpt"', "letters, digits"),
        (SHORT + "weight = 0.0", "weight: expected a number of at least"),
        (SHORT + '[stop]\ndate = "tomorrow"', "ISO 8601"),
        (SHORT + "[stop]\nversions = -1", "stop.versions: expected a whole number of at least 0"),
        (SHORT + "[task]\nmax_failures = 0", "at least 1"),
        (SHORT + "[retention]\nlatest = 0", "at least 1"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InvalidRunFile, match=says):
        run_file.parse(text)


def test_a_workloads_own_defaults_fill_only_what_is_not_given() -> None:
    own: dict[str, dict[str, float]] = {
        "train": {"lr": 0.1, "beta1": 0.5},
        "task": {"batch_size": 64},
    }
    run = run_file.parse(SHORT + "[train]\nlr = 0.2\n", own)
    assert (run.train.lr, run.train.beta1, run.task.batch_size) == (0.2, 0.5, 64)
    with pytest.raises(InvalidRunFile, match="train"):
        run_file.parse(SHORT + "train = 3", own)
