"""What people read when a value has the wrong type: where it stands, and what was expected
there.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from coordinator.rules import run_file
from shared.decoding import complaint, convert
from shared.errors import InvalidRunFile
from shared.workloads.gpt.workload import GptWorkload


class Plan(msgspec.Struct):
    """A table with a bound."""

    quorum: Annotated[int, msgspec.Meta(ge=1)]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"quorum": 0}, "[plan] quorum: expected a whole number of at least 1"),
        ({"quorum": "x"}, "[plan] quorum: expected a whole number, not a text"),
        ({}, '[plan]: "quorum" is missing'),
    ],
)
def test_a_wrong_value_is_named_as_people_write_it(value: object, says: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        convert(value, Plan)
    assert complaint(error.value, "[plan]") == says


def test_a_run_file_says_which_line_is_wrong() -> None:
    with pytest.raises(
        InvalidRunFile, match=r"^\[model\] n_embd: expected a whole number, not a text$"
    ):
        GptWorkload().schema({"n_embd": "x"})
    lines = 'name = "a"\nworkload = "gpt"\ndataset = "d"\n[task]\nbatch_size = "x"\n'
    with pytest.raises(
        InvalidRunFile, match=r"task\.batch_size: expected a whole number, not a text$"
    ):
        run_file.parse(lines)


def test_an_empty_run_file_says_what_it_needs() -> None:
    with pytest.raises(InvalidRunFile, match="the run file needs a line name"):
        run_file.parse("")
