"""Matrix of workloads and subjects: each cell works, or is refused with the sentence
of its declaration; an empty cell fails.

A cell is a server on a real socket, a run with a measured version, and what somebody does with it:
the organiser by commands, whoever asks by OpenAI's client and `volunteer`, a player at the board.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import httpx
import msgspec
import openai
import pytest
import uvicorn

from coordinator.admin.datasets import AddDataset, add
from coordinator.database.ledger import gifts
from coordinator.http.app import create_app
from coordinator.http.routes.operations import COMMANDS
from coordinator.http.server import listen
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import simulate
from shared import decoding
from shared.clock import SystemClock
from shared.errors import BadRequest, VolunteerError
from shared.protocol.accounts import ServerInfo
from shared.protocol.inference import NewKey
from shared.workloads.base import Workload, installed, load
from shared.workloads.declaration import Declaration, Subject, refusal
from shared.workloads.model_files import PLAIN
from tests.e2e.workloads.test_dcgan import PRESETS, copied
from tests.e2e.workloads.test_dcgan import RUN as PICTURES
from tests.e2e.workloads.test_exported_card import ADAPTERS
from tests.support.local_coordinator import RUN as TEXT
from tests.support.local_coordinator import LocalCoordinator, Worker, local_coordinator
from tests.support.rollouts_run import RUN as PROBLEMS
from tests.support.selfplay_run import RUN as GAMES
from tests.support.served import accepting
from tests.support.workloads import example_workload
from volunteer.account.profile_directory import Identity, Profile
from volunteer.cli.main import run_command
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.opponent import VersionOpponent
from volunteer.settings.settings import directories
from volunteer.tui.screens import run_keys

SERVE = '\n[serve]\nwho = "keys"\n'
RUNS: Mapping[str, str] = {
    "gpt": TEXT.replace("block_size = 8", "block_size = 64"),
    "causal-lm": ADAPTERS,
    "dcgan": PICTURES + PRESETS["fedavg"],
    "gomoku": GAMES,
    "rollouts": PROBLEMS.replace("context = 14", "context = 64"),
}
# A model of somebody's own, by the package of docs/workload.md.
OWN = 'name = "own"\nworkload = "cnn"\ndataset = "digits"\n[task]\nbatch_size = 8\n'


class Cell(NamedTuple):
    """Run of a workload on a server, and somebody who may ask it."""

    home: LocalCoordinator
    ann: Worker
    url: str
    key: str
    run: str
    path: Path
    text: str

    @property
    def workload(self) -> Workload:
        return load(self.text.partition('workload = "')[2].partition('"')[0])

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    async def command(self, command: str, /, **request: Any) -> Any:
        known = COMMANDS[command]
        return await known.run(self.home.coordinator, known.request(**request))


@asynccontextmanager
async def serving(path: Path, text: str) -> AsyncIterator[Cell]:
    """A run with a measured version 0, on a server that answers."""
    async with local_coordinator(path / "house") as home:
        coordinator = home.coordinator
        if 'workload = "dcgan"' in text:
            await coordinator.datasets.add(copied)
        if text == OWN:
            files = (str(example_workload.write_digits(path / "digits", 100)),)
            await add.run(coordinator, AddDataset(name="digits", files=files, workload="cnn"))
        run = await home.start_run(text + SERVE)
        while await coordinator.evaluation.evaluate_next():
            pass
        ann = await home.join("Ann", workloads=[*RUNS, "cnn"])
        await coordinator.db.write(
            lambda conn: gifts.grant(conn, ann.volunteer_id, "test", 10**12, "", 1.0)
        )
        engine = BuiltinEngine(
            coordinator.db, SystemClock(), coordinator.blobs, ProcessLimits(threads=1)
        )
        coordinator.answers.connect(engine)
        config = uvicorn.Config(create_app(coordinator), lifespan="off", log_level="error")
        try:
            with listen("127.0.0.1", 0) as listener:
                async with accepting(config, listener):
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    made = (await ann.post("/me/keys", {"name": "test"})).content
                    key = decoding.decode(made, NewKey).key
                    info: ServerInfo = await coordinator.server.info()
                    Profile(directories().profile).use(_identity(ann, info, url))
                    yield Cell(home, ann, url, key, run, path, text)
        finally:
            await engine.close()


def _identity(ann: Worker, info: ServerInfo, url: str) -> Identity:
    return Identity(
        url=url,
        tls_pin="",
        public_key=info.public_key,
        fingerprint=info.fingerprint,
        server=info.name,
        volunteer_id=ann.volunteer_id,
        worker_id=ann.worker_id,
        secret=ann.secret,
        nickname="Ann",
        registered=True,
    )


# -------------------------------------------------------------------------------------- whoever asks


async def ask(cell: Cell) -> None:
    async with cell.client() as client:
        found = await client.completions.create(model=cell.run, prompt="1", max_tokens=2)
        assert found.usage is not None
        assert found.usage.completion_tokens >= 1


async def chat(cell: Cell) -> None:
    turns: Any = [{"role": "user", "content": "1"}]
    async with cell.client() as client:
        found = await client.chat.completions.create(model=cell.run, messages=turns, max_tokens=2)
        assert found.choices[0].finish_reason in ("stop", "length")


async def draw(cell: Cell) -> None:
    async with cell.client() as client:
        found = await client.images.generate(model=cell.run, prompt="")
        assert found.data


async def generate(cell: Cell) -> None:
    draws = cell.workload.declaration.output == "image"
    to = ["--output", str(cell.path / "drawn.png")] if draws else []
    words = ["generate", cell.run, "1", "--max-tokens", "2", *to]
    code = await asyncio.to_thread(run_command, words)
    if code:
        raise BadRequest("volunteer generate ended with an error")


async def play(cell: Cell) -> None:
    identity = Profile(directories().profile).current()
    assert identity is not None
    client = Client(
        Address(url=cell.url, tls_pin=""), clock=SystemClock(), token=identity.token, transport=None
    )
    rival = VersionOpponent(
        Api(client), cell.run, public_key=identity.public_key, enabled=(*RUNS, "cnn"),
        directory=cell.path / "cache",
    )  # fmt: skip
    try:
        seated = await rival.sit()
        assert (await rival.reply([seated.size], 0)).move >= 0
    finally:
        rival.close()
        await client.close()


async def press(cell: Cell) -> None:
    """The app's key on this run starts what the declaration says."""
    info = await cell.home.coordinator.runs.queries.info(cell.run)
    output = cell.workload.declaration.output
    commands = {"text": "chat", "moves": "play", "image": "", "none": ""}
    assert run_keys.command_for(info) == commands[output]


# ------------------------------------------------------------------------------------- the organiser


async def sample(cell: Cell) -> None:
    (version,) = await cell.home.coordinator.runs.queries.versions(cell.run)
    assert bool(version.picture) == (cell.workload.declaration.output in ("image", "none"))
    assert version.picture or version.sample


async def best(cell: Cell) -> None:
    (version,) = await cell.home.coordinator.runs.queries.versions(cell.run)
    assert version.best
    assert version.loss is not None


async def export(cell: Cell, format: str) -> None:
    to = cell.path / format
    done = await cell.home.coordinator.export.export(cell.run, to, format=format)
    assert done.measure == cell.workload.declaration.measure
    card = (to / "README.md").read_text(encoding="utf-8")
    task = {"text": "text-generation", "image": "unconditional-image-generation"}
    output = cell.workload.declaration.output
    assert ("pipeline_tag" in card) == (output in task)
    assert task.get(output, "") in card
    if format == "transformers":
        import transformers

        transformers.AutoModelForCausalLM.from_pretrained(to)
        words: Any = transformers.AutoTokenizer.from_pretrained(to)
        assert words.decode(words("1 plus")["input_ids"], skip_special_tokens=True) == "1 plus"


async def page(cell: Cell) -> None:
    async with httpx.AsyncClient() as client:
        found = await client.get(f"{cell.url}/runs/{cell.run}")
        assert found.status_code == 200
        assert (await client.get(f"{cell.url}/runs/{cell.run}/versions/0")).status_code == 200


async def show(cell: Cell) -> None:
    shown = await cell.command("run.show", name=cell.run)
    declaration = cell.workload.declaration
    stated = (shown.run.output, shown.run.taught_by, shown.run.measure, shown.run.items)
    assert stated == msgspec.structs.astuple(declaration)
    assert (shown.experience is not None) == (declaration.taught_by == "experience")


async def top(cell: Cell) -> None:
    assert cell.run in msgspec.json.encode(await cell.command("top")).decode()


async def fork(cell: Cell) -> None:
    deed = await cell.command("run.fork", source=f"{cell.run}@0", name="again", yes=True)
    assert deed is not None
    forked = await cell.home.coordinator.runs.queries.info("again")
    assert (forked.state, forked.workload) == ("draft", cell.workload.name)


async def retention(cell: Cell) -> None:
    await cell.home.coordinator.upkeep.prune()
    await cell.home.coordinator.export.export(cell.run, cell.path / "kept")


async def check(cell: Cell) -> None:
    report = await cell.home.coordinator.checks.run()
    assert report.breaches == ()


async def alerts(cell: Cell) -> None:
    assert await cell.command("alerts.list") is not None


async def stop(cell: Cell) -> None:
    await cell.command("run.pause", name=cell.run)
    await cell.command("run.resume", name=cell.run)
    ended = await cell.command("run.stop", name=cell.run)
    assert ended.state == "completed"


async def simulated(cell: Cell) -> None:
    import tomllib

    table = tomllib.loads(cell.text)
    worker: dict[str, Any] = {"name": "w", "steps_per_s": 10.0, "count": 2}
    if cell.workload.declaration.taught_by == "experience":
        worker |= {"episodes_per_s": 5.0, "roles": ["play", "learn"]}
    table.pop("dataset", None)
    data = {} if not cell.workload.needs_dataset else {"data": {"items": 200_000}}
    scenario = from_table({"hours": 0.02, "run": table, "workers": [worker], **data})
    result = await simulate(scenario)
    assert result.traces


Act = Callable[[Cell], Awaitable[None]]
ASKED: Mapping[str, Act] = {
    "ask": ask, "chat": chat, "draw": draw, "generate": generate, "play": play, "press": press,
}  # fmt: skip
ORGANISED: Mapping[str, Act] = {
    "sample": sample, "best": best, "page": page, "show": show, "top": top, "fork": fork,
    "retention": retention, "check": check, "alerts": alerts, "simulate": simulated, "stop": stop,
}  # fmt: skip
SUBJECT_OF = {"ask": "ask", "chat": "ask", "draw": "draw", "generate": "generate", "play": "play"}


def cells(workload: Workload) -> dict[str, Act]:
    formats = {
        f"export {name}": partial(export, format=name) for name in (PLAIN, *workload.formats)
    }
    last = {"stop": ORGANISED["stop"]}
    return {**ASKED, **formats, **ORGANISED, **last}


def expected(declaration: Declaration, subject: str, run: str) -> str:
    """Return the sentence of the declaration that refuses a subject; "" where it works."""
    known: Any = SUBJECT_OF.get(subject)
    return str(refusal(declaration.output, known, run) or "") if known else ""


async def outcome(act: Act, cell: Cell, capsys: pytest.CaptureFixture[str]) -> str:
    """Return "" for a cell that works, or the sentence of its refusal."""
    try:
        await act(cell)
    except openai.APIStatusError as error:
        refused = str(json.loads(error.response.content)["error"]["message"])
        return refused if error.status_code == 400 else f"{error.status_code}: {refused}"
    except VolunteerError as error:
        printed = capsys.readouterr().err.strip()
        return printed or error.message
    except Exception as error:  # the cell fails by its text, and the next one is tried
        return f"{type(error).__name__}: {error}"
    return ""


def test_no_workload_is_left_out() -> None:
    assert RUNS.keys() == installed().keys()
    for name in RUNS:
        declaration = load(name).declaration
        for subject in get_args(Subject):
            refused = refusal(declaration.output, subject, name)
            assert refused is None or name in refused


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, "cnn"])
async def test_each_cell_works_or_is_refused_by_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "home"))
    if name == "cnn":
        monkeypatch.syspath_prepend(str(example_workload.install(tmp_path)))
    workload = load(name)
    found: dict[str, str] = {}
    async with serving(tmp_path, RUNS.get(name, OWN)) as cell:
        for subject, act in cells(workload).items():
            capsys.readouterr()
            found[subject] = await outcome(act, cell, capsys)
        run = cell.run
    wanted = {subject: expected(workload.declaration, subject, run) for subject in found}
    if name == "rollouts":  # its model of bytes has no adapters, and its tokenizer no merges
        wanted["export peft"] = "peft is for runs of a model from a folder or a hub"
        wanted["export gguf"] = "the format gguf is not for a model of bytes"
    wrong = {key: (found[key], wanted[key]) for key in found if wanted[key] not in found[key]}
    wrong |= {key: (found[key], "") for key in found if found[key] and not wanted[key]}
    assert wrong == {}
