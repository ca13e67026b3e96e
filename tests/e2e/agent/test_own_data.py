"""A run over data that stay with their members: the bytes that a member's machine sends, and its
ways out when its data cannot serve.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from msgspec import convert
from msgspec.structs import replace
from sqlalchemy import select
from typing_extensions import override

from coordinator.database.tables.tasks import tasks
from shared.errors import BadRequest
from shared.protocol.members import MemberData
from shared.workloads.base import Data, Job, Weights, Work
from shared.workloads.data.tokenizer import load_tokenizer
from shared.workloads.gpt.workload import GptWorkload
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine
from tests.support.own_files import add, own_data_of
from volunteer.control import commands, events
from volunteer.storage.own_data import OwnRecord

MEMBERS = SHORT + '[data]\nat = "members"\n'
MARK = "zq7canary"  # in no text of the product, of the example or of a figure
EXAMPLES = 1000


class Recorder(httpx.AsyncBaseTransport):
    """The way to a coordinator, with every byte of every request."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.requests: list[tuple[str, bytes]] = []  # address, and the request with its body

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        head = f"{request.method} {request.url}\n{list(request.headers.raw)}\n".encode()
        self.requests.append((f"{request.method} {request.url.path}", head + body))
        return await self._inner.handle_async_request(request)

    def bodies(self, address: str) -> list[dict[str, object]]:
        """Return the JSON of the requests to addresses that end so."""
        found = [sent for where, sent in self.requests if where.endswith(address)]
        return [json.loads(sent[sent.index(b"\n{") :]) for sent in found]


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path / "coordinator") as made:
        made.transport = Recorder(made.transport)
        await made.start_run(MEMBERS)
        yield made


def requests(home: LocalCoordinator) -> Recorder:
    assert isinstance(home.transport, Recorder)
    return home.transport


def withdrawn(home: LocalCoordinator) -> bool:
    return any(where.startswith("DELETE ") for where, _ in requests(home).requests)


def diary(path: Path, examples: int = EXAMPLES) -> Path:
    """Marked examples in a folder with marked names."""
    path.mkdir()
    rng = random.Random(7)
    for number in range(examples // 100):
        lines = [f"{MARK} {rng.randrange(10**12):012} slept well.\n" for _ in range(100)]
        (path / f"{MARK} {number}.txt").write_text("".join(lines))
    return path


@pytest.fixture
async def machine(tmp_path: Path, home: LocalCoordinator) -> LocalMachine:
    made = LocalMachine(tmp_path / "machine", home)
    await made.join()
    return made


def hashes_of(record: OwnRecord) -> list[str]:
    return [ref.sha256 for ref in record.refs]


async def versions(home: LocalCoordinator, machine: LocalMachine, count: int) -> None:
    """Let a machine train versions, each in a process of its own."""
    for _ in range(count):
        await machine.work(1)
        assert await home.coordinator.merger.merge_if_due(1)


async def test_no_example_word_or_name_of_a_file_leaves_the_machine(
    home: LocalCoordinator,
    machine: LocalMachine,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = await add(machine, diary(tmp_path / "ward"))
    await versions(home, machine, 2)
    assert await home.coordinator.evaluation.evaluate_next()
    own = own_data_of(machine)
    files = own.files(record, record.refs)
    tokenizer = load_tokenizer(files[record.manifest.assets["tokenizer"].sha256].read_bytes())
    tokens = tokenizer.encode(MARK, add_special_tokens=False).ids
    chunks = b"".join(files[ref.sha256].read_bytes() for ref in record.manifest.chunks)
    spelt = b"".join(token.to_bytes(2, "little") for token in tokens[1:-1])
    assert chunks.count(spelt) > EXAMPLES / 2  # the marks are in what was learnt
    hashes = [ref.sha256 for ref in (*record.manifest.chunks, *record.manifest.heldout)]
    secrets = [MARK.encode(), spelt, str(tmp_path / "ward").encode(), str(own.root).encode()]
    secrets += [form for name in hashes for form in (name.encode(), bytes.fromhex(name))]
    sent = [data for _, data in requests(home).requests]
    stored = [path.read_bytes() for path in (tmp_path / "coordinator").rglob("*") if path.is_file()]
    written = [*map(str.encode, capfd.readouterr()), caplog.text.encode()]
    assert any(b'"samples":' in data for data in sent)  # what is searched holds what was sent
    assert any(len(data) > 1000 for data in stored)
    for secret in secrets:
        assert not any(secret in data for data in (*sent, *stored, *written)), secret


async def test_only_numbers_are_declared_and_the_loss_of_a_version_comes_from_what_is_kept_back(
    home: LocalCoordinator, machine: LocalMachine, tmp_path: Path
) -> None:
    record = await add(machine, diary(tmp_path / "ward"))
    await versions(home, machine, 2)
    await machine.work(1)
    declared = requests(home).bodies("/runs/tiny/data")
    assert declared
    for numbers in declared:
        assert convert(numbers, MemberData) == record.numbers
        assert sorted(numbers) == ["edition", "heldout", "items", "samples"]
        assert not any(record.numbers.edition in name for name in hashes_of(record))
    measured = [body["heldout"] for body in requests(home).bodies("/submit")]
    sums = [heldout for heldout in measured if isinstance(heldout, dict)]
    assert [heldout["version"] for heldout in sums] == [0, 1, 2]
    total = sum(ref.items for ref in record.manifest.heldout)
    for heldout in sums:
        assert 0 < heldout["items"] <= total
        assert 3 < heldout["loss_sum"] / heldout["items"] < 8  # nats of 300 tokens, untrained


@pytest.mark.parametrize("harm", ["damaged", "gone", "another form"])
async def test_unusable_data_give_the_lease_back_and_the_numbers_too(
    home: LocalCoordinator, machine: LocalMachine, tmp_path: Path, harm: str
) -> None:
    record = await add(machine, diary(tmp_path / "ward"))
    own = own_data_of(machine)
    for path in own.files(record, record.manifest.chunks).values():
        if harm == "damaged":
            path.write_bytes(bytes(path.stat().st_size))
        elif harm == "gone":
            path.unlink()
    if harm == "another form":
        meta = record.manifest.meta | {"vocab_size": 7}
        own.use(replace(record, manifest=replace(record.manifest, meta=meta)))
    async with machine.working(max_tasks=1) as process:
        ended = await process.until(events.TaskEnded)
        assert ended.how == "released"
        assert "volunteer data add tiny PATH" in ended.message
        await process.until(events.Idle, lambda idle: "volunteer data add" in idle.message)
        assert withdrawn(home)
        (released,) = requests(home).bodies("/release")
        assert (released["failed"], released["reason"]) == (False, "")
        await add(machine, tmp_path / "ward")  # the person does as it was told
        await process.control.do(commands.Retry())
        await process.until(events.Judged)


class Vanishing(GptWorkload):
    """A workload whose files are deleted while it reads them."""

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        path = data.chunk(0)
        path.unlink()
        raise FileNotFoundError(2, "No such file or directory", str(path))


async def test_copies_that_go_away_during_a_task_give_it_back_with_a_sentence(
    home: LocalCoordinator, machine: LocalMachine, tmp_path: Path
) -> None:
    await add(machine, diary(tmp_path / "ward"))
    async with machine.working(load=lambda name: Vanishing()) as process:
        ended = await process.until(events.TaskEnded)
    assert (ended.how, str(tmp_path) in ended.message) == ("released", False)
    assert "went away" in ended.message


async def test_a_machine_without_data_is_told_how_to_add_them(
    home: LocalCoordinator, machine: LocalMachine
) -> None:
    async with machine.working() as process:
        await process.until(events.Idle, lambda idle: "volunteer data add" in idle.message)
    assert not requests(home).bodies("/begin")


async def test_a_declaration_that_was_lost_is_sent_at_the_next_start(
    home: LocalCoordinator, machine: LocalMachine, tmp_path: Path
) -> None:
    await add(machine, diary(tmp_path / "ward"))
    record = await add(machine, diary(tmp_path / "small", 200), declared=False)
    await machine.work(1)
    assert convert(requests(home).bodies("/runs/tiny/data")[-1], MemberData) == record.numbers
    assert not withdrawn(home)


async def test_data_that_were_replaced_serve_the_next_task(
    home: LocalCoordinator, machine: LocalMachine, tmp_path: Path
) -> None:
    await add(machine, diary(tmp_path / "ward"))
    async with machine.working(max_tasks=2) as process:
        await process.until(events.Judged)
        await add(machine, diary(tmp_path / "small", 200))
        assert await home.coordinator.merger.merge_if_due(1)
        assert await process.ended() == 0
    assert not withdrawn(home)


async def test_a_task_may_reach_to_the_last_sample_of_its_machine(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(MEMBERS.replace("local_steps = 2", "local_steps = 400"))
        machine = LocalMachine(tmp_path / "machine", home)
        await machine.join()
        record = await add(machine, diary(tmp_path / "ward", 100))
        async with machine.working(max_tasks=1) as process:
            await process.until(events.Judged)
            assert await process.ended() == 0
        query = select(tasks.c.stop)
        stops = await home.coordinator.db.read(lambda conn: conn.execute(query).scalars().all())
        assert stops == [record.numbers.samples]


@pytest.mark.parametrize(
    ("deed", "sentence"),
    [("draft", "has not begun yet"), ("stop", "has ended"), ("other", "brings data of its own")],
)
async def test_files_for_a_run_that_takes_none_are_not_even_read(
    home: LocalCoordinator, machine: LocalMachine, deed: str, sentence: str
) -> None:
    runs = home.coordinator.runs
    if deed == "draft":
        await runs.create(MEMBERS.replace('"tiny"', '"next"'))
    elif deed == "other":
        await runs.create(SHORT.replace('"tiny"', '"next"'))
        await runs.start("next")
    else:
        await runs.stop("tiny")
    run = "tiny" if deed == "stop" else "next"
    with pytest.raises(BadRequest, match=sentence):
        await add(machine, Path("/absent"), run=run)
