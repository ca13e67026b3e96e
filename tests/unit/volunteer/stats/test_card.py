"""The picture to show friends: well-formed, safe, and right about who did what."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.errors import NotFound
from shared.protocol import endpoints
from shared.protocol.endpoints import Endpoint
from shared.protocol.versions import VersionInfo
from tests.tui.scenes import AFTER, BEFORE, ME, RUN
from volunteer.stats.card import CardFacts, card, card_facts, share_words
from volunteer.stats.card_data import deeds

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
    for part in (
        "ada",
        "contributed to 14 % of the 41 versions of stdlib-gpt",
        "24 device-hours, all runs",
        "24 merged, all runs",
        "8.300 → 3.225 Loss of the model",
        "before, version 0",
        "now, version 41",
    ):
        assert part in text


def test_another_measure_has_its_name_and_stays_in_its_box() -> None:
    drawn = card(replace(FACTS, points=((0, 311.79), (40, 14.02)), measure="Fréchet distance"))
    assert "311.8 → 14.020 Fréchet distance of the model" in words(drawn)
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
    found = card_facts(ME, RUN, rows, server="Lab")
    assert found.points == ((0, 4.0), (2, 2.0))
    assert found.mine == (1, 2)
    assert (found.before, found.after) == ((0, "first"), (2, "second"))
    assert card_facts(ME, RUN, [], server="Lab").before is None


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
        "digits": tuple(version(n, 1.0, mine=1) for n in range(5)),
    }

    async def query(self, endpoint: Endpoint[Any], **args: str | int) -> Any:
        if endpoint is endpoints.RUNS:
            return tuple(replace(RUN, name=name) for name in self.versions_of)
        assert endpoint is endpoints.VERSIONS
        after = int(args["cursor"] or -1)
        return tuple(v for v in self.versions_of[str(args["run"])] if v.version > after)[:3]


async def test_without_a_name_it_is_the_run_with_most_of_my_work() -> None:
    info, versions = await deeds(Lab())
    assert (info.name, len(versions)) == ("digits", 5)
    info, versions = await deeds(Lab(), "stdlib-gpt")
    assert [v.version for v in versions] == list(range(7))
    with pytest.raises(NotFound, match='there is no run "x" here'):
        await deeds(Lab(), "x")


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
