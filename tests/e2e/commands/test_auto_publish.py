"""Publishing without being asked each time, against a small server that stands for the hub."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load
from sqlalchemy import Connection

from coordinator.database import runs
from coordinator.database.hub.publications import PublicationRow
from coordinator.runs.auto_publish import PAUSE_S, RETRY_MAX_S, RETRY_S
from coordinator.services import STOP_S
from shared.errors import BadRequest, NotFound
from tests.e2e.commands.test_model_hub import alone
from tests.support.command_line import Run
from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.server_process import Process

HUB = "hub:ann/tiny"
SEEDS = itertools.count(1)  # no update twice


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


async def trained(home: LocalCoordinator, versions: int = 1) -> str:
    """A run with so many versions, the newest of them measured."""
    name = await home.start_run()
    token(home, TOKEN)
    await more(home, versions)
    return name


async def more(home: LocalCoordinator, versions: int) -> None:
    names = ("Ann", "Bob")
    workers = [await home.join(each + str(time.monotonic_ns())) for each in names]
    run_id = (await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))).id
    for _ in range(versions):
        for worker in workers:
            assert (await worker.work(next(SEEDS))).state == "accepted"
        await home.coordinator.merger.merge_if_due(run_id)
        while await home.coordinator.evaluation.evaluate_next():
            pass


def token(home: LocalCoordinator, text: str) -> None:
    home.coordinator.settings.hub_token_file.write_text(text + "\n")
    home.coordinator.settings.hub_token_file.chmod(0o600)


async def row(home: LocalCoordinator, name: str = "tiny") -> PublicationRow:
    found = await home.coordinator.publishing.of(name)
    assert found is not None
    return found


async def best(home: LocalCoordinator, version: int) -> None:
    def move(conn: Connection) -> None:
        runs.set_values(conn, runs.by_name(conn, "tiny").id, best=version)

    await home.coordinator.db.write(move)


async def test_every_so_many_versions_one_is_published_by_itself(
    tmp_path: Path, hub: FakeHub
) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await trained(home, 1)
        publishing = home.coordinator.publishing
        await publishing.order(name, "every=2", HUB, "transformers")
        assert not await publishing.publish_next()
        await more(home, 1)
        assert await publishing.publish_next()
        assert hub.messages == ['Version 2 of "tiny"']
        assert json.loads(hub.files["config.json"])["model_type"] == "gpt2"
        assert "transformer.wte.weight" in load(hub.files["model.safetensors"])
        found = await row(home)
        assert (found.version, found.error) == (2, "")
        assert found.url == f"{hub.url}/ann/tiny"
        await more(home, 2)
        assert not await publishing.publish_next()  # hubs count commits: not within a minute
        await home.clock.advance(PAUSE_S)
        assert await publishing.publish_next()
        assert hub.messages[1:] == ['Version 4 of "tiny"']
        assert list(home.coordinator.blobs.scratch().glob("publish-*")) == []


async def test_the_best_is_published_each_time_another_is(tmp_path: Path, hub: FakeHub) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await trained(home, 2)
        publishing = home.coordinator.publishing
        await best(home, 2)
        await publishing.order(name, "best", HUB)
        for version in (2, 1):
            await best(home, version)
            assert await publishing.publish_next()
            await home.clock.advance(PAUSE_S)
            assert not await publishing.publish_next()
        assert hub.messages == ['Version 2 of "tiny"', 'Version 1 of "tiny"']
        await publishing.order(name, "off")
        await best(home, 2)
        assert not await publishing.publish_next()


async def test_what_fails_is_tried_again_later_each_time(tmp_path: Path, hub: FakeHub) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await trained(home)
        publishing = home.coordinator.publishing
        await publishing.order(name, "every=1", HUB)
        hub.failing = 3
        for failures, wait in ((1, RETRY_S), (2, 2 * RETRY_S), (3, 4 * RETRY_S)):
            assert await publishing.publish_next()
            found = await row(home)
            assert (found.failures, found.version) == (failures, None)
            assert "500" in found.error
            assert found.next_at == home.clock.now() + wait
            assert not await publishing.publish_next()
            await home.clock.advance(wait)
        assert await publishing.publish_next()
        found = await row(home)
        assert (found.failures, found.error, found.version) == (0, "", 1)


async def test_a_refused_token_is_said_and_a_new_one_found(tmp_path: Path, hub: FakeHub) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await trained(home)
        publishing = home.coordinator.publishing
        token(home, "hf_read_only")
        await publishing.order(name, "every=1", HUB)
        assert await publishing.publish_next()
        said = (await row(home)).error
        assert said == "the hub does not let this token write to ann/tiny: check its scope"
        token(home, TOKEN)
        await home.clock.advance(RETRY_MAX_S)
        assert await publishing.publish_next()
        assert (await row(home)).version == 1
        assert "hf_" not in str(msgspec.to_builtins(await row(home)))


async def test_a_token_that_others_can_read_is_not_used(tmp_path: Path, hub: FakeHub) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await trained(home)
        home.coordinator.settings.hub_token_file.chmod(0o644)
        await home.coordinator.publishing.order(name, "every=1", HUB)
        assert await home.coordinator.publishing.publish_next()
        assert (await row(home)).error.startswith(
            "others can read the token for the hub: chmod 600"
        )
        assert hub.messages == []


async def test_without_a_token_it_is_said_where_one_may_lie(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    async with local_coordinator(tmp_path / "data") as home:
        name = await trained(home)
        home.coordinator.settings.hub_token_file.unlink()
        await home.coordinator.publishing.order(name, "every=1", HUB)
        assert await home.coordinator.publishing.publish_next()
        assert "hub.token" in (await row(home)).error
        assert hub.messages == []


async def test_an_order_to_another_place_begins_anew(tmp_path: Path, hub: FakeHub) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await trained(home)
        publishing = home.coordinator.publishing
        hub.failing = 1
        await publishing.order(name, "every=1", HUB)
        assert await publishing.publish_next()
        again = await publishing.order(name, "every=1")  # the organiser mended it
        assert (again.repository, again.failures) == ("ann/tiny", 0)
        assert await publishing.publish_next()
        assert (await publishing.order(name, "best")).version == 1
        assert (await publishing.order(name, "best", "hub:ann/other")).version is None


@pytest.mark.parametrize("auto", ["", "every", "every=", "every=0", "every=-1", "every=2.5", "all",
                                  "every=99999999", "every=٣"])  # fmt: skip
async def test_other_words_are_refused(tmp_path: Path, auto: str) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await home.start_run()
        with pytest.raises(BadRequest, match="--auto"):
            await home.coordinator.publishing.order(name, auto, HUB)


async def test_orders_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "data") as home:
        name = await home.start_run()
        publishing = home.coordinator.publishing
        with pytest.raises(BadRequest, match="--to hub:OWNER/NAME"):
            await publishing.order(name, "best")
        with pytest.raises(BadRequest, match="hub:OWNER/NAME"):
            await publishing.order(name, "best", "hub:../x")
        with pytest.raises(BadRequest, match='no format "onnx"'):
            await publishing.order(name, "best", HUB, "onnx")
        with pytest.raises(NotFound):
            await publishing.order("nobody", "best", HUB)
        assert await publishing.of(name) is None


def test_a_hub_that_hangs_holds_up_no_end_and_the_next_server_goes_on(
    busy: Path, run: Run, hub: FakeHub
) -> None:
    run("run", "publish", "tiny", "--auto", "every=1", "--to", HUB, "--data-dir", busy)
    environment = alone(busy.parent) | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    hub.answering.clear()
    with Process(busy, "--port", "0", **environment) as server:
        assert hub.asked.wait(60)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < STOP_S
    shown = json.loads(run("run", "show", "tiny", "--data-dir", busy, "--json").out)
    assert (shown["publishing"]["failures"], shown["publishing"]["version"]) == (0, None)
    hub.answering.set()
    with Process(busy, "--port", "0", **environment):
        until = time.monotonic() + 60
        while not hub.messages and time.monotonic() < until:
            time.sleep(0.2)
    assert hub.messages == ['Version 1 of "tiny"']


def test_a_server_publishes_and_says_so(busy: Path, run: Run, hub: FakeHub) -> None:
    """By the command line, with the token of the server's environment."""
    place = ("--data-dir", busy)
    assert "none published yet" in run("run", "publish", "tiny", "--auto", "every=1", "--to", HUB,
                                       *place).out  # fmt: skip
    environment = alone(busy.parent) | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    with Process(busy, "--port", "0", **environment) as server:
        until = time.monotonic() + 60
        while not hub.messages and time.monotonic() < until:
            time.sleep(0.2)
        assert hub.messages
        while (shown := json.loads(run("run", "show", "tiny", *place, "--json").out)) and (
            shown["publishing"]["version"] is None and time.monotonic() < until
        ):
            time.sleep(0.2)
        assert server.stop() == 0
    assert shown["publishing"]["version"] >= 1
    assert shown["publishing"]["error"] == ""
    assert "every=1 to hub:ann/tiny as safetensors; version 1 published" in (
        run("run", "show", "tiny", *place).out
    )
    assert TOKEN.encode() not in b"".join(
        path.read_bytes() for path in busy.glob("coordinator.sqlite3*")
    )
