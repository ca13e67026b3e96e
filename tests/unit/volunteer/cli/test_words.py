"""No command says a sentence in English where another language is spoken: all of them are typed in
a language of Greek letters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shared.errors import NotFound, Unreachable
from shared.protocol import endpoints
from shared.protocol.accounts import Benchmark, Device, LinkCode
from shared.protocol.endpoint import Endpoint
from shared.protocol.inference import (
    Given,
    ImageReply,
    ImageUsage,
    KeyInfo,
    ModelCard,
    NewKey,
    Usage,
    UsageRow,
)
from shared.protocol.transparency import LedgerEntry, Receipt, TreeHead
from shared.sentences import Sentence
from shared.workloads.declaration import Output
from tests.support.greek import in_english, pseudo
from tests.tui.scenes import ME
from volunteer.account.profile_directory import Identity, Profile
from volunteer.account.record_check import CheckedReceipt
from volunteer.cli import benchmark_command, receipt_commands, start
from volunteer.cli.main import run_command
from volunteer.cli.prompt_commands import _usage_cells
from volunteer.control.commands import Joined
from volunteer.control.status import Status
from volunteer.i18n import catalogue
from volunteer.i18n.catalogue import LanguageChoice, choose, use
from volunteer.net.prompt_api import Chunk
from volunteer.net.prompt_api import CompletionChoice as Piece
from volunteer.settings.settings import TABLE, directories

# Commands, options, lists of names, and what a model or an organiser wrote.
OTHERS = re.compile(
    r"^volunteer: |volunteer join '[^']*'|`[^`]*`|--[a-z-]+(?: NAME| VALUE)?|NAME=VALUE|"
    r"(?:benchmark|create), [a-z, ]+|"
    r"(?:schedule|play|gpt|pause|work|easy|mon|key|threads|workloads), [a-z_, -]+|"
    r'"[^"]*", "[^"]*"|once upon a time|Little Lab'
)
Said = Callable[..., set[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Speak Greek on a machine of a test's own, with a `systemctl` that does nothing."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "volunteer"))
    monkeypatch.setenv("VOLUNTEER_LANGUAGE", "xx")
    monkeypatch.setenv("VOLUNTEER_SANDBOX", "false")
    monkeypatch.setenv("VOLUNTEER_PRIORITY", "normal")
    monkeypatch.delenv("VOLUNTEER_JOIN", raising=False)
    monkeypatch.setattr(catalogue, "languages", lambda: ("en", "xx"))
    monkeypatch.setattr(catalogue, "load", lambda name: pseudo())
    yield tmp_path
    use(LanguageChoice())


@pytest.fixture
def said(home: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Type a command and return what it says in English."""

    def typed(*words: str, code: int = 0) -> set[str]:
        assert run_command([*words]) == code
        out = capsys.readouterr()
        assert (out.out + out.err).strip(), "it says nothing"
        text = (out.out + out.err).replace(str(home), "")
        return in_english(text, OTHERS)

    return typed


ALONE = [  # words, and the code they end with where nothing was joined
    ("benchmrk", 2),
    ("key revok", 2),
    ("--language xx status", 2),
    ("--no-iu", 2),
    ("usage --nothing", 2),
    ("give Bob", 2),
    ("give Bob much", 2),
    ("pause cpu now", 2),
    ("play g --level x", 2),
    ("--device", 2),
    ("--threads 1 --threads 2", 2),
    ("join", 2),
    ("join hello", 2),
    ("join http://example.org/join", 2),
    ("play tiny", 2),
    ("--set x", 2),
    ("", 2),
    ("--no-ui", 78),
    ("--no-ui --set threads=many", 2),
    ("--no-ui --set thread=2", 2),
    ("--no-ui --set qqqqqqqqq=2", 2),
    ("--no-ui --set metered=cheap", 2),
    ("--no-ui --set schedule=never", 2),
    ("--no-ui --set device_roles=cpu=cook", 2),
    ("--no-ui --set device=", 2),
    ("--no-ui --set idle_minutes=0", 2),
    ("status", 75),
    ("pause", 75),
    ("pause --for soon", 2),
    ("pause --until 25:00", 2),
    ("pause --for 2h --until 22:00", 2),
    ("stop", 75),
    ("receipts verify", 78),
    ("key list", 78),
    ("give Bob 0", 2),
    ("uninstall", 1),
    ("uninstall --json", 2),
    ("uninstall --yes", 0),
    ("service install", 0),
    ("service remove", 0),
    ("service install --system", 78),
]


@pytest.mark.parametrize(("words", "code"), ALONE, ids=[words for words, _ in ALONE])
def test_a_command_alone(said: Said, words: str, code: int) -> None:
    assert said(*words.split(), code=code) == set()


def test_the_help_of_every_setting(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["settings"]) == 0
    helps = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(helps) == len(TABLE.names)
    assert in_english("\n".join(helps), OTHERS) == set()


KEY = KeyInfo(
    id=3,
    name="n",
    prefix="vk_1",
    state="active",
    spent_micro=1_500_000,
    cap_micro=None,
    runs=("tiny",),
    created_at=0.0,
    expires_at=None,
)
ROW = UsageRow(
    id="x",
    at=0.0,
    model="tiny@3",
    kind="completion",
    key="",
    tokens_in=5,
    tokens_out=1200,
    cost_micro=7,
    free=False,
    latency_s=1.5,
    first_token_s=None,
)


def test_a_time_that_no_calendar_has_is_an_unknown_day() -> None:
    assert _usage_cells(ROW)[0] == "1970-01-01 00:00"
    assert _usage_cells(replace(ROW, at=1e300))[0] == "an unknown day"


class Answers:
    """Answers of a coordinator."""

    client = None

    def __init__(self) -> None:
        self.output: Output = "text"

    async def query(self, endpoint: Endpoint[Any], **args: Any) -> Any:
        return await self.call(endpoint, args)

    async def link_code(self) -> Any:
        return await self.call(endpoints.LINK)

    async def call(self, endpoint: Endpoint[Any], *told: Any, **options: Any) -> Any:
        card = ModelCard(
            id="tiny", created=0, owned_by="x", output=self.output, answered_by="volunteers"
        )
        return {
            endpoints.ME: ME,
            endpoints.VISIBILITY: None,
            endpoints.LINK: LinkCode(
                code="c", link="https://example.org/join#code=c", expires_at=0.0
            ),
            endpoints.KEY_CREATE: NewKey(key="vk_123", info=KEY),
            endpoints.KEYS: (
                KEY,
                replace(KEY, cap_micro=9, state="revoked"),
                replace(KEY, state="expired"),
            ),
            endpoints.KEY_REVOKE: replace(KEY, state="revoked"),
            endpoints.USAGE: (
                ROW,
                replace(ROW, kind="image", free=True),
                replace(ROW, latency_s=None),
            ),
            endpoints.GIVE: Given(to="Bob", amount_micro=2_500_000, left_micro=1),
            endpoints.MODEL: card,
            endpoints.IMAGES: ImageReply(created=0, data=(), usage=ImageUsage(cost_micro=5)),
        }[endpoint]


@pytest.fixture
def joined(home: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return the answers of a coordinator that this machine has joined."""
    answers = Answers()
    profile = Profile(directories().profile)
    profile.use(
        Identity(
            url="https://example.org",
            tls_pin="",
            public_key="ab" * 32,
            fingerprint="AB-CD",
            server="Little Lab",
            volunteer_id="a" * 32,
            worker_id="b" * 32,
            secret="c" * 64,
            nickname="Ann",
            registered=True,
        )
    )

    async def ask(directories: Any, question: Callable[[Any], Awaitable[Any]]) -> Any:
        return await question(answers)

    async def join(directories: Any, link: str, name: str) -> Joined:
        start._remark_proof_of_work(20, 0.0)
        return Joined(
            server="Little Lab",
            url="https://example.org",
            fingerprint="AB-CD",
            nickname="Ann",
            created=name == "Ann",
        )

    async def streamed(client: object, path: str, body: object) -> AsyncIterator[Chunk]:
        yield Chunk(
            choices=(Piece(text="once upon a time"),),
            usage=Usage(prompt_tokens=5, completion_tokens=9, total_tokens=14, cost_micro=3),
        )

    monkeypatch.setattr(start, "ask_coordinator", ask)
    monkeypatch.setattr(start, "join_now", join)
    monkeypatch.setattr("volunteer.net.prompt_api.stream_answer", streamed)
    return answers


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("join LINK", 0),
        ("join LINK --name Ann", 0),
        ("link", 0),
        ("key create", 0),
        ("key list", 0),
        ("key revoke 3", 0),
        ("usage", 0),
        ("give Bob 2.5", 0),
        ("generate tiny Once", 0),
        ("generate tiny Once --output x.png", 2),
        ("receipts accept", 0),
        ("receipts verify --offline", 0),
        ("name --show", 0),
        ("name", 0),
    ],
)
def test_a_command_of_an_account(joined: Answers, said: Said, words: str, code: int) -> None:
    assert said(*words.split(), code=code) == set()


def test_a_picture_that_is_none(joined: Answers, said: Said) -> None:
    joined.output = "image"
    assert said("generate", "tiny", "--seed", "3", code=2) == set()


def test_receipts(joined: Answers, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = LedgerEntry(
        id=1, key="k", kind="earn", run_id=1, contribution_id=7, memo="", at=0.0, moves=()
    )
    receipt = Receipt(
        volunteer="a" * 32,
        run="tiny",
        contribution=7,
        version=3,
        credits_micro=5,
        entry=entry,
        leaf=4,
        proof=(),
        tree=TreeHead(size=5, root="ab", at=0.0),
    )
    answer = replace(receipt, contribution=None, version=None)
    found = [CheckedReceipt(receipt=each, problem="") for each in (receipt, answer)]
    monkeypatch.setattr(receipt_commands, "_check_receipts", lambda identity, book: found)
    assert said("receipts", "verify", "--offline") == set()
    wrong = Sentence("it belongs to another account")
    found += [CheckedReceipt(receipt=each, problem=wrong) for each in (receipt, answer, None)]

    async def rewritten(*args: object) -> str:
        return Sentence("the coordinator no longer shows the record that it signed before")

    monkeypatch.setattr(receipt_commands, "_ask", rewritten)
    assert said("receipts", "verify", code=1) == set()
    for error in (
        NotFound(),
        Unreachable(Sentence("connection refused; is the coordinator running?")),
    ):

        async def away(*args: object, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(receipt_commands, "_ask", away)
        assert said("receipts", "verify", code=1) == set()


class Obedient:
    """A volunteer at work that does as it is told."""

    status = Status()

    async def do(self, command: object) -> None: ...


@pytest.mark.parametrize(
    "words",
    [
        "status",
        "pause",
        "pause cpu --for 1d",
        "pause --until login",
        "resume",
        "finish",
        "finish --then-stop",
        "stop",
        "stop --save",
    ],
)
def test_an_order_to_a_volunteer(said: Said, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    @asynccontextmanager
    async def attach(endpoint: Path, clock: object) -> AsyncIterator[Obedient]:
        yield Obedient()

    monkeypatch.setattr("volunteer.control.local_socket.attach", attach)
    assert said(*words.split()) == set()


def test_what_was_measured(home: Path) -> None:
    use(choose("xx"))
    broken = Device(
        id="cuda:0",
        kind="cuda",
        name="gpu",
        memory_bytes=1,
        usable=False,
        problem=Sentence("its loss cannot be right"),
    )
    result = Benchmark(device="cpu", fp32_flops=1e9, bf16_flops=1e9, step_flops=1e9)
    lines = benchmark_command._lines((broken,), [result])
    assert in_english("\n".join(lines), OTHERS) == set()


def test_machines_read_english(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["settings", "--json"]) == 0
    assert "Torch threads" in capsys.readouterr().out
    assert run_command(["pause", "--for", "soon", "--json"]) == 2
    assert "is not a time" in json.loads(capsys.readouterr().err)["error"]
