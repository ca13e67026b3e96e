"""Who may come in, and how often the same request may come; on both databases."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, select

from coordinator.accounts.accounts import LINK_S, Volunteers
from coordinator.config import Settings
from coordinator.database import record
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.accounts import consents, workers
from coordinator.database.tables.schema import metadata
from coordinator.rules import reports
from shared.errors import (
    BadRequest,
    Forbidden,
    InvalidCode,
    InvalidName,
    NotFound,
    Unauthorized,
    UpgradeRequired,
)
from shared.proofs.signing import SigningKey
from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device, Hardware
from tests.support.account_rows import OTHER, SECRET, add_run, join, newcomer
from tests.support.virtual_clock import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def people(database: Database, clock: VirtualClock) -> Volunteers:
    return Volunteers(database, clock, Settings())


async def test_a_newcomer_is_let_in_and_known(people: Volunteers) -> None:
    request = newcomer("Mia", hardware=Hardware(hostname="desk", cores=4))
    done = await people.register(request)
    assert done.created
    assert (done.volunteer_id, done.worker_id) == (request.volunteer_id, request.worker_id)
    principal = await people.authenticate(request.worker_id, request.secret)
    assert principal.nickname == "Mia"
    me = await people.me(principal)
    assert (me.state, me.earned_micro, me.rank) == ("active", 0, None)
    assert [(w.hostname, w.state) for w in me.workers] == [("desk", "online")]


async def test_a_lost_reply_costs_nothing(people: Volunteers, database: Database) -> None:
    request = newcomer("Mia")
    replies = [await people.register(request) for _ in range(3)]
    assert [reply.created for reply in replies] == [True, False, False]
    assert len({reply.volunteer_id for reply in replies}) == 1
    await database.write(lambda conn: add_run(conn, "alpha"))
    changed = msgspec.structs.replace(
        request, nickname="Other", hardware=Hardware(hostname="attic"), accepts=("alpha",)
    )
    principal = await people.authenticate(request.worker_id, request.secret)
    await people.leave(principal)
    assert (await people.register(changed)).nickname == "Mia"
    machines = (await people.me(principal)).workers
    assert [(machine.hostname, machine.state) for machine in machines] == [("attic", "online")]
    assert len(await database.read(lambda conn: conn.execute(select(consents)).all())) == 1


async def test_the_same_request_twenty_times_at_once_makes_one_account(people: Volunteers) -> None:
    request = newcomer("Mia")
    replies = await asyncio.gather(*(people.register(request) for _ in range(20)))
    assert sum(reply.created for reply in replies) == 1
    assert len(await people.list()) == 1


async def test_one_name_wanted_by_twenty_at_once_goes_to_one(people: Volunteers) -> None:
    requests = [newcomer(f"n{n}", nickname="Mia") for n in range(20)]
    replies = await asyncio.gather(*map(people.register, requests), return_exceptions=True)
    refused = [reply for reply in replies if isinstance(reply, InvalidName)]
    assert len(refused) == 19
    assert all("is free" in error.message for error in refused)


async def test_another_secret_for_a_known_worker_is_refused(people: Volunteers) -> None:
    await people.register(newcomer("Mia"))
    with pytest.raises(Unauthorized, match="wrong secret"):
        await people.register(newcomer("Mia", secret=OTHER))
    with pytest.raises(Unauthorized, match="volunteer link"):  # a machine more, without a code
        await people.register(newcomer("Mia", machine=2))


async def test_a_lookalike_of_a_name_is_refused_with_a_free_one(people: Volunteers) -> None:
    await people.register(newcomer("Mia"))
    with pytest.raises(InvalidName, match='"M1A 2" is free'):
        await people.register(newcomer("eve", nickname="M1A"))
    await people.register(newcomer("eve", nickname="M1A 2"))


NEWCOMERS: list[dict[str, Any]] = [
    {"volunteer_id": "short"},
    {"volunteer_id": "system"},
    {"worker_id": "../../etc/passwd-------"},
    {"worker_id": "w" * 65},
    {"worker_id": "worker.with.dots.in.it"},
    {"secret": "short"},
    {"secret": "a" * 40},
    {"secret": "x" * 300},
    {"secret": "é" * 40},
    {"accepts": ("run",) * 65},
    {"code": "not a code!"},
]


async def test_what_cannot_be_right_is_refused(people: Volunteers) -> None:
    for change in NEWCOMERS:
        with pytest.raises(BadRequest):
            await people.register(newcomer("Mia", **change))
        assert await people.list() == (), change


async def test_too_old_a_client_is_told_how_to_upgrade(people: Volunteers) -> None:
    with pytest.raises(UpgradeRequired, match="volunteer update"):
        await people.register(newcomer("Mia", protocol=0))


async def test_only_hashes_of_secrets_and_codes_are_stored(
    people: Volunteers, database: Database
) -> None:
    (invite,) = await people.invites.create()
    principal = await join(people, "Mia", code=invite.code)
    link = await people.link_code(principal)

    def dump(conn: Connection) -> str:
        return repr([conn.execute(select(table)).all() for table in metadata.sorted_tables])

    everything = await database.read(dump)
    for secret in (SECRET, invite.code, link.code, link.code.replace("-", "")):
        assert secret not in everything


async def test_a_monstrous_hardware_report_is_cut_to_size(
    people: Volunteers, database: Database
) -> None:
    device = Device(id="c" * 999, kind="cuda", name="\x1b[31mGPU\n" * 999, memory_bytes=1 << 200)
    told = Hardware(hostname="h\x00\u202e" * 9999, cores=-5, devices=(device,) * 5000)
    names = tuple(f"workload {n}" * 50 for n in range(5000))
    software = "\x1b[31m" + "s" * 9999
    principal = await join(people, "Mia", hardware=told, workloads=names, software=software)
    results = (Benchmark(device="cpu", fp32_flops=float("inf"), bf16_flops=-1.0,
                        step_flops=7.0),) * 5000  # fmt: skip
    await people.set_benchmark(principal, BenchmarkRequest(benchmarks=results, hardware=told))
    (row,) = await database.read(lambda conn: conn.execute(select(workers)).all())
    assert sum(map(len, (row.hostname, row.hardware, row.benchmark, row.workloads))) < 20_000
    assert "\\u001b" not in row.hardware
    assert (row.software, row.step_flops) == ("[31m" + "s" * (reports.NAME_CHARS_MAX - 4), 7.0)
    kept = msgspec.json.decode(row.hardware, type=Hardware)
    assert (kept.cores, len(kept.devices)) == (0, reports.DEVICES_MAX)


async def test_what_may_run_on_a_machine_follows_its_owner(
    people: Volunteers, database: Database
) -> None:
    principal = await join(people, "Mia", workloads=("gpt",))

    async def told() -> object:
        (row,) = await database.read(lambda conn: conn.execute(select(workers)).all())
        return msgspec.json.decode(row.workloads)

    await people.set_benchmark(principal, BenchmarkRequest(benchmarks=()))
    assert await told() == ["gpt"]
    changed = BenchmarkRequest(benchmarks=(), workloads=("gomoku", "gpt"))
    await people.set_benchmark(principal, changed)
    assert await told() == ["gomoku", "gpt"]
    moved = BenchmarkRequest(benchmarks=(), hardware=Hardware(hostname="attic", cores=2))
    await people.set_benchmark(principal, moved)
    assert [machine.hostname for machine in (await people.me(principal)).workers] == ["attic"]


async def test_the_same_consent_many_times_at_once_is_one(
    people: Volunteers, database: Database
) -> None:
    """Found by fuzzing PostgreSQL: the second to insert was answered with 500."""
    principal = await join(people, "Mia")
    await database.write(lambda conn: add_run(conn, "beta", "MIT"))
    await asyncio.gather(*(people.consent(principal, "beta") for _ in range(16)))
    assert len(await database.read(lambda conn: conn.execute(select(consents)).all())) == 1


async def test_consent_records_the_licence_that_was_shown(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    await database.write(lambda conn: add_run(conn, "alpha", "CC-BY-4.0"))
    await database.write(lambda conn: add_run(conn, "beta", "MIT"))
    principal = await join(people, "Mia", accepts=("alpha", "alpha"))
    await people.consent(principal, "beta")
    await clock.advance(10)
    await people.consent(principal, "beta")
    rows = await database.read(
        lambda conn: conn.execute(select(consents.c.licence, consents.c.given_at)).all()
    )
    start = clock.now() - 10
    assert sorted(map(tuple, rows)) == [("CC-BY-4.0", start), ("MIT", start)]
    with pytest.raises(NotFound, match="gamma"):
        await people.register(newcomer("Bob", accepts=("gamma",)))


# --- invites and links ---


async def test_by_invitation_only(database: Database, clock: VirtualClock) -> None:
    people = Volunteers(database, clock, Settings(invite_only=True))
    with pytest.raises(Forbidden, match="by invitation only"):
        await people.register(newcomer("Mia"))
    (invite,) = await people.invites.create(uses=2)
    await people.register(newcomer("Mia", code=invite.code.lower().replace("-", " ")))
    await people.register(newcomer("Mia", code=invite.code))  # again: takes no second use
    await people.register(newcomer("Bob", code=invite.code))
    with pytest.raises(InvalidCode, match="used already") as refused:
        await people.register(newcomer("Eve", code=invite.code))
    assert refused.value.exit_code == 78  # a service that only repeats this is not started again
    await people.register(newcomer("Mia"))  # who is in needs no code
    (info,) = await people.invites.list()
    assert (info.state, info.joined) == ("used", ("Mia", "Bob"))


async def test_beyond_loopback_a_code_is_needed_unless_it_is_open(
    database: Database, clock: VirtualClock
) -> None:
    for reach in ({"host": "0.0.0.0"}, {"url": "https://train.example.org"}):
        closed = Volunteers(database, clock, Settings(**reach))  # type: ignore[arg-type]
        with pytest.raises(Forbidden, match="by invitation only"):
            await closed.register(newcomer("Mia"))
    with_door = Settings(host="0.0.0.0", open=True, proof_of_work_bits=0)
    assert (await Volunteers(database, clock, with_door).register(newcomer("Mia"))).created


async def test_the_invite_of_the_server_is_kept_until_it_lets_nobody_in(
    people: Volunteers, clock: VirtualClock
) -> None:
    key = SigningKey.new()
    first, other = await asyncio.gather(
        *(people.invites.of_server(key, uses=1, expires_s=60.0) for _ in range(2))
    )
    assert first == other  # two replicas that start at once
    assert len(await people.invites.list()) == 1
    await people.register(newcomer("Mia", code=first.code))
    second = await people.invites.of_server(key, uses=1, expires_s=60.0)
    assert second.code != first.code
    await clock.advance(61.0)
    third = await people.invites.of_server(key, uses=7, expires_s=60.0)
    assert (third.code != second.code, third.uses_left) == (True, 7)


async def test_one_invite_and_ten_who_want_it(people: Volunteers) -> None:
    (invite,) = await people.invites.create()
    requests = [newcomer(f"somebody{n}", code=invite.code) for n in range(10)]
    replies = await asyncio.gather(*map(people.register, requests), return_exceptions=True)
    assert sum(isinstance(reply, Forbidden) for reply in replies) == 9
    assert len(await people.list()) == 1


async def test_a_class_gets_one_invite_for_each_name(people: Volunteers) -> None:
    made = await people.invites.create(["Mia Meyer", " Bob\tBaker ", "Mia M."])
    assert [invite.label for invite in made] == ["Mia Meyer", "Bob Baker", "Mia M."]
    assert len({invite.code for invite in made}) == 3
    await people.register(newcomer("xy", nickname="", code=made[1].code))
    assert [person.nickname for person in await people.list()] == ["Bob Baker"]
    states = [(info.label, info.state) for info in await people.invites.list()]
    assert states == [("Mia Meyer", "open"), ("Bob Baker", "used"), ("Mia M.", "open")]


async def test_names_that_could_not_both_be_nicknames_are_named(people: Volunteers) -> None:
    with pytest.raises(BadRequest) as refused:
        await people.invites.create(["Mia Meyer", "Bob", "mia  meyer", "B0b", "***", "???"])
    assert '"Mia Meyer" (number 1) and "mia meyer" (number 3)' in refused.value.message
    assert '"Bob" (number 2) and "B0b" (number 4)' in refused.value.message
    assert "???" not in refused.value.message
    assert await people.invites.list() == ()


async def test_expired_withdrawn_and_unknown_invites_open_nothing(
    people: Volunteers, clock: VirtualClock, database: Database
) -> None:
    short, gone = await people.invites.create(count=2, expires_s=60)
    assert (await people.invites.revoke(gone.id)).state == "withdrawn"
    await clock.advance(60)
    for code, sentence in (
        (short.code, "expired"),
        (gone.code, "withdrawn"),
        ("7K3M", "does not know"),
    ):
        with pytest.raises(Forbidden, match=sentence):
            await people.register(newcomer("Mia", code=code))
    with pytest.raises(NotFound, match="invite list"):
        await people.invites.revoke(10**9)
    lines = await database.read(lambda conn: record.entries(conn))
    assert [(line.action, line.subject) for line in lines] == [
        ("invite.revoke", str(gone.id)), ("invite.create", str(short.id)),
    ]  # fmt: skip


INVITES: list[dict[str, Any]] = [
    {"count": 0},
    {"count": 1001},
    {"count": 10**18},
    {"uses": 0},
    {"expires_s": 0.0},
    {"expires_s": float("nan")},
    {"names": ["Mia", "\x00"]},
    {"names": ["x"] * 1001},
]


async def test_senseless_invites_are_refused(people: Volunteers) -> None:
    for wrong in INVITES:
        with pytest.raises(BadRequest):
            await people.invites.create(**wrong)
        assert await people.invites.list() == (), wrong


async def test_a_link_code_adds_a_machine_to_the_account(
    people: Volunteers, clock: VirtualClock, database: Database
) -> None:
    mia = await join(people, "Mia")
    link = await people.link_code(mia)
    assert link.expires_at == clock.now() + LINK_S
    assert len(link.code) == 9
    request = newcomer("laptop", nickname="", code=link.code)  # its own idea of an account
    done = await people.register(request)
    assert (done.volunteer_id, done.nickname) == (mia.volunteer_id, "Mia")
    assert (await people.register(request)).volunteer_id == mia.volunteer_id  # lost reply
    laptop = await people.authenticate(request.worker_id, request.secret)
    assert laptop.volunteer_id == mia.volunteer_id
    assert len((await people.me(mia)).workers) == 2
    (line,) = await database.read(lambda conn: record.entries(conn))
    assert (line.action, line.subject) == ("volunteer.link", mia.volunteer_id)
    with pytest.raises(Forbidden, match="used already"):
        await people.register(newcomer("eve", code=link.code))


async def test_a_link_code_lives_ten_minutes_and_one_at_a_time(
    people: Volunteers, clock: VirtualClock
) -> None:
    mia = await join(people, "Mia")
    first, second = await people.link_code(mia), await people.link_code(mia)
    with pytest.raises(Forbidden, match="does not know"):
        await people.register(newcomer("eve", code=first.code))
    await clock.advance(LINK_S)
    with pytest.raises(Forbidden, match="expired"):
        await people.register(newcomer("eve", code=second.code))


async def test_a_lost_secret_is_replaced_and_the_old_ones_stop_working(people: Volunteers) -> None:
    mia = await join(people, "Mia")
    code = (await people.reissue("mia")).code
    with pytest.raises(Unauthorized, match="withdrawn"):
        await people.authenticate(mia.worker_id, SECRET)
    with pytest.raises(Unauthorized, match="withdrawn"):
        await people.register(newcomer("Mia"))
    back = await join(people, "Mia", machine=2, code=code)
    assert back.volunteer_id == mia.volunteer_id
    with pytest.raises(Forbidden):
        await people.register(newcomer("Mia", machine=3, code=code))
