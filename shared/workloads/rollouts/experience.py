"""Rollouts for the coordinator: pacing, inspection, rewards, sealing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import Config, Job
from shared.workloads.experience import (
    EpisodeChunk,
    Experience,
    Inspection,
    KnownVersion,
    Pacing,
    Rollout,
    RolloutSums,
)
from shared.workloads.rollouts.answer_proof import refuted
from shared.workloads.rollouts.answer_records import (
    GroupRecord,
    InvalidGroup,
    JudgedGroup,
    decode,
    encode,
    judged,
)
from shared.workloads.rollouts.config import Problems, RolloutsConfig, RolloutsOptions
from shared.workloads.rollouts.problems import reward, solution


class RolloutExperience(Experience):
    """Answers to problems; see `Experience`. Episodes are groups, samples are the answers of groups
    with unequal rewards.
    """

    @override
    def plan(self, config: Config, options: Mapping[str, object]) -> Pacing:
        checked, how = RolloutsConfig.from_dict(config), RolloutsOptions.from_dict(options)
        _check_warm(checked, how)
        return Pacing(
            replay=how,
            warm_steps=how.warm_steps,
            warm_lr=how.warm_lr,
            episodes=how.problems,
            episode_flops=checked.token_flops * how.group * checked.answer,
            evaluation_flops=checked.token_flops,
            fresh=how.lag,
            unit="problem",
            samples=how.group,
        )

    @override
    def inspect(
        self,
        job: Job,
        data: bytes,
        versions: Sequence[KnownVersion],
        file: Callable[[int | str], Path],
        secret: int,
        *,
        whole: bool = False,
    ) -> Inspection:
        """Inspect a file of groups; see `Experience.inspect`. Rewards are computed here."""
        from shared.workloads.rollouts.rereading import differing

        config, how = RolloutsConfig.from_dict(job.config), RolloutsOptions.from_dict(job.options)
        try:
            records = decode(data)
        except InvalidGroup as error:
            return Inspection(refused=job.stop - job.start, complaint=error.message)
        problems = Problems.of(config, file)
        task = _Task(job, config, how, problems, {v.number: v.sha256 for v in versions})
        wrong = _misfits(records, task)
        sound = {n: r for n, r in enumerate(records) if n not in wrong}
        again = differing(sound, job, file, secret, whole=whole)
        wrong |= again.complaints
        judged_records = [
            _judge(record, problems) for place, record in sound.items() if place not in wrong
        ]
        teaching = [record for record in judged_records if len(set(record.rewards)) > 1]
        return Inspection(
            data=encode(teaching) if judged_records else b"",
            episodes=len(judged_records),
            samples=sum(len(record.lengths) for record in teaching),
            evaluations=sum(sum(record.lengths) for record in judged_records),
            refused=len(wrong),
            complaint=next(iter(wrong.values()), ""),
            read=again.read,
            faults=again.faults,
            rollouts=_sums(judged_records, config.end),
        )

    @override
    def refuted(self, faults: int, read: int) -> bool:
        return refuted(faults, read)

    @override
    def rollouts(
        self, config: Config, data: bytes, file: Callable[[str], Path]
    ) -> Sequence[Rollout]:
        checked = RolloutsConfig.from_dict(config)
        problems = Problems.of(checked, file)
        return [
            Rollout(
                version=record.version,
                problem=record.problem,
                prompt=problems.get(record.problem).prompt,
                answer=problems.text.decode(answer.tolist()),
                reward=value,
                tokens=len(answer),
                logprob=float(logprobs.mean()),
                cut=int(answer[-1]) != checked.end,
            )
            for record in judged(data)
            for answer, logprobs, value in zip(
                record.answers(), record.said(), record.rewards, strict=True
            )
        ]

    @override
    def seal(self, files: Sequence[bytes]) -> EpisodeChunk:
        records = [record for data in files for record in judged(data)]
        samples = sum(len(record.lengths) for record in records)
        return EpisodeChunk(data=encode(records), samples=samples)


class _Task(NamedTuple):
    """Task of an actor, with its problems."""

    job: Job
    config: RolloutsConfig
    how: RolloutsOptions
    problems: Problems
    hashes: Mapping[int, str]  # hashes of the weights of the versions that may answer


def _check_warm(config: RolloutsConfig, how: RolloutsOptions) -> None:
    """Raise InvalidRunFile for a warm start on problems without solutions."""
    listed = config.dataset
    if listed and how.warm_size:
        raise InvalidRunFile(
            "[task.options] warm_size is for generated problems, but this run has a dataset:"
            " remove the line"
        )
    if how.warm_size:
        config.check_drawn(how.warm_size, "[task.options] warm_size")
    drawn = not listed and solution(Problems(config).get(0)) is None
    if how.warm_steps and (drawn or (listed and listed.without_solution)):
        which = f"the dataset ({listed.without_solution:,})" if listed else config.problems
        raise InvalidRunFile(
            f"[task.options] warm_steps: problems of {which} have no answer to learn from before"
            " the first rollouts; set it to 0"
        )


def _judge(record: GroupRecord, problems: Problems) -> JudgedGroup:
    problem = problems.get(record.problem)
    decode = problems.text.decode
    rewards = tuple(reward(problem, decode(answer.tolist())) for answer in record.answers())
    return JudgedGroup(**msgspec.structs.asdict(record), rewards=rewards)


def _sums(records: Sequence[JudgedGroup], end: int) -> tuple[RolloutSums, ...]:
    """Return the sums over groups by version; `end` is the token that ends an answer."""
    by_version: dict[int, list[JudgedGroup]] = {}
    for record in records:
        by_version.setdefault(record.version, []).append(record)
    return tuple(
        RolloutSums(
            version=version,
            answers=sum(len(group.lengths) for group in groups),
            reward=sum(sum(group.rewards) for group in groups),
            tokens=sum(sum(group.lengths) for group in groups),
            surprise=-float(sum(part.sum() for group in groups for part in group.said())),
            cut=sum(int(answer[-1]) != end for group in groups for answer in group.answers()),
        )
        for version, groups in sorted(by_version.items())
    )


def _misfits(records: Sequence[GroupRecord], task: _Task) -> dict[int, str]:
    """Return the faults of records that do not fit the task, by their place in the file."""
    complaints: dict[int, str] = {}
    problems_seen: set[int] = set()
    for place, record in enumerate(records):
        try:
            _check(record, task)
            if record.problem in problems_seen:
                raise InvalidGroup(f"problem {record.problem} is in the file twice")
        except InvalidGroup as error:
            complaints[place] = error.message
        problems_seen.add(record.problem)
    return complaints


def _check(record: GroupRecord, task: _Task) -> None:
    place = f"problem {record.problem}"
    if not task.job.start <= record.problem < task.job.stop:
        raise InvalidGroup(f"{place} is not one of {task.job.start} to {task.job.stop - 1}")
    if task.hashes.get(record.version) != record.weights:
        raise InvalidGroup(
            f"{place}: version {record.version} with these weights may not answer here (any more)"
        )
    if len(record.lengths) != task.how.group:
        raise InvalidGroup(f"{place} has {len(record.lengths)} answers instead of {task.how.group}")
    text = task.problems.text
    room = task.config.context - len(text.prompt(task.problems.get(record.problem).prompt))
    for answer in record.answers():
        if not task.config.fits(answer.tolist(), room, text.vocabulary):
            raise InvalidGroup(f"{place}: an answer does not end where it should")
