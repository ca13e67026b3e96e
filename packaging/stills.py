"""Stills of the volunteer's screen, as SVG, from a volunteer that joins and goes to work.

    coordinator demo --minutes 5 --data-dir /tmp/demo &
    python packaging/stills.py 'http://127.0.0.1:8765/join#key=...' --after 120 --out docs/images

It takes the first steps of a new machine as a person would, key by key, trains, and draws the pages
that the documents show. The pictures load nothing: the fonts that Textual would fetch from elsewhere
are left out, and the reader's own are used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from volunteer.tui.app import VolunteerApp

PAGES = {"1": "dashboard", "3": "device"}  # keys and names
SIZE = (120, 36)
PATIENCE_S = 120.0
FETCHED = re.compile(r"@font-face\s*\{[^}]*\}")
FONTS = "Fira Code", "'Fira Code', Menlo, Consolas, 'DejaVu Sans Mono'"


class Walk:
    """A person before the screen, who takes pictures."""

    def __init__(self, app: VolunteerApp, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot
        self.drawn: dict[str, str] = {}

    async def until(self, seen: Callable[[], bool]) -> None:
        for _ in range(round(PATIENCE_S / 0.1)):
            if seen():
                break
            await asyncio.sleep(0.1)
        else:
            raise SystemExit("what was waited for never came")
        await asyncio.sleep(1.0)  # until it is drawn

    def take(self, name: str) -> None:
        self.drawn[name] = alone(self.app.export_screenshot(title="volunteer"))

    async def first_steps(self, link: str, name: str) -> None:
        """From nothing to a machine that is ready to start, and starts."""
        from textual.widgets import Input

        from volunteer.tui.onboarding.join_step import JoinStep

        self.app.screen.query_one("#link", Input).value = link
        step = self.app.screen.query_one(JoinStep)
        await self.until(lambda: step.choice.server is not None)
        self.take("join")
        await self.press("enter", *name, "enter")
        self.take("limits")
        await self.press("n")
        await self.until(lambda: self.app.view.benchmark is not None)
        await self.until(lambda: self.app.view.benchmark is None)
        await self.press("enter", "enter")
        self.take("ready")
        await self.press("space")

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)

    async def pages(self) -> None:
        for key, page in PAGES.items():
            await self.press(key)
            await asyncio.sleep(2.0)
            self.take(page)


async def stills(link: str, name: str, after_s: float) -> dict[str, str]:
    """All pictures: the first steps, then each page `after_s` seconds later."""
    from volunteer.engine import Engine
    from volunteer.settings.settings import directories
    from volunteer.tui.app import VolunteerApp
    from volunteer.tui.appearance import Look

    engine = Engine(directories(), start_paused=True)
    working = asyncio.create_task(engine.run())
    app = VolunteerApp(engine.control, look=Look(page="onboarding"))
    async with app.run_test(size=SIZE) as pilot:
        walk = Walk(app, pilot)
        await walk.first_steps(link, name)
        await asyncio.sleep(after_s)
        await walk.pages()
        engine.stop("release")
        await working
    return walk.drawn


def alone(svg: str) -> str:
    """A picture that needs nothing from anywhere."""
    return FETCHED.sub("", svg).replace(f"font-family: {FONTS[0]}", f"font-family: {FONTS[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("link")
    parser.add_argument("--name", default="ada")
    parser.add_argument("--after", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stills-") as home:
        os.environ["VOLUNTEER_HOME"] = home
        drawn = asyncio.run(stills(options.link, options.name, options.after))
    options.out.mkdir(parents=True, exist_ok=True)
    for page, picture in drawn.items():
        path = options.out / f"{page}.svg"
        path.write_text(picture, encoding="utf-8")
        print(path, flush=True)
    os._exit(0)  # a training thread may still be at it


if __name__ == "__main__":
    main()
