"""Answers of a run with their rewards, by `coordinator run rollouts`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection

from coordinator.database import datasets, experience
from coordinator.database.experience import ChunkRow
from coordinator.runs.queries import rollout_course
from shared.workloads.experience import RolloutSums
from shared.workloads.rollouts.answer_records import JudgedGroup, encode, packed, quantised
from shared.workloads.rollouts.config import Problems, RolloutsConfig
from tests.support.command_line import Run
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.rollouts_run import RUN

SUMS = [
    RolloutSums(version=n, answers=16, reward=2 * n, tokens=48, surprise=96 - 12 * n, cut=4 - n)
    for n in (1, 2, 4)
]

ANSWERS = (b"12\0", b"9\x1b\nx")  # the second has no end, and marks that steer a terminal


def group(problem: int, version: int) -> JudgedGroup:
    tokens = [byte for answer in ANSWERS for byte in answer]
    return JudgedGroup(
        problem=problem,
        version=version,
        weights="0" * 64,
        lengths=tuple(map(len, ANSWERS)),
        tokens=packed(tokens),
        logprobs=quantised([-0.25] * len(tokens)),
        rewards=(1.0, 0.0),
    )


async def chunk(home: LocalCoordinator, number: int, groups: list[JudgedGroup]) -> None:
    data = encode(groups)
    name = await home.coordinator.blobs.put_bytes(data)
    row = ChunkRow(
        run_id=1,
        number=number,
        sha256=name,
        size=len(data),
        episodes=len(groups),
        samples=2 * len(groups),
        sealed_at=0.0,
        retired_at=None,
    )

    def add(conn: Connection) -> None:
        datasets.register_referenced(conn, [(name, len(data), "chunk")], 0.0)
        assert experience.seal(conn, row, [])

    await home.coordinator.db.write(add)


async def prepare(directory: Path) -> None:
    async with local_coordinator(directory) as home:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("rollouts")
        await chunk(home, 0, [group(5, 0)])
        await chunk(home, 1, [group(7, 1), group(8, 2)])


@pytest.fixture
def there(tmp_path: Path) -> tuple[str, Path]:
    asyncio.run(prepare(tmp_path / "home"))
    return "--data-dir", tmp_path / "home"


def test_answers_are_listed_with_prompt_reward_and_length(
    run: Run, there: tuple[str, Path]
) -> None:
    rows = json.loads(run("run", "rollouts", "rollouts", *there, "--json").out)
    assert [(row["problem"], row["version"]) for row in rows] == [
        (7, 1), (7, 1), (8, 2), (8, 2), (5, 0), (5, 0)
    ]  # fmt: skip
    assert [row["reward"] for row in rows] == [1, 0] * 3
    assert [row["answer"] for row in rows[:2]] == ["12", "9\x1b\nx"]
    assert [(row["tokens"], row["cut"]) for row in rows[:2]] == [(3, False), (4, True)]
    assert rows[0]["logprob"] == pytest.approx(-0.25, abs=0.01)
    prompts = Problems(RolloutsConfig(problems="sorting", size=3, context=14, answer=4))
    assert [rows[0]["prompt"], rows[4]["prompt"]] == [prompts.get(n).prompt for n in (7, 5)]


def test_one_version_and_a_limit(run: Run, there: tuple[str, Path]) -> None:
    ask = ("run", "rollouts", "rollouts", *there)
    rows = json.loads(run(*ask, "--version", "2", "--json").out)
    assert [row["problem"] for row in rows] == [8, 8]
    assert len(json.loads(run(*ask, "--limit", "3", "--json").out)) == 3
    assert "No answer yet" in run(*ask, "--version", "40").out
    assert "between 1 and 1000" in run(*ask, "--limit", "0").err


def test_a_stranger_s_answer_steers_no_terminal(run: Run, there: tuple[str, Path]) -> None:
    text = run("run", "rollouts", "rollouts", *there).out
    assert "reward 1  version 1  problem 7  3 tokens  -0.25 nats a token" in text
    assert "reward 0  version 1  problem 7  4 tokens, cut off" in text
    assert "\x1b" not in text
    assert "    9 \n    x\n" in text


async def sums(directory: Path) -> None:
    async with local_coordinator(directory) as home:
        await home.coordinator.db.write(lambda conn: experience.add_rollouts(conn, 1, SUMS))


def test_reward_entropy_length_and_cut_answers_are_curves_over_versions(
    run: Run, there: tuple[str, Path]
) -> None:
    unjudged = run("run", "show", "rollouts", *there).out
    assert not re.search("^reward", unjudged, re.MULTILINE)
    asyncio.run(sums(there[1]))
    text = run("run", "show", "rollouts", *there).out
    assert re.search(r"^reward +0\.500 \(first 0\.125\)  ▁▃█$", text, re.MULTILINE)
    assert re.search(
        r"^entropy +1\.000 nats a token \(first 1\.750 nats a token\)  █▆▁$", text, re.M
    )
    assert re.search(r"^length +3\.0 tokens \(first 3\.0 tokens\)  ▁▁▁$", text, re.MULTILINE)
    assert re.search(r"^cut off +0\.0 % of answers \(first 18\.8 % of answers\)  █", text, re.M)
    shown = json.loads(run("run", "show", "rollouts", *there, "--json").out)
    points = shown["experience"]["rollouts"]
    assert [point["version"] for point in points] == [1, 2, 4]
    assert points[0] == {
        "version": 1, "answers": 16, "reward": 0.125, "entropy": 1.75, "length": 3, "cut": 0.1875
    }  # fmt: skip


async def test_the_page_of_a_run_draws_the_same_curves(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, home.client() as client:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("rollouts")
        await home.coordinator.db.write(lambda conn: experience.add_rollouts(conn, 1, SUMS))
        page = (await client.get("/runs/rollouts")).text
        for words in (
            "Reward went from 0.125 at version 1 to 0.5 at version 4",
            "Entropy went from 1.75 at version 1 to 1 at version 4",
            "Length went from 3 at version 1",
            "Cut off went from 18.75 at version 1 to 0 at version 4",
        ):
            assert f'aria-label="{words}' in page


def test_many_versions_are_joined_to_few_points() -> None:
    row = RolloutSums(version=0, answers=1, reward=1.0, tokens=2, surprise=1.0, cut=0)
    rows = [msgspec.structs.replace(row, version=n, reward=n % 2) for n in range(1000)]
    points = rollout_course(rows, 4)
    assert [point.version for point in points] == [249, 499, 749, 999]
    assert {(point.answers, point.reward, point.entropy) for point in points} == {(250, 0.5, 0.5)}
    assert rollout_course([], 4) == ()
    assert len(rollout_course(rows[:3], 4)) == 3


def test_a_run_of_a_dataset_has_none(run: Run, tmp_path: Path) -> None:
    async def plain() -> None:
        async with local_coordinator(tmp_path / "home") as home:
            await home.start_run()

    asyncio.run(plain())
    refused = run("run", "rollouts", "tiny", "--data-dir", tmp_path / "home")
    assert (refused.code, "has no rollouts" in refused.err) == (2, True)
