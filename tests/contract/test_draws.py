"""Answers that are drawn, on both databases: none is left out, and what cannot be compared
waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
from sqlalchemy import text

from coordinator.accounts.bearer_tokens import Principal
from coordinator.database import volunteers as store
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import answer_pay, payments
from coordinator.inference.answer_draws import AT_ONCE, WAITING_MAX
from coordinator.inference.answerers import AnswerPart, WaitingMachine
from coordinator.inference.inference_engine import Generation, ModelVersion
from coordinator.inference.metering import GONE_S, Meter
from coordinator.rules.run_file import TierSettings
from shared.errors import Unavailable
from shared.protocol.inference import AnswerTask, AnswerTokens
from shared.protocol.versions import SignedManifest
from shared.workloads.generation import batch
from tests.contract.test_metering import Bench
from tests.support.account_rows import breaches, join

MODEL = ModelVersion(run_id=1, run="alpha", version=0)
TIER = TierSettings(requests_per_minute=1000, tokens_waiting=1000)
TOKENS = 10
PAY = 12  # for them: 1.5 micro-credits a token, less a fifth


class Judge:
    """Compares at its pace: says how many tokens of the next answers are wrong."""

    def __init__(self) -> None:
        self.wrong = 0
        self.works = True
        self.order: list[str] = []
        self.most = self.now = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(
        self, request: Generation, tokens: Sequence[int], *, ended: bool
    ) -> tuple[int, int]:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        if not self.works:
            raise Unavailable("the inference process is gone")
        self.order.append(request.sequence.id)
        return len(tokens), self.wrong


class House:
    """A meter whose answers are made by accounts with a machine each."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.judge = bench, Judge()
        self.meter = self.process()

    def process(self) -> Meter:
        meter = self.bench.meter()
        meter.draws.roll = float  # 0: every answer is drawn
        meter.draws.connect(self.judge)
        return meter

    async def answer(self, who: Principal, free: int = 0) -> str:
        """An account answers a request."""
        order = self.bench.order(TOKENS, prompt=0, free=free, house_share=0.2, tier=TIER)
        metered = await self.meter.begin(order)
        name = f"{metered.id}-0"
        sequence = batch.Sequence(id=name, prompt=(1,), max_tokens=TOKENS, seed=1)
        request = Generation(model=MODEL, sequence=sequence)
        manifest = SignedManifest(payload="", signature="")
        task = AnswerTask(
            id=name, manifest=manifest, prompt=(1,), max_tokens=TOKENS, seed=1, place=0,
            temperature=1.0, top_p=1.0, end=None,
        )  # fmt: skip
        part = AnswerPart(WaitingMachine(who, ()), task)
        part.take(AnswerTokens(start=0, tokens=(7,) * TOKENS))
        self.meter.draws.keep(request, part)
        self.meter.count(metered, TOKENS, who.volunteer_id)
        await self.meter.end(metered)
        return name

    async def quiet(self) -> None:
        async with asyncio.timeout(120):
            while self.meter.draws.waiting:
                await asyncio.sleep(0.001)

    async def has(self, who: Principal) -> tuple[int, int]:
        """Return what an account has earned, and what is at stake."""
        found = await self.bench.db.read(lambda c: payments.balances(c, who.volunteer_id))
        return found.earned_micro, found.escrow_micro

    async def standing(self, who: Principal) -> str:
        return await self.bench.db.read(lambda c: store.existing(c, who.volunteer_id).standing)


@pytest.fixture
async def house(database: Database) -> House:
    bench = Bench(database)
    await bench.begin()
    return House(bench)


async def test_of_a_burst_every_draw_is_compared_in_its_order_and_its_pay_waits(
    house: House,
) -> None:
    people = [await join(house.bench.people, f"Bob{n}") for n in range(AT_ONCE + 2)]
    house.judge.go.clear()
    names = {who.volunteer_id: [await house.answer(who) for _ in range(3)] for who in people}
    many = [await house.answer(people[0]) for _ in range(WAITING_MAX)]
    async with asyncio.timeout(120):
        while house.judge.now < AT_ONCE or not house.meter.draws.busy:
            await asyncio.sleep(0.001)
    assert house.meter.draws.waiting == 3 * len(people) + WAITING_MAX
    assert house.meter.draws.busy == {people[0].volunteer_id}  # it gets no prompt by now
    assert [await house.has(who) for who in people[1:]] == [(0, 3 * PAY)] * (len(people) - 1)
    house.judge.go.set()
    await house.quiet()
    assert house.judge.most == AT_ONCE
    names[people[0].volunteer_id] += many
    for mine in names.values():
        assert [name for name in house.judge.order if name in mine] == mine
    assert [await house.has(who) for who in people[1:]] == [(3 * PAY, 0)] * (len(people) - 1)
    assert house.meter.draws.busy == set()
    assert await breaches(house.bench.db) == []


async def test_a_draw_that_cannot_be_compared_frees_nothing_and_the_next_is_drawn_for_sure(
    house: House,
) -> None:
    bob = await join(house.bench.people, "Bob")
    house.judge.works = False
    await house.answer(bob)
    await house.quiet()
    assert await house.has(bob) == (0, PAY)
    house.judge.works, house.meter.draws.roll = True, lambda: 0.999
    for answers in (2, 3, 4):
        await house.answer(bob)
        await house.quiet()
        assert await house.has(bob) == (answers * PAY, 0)
    await house.answer(bob)  # not drawn
    await house.quiet()
    assert await house.has(bob) == (4 * PAY, PAY)
    assert await breaches(house.bench.db) == []


async def test_draws_of_a_process_that_is_killed_are_found_and_free_nothing(house: House) -> None:
    bob = await join(house.bench.people, "Bob")
    house.judge.go.clear()
    name = (await house.answer(bob)).rpartition("-")[0]
    states = partial(answer_pay.states, request_id=name)
    await house.meter.draws.close()
    house.meter.close()
    killed, house.meter = house.meter, house.process()
    await house.meter.recover()
    assert await house.bench.db.read(states) == {bob.volunteer_id: "drawn"}  # it may be alive
    await house.bench.clock.advance(GONE_S + 1)
    await killed.recover()
    assert await house.bench.db.read(states) == {bob.volunteer_id: "drawn"}  # of its own
    await house.meter.recover()
    assert await house.bench.db.read(states) == {bob.volunteer_id: "untold"}
    assert await house.has(bob) == (0, PAY)
    house.judge.go.set()
    house.judge.wrong = 1  # of ten: it does not agree, and proves no other model
    await house.answer(bob)
    await house.quiet()
    assert await house.has(bob) == (0, 0)
    assert await house.bench.has() == (1_000_000 - 6, 0, 6)  # what the house kept of two answers
    assert await house.standing(bob) != "suspended"
    assert await breaches(house.bench.db) == []


async def test_answers_that_nobody_paid_are_compared_and_free_nothing(house: House) -> None:
    bob = await join(house.bench.people, "Bob")
    house.meter.draws.roll = lambda: 0.099
    for answers in (1, 2, 3):
        await house.answer(bob)
        await house.quiet()
        assert await house.has(bob) == (answers * PAY, 0)
    house.meter.draws.roll = lambda: 0.999
    await house.answer(bob)
    house.meter.draws.roll = lambda: 0.099
    await house.bench.db.write(lambda c: store.vet(c, house.bench.ann.volunteer_id))
    await house.answer(bob, free=1000)
    await house.quiet()
    assert (len(house.judge.order), await house.has(bob)) == (4, (3 * PAY, PAY))
    many = partial(
        answer_pay.record_comparison,
        request_id="",
        who=bob.volunteer_id,
        comparison=(900, 0),
        memo="",
        now=2.0,
    )
    await house.bench.db.write(many)  # many right tokens do not hide the wrong ones of one answer
    house.judge.wrong = 9
    await house.answer(bob, free=1000)
    await house.quiet()
    assert await house.has(bob) == (3 * PAY, 0)
    assert await house.standing(bob) == "suspended"
    assert await breaches(house.bench.db) == []


@pytest.mark.parametrize(
    "change", ["DELETE FROM answer_stakes", "UPDATE answer_stakes SET amount_micro = 1"]
)
async def test_a_stake_that_is_gone_or_another_is_told_by_the_check(
    house: House, change: str
) -> None:
    bob = await join(house.bench.people, "Bob")
    house.judge.works = False
    await house.answer(bob)
    await house.quiet()
    await house.bench.db.write(lambda c: c.execute(text(change)).rowcount)
    said = " ".join(await breaches(house.bench.db))
    assert f"{bob.volunteer_id}/escrow says {PAY}" in said
    assert ("is not once at stake" in said) == ("DELETE" in change)
