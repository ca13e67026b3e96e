"""Machines of volunteers answer prompts: whole volunteers beside a real server and its engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from coordinator.accounts.bearer_tokens import Principal
from coordinator.database import volunteers as store
from coordinator.database.ledger import gifts, payments
from coordinator.inference import answerers
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.inference.volunteer_engine import VolunteerEngine
from coordinator.rules.nicknames import skeleton
from shared import decoding
from shared.clock import SystemClock
from shared.protocol.inference import NewKey
from shared.protocol.transparency import Receipt
from shared.workloads.gpt.workload import GptWorkload
from tests.support.answering import Answering, answering
from tests.support.local_coordinator import RUN
from tests.support.local_volunteer import LocalMachine, Process
from tests.support.rollouts_run import RUN as ROLLOUTS
from volunteer.account.record_check import check_receipt
from volunteer.control import events

TIERS = """
[[serve.tiers]]
requests_per_minute = 10000
tokens = 4096
tokens_waiting = 1000000
"""
SERVE = '[serve]\nanswered_by = "volunteers"\nhouse_share = 0.25\n' + TIERS
SERVED = RUN.replace("block_size = 8", "block_size = 512") + SERVE


@asynccontextmanager
async def house(path: Path, run: str = SERVED, **more: Any) -> AsyncIterator[Answering]:
    """A server whose engine asks volunteers, and compares all that they answer."""
    async with answering(path / "coordinator", run, **more) as made:
        home = made.coordinator
        own = BuiltinEngine(home.db, SystemClock(), home.blobs, ProcessLimits(threads=1))
        draws = home.answers.meter.draws
        draws.roll = float  # 0: every answer is drawn
        manifest = home.run_queries.manifest
        engine = VolunteerEngine(own, home.answerers, draws, home.db, home.blobs, manifest)
        made.coordinator.answers.connect(engine)
        try:
            yield made
        finally:
            await engine.close()


@asynccontextmanager
async def machine(path: Path, made: Answering, name: str) -> AsyncIterator[Process]:
    """A volunteer's machine that waits for prompts."""
    lent = LocalMachine(path / name, made.home)
    lent.speed = 1.0
    await lent.join(name)
    waiting = made.coordinator.answerers.waiting
    async with lent.working(serve=True) as process:
        async with asyncio.timeout(120):
            while made.coordinator.answerers.waiting <= waiting:
                await asyncio.sleep(0.02)
        yield process


async def id_of(made: Answering, name: str) -> str:
    row = await made.coordinator.db.read(lambda conn: store.find(conn, "", skeleton(name)))
    return str(row.id)


async def standing(made: Answering, name: str) -> str:
    who = await id_of(made, name)
    row = await made.coordinator.db.read(lambda conn: store.find(conn, who, ""))
    return str(row.standing)


async def balance(made: Answering, name: str) -> payments.Balances:
    who = await id_of(made, name)
    found: payments.Balances = await made.coordinator.db.read(lambda c: payments.balances(c, who))
    return found


async def earned(made: Answering, name: str) -> int:
    return (await balance(made, name)).earned_micro


async def answers_paid(made: Answering, name: str) -> list[Receipt]:
    """Return the receipts of answers, each of them verified as the volunteer does."""
    who, record = await id_of(made, name), made.coordinator.transparency
    await record.seal()
    signed = await record.receipts(Principal(volunteer_id=who, worker_id="", nickname=name))
    key = (await made.coordinator.server.info()).public_key
    found = [check_receipt(each, key, who) for each in signed]
    assert [each.problem for each in found] == [""] * len(found)
    assert all(check_receipt(each, key, "another").problem for each in signed)
    receipts = [each.receipt for each in found if each.receipt is not None]
    return [each for each in receipts if each.contribution is None]


async def checked(made: Answering) -> None:
    """Wait until every answer that was drawn has been compared."""
    await made.settled()
    async with asyncio.timeout(120):
        while made.coordinator.answers.meter.draws.waiting:
            await asyncio.sleep(0.02)


async def price(made: Answering, tokens: int) -> int:
    said = await ask(made, tokens, extra_body={"answered_by": "organiser"})
    return int(said.usage.model_dump()["cost_micro"])


async def ask(made: Answering, tokens: int = 24, key: str = "", **more: Any) -> Any:
    async with made.client(key) as client:
        return await client.completions.create(
            model="tiny", prompt="1 plus 1", max_tokens=tokens, seed=5, **more
        )


async def test_a_volunteer_answers_as_the_organiser_would_and_is_paid(
    tmp_path: Path, database_url: str
) -> None:
    async with house(tmp_path, database=database_url) as made:
        own = await ask(made)
        async with machine(tmp_path, made, "Cid"):
            before = await earned(made, "Cid")
            said = await ask(made)
            assert said.choices[0].text == own.choices[0].text
            assert said.usage == own.usage
            await checked(made)
            price = said.usage.model_dump()["cost_micro"]
            assert await earned(made, "Cid") - before == int(price * 0.75)
            assert await standing(made, "Cid") == "vetted"
            paid = await answers_paid(made, "Cid")
            assert [each.entry.kind for each in paid] == ["answer", "answered"]
            for each in paid:
                assert (each.run, each.contribution) == ("tiny", None)
                assert each.credits_micro == int(price * 0.75)
        await made.sound()


async def test_tokens_that_gathered_during_a_slow_call_are_sent_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator refuses a message with more tokens than `SENT_TOKENS_MAX`."""
    monkeypatch.setattr("volunteer.agent.answering.GATHER_S", 60.0)  # until the answer is whole
    monkeypatch.setattr("volunteer.agent.answering.SENT_TOKENS_MAX", 5)
    async with house(tmp_path) as made:
        own = await ask(made)
        async with machine(tmp_path, made, "Cid"):
            said = await ask(made)
            assert said.choices[0].text == own.choices[0].text
            await checked(made)
            assert await answers_paid(made, "Cid")


async def test_volunteers_write_and_end_answers_of_a_model_of_bytes(tmp_path: Path) -> None:
    """The model of `rollouts` has no tokenizer among its files, and an end of its own."""
    served = ROLLOUTS.replace("context = 14", "context = 220") + SERVE
    async with house(tmp_path) as made:
        await made.home.start_run(served)
        wanted: dict[str, Any] = {"model": "rollouts", "prompt": "3 1 2", "max_tokens": 200}
        async with made.client() as client:

            async def answers(**more: Any) -> list[tuple[str, str, Any]]:
                said = [
                    await client.completions.create(**wanted, seed=seed, **more)
                    for seed in range(4)
                ]
                return [(s.choices[0].text, s.choices[0].finish_reason, s.usage) for s in said]

            own = await answers(extra_body={"answered_by": "organiser"})
            assert {finish for _, finish, _ in own} == {"stop", "length"}
            async with machine(tmp_path, made, "Cid") as cid:
                assert await answers() == own
                assert [path for path in cid.network.seen if "/tokens" in path]
                await checked(made)
                assert await standing(made, "Cid") == "vetted"
        await made.sound()


async def test_who_asks_may_keep_a_prompt_off_the_machines_of_others(tmp_path: Path) -> None:
    async with house(tmp_path) as made, machine(tmp_path, made, "Cid") as cid:
        before = len([path for path in cid.network.seen if "/tokens" in path])
        await ask(made, extra_body={"answered_by": "organiser"})
        assert len([path for path in cid.network.seen if "/tokens" in path]) == before
        async with made.client() as client:
            card = (await client.models.retrieve("tiny")).model_dump()
        assert "can read prompts" in card["description"]


async def test_a_run_that_forbids_it_asks_no_volunteer(tmp_path: Path) -> None:
    run = SERVED.replace('answered_by = "volunteers"\n', "")
    async with house(tmp_path, run) as made, machine(tmp_path, made, "Cid") as cid:
        await ask(made)
        assert not [path for path in cid.network.seen if "/tokens" in path]


async def test_an_answer_goes_on_elsewhere_when_its_machine_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answerers, "NEXT_S", 0.5)
    async with house(tmp_path) as made:
        whole = await ask(made, 400)
        async with machine(tmp_path, made, "Cid") as cid:
            before = await earned(made, "Cid")
            async with made.client() as client:
                stream = await client.completions.create(
                    model="tiny", prompt="1 plus 1", max_tokens=400, seed=5, stream=True
                )
                text = ""
                async for chunk in stream:
                    text += chunk.choices[0].text if chunk.choices else ""
                    if not cid.network.cut:
                        await cid.kill()
            assert text == whole.choices[0].text
            await checked(made)
            price = whole.usage.model_dump()["cost_micro"]
            assert 0 < await earned(made, "Cid") - before < price
        await made.sound()


class Narrow(GptWorkload):
    """A workload whose model does not fit the memory when it is to answer."""

    @override
    def decoder(self, *args: Any) -> Any:
        raise MemoryError("out of memory")


async def test_a_machine_that_fails_at_a_prompt_offers_itself_again(tmp_path: Path) -> None:
    async with house(tmp_path) as made:
        lent = LocalMachine(tmp_path / "Cid", made.home)
        await lent.join("Cid")
        narrow = lent.working(lambda name: Narrow(), serve=True)
        async with narrow as process, process.eventually():
            while not made.coordinator.answerers.waiting:
                await asyncio.sleep(0.02)
            assert (await ask(made)).choices[0].text  # by the organiser's machine, in its place
            await process.until(events.Notice, lambda event: "MemoryError" in event.message)
            while not made.coordinator.answerers.waiting:
                await asyncio.sleep(0.02)


async def test_a_machine_that_answers_with_other_words_is_suspended_and_not_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from volunteer.training import answer_model

    real = answer_model.AnswerModel.answer

    def lies(self: Any, version: Any, task: Any) -> Any:
        yield from real(self, version, msgspec.structs.replace(task, seed=task.seed + 1))

    monkeypatch.setattr(answer_model.AnswerModel, "answer", lies)
    async with house(tmp_path) as made, machine(tmp_path, made, "Cid"):
        before = await made.balances()
        await ask(made, 100)
        await checked(made)
        assert await standing(made, "Cid") == "suspended"
        assert (await balance(made, "Cid")).total_micro == 0
        spent = (await made.balances()).spent_micro - before.spent_micro
        assert spent == math.ceil(await price(made, 100) * 0.25)  # what the house kept
        await made.sound()


@pytest.mark.slow
async def test_nine_of_ten_answers_made_up_keep_nothing_and_their_askers_are_paid_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from volunteer.training import answer_model

    real, honest = answer_model.AnswerModel.answer, [True] * 3 + [False] * 9

    def lies(self: Any, version: Any, task: Any) -> Any:
        seed = task.seed if honest.pop(0) else task.seed + 1
        yield from real(self, version, msgspec.structs.replace(task, seed=seed))

    monkeypatch.setattr(answer_model.AnswerModel, "answer", lies)
    run = SERVED.replace("[serve]", '[serve]\nwho = "keys"')
    async with house(tmp_path, run) as made, machine(tmp_path, made, "Cid"):
        rolls = [0.0] * 3 + [0.999] * 8 + [0.0]  # the first three are drawn, and the last
        made.coordinator.answers.meter.draws.roll = lambda: rolls.pop(0)
        dee = await made.home.join("Dee")
        await made.coordinator.db.write(
            lambda c: gifts.grant(c, dee.volunteer_id, "dee", 10**9, "", 1.0)
        )
        key = decoding.decode((await dee.post("/me/keys", {"name": "x"})).content, NewKey)
        prices, honestly = list[int](), 0
        for number in range(12):
            if number == 11:  # paid back all the same
                await dee.post(f"/me/keys/{key.info.id}/revoke")
            said = await ask(made, 40, key=key.key if number in (3, 5, 7, 9) else "")
            prices.append(said.usage.model_dump()["cost_micro"])
            if number < 3:
                await checked(made)
                honestly = sum(int(price * 0.75) for price in prices)
                assert (await balance(made, "Cid")).earned_micro == honestly
        await checked(made)
        assert (honest, rolls) == ([], [])
        assert await standing(made, "Cid") == "suspended"
        has = await balance(made, "Cid")
        assert (has.total_micro, has.escrow_micro) == (honestly, 0)
        kept = [math.ceil(each * 0.25) for each in prices]  # by the house
        assert (await balance(made, "Dee")).spent_micro == sum(kept[3:11:2])
        spent = sum(prices[:3]) + sum(kept[4::2]) + kept[11]
        assert (await balance(made, "Ann")).spent_micro == spent
        await made.sound()


async def test_an_account_that_nobody_vouched_for_gets_no_prompts(tmp_path: Path) -> None:
    async with house(tmp_path) as made:
        eve = await made.home.join("Eve")
        await made.coordinator.db.write(
            lambda conn: store.set_volunteer(conn, eve.volunteer_id, standing="probation")
        )
        refused = await eve.post("/answers/offer", {"runs": []})
        assert refused.status_code == 403
        assert "vetted" in refused.text


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(10**6, id="of no word"),
        pytest.param(10**15, id="of no number of words", marks=pytest.mark.slow),
    ],
)
async def test_tokens_that_no_version_has_are_made_again_elsewhere(
    tmp_path: Path, token: int
) -> None:
    async with house(tmp_path) as made:
        own = await ask(made)
        eve = await made.home.join("Eve")
        offering = asyncio.ensure_future(eve.post("/answers/offer", {"wait_s": 30}))
        async with asyncio.timeout(120):
            while not made.coordinator.answerers.waiting:
                await asyncio.sleep(0.02)
        asking = asyncio.ensure_future(ask(made))
        work = (await offering).json()["task"]
        sent = {"start": 0, "tokens": [token], "finish": "failed"}
        await eve.post(f"/answers/{work['id']}/tokens", sent)
        said = await asking
        assert said.choices[0].text == own.choices[0].text
        await made.settled()
        assert await earned(made, "Eve") == 0
