"""Settings of a server and of a run that no other test would miss if they were ignored."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import structlog

from coordinator.compute import half_the_cores
from coordinator.config import Constants, Settings
from coordinator.database import evaluations
from coordinator.http.server import listen, serve, uvicorn_config
from coordinator.inference.inference_engine import ModelVersion
from coordinator.inference.upstream_engine import upstream
from shared.errors import Configuration
from shared.protocol.leases import ClaimReply
from shared.units import DAY_S
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
            if found.status() != psutil.STATUS_ZOMBIE
            and "coordinator.inference.inference_process" in found.cmdline()
        ]
        assert line[0] == sys.executable
        assert line[-3:] == words


async def test_a_run_ends_on_its_date(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        tomorrow = datetime.fromtimestamp(home.clock.now() + DAY_S, UTC).date()
        await home.start_run(f'{RUN}[stop]\ndate = "{tomorrow}"\n')
        inside = home.coordinator
        assert await inside.upkeep.end_runs() == 0
        await home.clock.advance(DAY_S)
        assert await inside.upkeep.end_runs() == 1
        assert (await inside.run_queries.info("tiny")).state == "completed"


@pytest.mark.parametrize(
    ("said", "samples", "complete"),
    [
        ("", [True, True, True], 1.0),
        ("sample_every = 2", [True, False, True], 1.0),
        ("budget_seconds = 1e-9", [True, True, True], 0.0),
    ],
)
async def test_evaluation_writes_samples_as_often_and_takes_as_long_as_the_run_says(
    tmp_path: Path, said: str, samples: list[bool], complete: float
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(f"{RUN}[evaluation]\n{said}\n")
        people = [await home.join(name) for name in ("Ann", "Bob")]
        inside = home.coordinator
        assert await inside.evaluation.evaluate_next()
        for version in (1, 2):
            for number, worker in enumerate(people):
                await worker.work(10 * version + number)
            assert await inside.merger.merge_if_due(1)
            assert await inside.evaluation.evaluate_next()
        seen = [
            await inside.db.read(partial(evaluations.evaluation, run_id=1, version=version))
            for version in range(3)
        ]
        assert [bool(each.sample) for each in seen] == samples
        found = [json.loads(each.metrics) for each in seen]
        assert {each["complete"] for each in found} == {complete}


def test_models_at_another_server_have_the_names_that_the_settings_say(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=str(tmp_path),
        inference="http://h.example/v1",
        inference_models="mine@4=tuned, yours=base-{version}",
    )
    there = upstream(settings)
    assert there.pinned_versions() == {"mine": 4}
    asked = [("mine", 4), ("mine", 5), ("yours", 7), ("another", 1)]
    models = [ModelVersion(run_id=1, run=run, version=version) for run, version in asked]
    assert list(map(there.name_of, models)) == ["tuned", "mine@5", "base-7", "another@1"]


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("wanted", [True, False])
def test_the_log_of_a_server_is_json_where_the_settings_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: bool
) -> None:
    missing = str(tmp_path / "missing.pem")
    settings = Settings(data_dir=str(tmp_path), json_logs=wanted, tls_cert=missing, tls_key=missing)
    with pytest.raises(Configuration):
        serve(settings)
    structlog.get_logger("test").warning("a line")
    line = capsys.readouterr().err
    assert "a line" in line
    assert line.startswith("{") is wanted


def test_only_who_stands_beside_others_is_left_out_before_it_stops() -> None:
    constants = Constants(drain_s=7.0)
    assert Settings(constants=constants).drain_s == 0
    database = "postgresql+asyncpg://user@host/name"
    assert Settings(constants=constants, database=database).drain_s == 7.0
