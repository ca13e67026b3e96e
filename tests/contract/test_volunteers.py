"""Volunteers: known ones, actions of the organiser, remains of a forgotten one; on both
databases.
"""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, select, text, update

from coordinator.accounts.accounts import ORDERS_A_MINUTE, Volunteers
from coordinator.accounts.api_keys import ApiKeys
from coordinator.accounts.bearer_tokens import AGAIN_S, CACHE_S
from coordinator.accounts.ledger import Ledger
from coordinator.config import Settings
from coordinator.database import contributions, recomputes, record
from coordinator.database import volunteers as store
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments, record_tree
from coordinator.database.tables.accounts import codes, volunteers, workers
from coordinator.database.tables.contributions import contributions as work
from coordinator.database.tables.schema import metadata
from coordinator.database.tables.tasks import failures
from shared.decoding import decode
from shared.errors import (
    Banned,
    Forbidden,
    InvalidCode,
    InvalidName,
    NotFound,
    TooManyRequests,
    Unauthorized,
)
from shared.protocol.accounts import Device, Hardware, LeaveRequest, MachineOrder
from shared.protocol.limits import HEARTBEAT_S
from shared.units import DAY_S
from tests.contract.test_escrow import draw
from tests.support.account_rows import (
    OTHER,
    SECRET,
    add_contribution,
    add_run,
    add_task,
    join,
    newcomer,
)
from tests.support.virtual_clock import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def people(database: Database, clock: VirtualClock) -> Volunteers:
    return Volunteers(database, clock, Settings())


# --- who asks ---


@pytest.mark.parametrize("secret", [OTHER, "", "x" * 100_000, "é" * 40, SECRET.upper()])
async def test_a_wrong_secret_is_refused_before_and_after_a_right_one(
    people: Volunteers, secret: str
) -> None:
    request = newcomer("Mia")
    await people.register(request)
    for _ in range(2):
        with pytest.raises(Unauthorized):
            await people.authenticate(request.worker_id, secret)
        await people.authenticate(request.worker_id, SECRET)
    with pytest.raises(Unauthorized):
        await people.authenticate("worker-nobody-000000", SECRET)


async def test_a_ban_works_at_once_and_is_lifted_at_once(people: Volunteers) -> None:
    mia = await join(people, "Mia")
    await people.ban("MIA")  # however it is written
    with pytest.raises(Banned):
        await people.authenticate(mia.worker_id, SECRET)
    with pytest.raises(Banned):
        await people.register(newcomer("Mia"))
    await people.unban(mia.volunteer_id)
    assert await people.authenticate(mia.worker_id, SECRET) == mia


async def test_a_ban_from_another_process_works_within_a_second(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia = await join(people, "Mia")
    await Volunteers(database, clock, Settings()).ban("Mia")
    await clock.advance(CACHE_S)
    with pytest.raises(Banned):
        await people.authenticate(mia.worker_id, SECRET)
    assert CACHE_S < 1.0


async def test_a_secret_withdrawn_by_another_process_stops_working_within_a_second(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia = await join(people, "Mia")
    await Volunteers(database, clock, Settings()).reissue("Mia")
    await clock.advance(CACHE_S)
    with pytest.raises(Unauthorized):
        await people.authenticate(mia.worker_id, SECRET)


async def test_who_asks_is_remembered_from_one_heartbeat_to_the_next(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia = await join(people, "Mia")
    await database.write(lambda conn: store.set_volunteer(conn, mia.volunteer_id, nickname="M."))
    await clock.advance(HEARTBEAT_S)
    assert await people.authenticate(mia.worker_id, SECRET) == mia
    await clock.advance(AGAIN_S)
    assert (await people.authenticate(mia.worker_id, SECRET)).nickname == "M."


async def test_only_the_very_same_header_is_recalled(
    people: Volunteers, clock: VirtualClock
) -> None:
    mia = await join(people, "Mia")
    header = f"Bearer {mia.worker_id}.{SECRET}".encode()
    assert people.recall(header) == mia
    for other in (b"", header[:-1], header + b"x", header.replace(b"Bearer ", b"")):
        assert people.recall(other) is None
    await clock.advance(CACHE_S)  # nobody looked whether somebody was shut out
    assert people.recall(header) is None
    await people.authenticate(mia.worker_id, SECRET)
    assert people.recall(header) == mia
    await people.ban("Mia")
    assert people.recall(header) is None


async def test_a_banned_account_cannot_be_entered_by_an_old_link_code(people: Volunteers) -> None:
    link = await people.link_code(await join(people, "Mia"))
    await people.ban("Mia")
    with pytest.raises(Banned):
        await people.register(newcomer("eve", code=link.code))
    with pytest.raises(Banned, match="no secret can be issued"):
        await people.reissue("Mia")


async def test_an_account_forgotten_while_a_machine_joins_it_is_called_gone(
    people: Volunteers, database: Database
) -> None:
    mia = await join(people, "Mia")
    link = await people.link_code(mia)
    await database.write(lambda c: store.set_volunteer(c, mia.volunteer_id, state="forgotten"))
    with pytest.raises(InvalidCode, match="the account of this code is gone"):
        await people.register(newcomer("eve", code=link.code))


async def test_states_follow_what_was_heard(people: Volunteers, clock: VirtualClock) -> None:
    mia = await join(people, "Mia")
    await clock.advance(store.OFFLINE_S + 1)
    assert [w.state for w in (await people.me(mia)).workers] == ["offline"]
    await people.leave(mia)
    assert [w.state for w in (await people.me(mia)).workers] == ["left"]
    await people.authenticate(mia.worker_id, SECRET)  # back again: any request will do
    assert [w.state for w in (await people.me(mia)).workers] == ["online"]
    await people.leave(mia)  # at once, while its secret is still cached
    await people.authenticate(mia.worker_id, SECRET)
    assert [w.state for w in (await people.me(mia)).workers] == ["online"]


async def test_a_machine_shows_the_task_it_holds(people: Volunteers, database: Database) -> None:
    mia = await join(people, "Mia", hardware=Hardware(hostname="desk"))

    def write(conn: Connection) -> int:
        values = {"worker_id": mia.worker_id, "device": "cuda:0"}
        return add_task(conn, add_run(conn), "doing", **values)

    task = await database.write(write)
    (info,) = (await people.me(mia)).workers
    assert (info.hostname, info.device, info.task) == ("desk", "cuda:0", task)


# --- the organiser ---


async def test_renaming_keeps_the_rules(people: Volunteers) -> None:
    await join(people, "Mia")
    await join(people, "Bob")
    assert await people.rename("Mia", " Mia  M ") == "Mia M"
    assert await people.rename("Mia M", "MIA M") == "MIA M"  # one's own lookalike
    with pytest.raises(InvalidName, match="is free"):
        await people.rename("Mia M", "B0B")
    with pytest.raises(NotFound, match="volunteer list"):
        await people.ban("nobody")
    assert (await people.show("mia m")).person.nickname == "MIA M"


async def test_a_forgotten_volunteer_leaves_only_true_books(
    people: Volunteers, database: Database
) -> None:
    (invite,) = await people.invites.create(["Mia Meyer, class 9b"])
    told = Hardware(
        hostname="mias-bedroom-pc",
        devices=(Device(id="cpu", kind="cpu", name="Xy9", memory_bytes=1),),
    )
    mia = await join(people, "Mia", code=invite.code, hardware=told, software="mias-client")
    bob = await join(people, "Bob")
    await people.link_code(mia)

    def write(conn: Connection) -> int:
        run_id = add_run(conn)
        for who in (mia, bob):
            number = add_contribution(conn, run_id, who.volunteer_id, price_micro=50)
            one = payments.Payment.of(contributions.by_id(conn, number))
            payments.post_step(conn, "pending", [one], 1.0)
        task = add_task(conn, run_id)
        conn.execute(failures.insert().values(task_id=task, attempt=1, worker_id=mia.worker_id,
                     kind="failure", message="/home/mia/x", at=1.0))  # fmt: skip
        return run_id

    await database.write(write)
    await people.consent(mia, "alpha")
    name = await people.forget("Mia")
    assert name.startswith("forgotten-")
    assert await people.forget(mia.volunteer_id) == name  # once more changes nothing

    def dump(conn: Connection) -> str:
        return repr([conn.execute(select(table)).all() for table in metadata.sorted_tables]).lower()

    everything = await database.read(dump)
    for trace in ("mia meyer", "mias-bedroom", "xy9", "mias-client", "/home/mia", "'mia'"):
        assert trace not in everything, trace
    with pytest.raises(Unauthorized):
        await people.authenticate(mia.worker_id, SECRET)
    with pytest.raises(Unauthorized):
        await people.register(newcomer("Mia"))
    for change in (people.ban(name), people.unban(name), people.rename(name, "Mia")):
        with pytest.raises(Forbidden, match="was forgotten"):
            await change
    with pytest.raises(Banned, match="no secret can be issued"):
        await people.reissue(name)
    assert (await people.show(name)).person.pending_micro == 50
    await database.write(record_tree.extend)
    assert await Ledger(database).check() == ()
    (await people.register(newcomer("mia-the-second", nickname="Mia")))  # the name is free again
    left = select(codes.c.label, codes.c.kind)
    assert [tuple(row) for row in await database.read(lambda c: c.execute(left).all())] == [
        ("", "invite")
    ]


async def test_reasons_are_read_until_the_volunteer_is_forgotten(
    people: Volunteers, database: Database
) -> None:
    eve = await join(people, "Eve")
    keys, words = ApiKeys(database, VirtualClock(), Settings()), 'Eve Meyer, "a copy"'

    def paid(conn: Connection) -> None:
        number = add_contribution(conn, add_run(conn), eve.volunteer_id, price_micro=50)
        one = payments.Payment.of(contributions.by_id(conn, number))
        payments.post_step(conn, "pending", [one], 1.0)

    await database.write(paid)
    await people.suspend("Eve", words)
    await people.unsuspend("Eve", words)
    await keys.grant("Eve", 7, words)
    await people.ban("Eve", words)

    async def read() -> tuple[list[str], list[str]]:
        lines = await database.read(record.entries)
        rows = await database.read(lambda c: payments.history(c, eve.volunteer_id, None, 9))
        told = [row.memo for row in rows if row.kind in ("granted", "forfeited")]
        return [decode(line.detail)["reason"] for line in lines if line.detail], told

    assert await read() == ([words] * 4, [words] * 2)
    await database.write(record_tree.extend)
    await people.forget("Eve")

    def dump(conn: Connection) -> str:
        return repr([conn.execute(select(table)).all() for table in metadata.sorted_tables])

    assert "Meyer" not in await database.read(dump)
    left, memos = await read()
    assert {*memos} < {*left}
    assert all(name.startswith("reason-") for name in left)
    assert await database.read(lambda conn: list(record_tree.check(conn))) == []
    assert await Ledger(database).check() == ()


async def test_the_network_of_a_forgotten_volunteer_goes_when_no_limit_counts_it(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    request = newcomer("Mia")
    await people.register(request, "81.2.69.7")
    mia = request.volunteer_id
    counted = await database.read(lambda conn: store.existing(conn, mia).network)
    assert counted.startswith("81.2.69.")

    def write(conn: Connection) -> int:
        values = {"standing": "suspended", "suspended_reason": "Mia Meyer sent noise"}
        store.set_volunteer(conn, mia, **values)
        run = add_run(conn)
        merged = add_contribution(conn, run, mia, "merged")
        for number in (merged, waiting := add_contribution(conn, run, mia)):
            change(conn, number, network=counted)
        draw(conn, merged)
        return waiting

    def change(conn: Connection, number: int, **values: object) -> None:
        conn.execute(update(work).where(work.c.id == number).values(**values))

    async def left() -> set[str]:
        """Clear what is due; return the networks in the database."""
        await database.write(lambda conn: store.clear_networks(conn, clock.now()))
        tables = (select(volunteers.c.network), select(work.c.network))
        found = await database.read(lambda c: [set(c.execute(q).scalars()) for q in tables])
        return set().union(*found)

    waiting = await database.write(write)
    await people.forget(mia)
    assert await database.read(lambda conn: store.existing(conn, mia).suspended_reason) == ""
    assert await left() == {counted}
    await database.write(lambda conn: change(conn, waiting, state="merged"))
    (drawn,) = await database.read(lambda conn: recomputes.open_of(conn, mia))
    await clock.advance(2 * DAY_S)
    assert await left() == {counted}  # its recompute still waits in the line
    told, now = ("", "{}"), clock.now()
    await database.write(lambda conn: recomputes.end(conn, drawn, "passed", told, now))
    assert await left() == {counted}  # the line counts it for a day
    await clock.advance(DAY_S + 1)
    await database.write(lambda conn: change(conn, waiting, state="accepted"))
    assert await left() == {counted}  # a merge limits the share of a network
    await database.write(lambda conn: change(conn, waiting, state="merged"))
    assert await left() == {""}


async def test_a_forgotten_volunteer_counts_among_the_accounts_of_its_network_for_a_day(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    request = newcomer("Mia")
    await people.register(request, "81.2.69.7")

    def network(conn: Connection) -> str:
        return store.existing(conn, request.volunteer_id).network

    counted = await database.read(network)
    await people.forget("Mia")
    assert await database.read(network) == counted
    await clock.advance(DAY_S)
    await database.write(lambda conn: store.clear_networks(conn, clock.now()))
    assert await database.read(network) == ""


async def test_a_volunteer_may_ask_to_be_forgotten(people: Volunteers) -> None:
    mia = await join(people, "Mia")
    await people.leave(mia, LeaveRequest(forget=True))
    assert [person.state for person in await people.list()] == ["forgotten"]
    with pytest.raises(Unauthorized):
        await people.authenticate(mia.worker_id, SECRET)


async def test_what_the_organiser_did_is_on_record(people: Volunteers, database: Database) -> None:
    mia = await join(people, "Mia")
    await people.ban("Mia")
    await people.unban("Mia")
    await people.rename("Mia", "Maria")
    await people.reissue("Maria")
    await people.forget("Maria")
    rows = await database.read(
        lambda conn: conn.execute(
            text("SELECT action, subject, detail FROM record ORDER BY id")
        ).all()
    )
    assert [row[0].split(".")[1] for row in rows] == [
        "banned",
        "active",
        "rename",
        "reissue",
        "forget",
    ]
    assert {row[1] for row in rows} == {mia.volunteer_id}
    assert not any("mia" in row[2].lower() or "maria" in row[2].lower() for row in rows)


async def test_a_worker_row_is_never_shared(people: Volunteers, database: Database) -> None:
    """Somebody who knows the id of another's machine gets nothing by registering with it."""
    mia = await join(people, "Mia")
    thief = newcomer("Eve", worker_id=mia.worker_id, secret=OTHER)
    with pytest.raises(Unauthorized):
        await people.register(thief)
    count = select(workers.c.volunteer_id)
    assert await database.read(lambda conn: conn.execute(count).scalars().all()) == [
        mia.volunteer_id
    ]
    names = select(volunteers.c.nickname)
    assert await database.read(lambda conn: conn.execute(names).scalars().all()) == ["Mia"]


async def test_orders_of_an_account_have_a_rate(people: Volunteers, clock: VirtualClock) -> None:
    mia = await join(people, "Mia")
    order = MachineOrder(worker_id=mia.worker_id, order="pause")
    for _ in range(ORDERS_A_MINUTE):
        await people.order(mia, order)
    with pytest.raises(TooManyRequests, match="come back in 1 s"):
        await people.order(mia, order)
    await clock.advance(2.0)
    await people.order(mia, order)


async def test_an_owner_orders_only_machines_of_the_own_account(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, bob = await join(people, "Mia"), await join(people, "Bob")
    await people.order(mia, MachineOrder(worker_id=mia.worker_id, order="pause"))
    with pytest.raises(NotFound):
        await people.order(bob, MachineOrder(worker_id=mia.worker_id, order="finish"))
    given = await database.read(lambda conn: store.orders(conn, clock.now() - 1))
    assert {who: each.order for who, each in given.items()} == {mia.worker_id: "pause"}
    assert await database.read(lambda conn: store.orders(conn, clock.now())) == {}
    await people.leave(mia, LeaveRequest())
    with pytest.raises(NotFound):
        await people.order(mia, MachineOrder(worker_id=mia.worker_id, order="resume"))
