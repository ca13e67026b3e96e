"""Claims for the runs and the work that an owner chose; what is not there, or is over, is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from typing_extensions import override

from shared.protocol.accounts import Device
from tests.support.local_volunteer import CPU, LocalMachine, local_machine
from volunteer.control import commands, events
from volunteer.settings import settings


async def said(machine: LocalMachine, *runs: str) -> tuple[int, str]:
    """Return the exit code and the last sentence of a volunteer for these runs."""
    async with machine.working(runs=runs) as process:
        code = await process.ended()
        assert not any("/claims" in seen for seen in process.network.seen)
        return code, process.all(events.Stopped)[-1].message


async def over(machine: LocalMachine) -> None:
    """End the run, and wait until the list of runs says so."""
    await machine.home.coordinator.runs.stop("tiny")
    await machine.home.clock.advance(5)


async def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        code, sentence = await said(machine, "tiny", "tinny")
        assert code == 2
        assert 'no run "tinny" here (did you mean "tiny"?)' in sentence
        assert "tiny (gpt, running)" in sentence


async def test_a_run_that_has_ended_is_told(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        await over(machine)
        code, sentence = await said(machine, "tiny")
        assert code == 2
        assert '"tiny" has ended' in sentence
        assert "tiny (gpt, completed)" in sentence


async def test_a_run_that_was_chosen_once_and_is_over_is_waited_out(tmp_path: Path) -> None:
    """A choice made on the screen is kept; it is no mistake of today's command line."""
    async with local_machine(tmp_path) as machine:
        settings.save(machine.directories.config / "config.toml", {"runs": ["tiny"]})
        await over(machine)
        async with machine.working() as process, process.eventually():
            while not (told := [e for e in process.all(events.Idle) if e.reason == "run_ended"]):
                await machine.home.clock.advance(5)  # a claim waits at the coordinator
            assert '"tiny" has ended' in told[0].message


async def test_a_machine_claims_the_work_that_its_owner_likes(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        settings.save(machine.directories.config / "config.toml", {"roles": ["play"]})
        async with machine.working(max_tasks=1) as process:
            told = await process.until(events.Idle, lambda e: e.reason == "no_fit")
            assert '"tiny" has tasks of the kind "train" only' in told.message
            assert "roles" in told.message
            await process.control.do(
                commands.SetSettings(changes={"device_roles": {"cpu": "train"}})
            )
            claimed = await process.until(events.Claimed)
            assert (claimed.run, claimed.kind) == ("tiny", "train")


class Heedless(httpx.AsyncBaseTransport):
    """The way to a coordinator that gives work of any run and kind."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/claims"):
            claim = json.loads(await request.aread()) | {"runs": [], "kinds": ["train"]}
            headers = {k: v for k, v in request.headers.items() if k != "content-length"}
            content = json.dumps(claim).encode()
            request = httpx.Request(request.method, request.url, headers=headers, content=content)
        return await self._inner.handle_async_request(request)


@pytest.mark.parametrize("chosen", [{"runs": ["other"]}, {"roles": ["play"]}])
async def test_work_that_its_owner_did_not_choose_goes_back_without_a_yes_to_it(
    tmp_path: Path, chosen: dict[str, list[str]]
) -> None:
    async with local_machine(tmp_path) as machine:
        settings.save(machine.directories.config / "config.toml", chosen)
        async with machine.working() as process:
            process.network.inner = Heedless(process.network.inner)
            told = await process.until(events.Idle, lambda event: event.reason == "refused")
            assert "a task of tiny (train), which was not asked for" in told.message
            assert any(seen.endswith("/release") for seen in process.network.seen)
            assert not any("/begin" in seen or "/consent" in seen for seen in process.network.seen)
            assert process.all(events.Claimed) == []


class Together(httpx.AsyncBaseTransport):
    """A way on which the first two claims are answered at one moment."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._claims = 0
        self._both = asyncio.Event()

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if request.url.path.endswith("/claims"):
            self._claims += 1
            if self._claims == 2:
                self._both.set()
                await asyncio.sleep(0)  # the other one is told now
            await self._both.wait()
        return response


async def test_two_devices_that_claim_at_one_moment_take_no_more_tasks_than_were_asked_for(
    tmp_path: Path,
) -> None:
    """The second lease goes back to the coordinator for somebody else."""
    async with local_machine(tmp_path) as machine:
        machine.devices = (
            CPU,
            Device(id="cpu:1", kind="cpu", name="another", memory_bytes=8 << 30),
        )
        async with machine.working(device="cpu, cpu:1", max_tasks=1) as process:
            process.network.inner = Together(process.network.inner)
            assert await process.ended() == 0
        assert len(process.all(events.Submitted)) == len(process.all(events.Claimed)) == 1
        assert sum(request.endswith("/release") for request in process.network.seen) == 1
