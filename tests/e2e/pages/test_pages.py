"""The public page: all that it shows, and what it keeps to itself."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import html
import re
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from safetensors.numpy import load
from sqlalchemy import Connection, update

from coordinator.admin.command import NameRequest
from coordinator.admin.runs import show
from coordinator.database import evaluations, runs, versions
from coordinator.database.tables.contributions import contributions
from coordinator.database.volunteers import set_volunteer
from coordinator.http.app import create_app
from shared.workloads.data.image_files import read_png
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator
from tests.support.rounds import MergeRounds

NASTY = "<script>alert(1)</script>\u202egnp.exe\x07"


def text(answer: httpx.Response) -> str:
    """Words of a page as a reader without scripts has them."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", answer.text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def hide(conn: Connection, who: str) -> None:
    """Hide a nickname, as the request of the volunteer's program does."""
    set_volunteer(conn, who, public=False)


async def merged(home: LocalCoordinator, rounds: int = 2, file: str = RUN) -> str:
    """A run with versions; its name."""
    run = await home.start_run(file)
    assert await home.coordinator.evaluation.evaluate_next()
    workers = (await home.join("Mia"), await home.join("Bob"))
    for number in range(rounds):
        for place, worker in enumerate(workers):
            await worker.work(seed=10 * number + place)
        assert await home.coordinator.merger.merge_if_due(1)
        await home.clock.advance(3)
        await home.coordinator.evaluation.evaluate_next()
    return run


async def test_a_run_is_shown_as_its_organiser_sees_it(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, name="Hillside school") as home:
        run = await merged(home)
        async with home.client() as client:
            answer = await client.get(f"/runs/{run}")
        assert answer.status_code == 200
        said = text(answer)
        shown = await show.run(
            home.coordinator, NameRequest(name=run)
        )  # what `run show --json` prints
        info = msgspec.to_builtins(shown.run)
        assert "Hillside school" in said
        assert f"Version {info['version']} " in said
        assert f"{info['loss']:.4g}" in said
        assert f"from {info['loss_first']:.4g}" in said
        assert f"At work {info['workers']} machines" in said
        assert "Contributions 4" in said
        assert "Mia" in said
        assert "Bob" in said
        for version in range(info["version"] + 1):
            assert f'/runs/{run}/versions/{version}"' in answer.text


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def test_every_page_needs_no_script_no_cookie_and_nobody_else(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home)
        paths = ["/", "/join", "/leaderboard", "/leaderboard?window=day", "/volunteers/Mia"]
        paths += [f"/runs/{run}", f"/runs/{run}/versions/1"]
        async with home.client() as client:
            for path in paths:
                answer = await client.get(path)
                assert answer.status_code == 200, path
                policy = answer.headers["content-security-policy"]
                assert policy == POLICY
                assert "set-cookie" not in answer.headers
                assert not re.search(r"<script>|<style|\sstyle=|\son[a-z]+=", answer.text), path
                for address in re.findall(r'(?:src|href)="([^"]*)"', answer.text):
                    assert address.startswith(("/", "#")), (path, address)
                    if address.startswith("/"):
                        there = await client.get(html.unescape(address))
                        assert there.status_code == 200, (path, address)


async def test_a_private_run_is_told_from_none_by_nobody(tmp_path: Path) -> None:
    hidden = RUN.replace('"tiny"', '"secret"') + "[page]\nvisible = false\n"
    async with local_coordinator(tmp_path) as home:
        await merged(home, file=hidden)
        async with home.client() as client:
            for path in ("", "/versions/1", "/versions/1/sample.png", "/share.png", "/events"):
                there = await client.get(f"/runs/secret{path}")
                missing = await client.get(f"/runs/secreX{path}")
                assert there.status_code == missing.status_code == 404
                assert there.text.replace("secret", "secreX") == missing.text
            for path in ("/", "/runs/secrt", "/leaderboard", "/volunteers/Mia"):
                answer = await client.get(path)
                assert "secret" not in answer.text
                assert "Mia" not in answer.text.replace('"Mia"', "").replace("&#34;Mia&#34;", "")


async def test_a_shared_link_has_the_picture_of_its_run(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home)
        async with home.client() as client:
            for path in ("/", f"/runs/{run}", f"/runs/{run}/versions/1"):
                page = (await client.get(path)).text
                address = re.findall(r'property="og:image" content="([^"]*)"', page)
                assert len(address) == 1
                assert address[0].endswith(f"/runs/{run}/share.png")
                assert 'name="twitter:card" content="summary_large_image"' in page
            for path in ("/join", "/leaderboard"):  # pages about no run
                assert "og:image" not in (await client.get(path)).text
            picture = await client.get(f"/runs/{run}/share.png")
            again = await client.get(
                f"/runs/{run}/share.png", headers={"if-none-match": picture.headers["etag"]}
            )
        assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")
        assert picture.headers["cache-control"] == "public, max-age=60"
        assert (again.status_code, again.content) == (304, b"")
        assert read_png(picture.content).shape == (630, 1200, 3)


async def test_a_draft_is_nobodys_business(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await merged(home)
        await home.coordinator.runs.create(RUN.replace('"tiny"', '"plans"'))
        async with home.client() as client:
            assert (await client.get("/runs/plans")).status_code == 404
            assert (await client.get("/runs/tiny")).status_code == 200
            for path in ("/", "/leaderboard", "/volunteers/Mia"):
                answer = await client.get(path)
                assert answer.status_code == 200
                assert "plans" not in answer.text


@pytest.mark.parametrize(
    ("said", "status"), [("", 404), ("[page]\nvisible = true\n", 200)], ids=["silent", "visible"]
)
async def test_a_server_by_invitation_shows_what_was_said_to_be_visible(
    tmp_path: Path, said: str, status: int
) -> None:
    async with local_coordinator(tmp_path, invite_only=True) as home:
        run = await home.start_run(RUN + said)
        async with home.client() as client:
            assert (await client.get(f"/runs/{run}")).status_code == status
            join = text(await client.get("/join"))
            assert "by invitation" in join
            assert "volunteer join 'LINK'" in join


async def test_an_open_server_says_how_to_join(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, open=True) as home, home.client() as client:
        answer = await client.get("/join")
        link = home.coordinator.server.link()
        assert f"volunteer join '{link.url}/join#key=" in text(answer)
        assert 'aria-label="QR code of the join link"' in answer.text


async def test_a_link_to_any_page_unfurls_and_robots_find_their_rules(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home, 1)
        async with home.client() as client:
            for path in ("/", "/join", "/leaderboard", f"/runs/{run}", f"/runs/{run}/versions/1"):
                said = re.search(
                    r'property="og:description" content="([^"]*)"', (await client.get(path)).text
                )
                assert said is not None, path
                assert len(said[1]) > 20, path
            assert (await client.get("/favicon.ico")).headers["content-type"] == "image/svg+xml"
            assert "Disallow: /api/" in (await client.get("/robots.txt")).text


async def test_other_sites_may_read_the_figures_of_public_runs_alone(tmp_path: Path) -> None:
    hidden = RUN.replace('"tiny"', '"secret"') + "[page]\nvisible = false\n"
    async with local_coordinator(tmp_path, name="Hillside school") as home:
        run = await merged(home)
        await home.coordinator.runs.create(hidden)
        async with home.client() as client:
            answer = await client.get("/figures.json")
            page = await client.get("/")
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-origin" not in page.headers
        figures = answer.json()
        assert figures["server"] == "Hillside school"
        (row,) = figures["runs"]
        assert (row["name"], row["state"], row["version"]) == (run, "running", 2)
        assert (row["accepted"], row["refused"], row["standstill"]) == (4, 0, "")
        assert row["url"].endswith(f"/runs/{run}")


async def test_versions_that_are_made_fast_share_a_line(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home, 12)
        async with home.client() as client:
            page = await client.get(f"/runs/{run}")
            first = await client.get("/")
        assert re.search(r"10 versions in \d+:?\d* \w+, from 3 to 12\.", text(page))
        assert page.text.count('scope="row"><a href="/runs/tiny/versions/') <= 2
        assert "Newest result: version 12 of tiny" in text(first)


async def test_only_a_run_that_needs_somebody_asks_for_it(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await home.start_run()
        async with home.client() as client:
            assert "Be the first" in text(await client.get(f"/runs/{run}"))
            await home.coordinator.runs.stop(run)
            await home.clock.advance(2.0)
            ended = await client.get(f"/runs/{run}")
        assert 'class="button" href="/join"' not in ended.text


async def test_errors_are_pages(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await home.start_run()
        async with home.client() as client:
            for path, words in (
                ("/runs/tinny", 'did you mean "tiny"?'),
                (f"/runs/{run}/versions/77", "no version 77"),
                (f"/runs/{run}/versions/x", "no such version"),
                ("/volunteers/Nobody", 'no volunteer "Nobody"'),
                ("/static/../app.py", ""),
                ("/static/page.txt", "no such file"),
            ):
                answer = await client.get(path, headers={b"accept": b"\xff;q=9,*/*;q=x"})
                assert answer.status_code == 404
                assert words in text(answer)
            assert (await client.get("/api/v1/nothing")).json()["code"] == "not_found"


@pytest.mark.parametrize("licence", ["CC0-1.0", "all rights reserved"])
async def test_a_model_is_given_where_its_licence_gives_it(tmp_path: Path, licence: str) -> None:
    file = RUN.replace("workload", f'licence = "{licence}"\nworkload', 1)
    async with local_coordinator(tmp_path) as home:
        run = await merged(home, 1, file)
        address = f"/runs/{run}/versions/1/model.safetensors"
        async with home.client() as client:
            page = await client.get(f"/runs/{run}")
            version = await client.get(f"/runs/{run}/versions/1")
            got = await client.get(address)
            head = await client.head(address)
            begun = await client.get(address, headers={"range": "bytes=0-99"})
            whole = await client.get(
                address, headers={"range": "bytes=100-", "if-range": begun.headers.get("etag", "")}
            )
            other = await client.get(
                address, headers={"range": "bytes=100-", "if-range": '"another"'}
            )
            beyond = await client.get(address, headers={"range": "bytes=99999999-"})
            row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, run))
            made = await home.coordinator.db.read(lambda conn: versions.get(conn, row.id, 1))
            prune = partial(evaluations.set_evaluation, run_id=row.id, version=1, pruned=True)
            await home.coordinator.db.write(prune)
            gone = await client.get(address)
    free = licence == "CC0-1.0"
    assert [address in answer.text for answer in (page, version)] == [free, free]
    assert ("load_file(" in text(version)) == free
    assert made.published_sha256 in text(version)  # as before
    if not free:
        assert (got.status_code, "licence" in text(got)) == (404, True)
        return
    assert (gone.status_code, "are gone" in text(gone)) == (404, True)
    assert hashlib.sha256(got.content).hexdigest() == made.published_sha256
    assert load(got.content)
    assert int(head.headers["content-length"]) == len(got.content)
    assert (begun.status_code, whole.status_code) == (206, 206)
    assert begun.headers["content-range"] == f"bytes 0-99/{len(got.content)}"
    assert begun.content + whole.content == other.content == got.content
    assert (beyond.status_code, beyond.content) == (416, b"")


async def test_one_address_leaves_room_for_the_downloads_of_others(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home, 1, RUN.replace("workload", 'licence = "CC0-1.0"\nworkload', 1))
        path = f"/runs/{run}/versions/1/model.safetensors"
        app, statuses, reading = create_app(home.coordinator), list[int](), asyncio.Event()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await reading.wait()

        async def receive() -> MutableMapping[str, Any]:
            await reading.wait()
            return {"type": "http.disconnect"}

        def download(address: str) -> asyncio.Future[None]:
            """Fetch the weights from an address, and read none of them until told."""
            scope = {
                "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
                "root_path": "", "scheme": "http", "query_string": b"", "headers": [],
                "client": (address, 1), "server": ("here", 80), "http_version": "1.1",
            }  # fmt: skip
            return asyncio.ensure_future(app(scope, receive, send))

        going = [download(f"203.0.113.{n}") for n in (5, 5, 5, 6)]
        while len(statuses) < len(going):
            await asyncio.sleep(0.01)
        reading.set()
        await asyncio.gather(*going)
    assert sorted(statuses) == [200, 200, 200, 503]


async def test_rates_by_address_hold_for_the_page(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, rate_ip="3/minute") as home:
        async with home.client() as client:
            codes = [(await client.get("/join")).status_code for _ in range(5)]
        assert codes[0] == 200
        assert codes[-1] == 429


async def test_who_hides_is_gone_at_once(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home)
        async with home.client() as client:
            assert (await client.get("/volunteers/Mia")).status_code == 200
            mia = await home.coordinator.volunteers.public("Mia")
            await home.coordinator.db.write(lambda conn: hide(conn, mia[0]))
            home.coordinator.volunteers._board.show(mia[0], False)
            await home.clock.advance(1.0)
            gone = await client.get("/volunteers/Mia")
            never = await client.get("/volunteers/Mix")
            assert gone.status_code == 404
            assert text(gone).replace("Mia", "Mix") == text(never)
            for path in (f"/runs/{run}", "/leaderboard"):
                assert "Mia" not in text(await client.get(path))


async def test_who_is_renamed_is_shown_by_the_new_name(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await merged(home)
        async with home.client() as client:
            mia, _ = await home.coordinator.volunteers.public("Mia")
            assert "Mia" in text(await client.get("/volunteers/Mia"))
            await home.coordinator.volunteers.rename(mia, "Zoe")
            assert "Mia" not in text(await client.get("/volunteers/Zoe"))
            await home.clock.advance(1.0)
            assert "Mia" not in text(await client.get("/leaderboard"))


async def test_a_volunteers_page_has_marks_that_count_days_in_a_row(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await home.start_run()
        workers = (await home.join("Mia"), await home.join("Bob"))
        history = MergeRounds(home, run, workers, lambda: 0.0)
        for day in range(3):
            await history.round(10 * day)
        day_s = 86_400.0

        def spread(conn: Connection) -> None:  # as if decided on the 1st, the 3rd and the 4th day
            for number, day in enumerate((0, 2, 3)):
                one = contributions.c.version == number + 1
                at = 1_700_000_000.0 + day * day_s
                conn.execute(update(contributions).where(one).values(decided_at=at))

        await home.coordinator.db.write(spread)
        async with home.client() as client:
            said = text(await client.get("/volunteers/Mia"))
        assert "Since 2023-11-14 22:13 UTC this volunteer lent" in said


async def test_what_others_wrote_stays_text(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, name="A <b>bold</b> name") as home:
        quoted = msgspec.json.encode(NASTY).decode()
        run = await merged(home, file=f"description = {quoted}\ncontact = {quoted}\n" + RUN)

        def draw(conn: Connection) -> None:
            row = runs.by_name(conn, run)
            evaluations.set_evaluation(conn, row.id, 1, sample=f"def f():\n\tx{NASTY}")

        await home.coordinator.db.write(draw)
        await home.clock.advance(2.0)
        async with home.client() as client:
            for path in ("", "/versions/1"):
                answer = await client.get(f"/runs/{run}{path}")
                assert "<script>alert" not in answer.text
                assert "<b>bold" not in answer.text
                assert "\u202e" not in answer.text
                assert "\x07" not in answer.text
            page = await client.get(f"/runs/{run}/versions/1")
            assert "def f():\n    x&lt;script&gt;" in page.text


async def test_a_page_is_made_once_a_second_for_everybody(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home)
        async with home.client() as client:
            plain = await client.get(f"/runs/{run}", headers={"accept-encoding": "identity"})
            tag = plain.headers["etag"]
            again = await client.get(f"/runs/{run}", headers={"if-none-match": tag})
            assert (again.status_code, again.content) == (304, b"")
            async with client.stream("GET", f"/runs/{run}") as zipped:
                raw = b"".join([piece async for piece in zipped.aiter_raw()])
            assert gzip.decompress(raw) == plain.content
            head = await client.head(f"/runs/{run}")
            assert (head.content, head.headers["etag"]) == (b"", tag)
            for address in re.findall(r'"(/static/[^"]*)"', plain.text):
                kept = (await client.get(address)).headers["cache-control"]
                assert "immutable" in kept


async def test_a_page_follows_the_run(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await merged(home)
        async with home.client() as client:
            assert "Version 2 " in text(await client.get(f"/runs/{run}"))
            workers = (await home.join("Ann"), await home.join("Joe"))
            await MergeRounds(home, run, workers, lambda: 0.0).round(90)
            await home.clock.advance(2.0)
            said = text(await client.get(f"/runs/{run}"))
            assert "Version 3 " in said
            assert "Contributions 6" in said
            assert "Ann" in said


async def test_a_server_without_the_page_opens_join_links_only(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, public_page=False) as home:
        await home.start_run()
        async with home.client() as client:
            for path in ("/", "/runs/tiny", "/leaderboard"):
                assert (await client.get(path)).status_code == 404
            answer = await client.get("/join")
            assert "volunteer join 'http" in text(answer)
            assert "/leaderboard" not in answer.text
            assert 'href="/"' not in answer.text


async def test_a_volunteers_page_says_what_was_lent_and_when(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await home.start_run()
        workers = (await home.join("Mia"), await home.join("Bob"))
        history = MergeRounds(home, run, workers, lambda: 0.0)
        await history.round(0)
        await home.clock.advance(3 * 86_400.0)
        await history.round(10)
        async with home.client() as client:
            answer = await client.get("/volunteers/Mia")
        assert "of computing to 1 run: 2 contributions were found good." in text(answer)
        assert answer.text.count("<rect") == 2
        assert "1 contribution" in answer.text
