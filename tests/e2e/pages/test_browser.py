"""The page in a real browser: headless Chromium, where the system has one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from sqlalchemy import Connection

from coordinator.database import evaluations, runs
from shared.workloads.gomoku.match import _game_text
from shared.workloads.gomoku.rules import BoardRules
from tests.e2e.pages.test_pages import merged
from tests.support.local_coordinator import LocalCoordinator, Worker, local_coordinator
from tests.support.rounds import MergeRounds
from tests.support.served import served

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FINDINGS = """axe.run().then(found => found.violations.map(
    each => `${each.impact} ${each.id} ${each.nodes[0].html}`))"""
MOVES = (0, 6, 1, 7, 2, 8, 3)

playwright = pytest.importorskip("playwright.async_api")
axe = pytest.importorskip("axe_playwright_python.base")
expect = playwright.expect
expect.set_options(timeout=60_000)  # on a busy machine; what comes sooner is not waited for
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with playwright.async_playwright() as api:
        found = await api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield found
        finally:
            await found.close()


@contextlib.asynccontextmanager
async def looking(found: Browser, address: str) -> AsyncIterator[Page]:
    """A page in which nothing may go wrong: no error, no violation of the policy."""
    wrong: list[str] = []
    page = await found.new_page(viewport={"width": 390, "height": 844})
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    await page.goto(address)
    yield page
    assert not wrong
    await page.close()


def told_game() -> str:
    """The sample of a workload that plays."""
    return _game_text(BoardRules(size=6, win=4), MOVES)


async def drawn_game(home: LocalCoordinator, run: str, version: int) -> None:
    """Give a version the sample of a workload that plays."""

    def draw(conn: Connection) -> None:
        evaluations.set_evaluation(conn, runs.by_name(conn, run).id, version, sample=told_game())

    await home.coordinator.db.write(draw)


async def more(home: LocalCoordinator, run: str, workers: tuple[Worker, ...], seed: int) -> None:
    await MergeRounds(home, run, workers, lambda: 0.0).round(seed)


async def test_a_visitor_sees_a_version_arrive_and_goes_through_the_story(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium:
        run = await merged(home)
        workers = (await home.join("Ann"), await home.join("Joe"))
        async with served(home) as url, looking(chromium, f"{url}/runs/{run}") as page:
            version = page.locator('[data-live="version"]')
            assert await version.text_content() == "2"
            curve = page.locator("#curves .line")
            before = await curve.get_attribute("d")
            await more(home, run, workers, 50)
            await expect(version).to_have_text("3")
            await expect(curve).not_to_have_attribute("d", str(before))
            slider = page.get_by_label("Version", exact=True)
            await slider.focus()
            await page.keyboard.press("Home")
            await expect(page.locator("[data-now] figcaption")).to_have_text("Version 0")
            assert await slider.get_attribute("aria-valuetext") == "version 0"
            chart = page.get_by_role("slider", name="Held-out loss")
            await chart.focus()
            await page.keyboard.press("Home")
            said = await chart.get_attribute("aria-valuetext")
            assert said is not None
            assert said.startswith("version 0: ")
            assert await page.locator("[data-chart] output").first.text_content() == said
            assert not await page.locator("[aria-hidden=true] output").count()


@pytest.mark.slow
async def test_a_game_can_be_stepped_through(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium:
        run = await merged(home)
        await drawn_game(home, run, 2)
        address = f"/runs/{run}/versions/2"
        async with served(home) as url, looking(chromium, url + address) as page:
            lying = page.locator("svg[data-game] [data-ply][visibility=visible]")
            assert await lying.count() == len(MOVES)
            slider = page.get_by_role("slider", name="Move")
            await slider.focus()
            for left in (6, 5):
                await page.keyboard.press("ArrowLeft")
                assert await lying.count() == left
            assert await page.locator(".slider output").text_content() == "5: c6"


async def test_an_opened_join_link_is_a_command_to_copy(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium, served(home) as url:
        link = f"{url}/join#key=abcd-efgh+code=XYZ"
        async with looking(chromium, link) as page:
            await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            command = f"volunteer join '{link}'"
            assert await page.locator("[data-join]").text_content() == command
            joining = page.get_by_role("paragraph").filter(has=page.locator("[data-join]"))
            await joining.get_by_role("button", name="Copy").click()
            await page.get_by_role("button", name="Copied").wait_for()
            assert await page.evaluate("navigator.clipboard.readText()") == command
        async with looking(chromium, f"{url}/join#x=';rm -rf ~;$(id)`id`'") as page:
            shown = await page.locator("[data-join]").text_content()
            assert shown is not None
            assert not set(shown.removeprefix("volunteer join '").removesuffix("'")) & set(
                "';$()` "
            )


HEIGHT = "document.documentElement.scrollHeight"
WINDOWS = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) Chrome/140.0 Safari/537.36"
PHONE = "Mozilla/5.0 (Linux; Android 15; Pixel 9) Chrome/140.0 Mobile Safari/537.36"


async def test_the_way_in_is_one_line_on_a_small_window(tmp_path: Path) -> None:
    async with (
        local_coordinator(tmp_path, name="Hillside school") as home,
        browser() as chromium,
        served(home) as url,
        looking(chromium, f"{url}/join#key=abcd-efgh+code=XYZ") as page,
    ):
        assert await page.evaluate(HEIGHT) <= 1000
        assert await page.locator("[data-install]:visible").count() == 1
        line = await page.locator("[data-install]:visible").text_content()
        assert line is not None
        assert "volunteer[cpu] @ " in line
        await page.get_by_text("NVIDIA GPU").first.click()
        assert await page.locator("[data-install]:visible").count() == 1


async def test_the_way_in_is_short_for_windows_too(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium, served(home) as url:
        page = await chromium.new_page(user_agent=WINDOWS, viewport={"width": 390, "height": 844})
        await page.goto(f"{url}/join#key=abcd-efgh+code=XYZ")
        assert await page.evaluate(HEIGHT) <= 1000


async def test_a_phone_sends_the_link_to_a_computer(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium, served(home) as url:
        page = await chromium.new_page(user_agent=PHONE, viewport={"width": 390, "height": 844})
        await page.goto(f"{url}/join#key=abcd-efgh+code=XYZ")
        assert await page.evaluate(HEIGHT) <= 1000
        assert not await page.locator("[data-install]:visible").count()
        href = await page.get_by_role("link", name="Send me the link").get_attribute("href")
        assert href is not None
        assert href.endswith("%2Fjoin%23key%3Dabcd-efgh%2Bcode%3DXYZ")


async def test_a_first_visit_is_small(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium:
        run = await merged(home, rounds=6)
        async with served(home) as url:
            page = await chromium.new_page()
            session = await page.context.new_cdp_session(page)
            await session.send("Network.enable")
            sizes: list[float] = []
            session.on(
                "Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"])
            )
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            await page.goto(f"{url}/runs/{run}")
            await page.wait_for_load_state("load")
            assert len(asked) <= 6, asked
            assert all(address.startswith(url) for address in asked)
            assert sum(sizes) <= 100_000
            assert await page.context.cookies() == []
            await page.close()


async def test_everything_is_readable_without_a_script_and_fits_a_phone(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium:
        run = await merged(home)
        await drawn_game(home, run, 2)
        async with served(home) as url:
            context = await chromium.new_context(
                java_script_enabled=False, viewport={"width": 390, "height": 844}
            )
            page = await context.new_page()
            for path in ("/", f"/runs/{run}", f"/runs/{run}/versions/2", "/join", "/leaderboard"):
                await page.goto(url + path)
                wide = page.locator("html")
                box = await wide.bounding_box()
                assert box is not None
                assert box["width"] <= 390, path
            await page.goto(f"{url}/runs/{run}")
            for words in ("At work", "What it makes", "Join with your computer", "It trains while"):
                box = await page.get_by_text(words).first.bounding_box()
                assert box is not None
                assert box["y"] + box["height"] <= 844, words  # without scrolling
            await context.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
async def test_nothing_is_in_the_way_of_those_who_cannot_see_or_point(
    tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    script = axe.AXE_SCRIPT
    async with local_coordinator(tmp_path) as home, browser() as chromium:
        run = await merged(home)
        await drawn_game(home, run, 1)
        shown = ("/", f"/runs/{run}", f"/runs/{run}/versions/1", f"/runs/{run}/versions/2", "/join")
        async with served(home) as url:
            context = await chromium.new_context(
                color_scheme=scheme, viewport={"width": 390, "height": 844}
            )
            page = await context.new_page()
            session = await context.new_cdp_session(page)
            for path in (*shown, "/leaderboard", "/volunteers/Mia"):
                await page.goto(url + path)
                # Past the policy of the page, which allows no script but its own.
                await session.send("Runtime.evaluate", {"expression": script})
                asked = {"expression": FINDINGS, "awaitPromise": True, "returnByValue": True}
                reply = await session.send("Runtime.evaluate", asked)
                assert reply["result"]["value"] == [], path
            await context.close()


HEAD = b"HTTP/1.1 %s\r\nContent-Length: 5\r\nConnection: close\r\n%s\r\nsorry"
FAILURES = {
    "bad gateway": HEAD % (b"502 Bad Gateway", b""),
    "unavailable": HEAD % (b"503 Service Unavailable", b"Retry-After: 60\r\n"),
    "not found": HEAD % (b"404 Not Found", b""),
    "a page": HEAD % (b"200 OK", b"Content-Type: text/html\r\n"),
    "cut": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "silence": None,
}


class Gateway:
    """A proxy in front of a coordinator that passes everything on, or answers as it pleases."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.failure = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.failure:
                await reader.read(1)
                await self._fail(writer)
                return
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await asyncio.gather(_pump(reader, forth), _pump(back, writer))
            finally:
                forth.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort() if self.failure in ("", "cut") else writer.close()

    async def _fail(self, writer: asyncio.StreamWriter) -> None:
        answer = FAILURES[self.failure]
        if answer is None:
            await asyncio.Event().wait()
        else:
            writer.write(answer)
            await writer.drain()

    def fail(self, how: str) -> None:
        """Cut every connection; answer new ones in this way, "" as the coordinator does."""
        self.failure = how
        for task in self._tasks:
            task.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


@pytest.mark.slow
async def test_the_live_page_comes_back_after_any_answer(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home, browser() as chromium:
        run = await merged(home)
        workers = (await home.join("Ann"), await home.join("Joe"))
        async with served(home) as url:
            gateway = Gateway(int(url.rpartition(":")[2]))
            async with await asyncio.start_server(gateway.take, "127.0.0.1", 0) as server:
                address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/runs/{run}"
                page = await chromium.new_page()
                await page.clock.install()
                await page.goto(address)
                old, version = page.locator("[data-old]"), page.locator('[data-live="version"]')
                await expect(old).to_be_hidden()
                for number, failure in enumerate(FAILURES, start=3):
                    gateway.fail(failure)
                    async with asyncio.timeout(120):
                        while not await old.is_visible():
                            await page.clock.fast_forward(5_000)
                    assert "does not answer" in str(await old.text_content())
                    await more(home, run, workers, 50 + number)
                    gateway.fail("")
                    async with asyncio.timeout(120):
                        while await version.text_content() != str(number):
                            await page.clock.fast_forward(5_000)
                    await expect(old).to_be_hidden()
