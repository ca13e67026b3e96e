"""A sentence is English wherever a text is, and whole for another program of the same owner."""

from __future__ import annotations

import errno
from enum import StrEnum

import msgspec
import numpy as np
import pytest

from shared.decoding import decode
from shared.errors import Unreachable, why
from shared.sentences import Sentence, Words, encode_english, encode_parts, figure, plural
from shared.text import printable
from volunteer.i18n.catalogue import LanguageChoice, choose, translated, use

AWAY = Sentence(
    "{url} cannot be reached: {why}",
    url="https://a.example",
    why=Sentence("the connection was interrupted"),
)


class Told(msgspec.Struct, frozen=True):
    message: Words = ""


@pytest.fixture
def german():  # type: ignore[no-untyped-def]
    use(choose("de"))
    yield
    use(LanguageChoice())


def test_it_is_its_english_in_logs_and_in_json() -> None:
    text = "https://a.example cannot be reached: the connection was interrupted"
    assert text == AWAY
    assert type(str(AWAY)) is str
    assert str(Unreachable(AWAY)) == text
    assert msgspec.json.decode(msgspec.json.encode(Told(AWAY), enc_hook=encode_english)) == {
        "message": text
    }


@pytest.mark.usefixtures("german")
def test_it_is_translated_with_the_sentences_in_it_where_it_is_shown() -> None:
    assert (
        translated(AWAY)
        == "https://a.example ist nicht erreichbar: die Verbindung wurde unterbrochen"
    )
    assert AWAY.startswith("https://a.example cannot")
    wanted = "next version after {n} more contribution", "next version after {n} more contributions"
    assert translated(plural(*wanted, 1)) == "nächste Version nach 1 weiterem Beitrag"
    assert translated(plural(*wanted, 2000)) == "nächste Version nach 2.000 weiteren Beiträgen"
    assert translated(figure("1.5 GB")) == "1,5 GB"


@pytest.mark.usefixtures("german")
def test_words_of_others_are_never_looked_up() -> None:
    assert translated("the connection was interrupted") == "the connection was interrupted"
    theirs = "the connection was interrupted {n} {x!r}"
    said = Sentence("the coordinator refused a heartbeat: {error}", error=theirs)
    assert translated(said) == f"der Koordinator hat ein Lebenszeichen abgelehnt: {theirs}"


@pytest.mark.usefixtures("german")
def test_another_program_of_the_owner_hears_it_whole() -> None:
    heard = decode(msgspec.json.encode(Told(AWAY), enc_hook=encode_parts), Told).message
    assert heard == AWAY
    assert translated(heard) == translated(AWAY)
    plain = decode(msgspec.json.encode(Told("by hand"), enc_hook=encode_parts), Told).message
    assert translated(plain) == plain == "by hand"
    with pytest.raises(msgspec.ValidationError):
        decode('{"message": ["x"]}', Told)
    newer = decode('{"message": ["x {n}", "x {n}", "", {"n": 1}, "of a newer version"]}', Told)
    assert newer.message.values == {"n": 1}  # type: ignore[attr-defined]


class State(StrEnum):
    LOST = "lost"


def test_values_of_any_kind_reach_another_program() -> None:
    said = Sentence("{state} at {loss}, {n}", state=State.LOST, loss=np.float64(1.5), n=2)
    heard = decode(msgspec.json.encode(Told(said), enc_hook=encode_parts), Told).message
    assert heard == "lost at 1.5, 2"
    assert heard.values == {"state": "lost", "loss": "1.5", "n": 2}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("german")
def test_it_stays_a_sentence_when_it_is_made_safe_for_a_terminal() -> None:
    said = printable(Sentence("{host} did not answer in time", host="a\x1b[31m"))
    assert translated(said) == "a [31m hat nicht rechtzeitig geantwortet"
    assert said == "a [31m did not answer in time"


def test_what_the_system_says_every_day_is_in_the_catalogue() -> None:
    said = why(FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"))
    assert isinstance(said, Sentence)
    assert said == said.message == "no such file or directory"
    assert why(OSError(errno.EXDEV, "Invalid cross-device link")) == "invalid cross-device link"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            b"a = 1\nb = '\xe9'\n",
            "it is not UTF-8 text, by the byte 0xe9 in line 2: save it as UTF-8",
        ),
        ("n = 1".encode("utf-16"), "it is UTF-16, not UTF-8 text: save it as UTF-8"),
        (b"\x00\xff\x00", "it is not text"),
    ],
)
def test_a_text_in_another_encoding_is_named_with_its_line(data: bytes, reason: str) -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        data.decode()
    assert why(caught.value) == reason
