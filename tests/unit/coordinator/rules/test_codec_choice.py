"""Workers that do not speak the codec of a run: the codec that is agreed on."""

from __future__ import annotations

import pytest

from coordinator.plan.plan import plan
from coordinator.rules.codec_choice import choose_codec, grantable


@pytest.mark.parametrize(
    ("wanted", "spoken", "found"),
    [
        ("int8", {"int8", "float32"}, "int8"),
        ("int4", {"int8", "bf16", "float32"}, "int8"),
        ("int8", {"float32"}, "float32"),
        ("int8", {"ternary"}, ""),
        ("int8", set(), "int8"),
        ("bf16", {"float32", "bf16"}, "bf16"),
        ("float32", set(), "float32"),
    ],
)
def test_the_best_codec_that_both_speak_is_agreed_on(
    wanted: str, spoken: set[str], found: str
) -> None:
    assert choose_codec(wanted, spoken) == found


def test_an_upload_may_be_in_any_codec_that_a_lease_may_have_named() -> None:
    found = grantable(plan({"preset": "fedavg", "codec": "int4"}))
    assert found == {"int4", "int8", "bf16", "float32"}
