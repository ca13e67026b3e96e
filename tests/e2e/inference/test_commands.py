"""The volunteer's commands around prompts, against a real server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import openai
import pytest

from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from shared.clock import SystemClock
from shared.protocol.accounts import ServerInfo
from shared.workloads.data.image_files import read_png
from tests.e2e.workloads.test_dcgan import RUN as DIGITS
from tests.e2e.workloads.test_dcgan import copied
from tests.support.answering import Answering, answering
from tests.support.counting_engine import expected
from tests.support.local_coordinator import RUN
from tests.tui.terminal import Terminal
from volunteer.account.profile_directory import Identity, Profile
from volunteer.cli import prompt_commands
from volunteer.cli.main import run_command
from volunteer.settings.settings import directories
from volunteer.tui.widgets.pictures import UPPER

Run = Callable[..., Awaitable[tuple[int, str, str]]]
SERVE = '[serve]\nfree_tokens_per_day = 20\n[serve.chat]\nuser = "Q: {content} "\nreply = "A:"\n'


async def identity(house: Answering) -> Identity:
    server: ServerInfo = await house.coordinator.server.info()
    return Identity(
        url=house.url,
        tls_pin="",
        public_key=server.public_key,
        fingerprint=server.fingerprint,
        server=server.name,
        volunteer_id=house.ann.volunteer_id,
        worker_id=house.ann.worker_id,
        secret=house.ann.secret,
        nickname="Ann",
        registered=True,
    )


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Answering]:
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "home"))
    async with answering(tmp_path / "house", RUN + SERVE) as made:
        Profile(directories().profile).use(await identity(made))
        yield made


@pytest.fixture
def run(house: Answering, capsys: pytest.CaptureFixture[str]) -> Run:
    async def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(run_command, list(words))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


async def test_generate_says_the_text_and_its_price(house: Answering, run: Run) -> None:
    asked = ("generate", "tiny", "hello", "--seed", "2", "--max-tokens", "9")
    text = expected("hello", 2, 9)
    code, out, err = await run(*asked)
    assert (code, out.strip()) == (0, text)
    assert "5 tokens in, 9 out: 0.000000 credits" in err  # of the free quota
    code, out, err = await run(*asked, "--stream")
    assert out.strip() == text
    assert "credits" in err
    assert "0.000000" not in err
    code, out, _ = await run(*asked, "--json")
    said = json.loads(out)
    assert (said["text"], said["usage"]["completion_tokens"]) == (text, 9)
    code, out, _ = await run("usage")
    assert sorted("free" in line for line in out.splitlines()[1:]) == [False, False, True]
    await house.sound()


async def test_generate_of_an_image_run_writes_or_draws_a_picture(
    house: Answering, run: Run, tmp_path: Path
) -> None:
    inside = house.coordinator
    await inside.datasets.add(copied)
    await inside.runs.create(DIGITS)
    await inside.runs.start("digits")
    engine = BuiltinEngine(inside.db, SystemClock(), inside.blobs, ProcessLimits(threads=1))
    inside.answers.connect(engine)
    try:
        path = tmp_path / "a.png"
        code, _, err = await run("generate", "digits", "--seed", "3", "--output", str(path))
        assert code == 0, err
        assert "1 picture: 0.0" in err
        code, out, _ = await run("generate", "digits", "--seed", "3", "--json")
        said = json.loads(out)
        assert read_png(base64.b64decode(said["images"][0])).ndim == 2
        assert said["usage"]["cost_micro"] > 0
        command = [sys.executable, "-m", "volunteer", "generate", "digits", "--seed", "3"]
        drawn = await asyncio.to_thread(in_a_terminal, command)
        assert UPPER in drawn
        piped = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert (await piped.communicate())[0] == path.read_bytes()
        async with house.client() as client:
            reply = await client.images.generate(model="digits", prompt="seven", n=2)
            assert len(reply.data or ()) == 2
        code, _, err = await run("generate", "tiny", "x", "--output", str(path))
        assert "leave --output out" in err
        assert code != 0
    finally:
        await engine.close()
    rows = (await house.ann.get("/me/usage")).json()
    assert {row["kind"] for row in rows} == {"image"}
    await house.sound()


def in_a_terminal(command: list[str]) -> str:
    with Terminal(command) as terminal:
        assert terminal.ended() == 0
        return terminal.text


async def test_generate_reads_standard_input(
    house: Answering, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("käse".encode())))
    code, out, _ = await run("generate", "tiny", "--seed", "1", "--max-tokens", "3")
    assert (code, out.strip()) == (0, expected("käse", 1, 3))


async def test_chat_uses_the_runs_template(
    house: Answering, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n\n"))
    code, out, _ = await run("chat", "tiny", "--seed", "1", "--max-tokens", "4")
    assert (code, out.strip()) == (0, expected("Q: Why? A:", 1, 4))
    async with house.client() as client:
        card = (await client.models.retrieve("tiny")).model_dump()
    assert "the run's own template" in card["description"]


async def test_a_long_chat_forgets_its_beginning_and_goes_on(
    house: Answering, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{number} and {'more ' * 30}" for number in range(9)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, ""])))
    code, _, err = await run("chat", "tiny", "--max-tokens", "4")
    assert (code, err.count("tokens in, 4 out")) == (0, len(lines)), err
    assert "the beginning of the talk no longer fits the model" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 5000 + "\nWhy?\n\n"))
    code, _, err = await run("chat", "tiny", "--max-tokens", "4")
    assert (code, "shorten it" in err) == (2, True)
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 5000 + "\nWhy?\n\n"))
    monkeypatch.setattr(prompt_commands, "at_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: sys.stdin.readline())
    code, out, err = await run("chat", "tiny", "--seed", "1", "--max-tokens", "4")
    assert (code, out.strip()) == (0, expected("Q: Why? A:", 1, 4))
    assert "shorten it" in err


async def test_chat_says_at_a_terminal_what_it_costs_and_how_it_ends(
    house: Answering, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    monkeypatch.setattr(prompt_commands, "at_terminal", lambda: True)
    code, _, err = await run("chat", "tiny")
    assert code == 0
    assert "tiny: " in err
    assert "credits for a thousand tokens; an empty line ends it" in err
    code, _, err = await run("chat", "nope")
    assert code != 0
    assert 'there is no model "nope": `volunteer runs`' in err


@pytest.mark.parametrize("days", ["nan", "inf", "0", "-1", "1e9"])
async def test_a_key_without_an_end_is_not_made_by_mistake(run: Run, days: str) -> None:
    code, _, err = await run("key", "create", f"--days={days}")
    assert code == 2
    assert "--days" in err
    assert "laptop" not in (await run("key", "list"))[1]


async def test_a_key_is_made_listed_used_and_revoked(house: Answering, run: Run) -> None:
    code, out, err = await run("key", "create", "laptop", "--run", "tiny", "--days", "2")
    made = out.strip()
    assert (code, made[:3]) == (0, "vk-")
    assert "not shown again" in err
    async with house.client(made) as client:
        await client.completions.create(model="tiny", prompt="x", max_tokens=1)
    _, out, _ = await run("key", "list")
    line = next(line for line in out.splitlines() if "laptop" in line)
    assert made not in out
    assert made[:10] in line
    code, out, _ = await run("key", "revoke", line.split()[0])
    assert (code, out.strip()) == (0, f"key {line.split()[0]} is revoked")
    async with house.client(made) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_credits_are_given(house: Answering, run: Run) -> None:
    code, out, _ = await run("give", "Bob", "2.5")
    assert code == 0
    assert out.startswith("Bob got 2.50 credits; you have ")
    code, out, _ = await run("give", "Bob", "0.0004")
    assert (code, out[:24]) == (0, "Bob got 0.0004 credits; ")
    code, _, err = await run("give", "Bob", "999.0000004")
    assert (code, "credits to give, not 999.00" in err) == (1, True)
    code, _, err = await run("give", "Nobody", "1")
    assert code == 1
    assert 'there is no volunteer "Nobody"' in err
    assert (await run("give", "Bob", "-1"))[0] == 2


@asynccontextmanager
async def without_replies_to(path: bytes, url: str) -> AsyncIterator[str]:
    """Yield the address of a server whose replies to requests for `path` are all lost."""
    port = int(url.rpartition(":")[2])
    serving = set[asyncio.Task[None]]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer), closing(outer):
            while request := await reader.read(1 << 16):
                outer.write(request)
                reply = await inner.read(1 << 16)
                if path in request:
                    return
                writer.write(reply)

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(carry(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def test_a_gift_typed_again_after_a_lost_reply_is_made_once(
    house: Answering, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volunteer.net.api.ASK_S", 0.5)
    profile = Profile(directories().profile)
    account = await identity(house)
    before = (await house.balances()).earned_micro
    async with without_replies_to(b"/me/give", house.url) as url:
        profile.use(msgspec.structs.replace(account, url=url))
        code, out, _ = await run("give", "Bob", "2.5")
    assert (code, out) == (75, "")
    profile.use(account)
    code, out, err = await run("give", "Bob", "2.5")
    assert (code, out[:19]) == (0, "Bob got 2.50 credit")
    assert "paid only once" in err
    assert (await house.balances()).earned_micro == before - 2_500_000
    code, _, err = await run("give", "Bob", "2.5")  # a second gift, meant as such
    assert (code, err) == (0, "")
    assert (await house.balances()).earned_micro == before - 5_000_000


async def test_refusals_are_sentences(house: Answering, run: Run) -> None:
    code, _, err = await run("generate", "tinny", "x")
    assert (code, 'did you mean "tiny"' in err) == (1, True)
    code, _, err = await run("generate", "tiny", "x", "--max-tokens", "9999")
    assert (code, "at most" in err or "fit" in err) == (2, True)


async def test_a_run_that_nobody_may_ask(tmp_path: Path) -> None:
    nobody = RUN + '[serve]\nwho = "nobody"\n'
    async with answering(tmp_path, nobody) as house, house.client() as client:
        assert [card async for card in client.models.list()] == []
        with pytest.raises(openai.PermissionDeniedError, match="nobody may ask"):
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)


async def test_a_text_run_draws_no_pictures(house: Answering) -> None:
    async with house.client() as client:
        with pytest.raises(openai.BadRequestError, match="writes text: volunteer generate"):
            await client.images.generate(model="tiny", prompt="x")
    assert (await house.balances()).held_micro == 0
