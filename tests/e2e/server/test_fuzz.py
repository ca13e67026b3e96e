"""A few seconds of `make fuzz`: no 500, no hang, flat memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fuzz import fuzz_routes
from tests.support.fuzz_streams import fuzz_parser
from tests.support.fuzz_watch import Plan


@pytest.mark.slow
def test_no_body_of_any_route_is_a_fault(tmp_path: Path) -> None:
    found = fuzz_routes(tmp_path, Plan(count=64, seconds=10.0, seed=1))
    assert len(found) > 20
    assert any(200 in counts for counts in found.values())


def test_no_stream_of_bytes_is_a_fault() -> None:
    found = fuzz_parser(Plan(count=400, seconds=5.0, seed=1))
    assert found["400"] > 0
