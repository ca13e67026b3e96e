"""Every figure of a run's page, and of its live events, is what `run show --json` prints."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from sqlalchemy import Connection, update

from coordinator.database.tables.contributions import contributions
from coordinator.pages import templates
from shared.protocol.limits import process_on
from shared.text import credit, size, whole_percent
from shared.workloads.declaration import MEASURES
from tests.e2e.pages.test_pages import merged
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.served import served
from tests.support.server_process import command

FILE = (
    'description = "Sums & <b>more</b>"\nlicence = "CC-BY-4.0"\ncontact = "ann@example.org"\n'
    + RUN
    + """[stop]
versions = 12
"""
)
ROUNDS = 11


class Page:
    """A page as its reader has it: terms with their figures, tables, links, and all its words."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.words = plain(body)
        terms = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", body, re.DOTALL)
        self.terms = {plain(term): plain(value) for term, value in terms}

    def table(self, heading: str) -> list[list[str]]:
        """Return the cells of the first table behind a heading, row by row."""
        after = self.body.partition(f">{heading}</h2>")[2]
        rows = re.findall(r"<tr>(.*?)</tr>", after.partition("</table>")[0], re.DOTALL)
        return [
            [plain(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows
        ]

    def series(self) -> list[tuple[int, str]]:
        """Return the points of the curve of losses."""
        found = re.search(r'data-series="([^"]*)"', self.body)
        assert found is not None
        points = (point.split(":") for point in found[1].split())
        return [(int(point[0]), point[1]) for point in points]


def plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def lasted(conn: Connection) -> None:
    """Let every contribution have taken some time, which the clock of the test did not."""
    conn.execute(update(contributions).values(train_s=125.5))


def of_a_run(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The terms of a page and what they say, by what is known of a run."""
    yield "Model", f"gpt, {templates.amount(run['parameters'])} parameters"
    yield (
        "Trained on",
        run["dataset"] + (f" ({run['dataset_licence']})" if run["dataset_licence"] else ""),
    )
    yield "Licence of the model", run["licence"]
    whole = size(process_on("cpu", run["memory_bytes"]))
    needs = f"{whole} of memory, the program included, or {size(run['memory_bytes'])} of a GPU's"
    yield "A machine needs", needs
    yield "Contact", run["contact"]


async def test_a_page_and_its_events_say_what_run_show_prints(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        name = await merged(home, ROUNDS, FILE)
        await home.coordinator.db.write(lasted)
        token = str(home.coordinator.settings.admin_token_file)
        async with (
            served(home, ticking=False) as url,
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):
            page = Page((await client.get(f"/runs/{name}")).text)
            live = await first_event(client, f"/runs/{name}/events")
            where = ("--server", url, "--token-file", token)
            printed = await asyncio.to_thread(command, "run", "show", name, "--json", *where)
    shown = json.loads(printed.stdout)
    info, checks = shown["run"], shown["checks"]

    assert info["version"] == ROUNDS
    assert f"{name} {info['state']}" in page.words
    assert info["description"] in page.words
    assert page.terms["At work"] == f"{info['workers']} machines"
    measure = MEASURES[info["measure"]].capitalize()
    loss, first = templates.loss(info["loss"]), templates.loss(info["loss_first"])
    assert page.terms[measure] == f"{loss} from {first}"
    assert page.terms["Version"].split()[0] == str(info["version"])
    assert page.terms[info["items"].capitalize()] == templates.amount(info["tokens"])
    assert page.terms["Device time"] == templates.hours(checks["work_s"])
    good, refused = shown["contributions"]["good"], shown["contributions"]["refused"]
    assert good == 2 * ROUNDS
    assert page.terms["Contributions"] == f"{good:,}"
    assert page.terms["Checks of work"] == (
        f"every contribution is validated: {good:,} found good, {refused:,} refused"
    )
    for term, said in of_a_run(info):
        assert page.terms[term] == said

    assert info["standstill"] is None
    merging = info["merging"].partition(" or ")[0]
    assert f"Done {whole_percent(info['progress'])} % {merging}" in page.words
    said_live = {
        "state": info["state"], "version": str(info["version"]), "loss": loss,
        "workers": str(info["workers"]), "accepted": f"{good:,}",
        "items": templates.amount(info["tokens"]), "device": templates.hours(checks["work_s"]),
        "merging": merging, "standstill": "", "progress": str(whole_percent(info["progress"])),
    }  # fmt: skip
    assert live == said_live

    newest = shown["versions"][::-1][:10]
    rows = page.table("Newest versions")[1:]
    assert [(row[0], row[2]) for row in rows] == [
        (f"{v['version']} best" if v["best"] else str(v["version"]), templates.loss(v["loss"]))
        for v in newest
        if v["best"] or v is newest[0]  # they were made within seconds
    ]
    assert f"from {newest[-1]['version']} to {newest[0]['version']}." in page.words
    measured = [(v["version"], f"{v['loss']:.4g}") for v in shown["versions"] if v["loss"]]
    assert page.series() == measured

    bits, before = (templates.loss(info[name]) for name in ("bits", "bits_first"))
    assert f"do not depend on the tokenizer: {bits}, from {before}." in page.words

    leaders = page.table("Who was at work")[1:]
    assert leaders == [
        [
            str(row["rank"]), row["nickname"], credit(row["earned_micro"], 0),
            str(row["accepted"]), templates.hours(row["device_s"]),
        ]
        for row in shown["leaders"]
    ]  # fmt: skip
    assert {row["nickname"] for row in shown["leaders"]} == {"Mia", "Bob"}


async def first_event(client: httpx.AsyncClient, path: str) -> dict[str, str]:
    """Return the first state that a stream tells."""
    async with client.stream("GET", path) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return msgspec.json.decode(line.removeprefix("data: "), type=dict[str, str])
    raise AssertionError("the stream told nothing")
