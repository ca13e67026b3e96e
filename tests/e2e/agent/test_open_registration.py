"""Strangers register at an open coordinator: a proof of work, on probation, a few a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Constants
from coordinator.database import volunteers as store
from shared.errors import BadRequest, Forbidden, TooManyRequests
from shared.proofs import proof_of_work
from shared.protocol.accounts import RegisterRequest
from tests.support.account_rows import newcomer
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from volunteer.control import commands, events

BITS = 8
PUBLIC = "93.184.216.34"
OPEN: dict[str, Any] = {"open": True, "proof_of_work_bits": BITS}


async def proved(home: LocalCoordinator, request: RegisterRequest) -> RegisterRequest:
    """Return the request with the proof of work that an open coordinator wants."""
    given = await home.coordinator.volunteers.challenge(request.volunteer_id, "")
    assert given.bits == BITS
    nonce = proof_of_work.solve(given.challenge, given.bits, lambda _: True)
    values = {name: getattr(request, name) for name in request.__struct_fields__}
    return RegisterRequest(**values | {"challenge": given.challenge, "nonce": f"{nonce:x}"})


async def test_a_volunteer_computes_and_is_let_in_on_probation(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "house", **OPEN) as home:
        machine = LocalMachine(tmp_path / "machine", home)
        engine = machine.engine()
        with engine.control.subscribe() as subscription:
            joined = await engine.control.do(commands.Join(link=machine.link, name="Ann"))
        subscription.close()
        said = [event async for event in subscription]
        progress = [event.done for event in said if isinstance(event, events.Registering)]
        assert progress[-1] == 1.0
        notices = [event.message for event in said if isinstance(event, events.Notice)]
        assert "this coordinator is open: about 1 s of computing" in notices
        assert joined.created
        (person,) = await home.coordinator.volunteers.list()
        row = await home.coordinator.db.read(lambda conn: store.by_id(conn, person.volunteer_id))
        assert row is not None
        assert (row.standing, row.invited) == ("probation", False)


async def test_without_a_proof_nothing_is_written(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, **OPEN) as home:
        register = home.coordinator.volunteers.register
        bare = newcomer("Mia")
        with pytest.raises(Forbidden, match="proof of work"):
            await register(bare)
        good = await proved(home, bare)
        for change, error in (
            ({"nonce": "zz"}, "does not solve"),
            ({"nonce": "f" * 16}, "does not solve"),
            ({"nonce": ""}, "does not solve"),
            ({"challenge": "1.2"}, "not made here"),
            ({"volunteer_id": "volunteer-of-another"}, "not made here"),
        ):
            values = {name: getattr(good, name) for name in good.__struct_fields__}
            with pytest.raises(BadRequest, match=error):
                await register(RegisterRequest(**values | change))
        assert await home.coordinator.volunteers.list() == ()
        assert (await register(good)).created
        assert not (await register(good)).created  # a lost reply
        assert not (await register(bare)).created  # a worker that is known needs none
        other = newcomer("Mia", machine=2, challenge=good.challenge, nonce=good.nonce)
        with pytest.raises(BadRequest, match="used already"):
            await register(other)
        await home.clock.advance(3600.0)
        with pytest.raises(BadRequest, match="expired"):
            await register(other)


async def test_an_invite_needs_no_proof(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, **OPEN) as home:
        (invite,) = await home.coordinator.volunteers.invites.create()
        people = home.coordinator.volunteers
        assert (await people.register(newcomer("Mia", code=invite.code))).created
        row = await home.coordinator.db.read(
            lambda conn: store.by_id(conn, newcomer("Mia").volunteer_id)
        )
        assert row is not None
        assert (row.standing, row.invited) == ("vetted", True)


async def test_a_network_makes_a_few_accounts_a_day(tmp_path: Path) -> None:
    few = Constants(accounts_per_network=3)
    some: dict[str, Any] = {"open": True, "proof_of_work_bits": 0, "constants": few}
    async with local_coordinator(tmp_path, **some) as home:
        people = home.coordinator.volunteers
        for number in range(3):
            await people.register(newcomer(f"n{number}"), f"93.184.216.{number}")
        with pytest.raises(TooManyRequests, match="3 accounts"):
            await people.register(newcomer("late"), PUBLIC)
        await people.register(newcomer("other"), "93.184.217.1")
        for number in range(5):  # a room of friends behind one router
            await people.register(newcomer(f"room{number}"), "192.168.0.7")
        await home.clock.advance(86_401.0)
        await people.register(newcomer("late"), PUBLIC)


async def test_an_account_on_probation_has_three_machines(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as home:
        people = home.coordinator.volunteers
        first = newcomer("Mia")
        await people.register(first)
        principal = await people.authenticate(first.worker_id, first.secret)
        for machine in (2, 3):
            code = (await people.link_code(principal)).code
            await people.register(newcomer("Mia", machine=machine, code=code))
        code = (await people.link_code(principal)).code
        with pytest.raises(Forbidden, match="at most 3 machines"):
            await people.register(newcomer("Mia", machine=4, code=code))
