"""Coordinator that answers prompts on a real socket, and OpenAI's clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import structlog
import uvicorn

from coordinator.database.ledger import gifts, payments
from coordinator.database.ledger.ledger_check import check_ledger
from coordinator.database.ledger.payments import Balances
from coordinator.http.app import create_app
from coordinator.http.server import listen
from coordinator.runs.datasets import Build
from shared import decoding
from shared.protocol.inference import NewKey
from tests.support.counting_engine import CountingEngine
from tests.support.local_coordinator import RUN, LocalCoordinator, Worker, local_coordinator
from tests.support.served import accepting

CREDITS = 1_000_000_000  # micro-credits that an asker has


class Answering:
    """Answering coordinator, its address, and one volunteer with credits."""

    def __init__(self, home: LocalCoordinator, url: str, engine: CountingEngine) -> None:
        self.home = home
        self.url = url
        self.engine = engine
        self.key = ""
        self.ann: Worker

    @property
    def coordinator(self) -> Any:
        return self.home.coordinator

    def client(self, key: str = "", **more: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 60.0} | more
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, **options)

    def plain(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    async def new_key(self, **wanted: Any) -> NewKey:
        reply = await self.ann.post("/me/keys", {"name": "test"} | wanted)
        assert reply.status_code == 200, reply.text
        return decoding.decode(reply.content, NewKey)

    async def balances(self) -> Balances:
        who = self.ann.volunteer_id
        found: Balances = await self.coordinator.db.read(lambda c: payments.balances(c, who))
        return found

    async def settled(self) -> None:
        """Wait until nothing is under way."""
        async with asyncio.timeout(120):
            while self.coordinator.answers.meter.running or (await self.balances()).held_micro:
                await asyncio.sleep(0.01)

    async def sound(self) -> None:
        """Check that no hold is open and every sum balances."""
        await self.settled()
        assert await self.coordinator.db.read(check_ledger) == []


@asynccontextmanager
async def answering(
    path: Path,
    run: str = "",
    engine: CountingEngine | None = None,
    workload: str = "gpt",
    dataset: Build | None = None,
    **settings: Any,
) -> AsyncIterator[Answering]:
    """A server whose run has one merged version, and Ann with a key and credits."""
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet)  # the command line has standard output for itself
    async with local_coordinator(path, **settings) as home:
        await home.start_run(run or RUN, dataset)
        ann, bob = [await home.join(name, workloads=[workload]) for name in ("Ann", "Bob")]
        assert {(await ann.work(1)).state, (await bob.work(2)).state} == {"accepted"}
        assert await home.coordinator.merger.merge_if_due(1)
        who = ann.volunteer_id
        await home.coordinator.db.write(lambda c: gifts.grant(c, who, "test", CREDITS, "", 1.0))
        made = engine or CountingEngine()
        home.coordinator.answers.connect(made)
        config = uvicorn.Config(create_app(home.coordinator), lifespan="off", log_level="error")
        with listen("127.0.0.1", 0) as listener:
            async with accepting(config, listener):
                found = Answering(home, f"http://127.0.0.1:{listener.getsockname()[1]}", made)
                found.ann = ann
                found.key = (await found.new_key()).key
                yield found
