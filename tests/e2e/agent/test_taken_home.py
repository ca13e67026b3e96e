"""A model taken home by a member: trained further on its own data, with nothing sent."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvicorn
from safetensors.numpy import load_file
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.http.app import create_app
from coordinator.http.server import listen
from coordinator.runs.datasets import Build
from tests.e2e.agent.test_own_data import MEMBERS, diary
from tests.e2e.agent.test_own_kinds import DIALOGUES, dialogues, talk
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import SHORT
from tests.support.served import accepting
from tests.support.sums import build_sums
from volunteer.cli.export_command import TakenHome, lines
from volunteer.cli.main import run_command

BATCH = 32
LESSONS = MEMBERS.replace("batch_size = 2", f"batch_size = {BATCH}") + "[train]\nlr = 0.01\n"
ADAPTERS = DIALOGUES.replace("[model]\n", '[model]\ntrain = "lora"\n')


@dataclass
class Listened:
    """Application of a coordinator, with the address of every request."""

    app: ASGIApp
    requests: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests.append(f"{scope['method']} {scope['path']}")
        await self.app(scope, receive, send)


@dataclass(frozen=True, kw_only=True)
class Ward:
    """Member of a run, with the commands of its machine."""

    home: LocalCoordinator
    url: str
    listened: Listened
    capsys: pytest.CaptureFixture[str]

    async def types(self, *words: str) -> tuple[int, str, str]:
        """Return the exit code of a command, and its output."""
        self.capsys.readouterr()
        code = await asyncio.to_thread(run_command, list(words))
        return code, *self.capsys.readouterr()

    async def answer(self, *words: str) -> Any:
        """Return the JSON of a command that succeeds."""
        code, out, errors = await self.types(*words, "--json")
        assert code == 0, errors
        began = re.search(r"^\{", out, re.MULTILINE)  # the server's log is before and behind
        assert began is not None, out
        return json.JSONDecoder().raw_decode(out, began.start())[0]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    monkeypatch.setenv("VOLUNTEER_DEVICE", "cpu")
    monkeypatch.setenv("VOLUNTEER_THREADS", "1")
    (tmp_path / "person").mkdir()


@asynccontextmanager
async def ward(
    path: Path, capsys: pytest.CaptureFixture[str], text: str = LESSONS, build: Build = build_sums
) -> AsyncIterator[Ward]:
    """A member that has joined a coordinator with one run."""
    async with local_coordinator(path / "coordinator") as home:
        await home.start_run(text, build)
        listened = Listened(create_app(home.coordinator))
        config = uvicorn.Config(listened, lifespan="off", log_config=None)
        with listen("127.0.0.1", 0) as listener:
            async with accepting(config, listener):
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                member = Ward(home=home, url=url, listened=listened, capsys=capsys)
                key = home.coordinator.server.link().fingerprint
                await member.answer("join", f"{url}/join#key={key}", "--name", "Ann")
                yield member


async def test_a_copy_learns_from_own_data_and_nothing_is_sent(
    tmp_path: Path, machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    own, common = tmp_path / "person" / "volunteer" / "tiny-v0-mine", tmp_path / "common"
    async with ward(tmp_path, capsys) as member:
        added = await member.answer("data", "add", "tiny", str(diary(tmp_path / "a", 200)), "--yes")
        begun = len(member.listened.requests)
        tuned = await member.answer("export", "tiny", "--tune", "--passes", "2")
        plain = await member.answer("export", "tiny", "--version", "0", "--to", str(common))
        requests = member.listened.requests[begun:]
        code, _, errors = await member.types("export", "tiny", "--tune")
    assert (code, "is not empty: name a new folder" in errors) == (1, True)
    assert requests
    assert all(request.startswith("GET ") for request in requests)
    assert tuned["loss_after"] < tuned["loss_before"]
    assert (tuned["passes"], tuned["steps"]) == (2, 2 * -(-added["samples"] // BATCH))
    names = ["LICENSE.txt", "README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert tuned["path"] == str(own)
    assert tuned["files"] == plain["files"] == names == sorted(path.name for path in own.iterdir())
    assert (plain["tuned"], plain["loss_before"]) == (False, None)
    weights, others = (load_file(folder / "model.safetensors") for folder in (own, common))
    assert weights.keys() == others.keys()
    assert any(not np.array_equal(weights[name], others[name]) for name in weights)
    assert own.stat().st_mode & 0o077 == 0
    assert "may repeat" in (own / "README.md").read_text()
    assert "may repeat" not in (common / "README.md").read_text()
    assert [*(tmp_path / "machine").rglob("export-*")] == []  # the downloads


@pytest.mark.parametrize("measured", [True, False])
def test_a_person_reads_how_good_a_copy_is_and_to_keep_it_to_themselves(measured: bool) -> None:
    before, after = (3.0, 2.5) if measured else (None, None)
    copy = TakenHome(
        run="ward", version=7, path="/home/ann/x", files=(), tuned=True,
        loss_before=before, loss_after=after,
    )  # fmt: skip
    text = "\n".join(lines(copy))
    assert "version 7 of ward is in /home/ann/x" in text
    assert ("3.0000 before, 2.5000 now" in text) == measured
    assert "learnt from your own files and may repeat parts of them" in text
    common = "\n".join(lines(msgspec.structs.replace(copy, tuned=False)))
    assert "may repeat" not in common


async def test_what_cannot_be_had_is_a_sentence_before_any_training_and_no_folder(
    tmp_path: Path, machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"

    async def refused(words: str, code: int, sentence: str) -> None:
        outcome, _, errors = await member.types("export", *words.split(), "--to", str(to))
        assert (outcome, sentence in errors) == (code, True), errors
        assert not to.exists()

    async with ward(tmp_path, capsys) as member:
        await member.home.coordinator.runs.create(SHORT.replace('"tiny"', '"other"'))
        await member.home.coordinator.runs.start("other")
        await refused("tiny", 1, "`volunteer data add tiny PATH`")
        await refused("tinny --tune", 1, 'did you mean "tiny"')
        await refused("other --tune", 2, "its organiser exports it")
        await refused("tiny --tune --passes 0", 2, "--passes")
        await member.answer("data", "add", "tiny", str(diary(tmp_path / "a", 200)), "--yes")
        await refused("tiny --tune --format gltf", 2, 'a gpt model has no format "gltf"')
        await refused("tiny --tune --version 7", 1, "version 7")
        for chunk in (tmp_path / "machine").rglob("members/*/*/" + "?" * 64):
            chunk.write_bytes(bytes(chunk.stat().st_size))
        await refused("tiny --tune", 1, "are damaged")


async def test_a_member_is_led_from_the_invitation_to_the_first_task(
    tmp_path: Path, machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    own = diary(tmp_path / "a", 200)
    (own / "copy.txt").write_bytes(next(own.glob("*.txt")).read_bytes())
    (own / "blank.txt").touch()
    (own / "report.docx").write_bytes(b"PK")
    async with ward(tmp_path, capsys) as member:
        coordinator = member.home.coordinator
        (invite,) = await coordinator.volunteers.invites.create(["Ward 3B"])
        link = f"{member.url}/join#key={coordinator.server.link().fingerprint}+code={invite.code}"
        code, out, _ = await member.types("join", link, "--profile", "b")
        assert code == 0
        assert 'welcome, "Ward 3B"' in out
        assert "`volunteer data add tiny PATH --profile b`" in out
        code, out, errors = await member.types("data", "add", "tiny", str(own), "--profile", "b")
        assert (code, "nothing was added" in errors) == (2, True)
        for sentence in (
            "3 files were read",
            "left out: 1 exact copy",
            "left out: blank.txt: it is blank",
            ".docx 1 (save them as text: .txt)",
            "This is all that leaves the machine",
            "published under",
        ):
            assert sentence in out
        _, out, _ = await member.types("data", "list", "--profile", "b")
        assert "no data of your own yet" in out
        _, _, errors = await member.types("export", "tiny", "--profile", "b")
        assert "there are no data of yours for tiny on this machine" in errors
        code, out, _ = await member.types(
            "data", "add", "tiny", str(own), "--yes", "--profile", "b"
        )
        assert code == 0
        assert "added; now: `volunteer --profile b`, or `volunteer --no-ui --profile b`" in out
        code, _, errors = await member.types("data", "remove", "tinny", "--profile", "b")
        assert (code, 'did you mean "tiny"' in errors) == (1, True)


@pytest.mark.slow
async def test_adapters_are_taken_home_too(
    tmp_path: Path, machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    async with ward(tmp_path, capsys, ADAPTERS, talk(tmp_path / "example")) as member:
        await member.answer("data", "add", "tiny", str(dialogues(tmp_path / "a")), "--yes")
        for kind, name in (("peft", "adapter_model.safetensors"), ("safetensors", "config.json")):
            to = tmp_path / kind
            done = await member.answer(
                *("export", "tiny", "--tune", "--passes", "2"),
                *("--format", kind, "--to", str(to)),
            )
            assert done["loss_after"] < done["loss_before"]
            assert (to / name).exists()
