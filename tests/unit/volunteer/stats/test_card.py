"""The picture to show friends: well-formed, safe, and right about who did what."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.errors import NotFound
from shared.protocol import endpoints
from shared.protocol.endpoints import Endpoint
from shared.protocol.listings import LeaderRow
from shared.protocol.versions import BlobRef, VersionInfo
from shared.workloads.data.image_files import read_png, write_png
from tests.support.greek import in_english, pseudo
from tests.tui.scenes import AFTER, BEFORE, ME, RUN
from volunteer.i18n import catalogue
from volunteer.stats.card import CardFacts, card, card_facts, share_words
from volunteer.stats.card_data import Part, part

SVG = "{http://www.w3.org/2000/svg}"
FACTS = CardFacts(
    nickname="ada",
    server="Little Lab",
    run="stdlib-gpt",
    description="A small language model of Python's standard library.",
    version=41,
    mine=(3, 10, 17, 24, 31, 38),
    merged=24,
    device_s=86_400.0,
    points=tuple((v, 3.1 + 5.2 * math.exp(-v / 11)) for v in range(42)),
    before=(0, BEFORE),
    after=(41, AFTER),
)


def words(svg: str) -> str:
    return " ".join(
        "".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")
    )


def version(number: int, loss: float | None, mine: int = 0, sample: str = "") -> VersionInfo:
    return VersionInfo(
        version=number,
        kind="merge",
        created_at=0,
        contributions=2,
        global_step=number,
        tokens=0,
        published_sha256="",
        loss=loss,
        sample=sample,
        mine=mine,
    )


def test_it_says_what_was_given() -> None:
    text = words(card(FACTS))
    for said in (
        "ada",
        "contributed to 14 % of the 41 versions of stdlib-gpt",
        "24:00 h of computing given",
        "24 contributions merged",
        "8.300 → 3.225 Loss",
        "before, version 0",
        "now, version 41",
    ):
        assert said in text


def test_it_speaks_the_language_of_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_current", pseudo())
    others = re.compile("Little Lab|VOLUNTEER")
    seen = replace(FACTS, before=None, after=None, description="")
    for facts in (
        replace(seen, drawn_before=(0, b""), drawn_after=(4, b"")),
        replace(seen, mine=(), points=()),
    ):
        assert in_english(words(card(facts)), others) == set()


def test_another_measure_has_its_name_and_stays_in_its_box() -> None:
    drawn = card(replace(FACTS, points=((0, 311.79), (40, 14.02)), measure="Fréchet distance"))
    assert "311.8 → 14.020 Fréchet distance" in words(drawn)
    assert "Loss" not in words(drawn)
    (size,) = re.findall(r'font-size="(\d+)"[^>]*>311\.8 → 14\.020<', drawn)
    assert int(size) * 0.6 * len("311.8 → 14.020") <= 218  # the box less its margins


def test_the_facts_come_from_what_the_coordinator_says() -> None:
    rows = [
        version(2, 2.0, mine=1, sample="second"),
        version(0, 4.0, sample="first"),
        version(1, None, mine=2),
        version(3, float("nan")),
    ]
    found = card_facts(ME, Part(info=RUN, versions=tuple(rows)), server="Lab")
    assert found.merged == 3
    assert found.device_s is None
    assert found.points == ((0, 4.0), (2, 2.0))
    assert found.mine == (1, 2)
    assert (found.before, found.after) == ((0, "first"), (2, "second"))
    assert card_facts(ME, Part(info=RUN, versions=()), server="Lab").before is None


@pytest.mark.parametrize(
    ("coordinator", "page"),
    [
        ("https://train.example.org:8765", "https://train.example.org:8765/runs/stdlib-gpt"),
        ("http://127.0.0.1:8765", ""),
        ("http://[::1]:8765", ""),
        ("http://localhost", ""),
        ("http://[broken", ""),
    ],
)
def test_the_link_on_it_is_one_that_a_friend_can_open(coordinator: str, page: str) -> None:
    found = Part(info=RUN, versions=())
    facts = card_facts(ME, found, server="Lab", coordinator=coordinator)
    assert facts.page == page
    assert (page in words(card(facts))) if page else ("://" not in words(card(facts)))


def test_a_run_that_draws_has_its_pictures_on_it() -> None:
    drawn = replace(FACTS, drawn_before=(0, b"old"), drawn_after=(41, b"new"))
    svg = card(drawn)
    hrefs = [node.get("href") for node in ElementTree.fromstring(svg).iter(f"{SVG}image")]
    assert hrefs == ["data:image/png;base64,b2xk", "data:image/png;base64,bmV3"]
    assert "now, version 41" in words(svg)
    assert AFTER[:20] not in words(svg)


@pytest.mark.parametrize(
    ("mine", "version", "says"),
    [
        ((), 40, "helps to train"),
        ((1,), 1000, "under 1 %"),
        (tuple(range(1, 41)), 40, "100 %"),
        ((1,), 0, "helps to train"),
    ],
)
def test_the_share(mine: tuple[int, ...], version: int, says: str) -> None:
    assert says in share_words(replace(FACTS, mine=mine, version=version))


class Lab:
    """A coordinator with two runs, whose versions come page by page."""

    versions_of: ClassVar = {
        "stdlib-gpt": tuple(version(n, 1.0, mine=n % 2) for n in range(7)),
        "digits": tuple(
            replace(version(n, 1.0, mine=1), picture=BlobRef(sha256="", size=1)) for n in range(5)
        ),
    }
    png = write_png(np.full((700, 350), 9, np.uint8))
    hidden = False

    async def query(self, endpoint: Endpoint[Any], **args: str | int) -> Any:
        if endpoint is endpoints.RUNS:
            return tuple(replace(RUN, name=name) for name in self.versions_of)
        if endpoint is endpoints.LEADERBOARD:
            assert args["run"] in self.versions_of
            row = LeaderRow(
                rank=1,
                nickname="ada",
                earned_micro=1,
                accepted=1,
                device_s=60.0,
                workers=1,
                me=True,
            )
            return () if self.hidden else (row,)
        assert endpoint is endpoints.VERSIONS
        after = int(args["cursor"] or -1)
        return tuple(v for v in self.versions_of[str(args["run"])] if v.version > after)[:3]

    async def picture(self, run: str, version: int) -> bytes:
        return self.png


async def test_without_a_name_it_is_the_run_with_most_of_my_work() -> None:
    found = await part(Lab())
    assert (found.info.name, len(found.versions), found.device_s) == ("digits", 5, 60.0)
    found = await part(Lab(), "stdlib-gpt")
    assert [v.version for v in found.versions] == list(range(7))
    assert found.before is None
    with pytest.raises(NotFound, match='there is no run "x" here'):
        await part(Lab(), "x")


async def test_the_pictures_of_the_first_and_the_newest_version_are_made_small() -> None:
    found = await part(Lab())
    assert found.before is not None
    assert found.after is not None
    assert (found.before[0], found.after[0]) == (0, 4)
    assert read_png(found.after[1]).shape == (160, 80)


async def test_what_is_no_picture_or_no_rank_leaves_the_card_without_it() -> None:
    lab = Lab()
    lab.png, lab.hidden = b"no picture", True
    found = await part(lab)
    assert (found.before, found.after, found.device_s) == (None, None, None)


def test_a_volunteer_who_just_began_gets_a_card_too() -> None:
    bare = replace(FACTS, mine=(), points=(), before=None, after=None, device_s=0.0)
    text = words(card(bare))
    assert "helps to train stdlib-gpt" in text
    assert "the curve begins with the next versions" in text


_text = st.text(st.characters(), max_size=300)
_loss = st.floats(min_value=-1e30, max_value=1e30)


@given(_text, _text, st.lists(st.tuples(st.integers(0, 10**6), _loss), max_size=20))
def test_no_text_or_number_of_others_breaks_it(
    text: str, sample: str, points: list[tuple[int, float]]
) -> None:
    facts = replace(
        FACTS,
        nickname=text,
        run=text,
        description=text,
        server=text,
        before=(0, sample),
        points=tuple(sorted(points)),
    )
    tree = ElementTree.fromstring(card(facts).encode())
    kinds = {node.tag.removeprefix(SVG) for node in tree.iter()}
    assert kinds <= {"svg", "title", "rect", "text", "polyline", "circle"}
    for node in tree.iter():
        assert not [name for name in node.attrib if name.startswith("on") or "href" in name]


def test_ten_thousand_versions_stay_a_small_file() -> None:
    points = tuple((v, 1 / (v + 1)) for v in range(10_000))
    assert len(card(replace(FACTS, points=points, mine=tuple(range(10_000))))) < 40_000
