"""Settings of a server and of a run that no other test would miss if they were ignored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coordinator.compute import half_the_cores
from coordinator.config import Constants, Settings
from coordinator.http.server import listen, uvicorn_config
from shared.protocol.leases import ClaimReply
from tests.support.answering import answering
from tests.support.local_coordinator import RUN, decode, local_coordinator
from tests.support.served import accepting


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({"url": "https://house.example"}, [200, 200, 200]),
        ({"url": "https://house.example", "trusted_proxies": "127.0.0.0/8"}, [200, 200, 200]),
        ({"url": "https://house.example", "trusted_proxies": "10.0.0.1"}, [200, 200, 429]),
        ({"trusted_proxies": "127.0.0.1"}, [200, 200, 429]),  # no proxy without a public address
    ],
)
async def test_a_forwarded_address_counts_where_its_proxy_is_trusted(
    tmp_path: Path, settings: dict[str, Any], statuses: list[int]
) -> None:
    async with local_coordinator(tmp_path, rate_ip="2/minute", **settings) as home:
        config = uvicorn_config(home.coordinator)
        config.lifespan = "off"
        with listen("127.0.0.1", 0) as listener:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with accepting(config, listener), httpx.AsyncClient(base_url=address) as client:
                found = [
                    (await client.get("/health", headers={"X-Forwarded-For": f"192.0.2.{n}"}))
                    for n in range(3)
                ]
    assert [reply.status_code for reply in found] == statuses


async def test_a_volunteer_holds_no_more_tasks_than_the_server_allows(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, max_volunteer_leases=2) as home:
        await home.start_run()
        ann, bob = await home.join("Ann"), await home.join("Bob")
        for _ in range(2):
            await ann.claim()
        wanted = {"claim_id": "c" * 32, "wait_s": 0.0, "codecs": ["float32"]}
        reply = decode(await ann.post("/claims", wanted), ClaimReply)
        assert reply.lease is None
        assert reply.idle is not None
        assert "2 tasks" in reply.idle.message
        await bob.claim()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, [str(half_the_cores()), "0", "cpu"]),
        (
            {
                "inference_threads": 3,
                "inference_memory_bytes": 4 << 30,
                "inference_device": "auto",
            },
            ["3", str(4 << 30), "auto"],
        ),
    ],
)
async def test_answers_take_the_threads_the_memory_and_the_device_of_the_settings(
    tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    """The process for answers gets them; what it does with them is its engine's contract."""
    async with (
        answering(tmp_path, RUN, **settings) as house,
        house.coordinator.working(),
        house.client() as client,
    ):
        reply = await client.completions.create(model="tiny", prompt="1", max_tokens=1)
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 1
        [line] = [
            found.cmdline()
            for found in psutil.Process().children(recursive=True)
            if "coordinator.inference.worker" in found.cmdline()
        ]
        assert line[0] == sys.executable
        assert line[-3:] == words


@pytest.mark.parametrize(("said", "reset"), [("", False), ("keep", False), ("reset", True)])
async def test_a_run_says_what_becomes_of_the_inner_state(
    tmp_path: Path, said: str, reset: bool
) -> None:
    file = RUN.replace("[task]", f'[task]\ninner_state = "{said}"') if said else RUN
    async with local_coordinator(tmp_path) as home:
        await home.start_run(file)
        lease = await (await home.join("Ann")).claim()
        assert lease.job.reset_inner is reset


def test_only_who_stands_beside_others_is_left_out_before_it_stops() -> None:
    constants = Constants(drain_s=7.0)
    assert Settings(constants=constants).drain_s == 0
    database = "postgresql+asyncpg://user@host/name"
    assert Settings(constants=constants, database=database).drain_s == 7.0
