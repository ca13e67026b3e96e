"""Askers of a run: those who helped, anybody with credits, anybody within a rate and a quota."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from coordinator.database.inference import public
from coordinator.inference.metering import PUBLIC_MAX
from shared import decoding
from shared.protocol.inference import NewKey
from shared.units import DAY_S
from tests.support.answering import Answering, answering
from tests.support.counting_engine import CountingEngine
from tests.support.local_coordinator import RUN

PUBLIC = """
[serve]
who = "public"
[serve.public]
requests_per_minute = 3
tokens = 4
tokens_per_day = {quota}
"""


def public_run(quota: int = 100) -> str:
    return RUN.replace("block_size = 8", "block_size = 64") + PUBLIC.format(quota=quota)


def stranger(house: Answering, address: str, key: str = "public") -> openai.AsyncOpenAI:
    return house.client(key, default_headers={"X-Forwarded-For": address})


async def used(house: Answering) -> int:
    inside = house.coordinator
    day = int(inside.clock.now() // DAY_S)
    found: int = await inside.db.read(lambda conn: public.used(conn, 1, day))
    return found


async def test_without_a_key_a_public_run_answers_and_nobody_pays(
    tmp_path: Path, database_url: str
) -> None:
    async with answering(tmp_path, public_run(), database=database_url) as house:
        async with stranger(house, "8.8.8.8") as client:
            assert [card.id async for card in client.models.list()] == ["tiny"]
            said = await client.completions.create(model="tiny", prompt="ab", max_tokens=3)
            assert said.usage is not None
            assert (said.usage.completion_tokens, said.usage.model_dump()["cost_micro"]) == (3, 0)
            assert await used(house) == 2 + 3
            with pytest.raises(openai.BadRequestError, match="without a key n is 1"):
                await client.completions.create(model="tiny", prompt="a", max_tokens=1, n=2)
            with pytest.raises(openai.BadRequestError, match="at most 4 tokens"):
                await client.completions.create(model="tiny", prompt="a", max_tokens=5)
        plain = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        async with httpx.AsyncClient() as bare:
            reply = await bare.post(f"{house.url}/v1/completions", json=plain)
        assert reply.status_code == 200
        assert (await house.balances()).spent_micro == 0
        await house.sound()


async def test_a_network_that_hammers_is_slowed_and_others_are_answered(tmp_path: Path) -> None:
    async with answering(tmp_path, public_run(10_000)) as house:

        async def ask(address: str) -> str:
            async with stranger(house, address) as client:
                try:
                    await client.completions.create(model="tiny", prompt="a", max_tokens=1)
                except openai.RateLimitError as error:
                    return f"come back in {error.response.headers['retry-after']} s"
            return "answered"

        found = [await ask(f"8.8.8.{host}") for host in range(1, 60)]
        assert found.count("answered") == 3
        assert set(found[3:]) == {"come back in 20 s"}
        assert await ask("9.9.9.9") == "answered"


async def test_the_quota_of_a_day_counts_what_was_generated_and_ends(tmp_path: Path) -> None:
    async with answering(tmp_path, public_run(10)) as house:
        for host in range(3):
            async with stranger(house, f"8.8.{host}.1") as client:
                await client.completions.create(model="tiny", prompt="ab", max_tokens=1)
        assert await used(house) == 9
        async with stranger(house, "9.9.9.9") as client:
            with pytest.raises(openai.RateLimitError, match="2 tokens are missing today") as caught:
                await client.completions.create(model="tiny", prompt="ab", max_tokens=1)
            assert caught.value.code == "insufficient_quota"
        await house.home.clock.advance(DAY_S)
        async with stranger(house, "9.9.9.9") as client:
            await client.completions.create(model="tiny", prompt="ab", max_tokens=1)
        assert await used(house) == 3


async def test_strangers_hold_few_streams_and_leave_the_rest_to_those_who_pay(
    tmp_path: Path,
) -> None:
    gate = asyncio.Semaphore(0)
    async with answering(tmp_path, public_run(10_000), CountingEngine(gate=gate)) as house:

        async def ask(address: str) -> Any:
            async with stranger(house, address) as client:
                wish: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
                return await client.completions.create(**wish)

        tasks = [asyncio.create_task(ask(f"8.{n}.1.1")) for n in range(PUBLIC_MAX)]
        async with asyncio.timeout(30):
            while house.coordinator.answers.meter.waiting < PUBLIC_MAX:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="without a key at the moment"):
            await ask("9.9.9.9")
        async with house.client() as client:
            paying = asyncio.create_task(
                client.completions.create(model="tiny", prompt="a", max_tokens=1)
            )
            for _ in range(2 * PUBLIC_MAX + 1):
                gate.release()
            assert (await paying).choices[0].text
        await asyncio.gather(*tasks)
        await house.sound()
        assert await used(house) == PUBLIC_MAX * 3


async def test_who_leaves_gives_the_rest_of_the_quota_back(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(2)
    engine = CountingEngine(gate=gate)
    async with answering(tmp_path, public_run(), engine) as house:
        async with stranger(house, "8.8.8.8") as client:
            stream = await client.completions.create(
                model="tiny", prompt="a", max_tokens=4, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
        await house.settled()
        assert 1 + 1 <= await used(house) <= 1 + 2


@pytest.mark.parametrize(("who", "answered"), [("volunteers", False), ("keys", True)])
async def test_given_credits_are_for_runs_that_want_any_key(
    tmp_path: Path, who: str, answered: bool
) -> None:
    run = RUN + f'[serve]\nwho = "{who}"\n'
    async with answering(tmp_path, run) as house:
        eve = await house.home.join("Eve")
        refused = await eve.post("/me/keys", {"name": "x"})
        assert refused.status_code == 403
        await house.coordinator.api_keys.grant("Eve", 1_000_000, "a guest")
        reply = await eve.post("/me/keys", {"name": "x"})
        key = decoding.decode(reply.content, NewKey).key
        async with house.client(key) as client:
            listed = [card.id async for card in client.models.list()]
            if answered:
                assert listed
                await client.completions.create(model="tiny", prompt="a", max_tokens=1)
            else:
                assert not listed
                with pytest.raises(openai.PermissionDeniedError, match="those who helped"):
                    await client.completions.create(model="tiny", prompt="a", max_tokens=1)


async def test_without_a_key_runs_that_are_not_public_are_not_told(tmp_path: Path) -> None:
    async with answering(tmp_path) as house, stranger(house, "8.8.8.8") as client:
        with pytest.raises(openai.AuthenticationError, match="volunteer key create"):
            await client.models.list()
        with pytest.raises(openai.AuthenticationError, match="volunteer key create"):
            await client.completions.create(model="tiny", prompt="a", max_tokens=1)


async def test_replicas_count_the_requests_of_a_minute_together(
    tmp_path: Path, database_url: str
) -> None:
    tier = "[[serve.tiers]]\nrequests_per_minute = 5\n"
    async with answering(tmp_path, RUN + tier, database=database_url) as house:
        async with house.client() as client:
            for n in range(5):
                house.coordinator.answers._rate._buckets.clear()  # another replica's is empty
                await client.completions.create(model="tiny", prompt="a", max_tokens=1, seed=n)
            house.coordinator.answers._rate._buckets.clear()
            with pytest.raises(openai.RateLimitError, match="5 requests a minute") as caught:
                await client.completions.create(model="tiny", prompt="a", max_tokens=1)
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        await house.sound()
