"""Problems from files of JSON lines, and the runs that learn from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetWanted
from shared.workloads.data.local_data import LocalData
from shared.workloads.experience import KnownVersion
from shared.workloads.rollouts.config import Problems, RolloutsConfig
from shared.workloads.rollouts.problem_dataset import build, stored
from shared.workloads.rollouts.problems import reward, solution
from tests.support.workloads import tiny_rollouts as tiny


def line(**fields: object) -> str:
    return json.dumps(fields)


class Stored:
    """A dataset of lines, as a coordinator keeps it."""

    def __init__(self, path: Path, *lines: str, **wanted: Any) -> None:
        self._path = path
        source = path / "sums.jsonl"
        source.write_text("\n".join(lines))
        self.manifest = build(DatasetWanted(name="sums", sources=(source,), **wanted), self._put)

    def _put(self, data: bytes) -> str:
        name = f"blob-{len(list(self._path.iterdir()))}"
        (self._path / name).write_bytes(data)
        return name

    def data(self, config: Mapping[str, Any], *chunks: ChunkRef) -> LocalData:
        manifest = DatasetManifest(name="r", kind="", licence="", source="", chunks=chunks)
        files = tiny.WORKLOAD.files(config)
        return LocalData(manifest, {f.name: f for f in self._path.iterdir()}, files)


SUMS = [line(prompt=f"{n}+1=", answer=n + 1) for n in range(40)]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (line(prompt="a"), "sums.jsonl line 41: the problem has no answer"),
        (line(prompt="a", verifier="jsn"), 'there is no verifier "jsn": did you mean "json"'),
        (line(prompt="a", verifier="numbr", answer=3), 'is no verifier "numbr": did you mean "num'),
        (line(prompt="a", verifier="number", answer="x"), "line 41: the answer 'x' is not a numb"),
        (line(prompt="a", verifier="sorted", answer=3), "line 41: a problem needs items for its"),
        (line(prompt="a", arguments={"answr": 1}), "line 41: a problem needs answer"),
        (
            line(promt="a", answer=1),
            'line 41: the problem has no prompt: its keys are "answer", "promt"',
        ),
        (line(prompt="\0", answer=1), "sums.jsonl line 41: the prompt has no text"),
        (
            line(prompt="a", answer="The answer: 42"),
            'sums.jsonl line 41: the verifier exact does not accept the answer "The answer: 42"',
        ),
        (line(prompt="a", answer="4\0"), "line 41: the verifier exact does not accept"),
        (line(prompt="a", answer=1e-300), "line 41: the verifier number does not accept"),
        (SUMS[4], "sums.jsonl line 41 has the prompt of sums.jsonl line 5"),
        ("{", "sums.jsonl line 41: "),
        ("[" * 60_000, "sums.jsonl line 41: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, wrong: str, sentence: str) -> None:
    with pytest.raises(InvalidRunFile) as caught:
        Stored(tmp_path, *SUMS, wrong)
    assert sentence.lower() in str(caught.value).lower()


def test_a_single_problem_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunFile, match=r"a dataset has 2 to 100,000 problems, .*, not 1$"):
        Stored(tmp_path, SUMS[0])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, -0.1, float("nan")])
def test_a_held_out_share_of_nothing_or_of_half_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(InvalidRunFile, match=r"heldout_share .* must lie between 0 and 0.5"):
        DatasetWanted(name="sums", sources=(tmp_path / "sums",), heldout_share=share)


def test_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "sums").write_bytes('{"prompt": "café", "answer": 1}'.encode("latin-1"))
    with pytest.raises(InvalidRunFile, match=r"sums line 1: this is not text in UTF-8: save"):
        build(DatasetWanted(name="sums", sources=(tmp_path / "sums",)), lambda _: "")


def test_files_that_are_too_large_together_are_no_dataset(tmp_path: Path) -> None:
    sources = tmp_path / "one", tmp_path / "two"
    for source in sources:
        prompts = (f"{source.name} {n} ".ljust(32 << 10, "+") for n in range(1100))
        source.write_text("\n".join(line(prompt=each, answer=1) for each in prompts))
    with pytest.raises(InvalidRunFile, match=r"^a part of a dataset has at most 64 MiB of probl"):
        build(DatasetWanted(name="sums", sources=sources, heldout_share=0.01), lambda _: "")


def test_a_file_becomes_a_dataset_with_a_part_held_out(tmp_path: Path) -> None:
    found = Stored(tmp_path, *SUMS, "", heldout_share=0.1).manifest
    assert (found.kind, found.chunks[0].items, found.heldout[0].items) == ("problems", 36, 4)
    learnt, held = (
        [each.rewards[0].arguments["answer"] for each in stored(tmp_path / ref.sha256)]
        for ref in (found.chunks[0], found.heldout[0])
    )
    assert sorted([*learnt, *held]) == [*range(1, 41)]


FORM = {"verifier": "form", "arguments": {"marks": ["<think>", "</think>", "<answer>"]}}
WEIGHED = [{"answer": 4, "weight": 3}, FORM]


def test_several_rewards_are_their_weighted_mean(tmp_path: Path) -> None:
    lines = [line(prompt=f"{n}+{n}=", rewards=WEIGHED) for n in range(4)]
    manifest = Stored(tmp_path, *lines).manifest
    problem = stored(tmp_path / manifest.chunks[0].sha256)[0]
    assert [each.weight for each in problem.rewards] == [3, 1]
    texts = [
        "<think>2</think><answer>4</answer>",
        "4",
        "<think>2</think><answer>5",
        "5",
        "</think>",
    ]
    assert [reward(problem, text) for text in texts] == [1, 0.75, 0.25, 0, 0]
    assert solution(problem) is None  # "4" has not the form
    assert manifest.meta["without_solution"] == 4


def test_an_answer_that_all_rewards_accept_is_a_solution(tmp_path: Path) -> None:
    both = [{"answer": "4"}, {"verifier": "number", "answer": 4, "weight": 0.1}]
    manifest = Stored(tmp_path, *SUMS, line(prompt="2+2=", rewards=both)).manifest
    assert manifest.meta["without_solution"] == 0


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([{"answer": 4, "weight": 0}, FORM], "line 41, reward 1 weight: expected a number above 0"),
        (
            [FORM, {"answer": 4, "weight": -1}],
            "line 41, reward 2 weight: expected a number above 0",
        ),
        (
            [{"answer": 4, "weight": 1e9}],
            "line 41, reward 1 weight: expected a number of at most 1",
        ),
        ([{"answer": 4, "weight": "2"}], "line 41, reward 1 weight: expected a number, not a text"),
        (
            [{"answer": 4, "wieght": 2}],
            'key "wieght" in sums.jsonl line 41, reward 1: did you mean',
        ),
        ([{"answer": 4}, {"weight": 1}], "line 41, reward 2: the problem has no answer"),
        (
            [{"answer": 4}, {"verifier": "frm"}],
            'line 41, reward 2: there is no verifier "frm": did',
        ),
        ([{"verifier": "form"}], "line 41, reward 1: a problem needs marks for its verifier form"),
        ([{"answer": "answer: 4"}], "line 41, reward 1: the verifier exact does not accept the"),
        ([], "line 41 rewards: expected at least 1"),
        ([{"answer": 4}] * 17, "line 41 rewards: expected at most 16 entries"),
        ("4", "line 41 rewards: expected a list, not a text"),
        ([4], "line 41 rewards[0]: expected a table, not a whole number"),
    ],
)
def test_wrong_rewards_are_named_with_line_and_key(
    tmp_path: Path, rewards: object, sentence: str
) -> None:
    with pytest.raises(InvalidRunFile) as caught:
        Stored(tmp_path, *SUMS, line(prompt="a", rewards=rewards))
    assert sentence in str(caught.value)


def test_rewards_leave_nothing_beside_them(tmp_path: Path) -> None:
    both = line(prompt="a", answer=4, rewards=WEIGHED)
    with pytest.raises(InvalidRunFile, match="line 41: beside rewards it has answer: write that"):
        Stored(tmp_path, *SUMS, both)


def test_an_answer_names_its_verifier_and_is_a_solution(tmp_path: Path) -> None:
    lines = [
        line(prompt="a", answer=3),
        line(prompt="b", answer=["x", "y"]),
        line(prompt="c", verifier="sorted", arguments={"items": ["b", 10], "descending": True}),
        line(prompt="d", verifier="choice", answer="B"),
        line(prompt="e", answer=0.00001),
        line(prompt="f", answer=-1e15),
    ]
    found = Stored(tmp_path, *lines).manifest
    refs = (found.chunks[0], found.heldout[0])
    every = [each for ref in refs for each in stored(tmp_path / ref.sha256)]
    names = ["choice", "exact", *3 * ["number"], "sorted"]
    assert sorted(each.rewards[0].verifier for each in every) == names
    assert [reward(each, solution(each) or "") for each in every] == [1.0] * 6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"context": 12},
            r'^the problem of sums.jsonl line 11 in "sums" has 5 bytes, but \[model\] ',
        ),
        (
            {"answer": 1},
            r'^the answer to a problem of "sums" has 2 bytes, and \[model\] answer 1 le',
        ),
        (
            {"size": 3},
            r'^\[model\] size is for generated problems, but this run uses .* "sums"',
        ),
    ],
)
def test_problems_that_do_not_fit_the_model_are_named(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    manifest = Stored(tmp_path, *SUMS).manifest
    table = {"context": 20, "answer": 8, **changes}
    with pytest.raises(InvalidRunFile, match=sentence):
        tiny.WORKLOAD.config(table, manifest)


def test_a_warm_start_needs_solutions(tmp_path: Path) -> None:
    hard = line(prompt="make 7:", verifier="countdown", arguments={"target": 7, "numbers": [3, 4]})
    manifest = Stored(tmp_path, *SUMS, hard).manifest
    config = tiny.WORKLOAD.config({"context": 20, "answer": 8}, manifest)
    plan = tiny.WORKLOAD.experience.plan
    assert plan(config, {"warm_steps": 0}).unit == "problem"
    with pytest.raises(InvalidRunFile, match=r"warm_steps: problems of the dataset .1. have no"):
        plan(config, {"warm_steps": 5})
    with pytest.raises(InvalidRunFile, match=r"warm_size is for generated problems"):
        plan(config, {"warm_size": 5})


def test_every_problem_of_a_dataset_is_asked_in_turns_and_answers_are_judged_by_it(
    tmp_path: Path,
) -> None:
    kept = Stored(tmp_path, *SUMS)
    table = {key: value for key, value in tiny.MODEL.items() if key not in ("problems", "size")}
    config = tiny.WORKLOAD.config(table, kept.manifest)
    data, weights = kept.data(config), tiny.lively()
    job = tiny.job("selfplay", 8, config=config, start=34, stop=42)
    result, _ = tiny.finish(tiny.WORKLOAD.begin(job, weights, data, "cpu"))
    problems = Problems.of(RolloutsConfig.from_dict(config), data.asset)
    assert problems.get(34).prompt != problems.get(35).prompt
    assert problems.get(37) == problems.get(37 - 38 * 2)
    found = tiny.WORKLOAD.experience.inspect(
        job,
        result.experience,
        [KnownVersion(number=0, sha256=tiny.SHA256)],
        lambda name: written(weights, tmp_path) if name == 0 else data.asset(str(name)),
        3,
    )
    assert (found.episodes, found.refused, found.faults) == (8, 0, 0)


def written(weights: Mapping[str, Tensor], path: Path) -> Path:
    from safetensors.torch import save_file

    file = path / "weights"
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    return file


def test_a_warm_start_and_a_measurement_take_the_dataset(tmp_path: Path) -> None:
    kept = Stored(tmp_path, *SUMS)
    table = {key: value for key, value in tiny.MODEL.items() if key not in ("problems", "size")}
    config = tiny.WORKLOAD.config(table, kept.manifest)
    job = tiny.job("learn", 2, config=config)
    work = tiny.WORKLOAD.begin(job, tiny.lively(), kept.data(config), "cpu")
    assert (tiny.finish(work)[0].loss_last or 0) > 0
    held = kept.data(config, *kept.manifest.heldout)
    metrics = tiny.WORKLOAD.evaluate(config, tiny.lively(), held, 60.0, lambda: False)
    assert 0 <= metrics["solved"] <= 1
    text = tiny.WORKLOAD.sample(config, tiny.lively(), held, "", 0).text
    assert len(text.split("\n")) >= 2
