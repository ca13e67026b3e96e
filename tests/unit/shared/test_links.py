"""Join links: what is printed is understood, whatever a chat program or a shell did to it; anything
else is a sentence.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadRequest
from shared.network.links import JoinLink, format_link, is_loopback, parse_link, tidy_link

PIN = "ab" * 32
KEY = "MFRG-GZDF-MZTW"

hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,5})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address.compressed}]"),
)
parts = st.from_regex(r"[A-Za-z0-9_-]{1,40}", fullmatch=True)


@given(
    host=hosts,
    port=st.one_of(st.none(), st.integers(1, 65535)),
    key=st.one_of(st.just(""), parts),
    pin=st.sampled_from(["", PIN]),
    code=st.one_of(st.just(""), parts),
)
def test_what_is_printed_is_understood(
    host: str, port: int | None, key: str, pin: str, code: str
) -> None:
    url = f"https://{host}" + (f":{port}" if port else "")
    link = JoinLink(url=url, fingerprint=key, tls_pin=pin, code=code)
    assert parse_link(format_link(link)) == link


@pytest.mark.parametrize("separator", ["+", "&", ";", "/"])
def test_every_separator_is_read(separator: str) -> None:
    fragment = separator.join([f"key={KEY}", f"pin={PIN.upper()}", "code=ABCD-EFGH"])
    expected = JoinLink(url="https://10.0.0.7:8765", fingerprint=KEY, tls_pin=PIN, code="ABCD-EFGH")
    assert parse_link(f" 'https://10.0.0.7:8765/join#{fragment}' ") == expected
    assert parse_link(f"volunteer://10.0.0.7:8765/#{fragment}") == expected


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8765", "http://127.0.0.1:8765"),
        ("localhost:8765", "http://localhost:8765"),
        ("volunteer://[::1]:8765/", "http://[::1]:8765"),
        ("[::1]:8765", "http://[::1]:8765"),
        ("train.example.org", "https://train.example.org"),
        ("http://127.0.0.1:1/join#code=A", "http://127.0.0.1:1"),
    ],
)
def test_a_bare_address_is_enough(text: str, url: str) -> None:
    assert parse_link(text).url == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://",
        "ftp://host/",
        "http://train.example.org/join#code=A",  # a secret would travel in the clear
        "nonsense",  # a word is no address: a machine of the house needs its port or https://
        "https://user:pw@host/",
        "https://host:99999/",
        "http://127.0.0.1:23100x",
        "127.0.0.1:23100x",
        "https://host/join#pin=123",
        "https://host/join#code=%00",
        "https://host/\x1b[31m",
        "' \n '",
        "https://host/join#code=" + "A" * 3000,
    ],
)
def test_a_damaged_link_gets_a_sentence(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_link(text)
    assert len(caught.value.message) > 20
    assert "integer" not in caught.value.message  # words of Python


LINK = JoinLink(url="http://127.0.0.1:8765", fingerprint=KEY, tls_pin=PIN, code="VW4T-JH3Q")


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "  {}\r\n",
        "'{}'",
        "“{}”.",
        "<{}>",
        "`{}`",
        "volunteer join '{}'",
        "$ volunteer join {}",
    ],
)
@pytest.mark.parametrize(
    "wrap", ["\n", "\r\n", " ", "\n> ", "\n >> ", " │\n│ ", "=\n", "\u200b", "\n\t"]
)
def test_a_link_survives_how_it_was_pasted(around: str, wrap: str) -> None:
    printed = format_link(LINK)
    if wrap == "=\n":  # after a name the "=" is the link's own
        printed = printed.replace("=", "= ")
    pieces = [printed[at : at + 31] for at in range(0, len(printed), 31)]
    assert parse_link(around.format(wrap.join(pieces))) == LINK


@given(text=st.text(max_size=300))
def test_a_tidy_link_has_no_white_space_and_stays_as_it_is(text: str) -> None:
    once = tidy_link(text)
    assert not any(letter.isspace() for letter in once)
    assert tidy_link(once) == once


def test_loopback_is_only_this_machine() -> None:
    assert is_loopback("127.0.0.53")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("192.168.1.4")
    assert not is_loopback("localhost.example.org")


def test_one_slash_after_the_scheme_is_two() -> None:
    assert parse_link("http:/127.0.0.1:8931/join").url == "http://127.0.0.1:8931"


def test_an_option_within_the_quotes_of_a_link_is_named() -> None:
    with pytest.raises(BadRequest, match='also hold " --name": close them'):
        parse_link("https://train.example.org/join#key=abcd --name ada")
