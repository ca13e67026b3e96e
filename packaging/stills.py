"""Stills of the volunteer's screen, as SVG, from a volunteer that is at work.

    coordinator demo --minutes 3 --data-dir /tmp/demo &
    python packaging/stills.py --home /tmp/demo/volunteer-1 --after 120 --out docs/images

It attaches to the running instance as a second `volunteer` does, waits, and draws each page once. The pictures load nothing:
the fonts that Textual would fetch from elsewhere are left out, and the reader's own are used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from pathlib import Path

PAGES = ("dashboard", "runs", "device", "history", "leaderboard")
SIZE = (120, 36)
FETCHED = re.compile(r"@font-face\s*\{[^}]*\}")
FONTS = "Fira Code", "'Fira Code', Menlo, Consolas, 'DejaVu Sans Mono'"


async def stills(home: Path, after_s: float, pages: tuple[str, ...]) -> dict[str, str]:
    """Draw `pages` of the volunteer in `home`, `after_s` seconds from now."""
    drawn: dict[str, str] = {}
    os.environ["VOLUNTEER_HOME"] = str(home)
    from shared.clock import SystemClock
    from volunteer.channel import attach
    from volunteer.config import directories
    from volunteer.profile import Profile
    from volunteer.tui.app import VolunteerApp

    profile = Profile(directories().profile)
    async with attach(profile.endpoint, SystemClock()) as control:
        app = VolunteerApp(control)
        async with app.run_test(size=SIZE) as pilot:
            await asyncio.sleep(after_s)
            for number, page in enumerate(PAGES, start=1):
                if page not in pages:
                    continue
                await pilot.press(str(number))
                await asyncio.sleep(3.0)
                drawn[page] = alone(app.export_screenshot(title="volunteer"))
    return drawn


def alone(svg: str) -> str:
    """A picture that needs nothing from anywhere."""
    return FETCHED.sub("", svg).replace(f"font-family: {FONTS[0]}", f"font-family: {FONTS[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--after", type=float, default=90.0)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--pages", nargs="*", default=list(PAGES))
    options = parser.parse_args()
    drawn = asyncio.run(stills(options.home, options.after, tuple(options.pages)))
    options.out.mkdir(parents=True, exist_ok=True)
    for page, picture in drawn.items():
        path = options.out / f"{page}.svg"
        path.write_text(picture, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
