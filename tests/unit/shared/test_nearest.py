"""Nearest name: slips and beginnings are guessed, other words are not."""

import pytest

from shared.nearest_name import hint, nearest

NAMES = ("port", "host", "database", "data_dir", "memory_gb", "quorum", "lr", "Tiny-GPT", "name")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("prot", "port"),
        ("HOTS", "host"),
        ("naem", "name"),
        ("lrr", "lr"),
        ("qurom", "quorum"),
        ("memory", "memory_gb"),
        ("tinny-gpt", "Tiny-GPT"),
        ("dat", "database"),
        # what Kubernetes sets beside a service `coordinator-database`
        ("database_port", ""),
        ("service_host", ""),
        ("da", ""),
        ("", ""),
        (7, ""),
        ("x" * 100_000, ""),
    ],
)
def test_only_a_slip_or_a_beginning_is_guessed(word: object, meant: str) -> None:
    assert nearest(word, NAMES) == meant


def test_a_hint_asks_for_the_nearest_or_lists_all() -> None:
    assert hint("prot", NAMES) == 'did you mean "port"?'
    assert hint("sled", ("a", "b")) == "known: a, b"
    assert hint("sled", ()) == "known: none"
