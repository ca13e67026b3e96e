"""What a mistyped command line of the volunteer is told: one sentence, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from volunteer.cli.main import run_command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["benchmrk"], 'there is no command "benchmrk": did you mean "benchmark"?'),
        (["--language", "de", "status"], '"status" comes first, and its options after it'),
        (["key", "--profile", "x", "list"], "`volunteer key list --profile x`"),
        (["key", "--nothing"], "there is no option --nothing here"),
        (["help", "jion"], 'there is no command "jion": did you mean "join"?'),
        (["create", "k"], 'there is no command "create": did you mean `volunteer key create k`?'),
        (["start"], 'there is no command "start": `volunteer` does it'),
        (["run", "small"], 'there is no command "run": `volunteer --run NAME` does it'),
        (["serve"], 'there is no command "serve" here: did you mean `coordinator serve`?'),
        (["xyz", "run"], 'there is no command "xyz": the nearest of '),
        (["--no-iu"], "there is no option --no-iu: did you mean --no-ui?"),
        (["usage", "--nothing"], "no option --nothing here; see `volunteer usage --help`"),
        (["key", "revok"], 'there is no command "revok": did you mean "revoke"?'),
        (["give", "Bob"], "AMOUNT is missing; see `volunteer give --help`"),
        (["give", "Bob", "much"], 'AMOUNT: "much" is not a number'),
        (
            ["pause", "cpu", "now"],
            '"now" is one word too many: only DEVICE may stand here; see `vol',
        ),
        (["data", "list", "mem"], '"mem" is one word too many: only options may stand here; see'),
        (["uninstall", "yes"], '"yes" is one word too many: did you mean --yes?'),
        (["uninstall", "-y"], "there is no option -y: did you mean --yes?"),
        (["name", "--hide", "--show"], "give one of --show, --hide; see `volunteer name --help`"),
        (["train", "small"], 'there is no command "train": `volunteer --run NAME` does it'),
        (["generate", "small", "x", "--max-tokens", "0"], "--max-tokens"),
        (["pause", "-x"], "there is no option -x here"),
        (["play", "g", "easy"], '"easy" needs an option before it: --level'),
        (
            ["key", "laptop", "revoke"],
            'no command "laptop": did you mean `volunteer key revoke laptop`?',
        ),
        (["play", "g", "--level", "x"], '--level: "x" is not one of easy, middle, hard'),
        (["--device"], "--device needs a value"),
        (["--threads", "1", "--threads", "2"], "--threads was given twice"),
        (["join"], "the link is missing: `volunteer join 'LINK'`"),
        (["--max-tasks", "x"], '--max-tasks: "x" is not a whole number'),
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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--json", "--json is for --no-ui"),
        ("service install --show --join https://a.example/join", "--join is for --system"),
        ("generate digits --json --output drawn.png", "leave --output out"),
        ("export ward --passes 3", "--passes is for --tune"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    line: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path))
    assert run_command(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
