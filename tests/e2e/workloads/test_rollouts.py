"""Rollouts through a whole coordinator: a warm start, answers, learners, and what is done about
fakes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import torch
import transformers
import uvicorn
from sqlalchemy import Connection, select
from torch import Tensor
from typing_extensions import override

from coordinator.database import evaluations, experience, runs
from coordinator.database.inference.api_key_rows import has_contributed
from coordinator.database.ledger import gifts
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.tasks import tasks
from coordinator.database.tasks import add_beside
from coordinator.http.app import create_app
from coordinator.http.server import listen
from coordinator.inference.answers import TOKENIZER_TEMPLATE
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from shared import decoding
from shared.clock import SystemClock
from shared.protocol.inference import NewKey
from shared.workloads.base import Data, DatasetWanted, Job, Result, Weights, Work
from shared.workloads.data.chat_template import template_beside
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.rollouts.answer_records import (
    GroupRecord,
    JudgedGroup,
    decode,
    encode,
    judged,
    packed,
    quantised,
)
from shared.workloads.rollouts.rollout_work import RolloutWork
from shared.workloads.rollouts.workload import RolloutsWorkload
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.rollouts_run import RUN
from tests.support.scripted_worker import Player
from tests.support.served import accepting
from tests.support.workloads.chat_base import chat_base
from volunteer.control import events
from volunteer.settings import settings

# a task that keeps its machine at work
MEASURING = {"run_id": 1, "kind": "evaluate", "start": 0, "stop": 1, "seed": 0, "steps": 1}
MEASURING |= {"batch_size": 1, "price_micro": 0, "options": "{}"}


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    assert report.breaches == ()
    return await home.coordinator.ledger.check() == ()


async def kinds_done(home: LocalCoordinator) -> set[str]:
    def read(conn: Connection) -> set[str]:
        done = select(tasks.c.kind).where(tasks.c.state == "done").distinct()
        return set(conn.execute(done).scalars())

    return await home.coordinator.db.read(read)


async def version(home: LocalCoordinator) -> int:
    return (await home.coordinator.runs.queries.info("rollouts")).version


async def test_two_volunteers_go_on_after_one_was_killed_among_its_answers(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("rollouts")
        async with home.coordinator.working():
            ann, bob = (LocalMachine(tmp_path / name, home) for name in ("ann", "bob"))
            await ann.join("Ann")
            await bob.join("Bob")
            async with ann.working() as steady:
                async with bob.working() as killed:
                    await killed.until(events.Training, lambda e: e.counted == "problems", 120)
                before = await version(home)
                async with bob.working() as again:
                    await again.until(events.Submitted, timeout_s=60)
                    async with steady.eventually(120):
                        while await version(home) < before + 1:
                            await steady.tick()
        assert await kinds_done(home) == {"selfplay", "learn"}
        found = await home.coordinator.db.read(lambda conn: experience.totals(conn, 1))
        assert found.sealed >= 8
        assert found.samples % 16 == 0
        rows = await home.coordinator.runs.queries.versions("rollouts")
        assert {"solved", "cut", "loss"} <= set(rows[0].metrics)
        shown = await home.coordinator.runs.queries.experience("rollouts")
        assert shown is not None
        assert shown.rollouts
        assert sum(point.answers for point in shown.rollouts) >= 16 * found.sealed
        assert all(0 <= point.reward <= 1 and 0 <= point.cut <= 1 for point in shown.rollouts)
        assert all(point.entropy > 0 and 1 <= point.length <= 5 for point in shown.rollouts)
        assert (await home.coordinator.runs.queries.decided("rollouts")).rejected == 0
        assert await sound(home)


async def test_volunteers_learn_from_the_problems_of_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "digits.jsonl"
    digits = ["".join(each) for each in permutations("123456", 3)]
    path.write_text("\n".join(f'{{"prompt": "{d}:", "answer": "{d[0]}"}}' for d in digits))
    table = RUN.replace('problems = "sorting"\nsize = 3\n', "")
    async with local_coordinator(tmp_path / "coordinator") as home:
        wanted = DatasetWanted(name="digits", sources=(path,), seed=1)
        await home.coordinator.datasets.add_for("rollouts", wanted, Skipped())
        await home.coordinator.runs.create(f'dataset = "digits"\n{table}')
        await home.coordinator.runs.start("rollouts")
        async with home.coordinator.working():
            ann = LocalMachine(tmp_path / "ann", home)
            await ann.join("Ann")
            async with ann.working() as machine, machine.eventually(120):
                while await kinds_done(home) != {"selfplay", "learn"} or not await sealed(home):
                    await machine.tick()
        assert {bytes(each.tokens)[0] for each in await sealed(home)} <= {*b"123456"}
        assert (await home.coordinator.runs.queries.decided("rollouts")).rejected == 0
        assert await sound(home)


async def test_adapters_of_a_chat_model_are_taught_exported_asked_and_loaded(
    tmp_path: Path,
) -> None:
    base, path, tuned = tmp_path / "base", tmp_path / "legs.jsonl", tmp_path / "tuned"
    base.mkdir()
    chat_base(base)
    lines = (f'{{"prompt": "{n} legs?", "answer": {n}, "system": "Count."}}' for n in range(50))
    path.write_text("\n".join(lines))
    model = f'from = "{base}"\ntrain = "lora"\ncontext = 96\nanswer = 4\n'
    head, _, rest = RUN.partition("[model]")
    table = f'dataset = "legs"\n[model]\n{model}[task]{rest.partition("[task]")[2]}'
    table += '[serve]\nwho = "keys"\n[evaluation]\nevery = 1\n'
    async with local_coordinator(tmp_path / "coordinator") as home:
        tokenizer = base / "tokenizer.json"
        wanted = DatasetWanted(
            name="legs",
            sources=(path,),
            seed=1,
            tokenizer=tokenizer.read_bytes(),
            template=msgspec.json.encode(template_beside(tokenizer)).decode(),
        )
        await home.coordinator.datasets.add_for("rollouts", wanted, Skipped())
        await home.coordinator.runs.create(
            head + table.replace("warm_steps = 300", "warm_steps = 1")
        )
        await home.coordinator.runs.start("rollouts")
        async with home.coordinator.working():
            ann = LocalMachine(tmp_path / "ann", home)
            await ann.join("Ann")
            async with ann.working() as machine, machine.eventually(240):
                done = {"selfplay", "learn"}
                while await kinds_done(home) != done or await version(home) < 1:
                    await machine.tick()
            weights = [e for e in machine.all(events.Fetching) if e.what == "weights"]
            number = await version(home)
            await only_solver(home, number)
            export = home.coordinator.export.export
            whole = await export("rollouts", tuned, format="transformers")
            adapters = await export("rollouts", tmp_path / "adapters", format="peft")
            assert whole.version == adapters.version == number
            assert {"adapter_model.safetensors", "tokenizer.json"} <= set(adapters.files)
            await asked(home)
        size = (base / "model.safetensors").stat().st_size
        assert weights
        assert max(event.total_bytes for event in weights) < size / 4
        assert (await home.coordinator.runs.queries.decided("rollouts")).rejected == 0
        assert await sound(home)
    loads_elsewhere(tuned, base)


def loads_elsewhere(tuned: Path, base: Path) -> None:
    """Load an export by the library, and compare its words with its base model's."""
    card = (tuned / "README.md").read_text()
    assert re.search(r"^- share solved: 100.0% ± 25.0% of 2 held-out problems", card, re.MULTILINE)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tuned)
    words: Any = transformers.AutoTokenizer.from_pretrained(tuned)
    reference = transformers.AutoTokenizer.from_pretrained(base)
    turns = [{"role": "system", "content": "Count."}, {"role": "user", "content": "8 legs?"}]
    ids = [
        each.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        for each in (words, reference)
    ]
    assert ids[0] == ids[1]
    assert words.eos_token == "<|im_end|>"
    assert words.convert_tokens_to_ids("<|im_end|>") in loaded.generation_config.eos_token_id
    made = loaded.generate(torch.tensor([ids[0]]), max_new_tokens=4, do_sample=False)
    assert made.shape[1] > len(ids[0])


async def only_solver(home: LocalCoordinator, number: int) -> None:
    """Write into the database that this version alone solves everything."""

    def write(conn: Connection) -> None:
        for each in range(number + 1):
            share = float(each == number)
            metrics = {"solved": share, "solved_error": 0.25, "problems": 2.0}
            text = msgspec.json.encode(metrics).decode()
            values = {"loss": 1 - share, "metrics": text, "state": "done"}
            evaluations.set_evaluation(conn, 1, each, **values)
        runs.set_values(conn, 1, best=evaluations.best(conn, 1))

    await home.coordinator.db.write(write)


async def asked(home: LocalCoordinator) -> None:
    """Ask the newest version in its own template, by the client of OpenAI."""
    coordinator = home.coordinator
    engine = BuiltinEngine(
        coordinator.db, SystemClock(), coordinator.blobs, ProcessLimits(threads=1)
    )
    coordinator.answers.connect(engine)
    ann = await home.join("Asker", workloads=["rollouts"])
    who = ann.volunteer_id
    await coordinator.db.write(lambda conn: gifts.grant(conn, who, "test", 10**9, "", 1.0))
    config = uvicorn.Config(create_app(coordinator), lifespan="off", log_level="error")
    try:
        with listen("127.0.0.1", 0) as listener:
            async with accepting(config, listener):
                key = decoding.decode(
                    (await ann.post("/me/keys", {"name": "test"})).content, NewKey
                ).key
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=120.0) as client:
                    card = (await client.models.retrieve("rollouts")).model_dump()
                    assert card["description"].endswith(TOKENIZER_TEMPLATE)
                    turns: Any = [
                        {"role": "system", "content": "Count."},
                        {"role": "user", "content": "8 legs?"},
                    ]
                    reply = await client.chat.completions.create(
                        model="rollouts@best", messages=turns, max_tokens=4
                    )
                    assert reply.usage is not None
                    assert reply.usage.completion_tokens >= 1
                    plain = await client.completions.create(
                        model="rollouts", prompt="8 legs?", max_tokens=4
                    )
                    assert plain.choices[0].finish_reason in ("stop", "length")
                    with pytest.raises(openai.BadRequestError, match="writes text: volunteer gen"):
                        await client.images.generate(model="rollouts", prompt="x")
    finally:
        await engine.close()


async def test_nothing_is_answered_by_the_model_from_before_its_warm_start(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.coordinator.runs.create(RUN.replace("warm_steps = 300", "warm_steps = 1"))
        await home.coordinator.runs.start("rollouts")
        ann = Player(home, await home.join("Ann", workloads=["rollouts"]))
        await home.coordinator.replay.tend(1)
        assert (await ann.do(await ann.claim("learn"))).state == "accepted"
        await home.coordinator.replay.tend(1)
        assert (await ann.ask("selfplay")).lease is None
        assert await home.coordinator.merger.merge_if_due(1)
        await home.coordinator.replay.tend(1)
        assert (await ann.claim("selfplay")).job.kind == "selfplay"


async def test_a_warm_start_is_judged_by_its_own_learning_rate(tmp_path: Path) -> None:
    """It is far above the rate of the steps that follow, which bounds the norm of theirs."""
    table = RUN.replace("warm_steps = 300", "warm_steps = 10").replace("lr = 1e-2", "lr = 1e-6")
    async with local_coordinator(tmp_path) as home:
        await home.coordinator.runs.create(table)
        await home.coordinator.runs.start("rollouts")
        ann = Player(home, await home.join("Ann", workloads=["rollouts"]))
        await home.coordinator.replay.tend(1)
        verdict = await ann.do(await ann.claim("learn"))
        assert (verdict.state, verdict.message) == ("accepted", "accepted")


async def test_no_task_is_added_to_a_warm_start_whose_merge_is_due(tmp_path: Path) -> None:
    """A merge waits for no more machines than are at work, whatever the plan's quorum."""
    table = RUN.replace("warm_steps = 300", "warm_steps = 1").replace(
        "[plan]", "[plan]\nquorum = 3"
    )
    async with local_coordinator(tmp_path) as home:
        await home.coordinator.runs.create(table)
        await home.coordinator.runs.start("rollouts")
        ann = Player(home, await home.join("Ann", workloads=["rollouts"]))
        await home.coordinator.replay.tend(1)
        assert (await ann.do(await ann.claim("learn"))).state == "accepted"
        assert not await home.coordinator.replay.tend(1)
        assert await home.coordinator.merger.merge_if_due(1)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_warm_start_that_no_merge_follows_is_added_to(tmp_path: Path, lost: bool) -> None:
    """Its update may be lost, as by a suspension, or alone too little for a merge."""
    table = RUN.replace("warm_steps = 300", "warm_steps = 1")
    if not lost:
        table = table.replace("[plan]", "[plan]\nquorum = 2")
    async with local_coordinator(tmp_path) as home:
        await home.coordinator.runs.create(table)
        await home.coordinator.runs.start("rollouts")
        names = ("Ann", "Bob")  # two at work: a merge waits for as many
        ann, bob = [Player(home, await home.join(n, workloads=["rollouts"])) for n in names]
        await home.coordinator.replay.tend(1)
        assert (await ann.do(await ann.claim("learn"))).state == "accepted"
        if lost:
            await home.coordinator.volunteers.suspend("Ann", "copies of others")
        else:
            await home.coordinator.db.write(lambda conn: add_beside(conn, MEASURING))
            await bob.claim("evaluate")
        # the range of a lost update is itself in the queue again
        assert await home.coordinator.replay.tend(1) is not lost
        assert not await home.coordinator.replay.tend(1)  # one at a time
        learner = bob if lost else ann
        lease = await learner.claim("learn")
        assert not await home.coordinator.replay.tend(1)
        assert (await learner.do(lease)).state == "accepted"
        assert not await home.coordinator.replay.tend(1)  # the merge is due
        assert await home.coordinator.merger.merge_if_due(1)
        await home.coordinator.replay.tend(1)
        assert (await learner.claim("selfplay")).job.kind == "selfplay"


def who_may_ask(conn: Connection) -> set[str]:
    found = conn.execute(select(volunteers.c.id, volunteers.c.nickname))
    return {str(name) for each, name in found if has_contributed(conn, each)}


async def test_one_machine_answers_and_another_learns(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("rollouts")
        machines = {role: LocalMachine(tmp_path / role, home) for role in ("play", "learn")}
        for role, machine in machines.items():
            await machine.join(role)
            settings.save(machine.directories.config / "config.toml", {"roles": [role]})
        async with (
            home.coordinator.working(),
            machines["play"].working() as actor,
            machines["learn"].working() as learner,
            learner.eventually(120),
        ):
            while await version(home) < 3:
                await learner.tick()
        assert {event.kind for event in actor.all(events.Claimed)} == {"selfplay"}
        assert {event.kind for event in learner.all(events.Claimed)} == {"learn"}
        assert await sound(home)
        assert await home.coordinator.db.read(who_may_ask) == {"play", "learn"}


Records = list[GroupRecord]


class Forger(RolloutsWorkload):
    """Changes the groups of each file before it is sent."""

    def __init__(self, change: Callable[[Records], Records]) -> None:
        self.change = change

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        if job.kind != "selfplay":
            return super().begin(job, weights, data, device)
        return ForgedAnswers(self.change, job, weights, data, device)


class ForgedAnswers(RolloutWork):
    def __init__(self, change: Callable[[Records], Records], *task: Any) -> None:
        super().__init__(*task)
        self._change = change

    @override
    def result(self) -> tuple[Result, dict[str, Tensor]]:
        report, tensors = super().result()
        games = encode(self._change(decode(report.experience)))
        return msgspec.structs.replace(report, experience=games), tensors


def forged(record: GroupRecord) -> GroupRecord:
    """A group that teaches: the second half of its answers is wrong, by hand."""
    answers = record.answers()
    half = len(answers) // 2
    answers[half:] = [np.array([*b"97", 0])] * (len(answers) - half)
    tokens = np.concatenate(answers).tolist()
    return msgspec.structs.replace(
        record,
        lengths=tuple(map(len, answers)),
        tokens=packed(tokens),
        logprobs=quantised([-0.1] * len(tokens)),
    )


async def sealed(home: LocalCoordinator) -> list[JudgedGroup]:
    """All groups that learners may draw from."""
    rows = await home.coordinator.db.read(lambda conn: experience.window(conn, 1, 1 << 20, 0))
    paths = [await home.coordinator.blobs.local(row.sha256) for row in rows]
    return [record for path in paths for record in judged(path.read_bytes())]


async def test_who_learns_how_much_may_be_forged_gets_nothing_in(tmp_path: Path) -> None:
    groups, sent, files = 8, set[tuple[int, bytes]](), 0

    def some(records: Records) -> Records:
        made = [forged(record) for record in records[:groups]]
        sent.update((record.problem, record.tokens) for record in made)
        return [*made, *records[groups:]]

    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("rollouts")
        ann, eve = (LocalMachine(tmp_path / name, home) for name in ("ann", "eve"))
        await ann.join("Ann")
        await eve.join("Eve")
        settings.save(eve.directories.config / "config.toml", {"roles": ["play"]})
        async with (
            home.coordinator.working(),
            ann.working(),
            eve.working(load=lambda name: Forger(some)) as hostile,
            hostile.eventually(240),
        ):
            while files < 8:
                await hostile.tick()
                for event in hostile.all(events.Judged)[files:]:
                    refused = event.verdict.state == "rejected"
                    groups, files = groups // 2 if refused else groups + 1, files + 1
        verdicts = [event.verdict for event in hostile.all(events.Judged)]
        assert re.match(
            r"8 of 8 problems were refused: problem \d+: read again", verdicts[0].message
        )
        assert sum(verdict.state == "rejected" for verdict in verdicts) >= 3
        assert len(sent) >= 8
        assert not [each for each in await sealed(home) if (each.problem, each.tokens) in sent]
        assert await sound(home)


async def test_faults_too_few_for_one_draw_are_summed_over_those_of_an_account(
    tmp_path: Path,
) -> None:
    def shaded(records: Records) -> Records:
        """Two tokens of a file are said to be much likelier than they were."""
        said = np.concatenate(records[0].said())
        said[:2] -= 2.0
        return [msgspec.structs.replace(records[0], logprobs=quantised(said)), *records[1:]]

    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.runs.create(f"{RUN}[trust]\nrecompute = 1.0\n")
        await home.coordinator.runs.start("rollouts")
        ann, eve = (LocalMachine(tmp_path / name, home) for name in ("ann", "eve"))
        await ann.join("Ann")
        await eve.join("Eve")
        settings.save(eve.directories.config / "config.toml", {"roles": ["play"]})
        async with (
            home.coordinator.working(),
            ann.working() as honest,
            eve.working(load=lambda name: Forger(shaded)) as hostile,
        ):
            told = await hostile.until(
                events.Judged, lambda event: event.verdict.state == "rejected", 120
            )
        assert re.match(r"\d+ of [\d,]+ tokens of \d+ drawn tasks are not", told.verdict.message)
        assert not [e for e in honest.all(events.Judged) if e.verdict.state == "rejected"]
