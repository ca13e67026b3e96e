"""Answers of actors: written by seed, packed, and what the coordinator finds in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import TrainSettings
from shared.workloads.experience import Actor, Inspection, KnownVersion
from shared.workloads.rollouts import rereading, rollout_work
from shared.workloads.rollouts.answer_proof import refuted
from shared.workloads.rollouts.answer_records import (
    LOWEST,
    STEPS,
    GroupRecord,
    decode,
    encode,
    judged,
    packed,
    quantised,
    restored,
)
from shared.workloads.rollouts.config import Problems, RolloutsConfig
from shared.workloads.rollouts.problems import END
from shared.workloads.rollouts.rereading import (
    TOKENS,
    differing,
    rounding,
    samples_to_read,
)
from tests.support.workloads import tiny_rollouts as tiny

Change = Callable[[list[GroupRecord]], list[GroupRecord]]
replace = msgspec.structs.replace


def published(path: Path) -> Path:
    """The file of a version's weights."""
    weights = path / "weights"
    save_file({name: value.contiguous() for name, value in tiny.lively().items()}, weights)
    return weights


def inspected(
    path: Path, data: bytes, *, known: int = 1, secret: int = 3, **changes: Any
) -> Inspection:
    """The findings of the coordinator, with `known` versions that are all the same."""
    weights = published(path)
    versions = [KnownVersion(number=n, sha256=tiny.SHA256) for n in range(known)]
    task = tiny.job("selfplay", changes.pop("steps", 8), **changes)
    return tiny.WORKLOAD.experience.inspect(task, data, versions, lambda _: weights, secret)


def test_log_probabilities_take_a_byte_each_and_likely_ones_lose_little() -> None:
    said = np.array([-0.0, -0.01, -0.1, -1.0, -5.0, -15.9, -40.0])
    again = restored(quantised(said))
    assert len(quantised(said)) == len(said)
    assert np.abs(again[:6] - said[:6]).max() < 0.07
    assert abs(again[1] + 0.01) < 0.002
    assert again[6] == -LOWEST


def test_the_same_task_writes_the_same_answers_whatever_the_slots_and_pauses(
    tmp_path: Path,
) -> None:
    straight = tiny.answers(tiny.lively(), tmp_path)
    assert [record.problem for record in straight] == list(range(8))
    assert all(len(record.lengths) == 4 for record in straight)
    few = tiny.WORKLOAD.options({"group": 4, "slots": 3})
    narrow = tiny.answers(tiny.lively(), tmp_path, options=few)
    assert [r.tokens for r in narrow] == [r.tokens for r in straight]
    many = tiny.WORKLOAD.options({"group": 4, "slots": 1024})
    wide = tiny.answers(tiny.lively(), tmp_path, steps=65, options=many)
    assert [r.tokens for r in wide[:8]] == [r.tokens for r in straight]
    work = tiny.WORKLOAD.begin(tiny.job("selfplay", 8), tiny.lively(), tiny.Window(tmp_path), "cpu")
    while not work.done:
        work.advance()
        work.suspend()
        work.resume()
    paused = decode(work.result()[0].experience)
    assert [r.tokens for r in paused] == [r.tokens for r in straight]


def test_a_restart_keeps_the_groups_that_were_done(tmp_path: Path) -> None:
    task = tiny.job("selfplay", 8)
    work = tiny.WORKLOAD.begin(task, tiny.lively(), tiny.Window(tmp_path), "cpu")
    while not work.done:
        work.advance()
    again = tiny.WORKLOAD.begin(task, tiny.lively(2), tiny.Window(tmp_path), "cpu")
    again.restore(work.snapshot())
    assert again.done
    assert decode(again.result()[0].experience) == decode(work.result()[0].experience)
    with pytest.raises(InvalidRunFile, match="another task"):
        again.restore({})


def test_speeds_are_those_of_the_whole_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(rollout_work, "perf_counter", lambda: next(ticks) / 10)
    task = tiny.job("selfplay", 8)
    work = tiny.WORKLOAD.begin(task, tiny.lively(), tiny.Window(tmp_path), "cpu")
    reports = [work.advance()]
    while not work.done:
        reports.append(work.advance())
    elapsed_s = (next(ticks) - len(reports)) / 10
    assert len(reports) > 1
    metrics = reports[-1].metrics
    assert metrics["tokens"] / metrics["tokens_per_s"] == pytest.approx(elapsed_s)
    assert metrics["problems_per_hour"] == pytest.approx(8 * 3600 / elapsed_s)


def test_a_newer_version_answers_the_problems_begun_from_then_on(tmp_path: Path) -> None:
    options = tiny.WORKLOAD.options({"group": 4, "slots": 4})
    work = tiny.WORKLOAD.begin(
        tiny.job("selfplay", 200, options=options),
        tiny.lively(),
        tiny.Window(tmp_path),
        "cpu",
    )
    assert isinstance(work, Actor)
    work.advance()
    work.swap(tiny.lively(2), 1, "01")
    while not work.done:
        work.advance()
    versions = [record.version for record in decode(work.result()[0].experience)]
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


def test_rewards_are_the_coordinator_s_own(tmp_path: Path) -> None:
    found = inspected(tmp_path, encode(tiny.answers(tiny.lively(), tmp_path)))
    assert (found.episodes, found.refused) == (8, 0)
    assert found.samples == 4 * len(judged(found.data))  # those with signal alone
    with pytest.raises(BadRequest, match="unknown field"):
        decode(encode([tiny.rewarded(tiny.answers(tiny.lively(), tmp_path)[0])]))


def other_tokens(records: list[GroupRecord]) -> list[GroupRecord]:
    return [replace(r, tokens=bytes(max(1, 255 - token) for token in r.tokens)) for r in records]


def surer(records: list[GroupRecord]) -> list[GroupRecord]:
    return [replace(r, logprobs=bytes(len(r.logprobs))) for r in records]


def best_first(records: list[GroupRecord]) -> list[GroupRecord]:
    """One answer in the place of all."""
    first = [r.lengths[0] for r in records]
    return [
        replace(
            r,
            lengths=(n,) * len(r.lengths),
            tokens=r.tokens[:n] * len(r.lengths),
            logprobs=r.logprobs[:n] * len(r.lengths),
        )
        for r, n in zip(records, first, strict=True)
    ]


@pytest.mark.parametrize("change", [other_tokens, surer, best_first])
def test_answers_that_the_version_did_not_write_are_refused(change: Change, tmp_path: Path) -> None:
    records = tiny.answers(tiny.lively(), tmp_path)
    found = inspected(tmp_path, encode(change(records)))
    assert found.refused >= 4
    assert found.complaint.startswith("problem ")


@pytest.mark.parametrize("secret", range(8))
def test_a_group_half_by_hand_is_refused_whichever_answers_are_read(
    tmp_path: Path, secret: int
) -> None:
    first, *others = tiny.answers(tiny.lively(), tmp_path)
    answers = [*first.answers()[:2], *2 * [np.array([*b"97", END])]]
    said = [*first.said()[:2], *2 * [np.full(3, -0.1)]]
    half = replace(
        first,
        lengths=tuple(map(len, answers)),
        tokens=packed(np.concatenate(answers).tolist()),
        logprobs=quantised(np.concatenate(said)),
    )
    found = inspected(tmp_path, encode([half, *others]), secret=secret)
    assert (found.episodes, found.refused) == (7, 1)


def test_answers_of_other_weights_or_another_temperature_are_refused(tmp_path: Path) -> None:
    for weights, heat in ((tiny.lively(2), 1.0), (tiny.lively(), 3.0)):
        hot = tiny.WORKLOAD.options({"group": 4, "slots": 8, "temperature": heat})
        records = tiny.answers(weights, tmp_path, options=hot)
        assert inspected(tmp_path, encode(records)).refused >= 4


def misfit(records: list[GroupRecord], **changes: Any) -> bytes:
    return encode([replace(records[0], **changes), *records[1:]])


def test_what_the_task_did_not_ask_for_is_refused_by_name(tmp_path: Path) -> None:
    records = tiny.answers(tiny.lively(), tmp_path)
    long = [*records[0].answers()[0].tolist(), *[65] * 20]
    cases = {
        "problem 99 is not one of 0 to 7": misfit(records, problem=99),
        "problem 1 is in the file twice": misfit(records, problem=1),
        "problem 0: version 7 with these weights may not answer": misfit(records, version=7),
        "problem 0: its lengths do not fit": misfit(records, lengths=(1, 1, 1, 1)),
        "problem 0 has 3 answers instead of 4": misfit(
            records,
            lengths=(1, 1, 1),
            tokens=bytes([65, 65, END]),
            logprobs=bytes(3),
        ),
        "problem 0: an answer does not end": misfit(
            records,
            lengths=(len(long), 1, 1, 1),
            tokens=bytes([*long, END, END, END]),
            logprobs=bytes(len(long) + 3),
        ),
    }
    for said, data in cases.items():
        found = inspected(tmp_path, data)
        assert said in found.complaint
        assert 1 <= found.refused <= 2
    assert inspected(tmp_path, b"no file").refused == 8


@pytest.mark.parametrize(
    ("table", "raw", "said"),
    [
        ("config", {"problems": "sums"}, "no generator"),
        ("config", {"context": 10, "answer": 12}, "the problem needs room too"),
        ("config", {"problems": "sorting", "size": 60}, "leaves"),
        ("config", {"problems": "sorting", "size": 20, "answer": 12}, "no room for it"),
        ("config", {"problems": "countdown", "size": 6, "context": 57}, "raise context"),
        ("options", {"group": 1}, "at least 2"),
        ("options", {"grupe": 2}, "group"),
        ("options", {"temperature": 1e-300}, "temperature"),
    ],
)
def test_what_cannot_be_is_said_before_a_run_begins(
    table: str, raw: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRunFile, match=said):
        getattr(tiny.WORKLOAD, table)(raw, *([None] if table == "config" else []))


def test_learning_tells_a_loss_that_is_never_negative(tmp_path: Path) -> None:
    task = tiny.job("learn", 3)
    work = tiny.WORKLOAD.begin(task, tiny.lively(), tiny.window(tmp_path), "cpu")
    report, _ = tiny.finish(work)
    assert min(report.loss_first or 0, report.loss_last or 0) > 0


def test_problems_whose_answer_only_a_search_finds_have_no_warm_start() -> None:
    model = tiny.WORKLOAD.config({"problems": "countdown", "size": 3}, None)
    plan = tiny.WORKLOAD.experience.plan
    assert plan(model, tiny.WORKLOAD.options({})).warm_steps == 0
    with pytest.raises(InvalidRunFile, match="warm_steps: problems of countdown"):
        plan(model, tiny.WORKLOAD.options({"warm_steps": 10}))


def test_a_warm_start_on_problems_that_cannot_be_drawn_is_refused_at_create() -> None:
    model = tiny.WORKLOAD.config({"problems": "sorting", "size": 4}, None)
    with pytest.raises(InvalidRunFile, match=r"\[task.options\] warm_size: the size of sorting"):
        tiny.WORKLOAD.experience.plan(model, tiny.WORKLOAD.options({"warm_size": 2}))
    model = tiny.WORKLOAD.config({"context": 25, "answer": 3}, None)  # sums of two digits
    with pytest.raises(InvalidRunFile, match=r"warm_size: the problem .* context 25 leaves 22"):
        tiny.WORKLOAD.experience.plan(model, tiny.WORKLOAD.options({"warm_size": 9}))
    with pytest.raises(InvalidRunFile, match="window_min must not be above window"):
        tiny.WORKLOAD.options({"window": 32, "window_min": 64})
    with pytest.raises(InvalidRunFile, match="window must not be above 4096 chunks of 2"):
        tiny.WORKLOAD.options({"window": 8193, "chunk": 2})


def test_a_warm_start_ends_slowly(tmp_path: Path) -> None:
    task = tiny.job("learn", 20, options={"warm_lr": 1e-3, "warm_size": 3})
    work = tiny.WORKLOAD.begin(task, tiny.lively(), tiny.Window(tmp_path), "cpu")
    report, _ = tiny.finish(work)
    assert report.metrics["lr"] < 0.1 * 1e-3


@pytest.mark.parametrize(("start", "rate"), [("", 1e-3), ("reason@40", 1e-2)])
def test_the_rate_of_learners_rises_after_the_warm_start(
    tmp_path: Path, start: str, rate: float
) -> None:
    train = TrainSettings(lr=1e-2, warmup_steps=10, init_from=start)
    options = tiny.WORKLOAD.options({"group": 4, "warm_steps": 300})
    task = tiny.job("learn", 1, options=options, train=train, global_step=300)
    work = tiny.WORKLOAD.begin(task, tiny.lively(), tiny.window(tmp_path), "cpu")
    assert tiny.finish(work)[0].metrics["lr"] == pytest.approx(rate)


def test_a_forged_file_is_read_no_further_than_its_first_batch(tmp_path: Path) -> None:
    def read(seed: int) -> Inspection:
        task = {"steps": 40}
        data = encode(tiny.answers(tiny.lively(seed), tmp_path, **task))
        return inspected(tmp_path, data, **task)

    honest, forged = read(1), read(2)
    assert (honest.episodes, honest.faults) == (40, 0)
    assert (forged.episodes, forged.refused) == (0, 40)
    assert forged.read < honest.read / 2


def test_a_forged_file_opens_no_version_after_the_judge_gave_up(tmp_path: Path) -> None:
    weights = published(tmp_path)
    opened: list[int | str] = []

    def file(name: int | str) -> Path:
        opened.append(name)
        return weights

    records = dict(enumerate(tiny.answers(tiny.lively(2), tmp_path)))
    later = {place: replace(record, version=place // 2) for place, record in records.items()}
    found = differing(later, tiny.job("selfplay", 8), file, 3, whole=False)
    assert opened == [0]
    assert found.complaints.keys() == records.keys()


def test_a_drawn_task_is_read_in_whole(tmp_path: Path) -> None:
    weights = published(tmp_path)
    options = tiny.WORKLOAD.options({"group": 32})
    records = dict(enumerate(tiny.answers(tiny.lively(), tmp_path, steps=2, options=options)))
    tokens = sum(sum(record.lengths) for record in records.values())
    task = tiny.job("selfplay", 2, options=options)
    some = differing(records, task, lambda _: weights, 3, whole=False)
    every = differing(records, task, lambda _: weights, 3, whole=True)
    assert some.read < every.read == tokens
    assert (some.faults, every.faults) == (0, 0)


def faked(record: GroupRecord, samples: Sequence[int], count: int = 99) -> GroupRecord:
    """A group whose answers of these numbers end with other tokens, so many of each."""
    answers = record.answers()
    for sample in samples:
        answers[sample][-count:] = 255 - answers[sample][-count:]
    return replace(record, tokens=packed(np.concatenate(answers).tolist()))


def test_a_complaint_names_problem_version_and_faults_of_the_group_alone(tmp_path: Path) -> None:
    """Two versions wrote; the groups of the one that another forged are all that is refused."""
    weights = published(tmp_path)
    options = tiny.WORKLOAD.options({"group": 32})
    groups = tiny.answers(tiny.lively(), tmp_path, steps=4, options=options)
    groups = [replace(groups[0], version=3), faked(groups[1], range(32)), *groups[2:]]
    task = tiny.job("selfplay", 4, options=options)
    reading = differing(dict(enumerate(groups)), task, lambda _: weights, 3, whole=True)
    tokens = sum(groups[1].lengths)
    assert reading.read == sum(sum(group.lengths) for group in groups)
    assert tokens / 2 < reading.faults <= tokens
    assert reading.complaints == {
        1: f"problem 1: read again by version 0, {reading.faults} of {tokens} tokens are not what "
        "it writes with its seed"
    }


def test_a_forged_answer_condemns_its_group_though_the_others_are_honest(tmp_path: Path) -> None:
    weights = published(tmp_path)
    options = tiny.WORKLOAD.options({"group": 96})
    (group,) = tiny.answers(tiny.lively(), tmp_path, steps=1, options=options)
    task, record = tiny.job("selfplay", 1, options=options), {0: faked(group, [70], 4)}
    reading = differing(record, task, lambda _: weights, 3, whole=True)
    assert (reading.faults, reading.read) == (4, sum(group.lengths))
    assert not refuted(reading.faults, reading.read)
    assert reading.complaints == {
        0: f"problem 0: read again by version 0, 4 of {reading.read} tokens are not what it writes "
        "with its seed"
    }


def test_groups_of_few_tokens_are_refuted_together_and_only_those_with_a_fault(
    tmp_path: Path,
) -> None:
    weights = published(tmp_path)
    options = tiny.WORKLOAD.options({"group": 2})
    groups = tiny.answers(tiny.lively(), tmp_path, steps=6, options=options)
    groups = [*(faked(group, [1], 2) for group in groups[:4]), *groups[4:]]
    task = tiny.job("selfplay", 6, options=options)
    reading = differing(dict(enumerate(groups)), task, lambda _: weights, 3, whole=True)
    assert ([*reading.complaints], reading.faults) == ([0, 1, 2, 3], 8)
    alone = differing({0: groups[0], 1: groups[4]}, task, lambda _: weights, 3, whole=True)
    assert (alone.complaints, alone.faults) == ({}, 2)


def test_a_file_that_is_mostly_forged_is_left_after_that_and_refused_in_whole(
    tmp_path: Path,
) -> None:
    weights = published(tmp_path)
    opened: list[int | str] = []

    def file(name: int | str) -> Path:
        opened.append(name)
        return weights

    options = tiny.WORKLOAD.options({"group": 32})
    honest = tiny.answers(tiny.lively(), tmp_path, steps=5, options=options)
    groups = [
        replace(honest[0], version=0),  # half of what is read is no reason to stop
        replace(faked(honest[1], range(32)), version=1),
        replace(faked(honest[2], range(32)), version=2),
        replace(honest[3], version=3),
        replace(honest[4], version=4),
    ]
    task = tiny.job("selfplay", 5, options=options)
    reading = differing(dict(enumerate(groups)), task, file, 3, whole=True)
    assert opened == [0, 1, 2]
    assert reading.complaints.keys() == {1, 2, 3, 4}
    for place in (3, 4):
        assert reading.complaints[place] == (
            f"problem {place}: not checked, since most before it were refused"
        )


def test_every_answer_is_read_however_few_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of a large vocabulary reads fewer answers at once, and one at least."""
    weights = published(tmp_path)
    options = tiny.WORKLOAD.options({"group": 8})
    records = dict(enumerate(tiny.answers(tiny.lively(), tmp_path, steps=2, options=options)))
    task = tiny.job("selfplay", 2, options=options)

    config = RolloutsConfig.from_dict(task.config)
    problems = Problems.of(config, lambda _: weights)
    scores = config.context * problems.text.vocabulary  # of an answer
    results = []
    for limit, together in ((rereading.LOGITS, rereading.BATCH), (3.5 * scores, 3), (9, 1)):
        monkeypatch.setattr(rereading, "LOGITS", int(limit))
        reader = rereading.Rereader(task, 0, lambda _: weights, problems)
        assert reader.batch == together
        results.append(differing(records, task, lambda _: weights, 3, whole=True))
    assert results[0] == results[1] == results[2]
    assert results[0].read == sum(sum(record.lengths) for record in records.values())


@pytest.mark.parametrize("lengths", [[40], [40, 50, 60], [10, 10, 10, 10, 10], [1, 2]])
def test_of_each_group_as_many_tokens_are_read_as_prove_something(lengths: list[int]) -> None:
    for seed in range(20):
        samples = samples_to_read(lengths, np.random.default_rng(seed))
        read = sum(lengths[sample] for sample in samples)
        assert len({*samples}) == len(samples)
        assert read >= min(TOKENS, sum(lengths))
        assert read - lengths[samples[-1]] < TOKENS  # and no answer more


def test_a_log_probability_at_the_floor_blames_nobody() -> None:
    """The wire has no smaller one: the true one may be any below."""
    reach = rounding(np.array([-LOWEST, -LOWEST / 2], np.float32))
    assert np.isinf(reach[0])
    assert np.isfinite(reach[1])


def test_what_the_wire_rounds_is_within_reach_and_the_reach_is_small() -> None:
    nats = np.linspace(0.0, LOWEST - 0.2, 2001)
    stored = restored(quantised(-nats))
    reach = rounding(stored)
    assert (np.abs(stored + nats) <= reach + 1e-6).all()
    # twice the square root of the share, at most a step on
    assert (reach <= LOWEST * (np.sqrt(nats / LOWEST) + 2 / STEPS) / STEPS).all()


def test_judged_answers_are_summed_whatever_they_teach(tmp_path: Path) -> None:
    records = tiny.answers(tiny.lively(), tmp_path)
    (sums,) = inspected(tmp_path, encode(records)).rollouts
    assert (sums.version, sums.answers) == (0, 8 * 4)
    assert sums.tokens == sum(sum(record.lengths) for record in records)
    spoken = sum(float(-part.sum()) for record in records for part in record.said())
    assert sums.surprise == pytest.approx(spoken)
    unended = [answer for r in records for answer in r.answers() if answer[-1] != END]
    assert sums.cut == len(unended)
    assert 0 <= sums.reward <= sums.answers


def test_refused_answers_are_in_no_sum(tmp_path: Path) -> None:
    records = tiny.answers(tiny.lively(), tmp_path)
    other = msgspec.structs.replace(records[0], weights="f" * 64)
    (sums,) = inspected(tmp_path, encode([other, *records[1:]])).rollouts
    assert sums.answers == 7 * 4


@pytest.mark.parametrize("prompt", ["12+34=" * 40, "\0"])
def test_a_prompt_of_any_length_has_an_answer(prompt: str) -> None:
    """A run file may name it; no evaluation fails by it."""
    sample = tiny.WORKLOAD.sample(tiny.config(), tiny.lively(), None, prompt, 0)
    assert sample.text.startswith(prompt)
