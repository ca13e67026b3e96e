"""What a mistyped command line of the volunteer is told: one sentence, and exit code 2."""

from __future__ import annotations

import pytest

from volunteer.cli.main import run_command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["benchmrk"], 'there is no command "benchmrk": did you mean "benchmark"?'),
        (["--language", "de", "status"], '"status" comes first, and its options after it'),
        (["xyz", "run"], 'there is no command "xyz": there are benchmark, '),
        (["--no-iu"], "Unknown option"),
        (["join"], "name the link: `volunteer join 'LINK'`"),
        (["--max-tasks", "x"], 'unable to convert "x" into int'),
    ],
)
def test_a_mistake_gets_one_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("volunteer: ")
    assert says in said.err
    assert said.err.count("\n") == 1
