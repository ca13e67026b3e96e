"""Pictures of six pages, at three widths, in both themes.

    python -m pytest tests/e2e/pages/test_pictures.py --snapshot-update

writes them anew. They are kept at half their size in few colours, and compared block by block, so
that the edges of letters may differ from one Chromium to another, and a block of the page may not.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from PIL import Image, ImageChops, ImageStat
from sqlalchemy import Connection, update

from coordinator.database import evaluations, runs
from coordinator.database.tables.contributions import contributions
from tests.e2e.pages.test_browser import browser, pytestmark, told_game
from tests.e2e.pages.test_pages import merged
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.served import served

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

__all__ = ["pytestmark"]  # marks of the browser hold here, too

FOLDER = Path(__file__).parent / "__snapshots__"
WIDTHS = {"phone": (390, 844), "tablet": (768, 1024), "wide": (1280, 900)}
HEIGHT_MAX = 2600  # of a page that is kept
COLOURS = 16
BLOCK = 8  # of a kept picture
MEAN_MAX, BLOCK_MAX = 4.0, 90  # of 255: over a picture, and in one block
PAGES = {
    "home": "/",
    "run": "/runs/sums",
    "version": "/runs/sums/versions/5",
    "leaderboard": "/leaderboard",
    "volunteer": "/volunteers/Mia",
    "join": "/join",
}
FILE = (
    'description = "A language model that learns to add, from nothing but examples."\n'
    'licence = "CC-BY-4.0"\n' + RUN.replace('"tiny"', '"sums"') + "[stop]\nversions = 12\n"
)
STORY = (
    "e7 s pls u q9  i plu3",
    "3 plus plus 3 is is 1",
    "7 plus 7 is 4;\n8 plus 8 is 16;",
    "21 plus 21 is 42;\n22 plus 22 is 44;\n23 plus 23 is 46;",
)
FONTS = """
html, button { font-family: "DejaVu Sans", sans-serif !important }
pre, code, kbd { font-family: "DejaVu Sans Mono", monospace !important }
"""


@contextlib.asynccontextmanager
async def exhibition(tmp_path: Path) -> AsyncIterator[str]:
    """Serve a run whose figures, samples and times are the same each time; its address."""
    about = {"name": "Hillside school", "contact": "ann@example.org"}
    async with local_coordinator(tmp_path, **about) as home:
        run = await merged(home, 7, FILE)

        def draw(conn: Connection) -> None:
            run_id = runs.by_name(conn, run).id
            for version in range(8):
                told = told_game() if version == 5 else STORY[version // 2]
                loss = 1.6 + 4.1 * 0.72**version
                evaluations.set_evaluation(conn, run_id, version, sample=told, loss=loss)
            conn.execute(update(contributions).values(train_s=4000.0))

        await home.coordinator.db.write(draw)
        async with served(home, ticking=False) as url:
            yield url


async def photograph(chromium: Browser, url: str, scheme: Literal["light", "dark"]) -> Any:
    """Yield the name and picture of each page at each width, as it is kept."""
    for size, (width, height) in WIDTHS.items():
        context = await chromium.new_context(
            bypass_csp=True, color_scheme=scheme, viewport={"width": width, "height": height}
        )
        page = await context.new_page()
        for name, path in PAGES.items():
            await page.goto(url + path)
            yield f"{name}-{size}-{scheme}", await pictured(page)
        await context.close()


async def pictured(page: Page) -> Image.Image:
    """Return a page without what differs from server to server: its keys, its hashes."""
    await page.add_style_tag(content=FONTS)
    changing = [page.locator(".qr"), page.locator("code.long")]
    shot = await page.screenshot(full_page=True, animations="disabled", mask=changing)
    found = Image.open(io.BytesIO(shot)).convert("RGB")
    found = found.crop((0, 0, found.width, min(found.height, HEIGHT_MAX)))
    half = found.resize((found.width // 2, found.height // 2), Image.Resampling.BOX)
    return half.quantize(COLOURS, dither=Image.Dither.NONE)


def difference(one: Image.Image, other: Image.Image) -> tuple[float, int]:
    """Return how much two pictures differ: in the mean, and in the block that differs most."""
    height = max(one.height, other.height)
    whole = []
    for each in (one, other):
        page = Image.new("L", (each.width, height))
        page.paste(each.convert("L"))
        whole.append(page.resize((each.width // BLOCK, height // BLOCK), Image.Resampling.BOX))
    change = ImageChops.difference(*whole)
    return ImageStat.Stat(change).mean[0], int(change.getextrema()[1])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_pages_look_as_they_did(
    tmp_path: Path, request: pytest.FixtureRequest, scheme: Literal["light", "dark"]
) -> None:
    anew = request.config.getoption("--snapshot-update")
    differ = []
    async with exhibition(tmp_path / "server") as url, browser() as chromium:
        async for name, picture in photograph(chromium, url, scheme):
            kept = FOLDER / f"{name}.png"
            if anew:
                FOLDER.mkdir(exist_ok=True)
                picture.save(kept, optimize=True)
                continue
            mean, most = difference(picture, Image.open(kept))
            if mean > MEAN_MAX or most > BLOCK_MAX:
                picture.save(tmp_path / f"{name}.png")
                differ.append(f"{tmp_path / name}.png: {mean:.1f} in the mean, {most} at most")
    assert not differ


def test_a_block_that_moved_is_seen_and_the_edge_of_a_letter_is_not() -> None:
    page = Image.new("L", (160, 400), 255)
    page.paste(0, (16, 16, 100, 20))
    smooth, moved = page.copy(), page.copy()
    smooth.paste(90, (16, 20, 100, 21))
    moved.paste(0, (16, 80, 140, 120))
    mean, most = difference(page, smooth)
    assert mean <= MEAN_MAX
    assert most <= BLOCK_MAX
    assert difference(page, moved)[1] > BLOCK_MAX
