"""Askers of a run: those who helped, anybody with credits, within a rate; nobody without a key."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest

from shared import decoding
from shared.protocol.inference import NewKey
from tests.support.answering import answering
from tests.support.local_coordinator import RUN


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


async def test_without_a_key_no_run_is_told(tmp_path: Path) -> None:
    async with answering(tmp_path) as house, house.client("public") as client:
        with pytest.raises(openai.AuthenticationError, match="volunteer key create"):
            await client.models.list()
        with pytest.raises(openai.AuthenticationError, match="volunteer key create"):
            await client.completions.create(model="tiny", prompt="a", max_tokens=1)
        async with httpx.AsyncClient() as bare:
            assert (await bare.get(f"{house.url}/v1/models")).status_code == 401


async def test_each_of_two_replicas_answers_half_of_the_requests_of_a_minute(
    tmp_path: Path,
) -> None:
    tier = "[[serve.tiers]]\nrequests_per_minute = 6\n"
    async with answering(tmp_path, RUN + tier) as house:
        house.coordinator.answers.rates.replicas = 2
        async with house.client() as client:
            for n in range(3):
                await client.completions.create(model="tiny", prompt="a", max_tokens=1, seed=n)
            with pytest.raises(openai.RateLimitError, match="6 requests a minute") as caught:
                await client.completions.create(model="tiny", prompt="a", max_tokens=1)
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        await house.sound()


async def test_the_organisers_key_asks_every_run_free_and_without_a_tier(tmp_path: Path) -> None:
    run = RUN + '[serve]\nwho = "nobody"\n[[serve.tiers]]\nrequests_per_minute = 2\ntokens = 2\n'
    async with answering(tmp_path, run) as house:
        await house.home.join("Eve")
        keys = house.coordinator.api_keys
        key = (await keys.create_for_organiser("Eve", None)).key
        async with house.client(key) as client:
            assert [card.id async for card in client.models.list()]
            for seed in range(4):
                reply = await client.completions.create(
                    model="tiny", prompt="a", max_tokens=9, seed=seed
                )
                assert reply.usage is not None
                assert reply.usage.completion_tokens == 9
                assert reply.usage.model_dump()["cost_micro"] == 0
        async with house.client() as other:
            with pytest.raises(openai.PermissionDeniedError, match="nobody may ask"):
                await other.completions.create(model="tiny", prompt="a", max_tokens=1)
        await house.coordinator.volunteers.ban("Eve", "")
        async with house.client(key) as client:
            with pytest.raises(openai.PermissionDeniedError, match="banned"):
                await client.completions.create(model="tiny", prompt="a", max_tokens=1)
        await house.sound()
