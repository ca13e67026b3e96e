"""The preset of a run file that names none."""

from __future__ import annotations

import pytest

from coordinator.plan.plan import plan
from coordinator.rules import run_file
from coordinator.runs.definition import table_defaults, with_preset
from shared.workloads.base import load

SAMPLES, SAMPLE_SIZE = 100_000, 32


def chosen(text: str, workload: str = "gpt") -> str:
    """Return the preset of a run over so many samples."""
    whole = f'name = "x"\nworkload = "{workload}"\ndataset = "d"\n{text}'
    file = run_file.parse(whole, table_defaults(run_file.parse(whole), load(workload)))
    return plan(with_preset(file, SAMPLES, SAMPLE_SIZE).plan).preset


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[stop]\nversions = 200\n",
        "[stop]\npasses = 9\n",
        "[plan]\nquorum = 4\ncodec = 'int4'\n",
    ],
)
def test_a_language_model_is_merged_with_momentum(text: str) -> None:
    assert chosen(text) == "diloco"


@pytest.mark.parametrize(
    "text",
    [
        "[stop]\nversions = 30\n",
        "[stop]\npasses = 1\n[task]\nbatch_size = 128\n",
        "[plan]\noptimizer = 'adam'\nlr = 0.003\n",
        "[plan]\nlr = 0.5\n",
        "[plan]\nlocal_steps = 20\n",
    ],
)
def test_a_short_run_and_one_with_a_way_of_its_own_are_averaged(text: str) -> None:
    assert chosen(text) == "fedavg"


def test_other_workloads_keep_theirs() -> None:
    assert chosen("", "dcgan") == "fedavg"
    assert chosen("", "gomoku") == "self-play"
