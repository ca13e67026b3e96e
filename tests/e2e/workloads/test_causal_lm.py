"""A language model of the library transformers trained by two whole volunteers: every weight, and
adapters alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import transformers

from coordinator.database import runs
from coordinator.runs.public_runs import may_be_had
from shared.decoding import decode
from shared.protocol.leases import ClaimReply
from shared.protocol.versions import VersionInfo
from tests.e2e.server.test_recomputes import lazy, results
from tests.support.fake_hub import FakeHub, Repository, fake_hub
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.workloads import tiny_causal
from volunteer.control import events

WEIGHTS = "model.safetensors"
RUN = """
name = "tiny"
workload = "causal-lm"
dataset = "sums"
[model]
context = 16
{model}
[task]
local_steps = 4
batch_size = 4
[train]
lr = 1e-2
[plan]
quorum = 2
codec = "int8"
"""
LLAMA = ", ".join(
    f"{key} = {value!r}".replace("'", '"') for key, value in tiny_causal.LLAMA.items()
)
TRAINED = {
    "all": f"config = {{ {LLAMA} }}",
    "lora": f'train = "lora"\nlora = {{ rank = 4 }}\nconfig = {{ {LLAMA} }}',
    "lora, 4 bits": f'train = "lora"\nbase_precision = "nf4"\nconfig = {{ {LLAMA} }}',
    "head": f'train = "head"\nconfig = {{ {LLAMA} }}',
    "folder, all": 'from = "FOLDER"',
    "folder, lora": 'train = "lora"\nfrom = "FOLDER"',
}


def folder(path: Path) -> str:
    """A small random model as transformers saves it."""
    settings = transformers.Qwen3Config(**{**tiny_causal.QWEN3, "vocab_size": 300})
    transformers.Qwen3ForCausalLM(settings).save_pretrained(path)
    return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that library and volunteers ask, with one model, and an empty cache of the library."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    files = {path.name: path for path in Path(folder(tmp_path / "model")).iterdir()}
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.models["ann/tiny"] = Repository()
        server.models["ann/tiny"].commit({name: path.read_bytes() for name, path in files.items()})
        yield server


async def test_a_model_of_a_hub_comes_from_there_and_else_from_the_coordinator(
    tmp_path: Path, hub: FakeHub
) -> None:
    model = 'train = "lora"\nfrom = "hub:ann/tiny@main"'
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(RUN.format(model=model).replace("quorum = 2", "quorum = 1"))
        info = (await home.coordinator.runs.queries.listing())[0]
        commit = hub.models["ann/tiny"].branches["main"]
        assert (info.origin, info.origin_licence) == (f"ann/tiny@{commit}", "apache-2.0")
        assert info.origin_bytes == len(hub.models["ann/tiny"].commits[commit][WEIGHTS])
        assert hub.fetched.count(WEIGHTS) == 1  # by the coordinator
        weights = hashlib.sha256(hub.models["ann/tiny"].commits[commit][WEIGHTS]).hexdigest()
        async with home.coordinator.working():
            for name, from_hub in (("Ann", True), ("Ben", False)):
                machine = LocalMachine(tmp_path / name, home)
                await machine.join(name)
                if not from_hub:
                    hub.models["ann/tiny"].damaged.add(WEIGHTS)
                async with machine.working() as process:
                    await process.until(
                        events.Judged, lambda event: event.verdict.state == "accepted", 60
                    )
                assert any(weights in path for path in process.network.seen) != from_hub
        assert hub.fetched.count(WEIGHTS) == 3


@pytest.mark.parametrize(("licence", "free"), [("apache-2.0", True), ("for research only", False)])
async def test_a_model_is_given_to_everybody_only_where_its_base_is(
    tmp_path: Path, hub: FakeHub, licence: str, free: bool
) -> None:
    hub.models["ann/tiny"].licence = licence
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await home.start_run(RUN.format(model='from = "hub:ann/tiny@main"'))
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, run))
    assert may_be_had(row) == free


@pytest.mark.parametrize("trained", ["lora", "lora, 4 bits", "head"])
async def test_honest_work_done_again_passes_and_other_work_does_not(
    tmp_path: Path, trained: str
) -> None:
    text = RUN.format(model=TRAINED[trained]).replace("quorum = 2", "quorum = 1")
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(text + "[trust]\nrecompute = 1.0\n")
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "Ann", home)
            await machine.join("Ann")
            async with machine.working(max_tasks=2) as process:
                assert await process.ended(120) == 0
            assert [result for result, _ in await results(home, 2)] == ["passed"] * 2
            machine = LocalMachine(tmp_path / "Eve", home)
            await machine.join("Eve")
            async with machine.working(lazy, max_tasks=1) as process:
                await process.ended(120)
            assert [result for result, _ in await results(home, 3)].count("failed") == 1
        assert await home.coordinator.ledger.check() == ()


async def test_a_machine_without_the_library_of_few_bits_hears_it_before_a_lease(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(RUN.format(model=TRAINED["lora, 4 bits"]))
        assert (await home.coordinator.runs.queries.listing())[0].libraries == ("bitsandbytes",)
        worker = await home.join("Ann", workloads=["causal-lm"])
        body = {"claim_id": "c" * 32, "wait_s": 0.0, "codecs": ["int8", "float32"]}
        reply = decode((await worker.post("/claims", body)).content, ClaimReply)
        assert reply.lease is None
        assert reply.idle is not None
        sentence = '"tiny" needs the library bitsandbytes, which is not installed on this machine'
        assert sentence in reply.idle.message
        body |= {"claim_id": "d" * 32, "libraries": ["bitsandbytes"]}
        assert decode((await worker.post("/claims", body)).content, ClaimReply).lease is not None


async def measured(home: LocalCoordinator) -> list[VersionInfo]:
    rows = await home.coordinator.runs.queries.versions("tiny")
    return [row for row in rows if row.loss is not None]


@pytest.mark.parametrize(
    "trained",
    [pytest.param(each, marks=() if each == "lora" else pytest.mark.slow) for each in TRAINED],
)
async def test_two_volunteers_train_it_together(tmp_path: Path, trained: str) -> None:
    model = TRAINED[trained].replace("FOLDER", folder(tmp_path / "model"))
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(RUN.format(model=model))
        async with home.coordinator.working(), AsyncExitStack() as stack:
            processes = []
            for name in ("Ann", "Ben"):
                machine = LocalMachine(tmp_path / name, home)
                await machine.join(name)
                processes.append(await stack.enter_async_context(machine.working()))
            async with processes[0].eventually(60):
                while len(await measured(home)) < 4:
                    await processes[0].tick()
            for process in processes:
                await process.until(events.Judged, lambda event: event.verdict.state == "accepted")
        versions = await measured(home)
        assert versions[-1].loss is not None
        assert versions[0].loss is not None
        assert versions[-1].loss < versions[0].loss
        assert (await home.coordinator.checks.run()).breaches == ()
