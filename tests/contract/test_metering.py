"""Metering on both databases: what is held is settled or released once, whatever is killed."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, func, select

from coordinator.accounts.accounts import Volunteers
from coordinator.accounts.api_keys import GIFTS_A_DAY, KEYS_A_DAY, ApiKeys, Asker
from coordinator.config import Settings
from coordinator.database import volunteers as store
from coordinator.database.engine.open_database import Database
from coordinator.database.inference import request_rows
from coordinator.database.ledger import answer_pay, gifts, payments
from coordinator.database.tables.ledger import accounts, events
from coordinator.inference.metering import GONE_S, Meter, MeteredRequest, RunningRequest
from coordinator.rules.answer_prices import cost_micro
from coordinator.rules.run_file import ServeSettings, TierSettings
from shared.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    InsufficientQuota,
    TooManyRequests,
    Unauthorized,
)
from shared.protocol.inference import GiveRequest, KeyRequest
from shared.units import DAY_S
from tests.support.account_rows import add_contribution, add_run, breaches, join
from tests.support.virtual_clock import VirtualClock

UNIT_NANO = 1500
CREDITS = 1_000_000


class Bench:
    """An account with credits, a run, and meters as replicas."""

    def __init__(self, db: Database, **more: float) -> None:
        self.db = db
        self.clock = VirtualClock()
        self.settings = Settings(**more)  # type: ignore[arg-type]
        self.people = Volunteers(db, self.clock, self.settings)
        self.keys = ApiKeys(db, self.clock, self.settings)
        self.run_id = 0

    async def begin(self) -> None:
        self.ann = await join(self.people, "Ann")
        self.run_id = await self.db.write(add_run)
        who = self.ann.volunteer_id
        await self.db.write(lambda c: gifts.grant(c, who, "first", CREDITS, "", 1.0))

    def meter(self, directory: Path | None = None) -> Meter:
        more = {} if directory is None else {"data_dir": str(directory)}
        return Meter(self.db, self.clock, msgspec.structs.replace(self.settings, **more))

    def order(
        self, tokens: int = 10, *, prompt: int = 5, free: int = 0, **more: object
    ) -> MeteredRequest:
        values: dict[str, object] = {
            "asker": Asker(volunteer_id=self.ann.volunteer_id),
            "run_id": self.run_id,
            "version": 0,
            "model": "alpha",
            "kind": "completion",
            "serve": ServeSettings(free_tokens_per_day=free),
            "tier": TierSettings(tokens_waiting=100),
            "unit_nano": UNIT_NANO,
            "tokens_in": prompt,
            "tokens_max": tokens,
        }
        return MeteredRequest(**(values | more))  # type: ignore[arg-type]

    async def has(self) -> tuple[int, int, int]:
        who = self.ann.volunteer_id
        b = await self.db.read(lambda c: payments.balances(c, who))
        return b.earned_micro, b.held_micro, b.spent_micro

    async def of_usage(self) -> list[tuple[int, int]]:
        rows = await self.keys.usage(self.ann)
        return [(row.tokens_out, row.cost_micro) for row in rows]


@pytest.fixture
async def bench(database: Database) -> Bench:
    made = Bench(database)
    await made.begin()
    return made


async def test_the_worst_case_is_held_and_what_was_generated_settled(bench: Bench) -> None:
    meter = bench.meter()
    one = await meter.begin(bench.order())
    assert await bench.has() == (CREDITS - 23, 23, 0)  # 15 tokens at 1.5, rounded up
    meter.count(one, 3)
    assert await meter.end(one) == 12
    assert await meter.end(one) == 12
    assert await bench.has() == (CREDITS - 12, 0, 12)
    assert await breaches(bench.db) == []


async def test_the_ledger_is_written_twice_a_request(bench: Bench) -> None:
    def count(conn: Connection) -> int:
        return int(conn.execute(select(func.count(events.c.id))).scalar_one())

    before, meter = await bench.db.read(count), bench.meter()
    one = await meter.begin(bench.order(50))
    for _ in range(50):
        meter.count(one, 1)
        await meter.tick()
    await meter.end(one)
    assert await bench.db.read(count) - before == 2


async def test_after_a_kill_volunteers_are_paid_once_for_what_was_written_down(
    bench: Bench,
) -> None:
    bob = await join(bench.people, "Bob")
    killed = bench.meter()
    one = await killed.begin(bench.order(house_share=0.25))
    killed.count(one, 2)
    killed.count(one, 2, bob.volunteer_id)
    await killed.tick()
    killed.count(one, 4, bob.volunteer_id)  # streamed in its last second
    killed.close()
    meter = bench.meter()
    assert await meter.recover(all_replicas=True) == 1
    assert await meter.recover(all_replicas=True) == 0
    await killed.end(one)  # too late
    assert await bench.has() == (CREDITS - 20, 0, 20)  # 13 tokens at 1.5, rounded up
    found = await bench.db.read(lambda c: payments.balances(c, bob.volunteer_id))
    assert (found.escrow_micro, found.earned_micro) == (20 * 3 // 4 * 6 // 8, 0)
    states = await bench.db.read(lambda c: answer_pay.states(c, one.id))
    assert states == {bob.volunteer_id: "untold"}  # drawn, and its prompt is gone
    assert await breaches(bench.db) == []

    def caught(conn: Connection) -> bool:
        who = bob.volunteer_id
        return answer_pay.record_comparison(conn, one.id, who, (6, 6), "not the model's", 5.0)

    for _ in range(2):
        assert await bench.db.write(caught)
    has = await bench.db.read(lambda c: payments.balances(c, bob.volunteer_id))
    assert has.total_micro == has.escrow_micro == 0
    spent = 20 - found.escrow_micro
    assert await bench.has() == (CREDITS - spent, 0, spent)
    assert await bench.of_usage() == [(8, spent)]
    assert await breaches(bench.db) == []


async def test_nothing_generated_costs_nothing(bench: Bench) -> None:
    meter = bench.meter()
    await meter.end(await meter.begin(bench.order()))
    assert await bench.has() == (CREDITS, 0, 0)


async def test_after_a_kill_what_was_sent_is_settled_to_the_token(
    bench: Bench, tmp_path: Path
) -> None:
    killed = bench.meter(tmp_path)
    one, two = await killed.begin(bench.order()), await killed.begin(bench.order())
    killed.count(one, 4)
    await killed.tick()
    killed.count(one, 2)
    killed.count(two, 1)
    await killed.begin(bench.order())
    other = bench.meter(tmp_path)
    assert await other.recover() == 0  # it lives: its file is locked
    killed.close()  # as the system does for a process that died
    assert len([*tmp_path.rglob("*.slots")]) == 1
    assert await other.recover() == 3  # without waiting for a minute
    assert sorted(await bench.of_usage()) == [(0, 0), (1, 9), (6, 17)]
    assert [*tmp_path.rglob("*.slots")] == []
    assert await breaches(bench.db) == []


async def test_a_cut_or_foreign_record_of_streams_settles_nothing_else(
    bench: Bench, tmp_path: Path
) -> None:
    killed = bench.meter(tmp_path)
    one, two = await killed.begin(bench.order()), await killed.begin(bench.order())
    killed.count(one, 4)
    killed.count(two, 3)
    killed.close()
    (path,) = tmp_path.rglob("*.slots")
    path.write_bytes(path.read_bytes().replace(two.id.encode(), b"\n" * 32))
    path.with_name("other.slots").write_bytes(b"\x00\xff" * 5000)
    assert await bench.meter(tmp_path).recover() == 1
    assert sorted(await bench.of_usage()) == [(0, 0), (4, 14)]


async def test_without_the_disk_of_the_process_the_last_second_is_not_paid(
    bench: Bench, tmp_path: Path
) -> None:
    killed = bench.meter(tmp_path / "its")
    one, two = await killed.begin(bench.order()), await killed.begin(bench.order())
    killed.count(one, 4)
    await killed.tick()
    killed.count(one, 2)  # streamed in its last second
    other = bench.meter()
    assert await other.recover() == 0  # it may still live
    await bench.clock.advance(GONE_S + 1)
    assert await other.recover() == 2
    assert await bench.of_usage() == [(0, 0), (4, 14)] or await bench.of_usage() == [
        (4, 14),
        (0, 0),
    ]
    assert await bench.has() == (CREDITS - 14, 0, 14)
    assert await killed.end(two) == 0  # it was no corpse after all: settled once all the same
    assert await breaches(bench.db) == []


async def test_a_server_that_starts_alone_settles_everything_at_once(bench: Bench) -> None:
    await bench.meter().begin(bench.order())
    assert await bench.meter().recover(all_replicas=True) == 1
    assert (await bench.has())[1] == 0


async def test_a_request_that_begins_during_a_recovery_is_paid(bench: Bench) -> None:
    meter, alone, ready = bench.meter(), ThreadPoolExecutor(1), Event()
    asyncio.get_running_loop().set_default_executor(alone)
    alone.submit(ready.wait)  # reading the logs of dead processes takes its time
    recovery = asyncio.ensure_future(meter.recover(all_replicas=True))
    await asyncio.sleep(0)
    one = await meter.begin(bench.order())
    ready.set()
    assert await recovery == 0
    meter.count(one, 4)
    assert await meter.end(one) == 14
    assert await bench.of_usage() == [(4, 14)]


async def test_fifty_at_once_hold_no_more_than_there_is(bench: Bench) -> None:
    meter = bench.meter()
    worst = cost_micro(UNIT_NANO, 15)
    await bench.keys.give(bench.ann, await gift(bench, CREDITS - 10 * worst))
    tier = TierSettings(tokens_waiting=10_000)
    begun = await asyncio.gather(
        *(meter.begin(bench.order(tier=tier)) for _ in range(50)), return_exceptions=True
    )
    refused = [each for each in begun if isinstance(each, InsufficientQuota)]
    assert len(refused) == 40
    assert "missing" in refused[0].message
    assert await bench.has() == (0, 10 * worst, 0)


async def gift(bench: Bench, amount: int) -> GiveRequest:
    await join(bench.people, "Bob")
    return GiveRequest(id="g" * 16, to="Bob", amount_micro=amount)


async def test_the_free_quota_is_counted_a_day(bench: Bench) -> None:
    meter = bench.meter()
    for _ in range(2):
        one = await meter.begin(bench.order(free=30))
        meter.count(one, 10)
        await meter.end(one)
    assert await bench.has() == (CREDITS, 0, 0)
    one = await meter.begin(bench.order(free=30))
    assert (await bench.has())[1] == 23
    await meter.end(one)
    await bench.clock.advance(86_400)
    await meter.begin(bench.order(free=30))
    assert (await bench.has())[1] == 0


async def test_a_stranger_on_probation_has_nothing_free(bench: Bench) -> None:
    who = bench.ann.volunteer_id
    await bench.db.write(lambda c: store.set_volunteer(c, who, standing="probation"))
    await bench.meter().begin(bench.order(free=30))
    assert (await bench.has())[1] == 23


async def test_tokens_under_way_are_limited(bench: Bench) -> None:
    meter = bench.meter()
    await meter.begin(bench.order(90))
    with pytest.raises(TooManyRequests, match="90 tokens of this account") as caught:
        await meter.begin(bench.order(11))
    assert caught.value.retry_after_s


async def test_the_day_has_a_cap(database: Database) -> None:
    bench = Bench(database, answer_credits_per_day=0.00004)
    await bench.begin()
    meter = bench.meter()
    await meter.begin(bench.order())
    with pytest.raises(InsufficientQuota, match="a day"):
        await meter.begin(bench.order())


async def test_a_key_needs_a_merged_contribution_or_credits(bench: Bench) -> None:
    bob = await join(bench.people, "Bob")
    with pytest.raises(Forbidden, match="when a contribution is merged"):
        await bench.keys.create(bob, KeyRequest(name="early"))
    who = bob.volunteer_id
    await bench.db.write(lambda c: add_contribution(c, bench.run_id, who, "merged", price_micro=0))
    assert (await bench.keys.create(bob, KeyRequest())).key
    assert (await bench.keys.create(bench.ann, KeyRequest())).key


async def test_an_account_has_five_keys_that_work(bench: Bench) -> None:
    made = [await bench.keys.create(bench.ann, KeyRequest(name=f"{n}")) for n in range(5)]
    with pytest.raises(Conflict, match="at most 5"):
        await bench.keys.create(bench.ann, KeyRequest())
    await bench.keys.revoke(bench.ann, made[0].info.id)
    await bench.keys.create(bench.ann, KeyRequest())
    states = [each.state for each in await bench.keys.listing(bench.ann)]
    assert states == ["revoked"] + ["active"] * 5
    assert all(
        each.prefix == m.key[:10]
        for each, m in zip(await bench.keys.listing(bench.ann), made, strict=False)
    )


async def test_keys_made_and_revoked_all_day_do_not_fill_the_database(bench: Bench) -> None:
    for _ in range(KEYS_A_DAY):
        made = await bench.keys.create(bench.ann, KeyRequest())
        await bench.keys.revoke(bench.ann, made.info.id)
    with pytest.raises(TooManyRequests, match="keys within 24 hours"):
        await bench.keys.create(bench.ann, KeyRequest())
    await bench.clock.advance(DAY_S + 1)
    assert (await bench.keys.create(bench.ann, KeyRequest())).key


async def test_many_tiny_gifts_do_not_fill_the_ledger(bench: Bench) -> None:
    await join(bench.people, "Bob")
    gifts = [GiveRequest(id=f"{n:016}", to="Bob", amount_micro=1) for n in range(GIFTS_A_DAY + 1)]
    for gift in gifts[:-1]:
        await bench.keys.give(bench.ann, gift)
    with pytest.raises(TooManyRequests, match="gifts within 24 hours"):
        await bench.keys.give(bench.ann, gifts[-1])
    left = (await bench.keys.give(bench.ann, gifts[0])).left_micro  # a lost reply, sent again
    assert left == CREDITS - GIFTS_A_DAY


async def test_a_gift_is_made_once_within_a_daily_cap_and_both_see_it(database: Database) -> None:
    bench = Bench(database, gift_credits_per_day=0.5)
    await bench.begin()
    bob = await join(bench.people, "Bob")
    one = GiveRequest(id="a" * 16, to="bob", amount_micro=400_000)
    for _ in range(2):
        assert (await bench.keys.give(bench.ann, one)).left_micro == CREDITS - 400_000
    with pytest.raises(Forbidden, match=r"0\.50 credits may be given"):
        await bench.keys.give(bench.ann, GiveRequest(id="b" * 16, to="Bob", amount_micro=200_000))
    with pytest.raises(BadRequest, match="to itself"):
        await bench.keys.give(bench.ann, GiveRequest(id="c" * 16, to="Ann", amount_micro=1))
    much = GiveRequest(id="d" * 16, to="Bob", amount_micro=10**12)
    with pytest.raises(Forbidden, match="credits to give, not "):
        await bench.keys.give(bench.ann, much)
    for who, amount in ((bench.ann, -400_000), (bob, 400_000)):
        mine = partial(payments.history, volunteer_id=who.volunteer_id, before=None, limit=9)
        rows = await database.read(mine)
        assert [r.amount_micro for r in rows if r.kind == "given"] == [amount]
    assert await breaches(database) == []


# --- any order of steps, with kills between ---


STEP = st.sampled_from(["begin", "count", "tick", "end", "kill", "recover"])


@settings(max_examples=25)
@given(steps=st.lists(st.tuples(STEP, st.integers(0, 9)), max_size=40))
def test_whatever_happens_every_hold_ends_and_the_ledger_sums_to_zero(
    sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "volunteer.db"
    shutil.copyfile(sqlite_template, path)
    asyncio.run(_happens(path, steps))


async def _happens(path: Path, steps: list[tuple[str, int]]) -> None:
    db = await Database.open(f"sqlite:///{path}")
    try:
        bench = Bench(db)
        await bench.begin()
        await _steps(bench, steps)
    finally:
        await db.close()


async def _steps(bench: Bench, steps: list[tuple[str, int]]) -> None:
    meter, streamed = bench.meter(), 0
    live: list[RunningRequest] = []
    for step, number in steps:
        one = live[number % len(live)] if live else None
        if step == "begin":
            try:
                live.append(await meter.begin(bench.order(10, prompt=number)))
            except TooManyRequests:
                continue
        elif step == "count" and one is not None and one.tokens < 10:
            meter.count(one, 1)
            streamed += 1
        elif step == "tick":
            await meter.tick()
        elif step == "end" and one is not None:
            live.remove(one)
            await meter.end(one)
        elif step == "kill":
            meter.close()
            meter, live = bench.meter(), []
        elif step == "recover":
            await bench.clock.advance(GONE_S + 1)
            await meter.tick()
            await meter.recover()
    for one in live:
        await meter.end(one)
    await meter.recover(all_replicas=True)
    earned, held, spent = await bench.has()
    rows = await bench.of_usage()
    assert (held, earned + spent) == (0, CREDITS)
    assert spent == sum(cost for _, cost in rows)
    assert sum(out for out, _ in rows) == streamed  # to the token, whatever was killed
    assert await breaches(bench.db) == []

    def total(conn: Connection) -> int:
        return int(conn.execute(select(func.sum(accounts.c.balance_micro))).scalar_one())

    assert await bench.db.read(total) == 0
    assert await bench.db.read(lambda c: request_rows.abandoned(c, 1e18)) == {}


async def test_a_lost_secret_takes_the_keys_with_it_and_old_use_is_forgotten(bench: Bench) -> None:
    who, meter = bench.ann.volunteer_id, bench.meter()
    await bench.db.write(lambda c: add_contribution(c, bench.run_id, who, "merged", price_micro=0))
    made = await bench.keys.create(bench.ann, KeyRequest(name="laptop"))
    assert (await bench.keys.sign_in(made.key)).volunteer_id == who
    await bench.people.reissue("Ann")
    with pytest.raises(Unauthorized, match="revoked"):
        await bench.keys.sign_in(made.key)
    done, left = await meter.begin(bench.order()), await meter.begin(bench.order())
    await meter.end(done)
    assert await bench.db.write(lambda c: request_rows.prune(c, 1e18)) == 1
    assert await meter.end(left) == 0


async def test_a_key_never_spends_more_than_its_cap(bench: Bench) -> None:
    who, meter = bench.ann.volunteer_id, bench.meter()
    await bench.db.write(lambda c: add_contribution(c, bench.run_id, who, "merged", price_micro=0))
    made = await bench.keys.create(bench.ann, KeyRequest(cap_micro=50))
    asker = await bench.keys.sign_in(made.key)
    one = await meter.begin(bench.order(asker=asker))
    await meter.begin(bench.order(asker=asker))
    with pytest.raises(InsufficientQuota, match="this key may spend"):
        await meter.begin(bench.order(asker=asker))
    await meter.end(one)  # nothing was generated: its hold counts no more
    await meter.begin(bench.order(asker=asker))


async def test_what_was_settled_is_no_longer_in_the_record_of_streams(
    bench: Bench, tmp_path: Path
) -> None:
    meter, sizes = bench.meter(tmp_path), set()
    for _ in range(3):
        one = await meter.begin(bench.order())
        meter.count(one, 1)
        (path,) = tmp_path.rglob("*.slots")
        sizes.add(path.stat().st_size)
        assert one.id.encode() in path.read_bytes()
        assert await meter.end(one) > 0
        assert path.read_bytes().partition(b"\n")[0] == b""
    assert len(sizes) == 1  # one slot, used again and again
    meter.close()
    assert [*tmp_path.rglob("*.slots")] == []  # nothing was under way
